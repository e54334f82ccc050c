"""What is wrong with a configuration, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from verl.utils.redact import MASK, is_secret, without_secrets


@dataclass(frozen=True)
class Problem:
    """One thing to change, or (``advice``) one to know about.

    Attributes:
        key: the dotted key that is at fault.
        value: what it is set to.
        wrong: what is wrong with it.
        allowed: which values would do; empty if the remedy says it all.
        remedy: what to change.
        advice: nothing has to change; it is logged, and the run starts.
    """

    key: str
    value: Any
    wrong: str
    allowed: str = ""
    remedy: str = ""
    advice: bool = False

    def __str__(self) -> str:
        value = MASK if is_secret(self.key, self.value) else shown(without_secrets(self.value))
        lines = [f"{self.key}={value}: {self.wrong.rstrip('.')}."]
        if self.allowed:
            lines.append(f"allowed: {self.allowed}")
        if self.remedy:
            lines.append(f"remedy: {self.remedy}")
        return "\n".join(lines)


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, str):
        return value or "''"
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()
    return text if len(text) <= 200 else text[:197] + "..."


def report(problems: Sequence[Problem]) -> str:
    """All problems as one numbered list."""
    count = len(problems)
    title = "1 problem in the configuration:" if count == 1 else f"{count} problems in the configuration:"
    items = (f"{number}. {problem}".replace("\n", "\n     ") for number, problem in enumerate(problems, 1))
    return "\n\n".join([title, *(f"  {item}" for item in items)])
