"""Problems of a configuration, and their report to the user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import yaml

from verl.base.redact import MASK, is_secret, without_secrets
from verl.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """A setting that must change or, as ``advice``, that the user should be aware of.

    Attributes:
        key: dotted key of the setting; empty if the value is a word of the command line that sets none.
        cause: what is wrong with its value.
        allowed: values that would be accepted; empty if the remedy suffices.
        remedy: what to change.
        advice: the problem is only logged, and the run starts.
    """

    key: str
    value: object
    cause: str
    allowed: str = ""
    remedy: str = ""
    advice: bool = False

    def __str__(self) -> str:
        value = MASK if is_secret(self.key, self.value) else shown(without_secrets(self.value))
        end = "" if self.cause.endswith((".", "?")) else "."
        lines = [f"{self.key}={value}: {self.cause}{end}" if self.key else f"{value}: {self.cause}{end}"]
        if self.allowed:
            lines.append(f"allowed: {self.allowed}")
        if self.remedy:
            lines.append(f"remedy: {self.remedy}")
        return "\n".join(lines)


def shown(value: object) -> str:
    """Format a value as on the command line, cut to 200 characters unless it is a string."""
    if isinstance(value, str):
        return value or "''"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return text if len(text) <= 200 else text[:197] + "..."


def check_update(problems: Iterable[Problem], path: str, ppo_mini_batch_size: int, train_batch_size: int) -> None:
    """Check the section of one update (of the actor or the critic) by itself.

    Args:
        problems: those of the section's own fields.
        path: name of the section, for messages.
        ppo_mini_batch_size: prompts of an optimizer step.
        train_batch_size: prompts of a training step.

    Raises:
        ConfigError: lists all problems.
    """
    errors = [problem for problem in problems if not problem.advice]
    if ppo_mini_batch_size > train_batch_size:
        cause = f"a training step has train_batch_size={train_batch_size} prompts"
        errors.append(Problem(f"{path}.ppo_mini_batch_size", ppo_mini_batch_size, cause, f"<= {train_batch_size}"))
    if errors:
        raise ConfigError(report(errors))


def report(problems: Sequence[Problem]) -> str:
    """Format all problems as one numbered list."""
    count = len(problems)
    title = "1 problem in the configuration:" if count == 1 else f"{count} problems in the configuration:"
    items = (f"{position}. {problem}".replace("\n", "\n     ") for position, problem in enumerate(problems, 1))
    return "\n\n".join([title, *(f"  {item}" for item in items)])
