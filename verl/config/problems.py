"""Problems of a configuration, and their report to the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from verl.base.redact import MASK, is_secret, without_secrets


@dataclass(frozen=True)
class Problem:
    """A setting that must change or, as ``advice``, that the user should be aware of.

    Attributes:
        key: dotted key of the setting; empty if the value is a word of the command line that sets none.
        wrong: what is wrong with its value.
        allowed: values that would be accepted; empty if the remedy suffices.
        remedy: what to change.
        advice: the problem is only logged, and the run starts.
    """

    key: str
    value: Any
    wrong: str
    allowed: str = ""
    remedy: str = ""
    advice: bool = False

    def __str__(self) -> str:
        value = MASK if is_secret(self.key, self.value) else shown(without_secrets(self.value))
        end = "" if self.wrong.endswith((".", "?")) else "."
        lines = [f"{self.key}={value}: {self.wrong}{end}" if self.key else f"{value}: {self.wrong}{end}"]
        if self.allowed:
            lines.append(f"allowed: {self.allowed}")
        if self.remedy:
            lines.append(f"remedy: {self.remedy}")
        return "\n".join(lines)


def shown(value: Any) -> str:
    """Format a value as on the command line, cut to 200 characters unless it is a string."""
    if isinstance(value, str):
        return value or "''"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return text if len(text) <= 200 else text[:197] + "..."


def report(problems: Sequence[Problem]) -> str:
    """Format all problems as one numbered list."""
    count = len(problems)
    title = "1 problem in the configuration:" if count == 1 else f"{count} problems in the configuration:"
    items = (f"{number}. {problem}".replace("\n", "\n     ") for number, problem in enumerate(problems, 1))
    return "\n\n".join([title, *(f"  {item}" for item in items)])
