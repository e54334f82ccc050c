"""How many of the imports that other projects make from verl resolve here, and why the others do not.

python -m benchmarks.public_imports tests/public_imports.txt

A line of the list is a number of uses, a module and a name (``(module)``: the module itself), separated by tabs.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from verl.compat.absent_names import absence_of

UNEXPLAINED = "missing, without a reason"


@dataclass
class Count:
    """Imports that resolve, and the others by reason."""

    uses: int = 0
    names: int = 0
    resolved_uses: int = 0
    resolved_names: int = 0
    rest: dict[tuple[str, str], list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    """(kind of reason, sentence) to uses and names."""

    @property
    def share(self) -> float:
        """Share of the uses that resolve."""
        return self.resolved_uses / self.uses

    def add(self, address: str, uses: int, here: bool) -> None:
        """Count an address that is here or not."""
        self.uses += uses
        self.names += 1
        if here:
            self.resolved_uses += uses
            self.resolved_names += 1
        else:
            absence = absence_of(address)
            reason = (absence.kind, absence.sentence) if absence else (UNEXPLAINED, "")
            self.rest[reason].append((uses, address))

    def reasons(self) -> list[str]:
        """Return lines of text with each reason and the names that are missing for it, the most used first."""
        lines = []
        for (kind, sentence), names in sorted(self.rest.items(), key=lambda item: -sum(uses for uses, _ in item[1])):
            lines.append(f"\n{sum(uses for uses, _ in names)} uses, {kind}: {sentence}".rstrip(": "))
            lines += [f"  {uses:4} {name}" for uses, name in names]
        return lines


def count(lines: Iterable[str]) -> Count:
    """Try every import of a list."""
    counted = Count()
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        number, module, name = line.rstrip("\n").split("\t")
        counted.add(module if name == "(module)" else f"{module}.{name}", int(number), resolves(module, name))
    return counted


def resolves(module: str, name: str) -> bool:
    """Whether ``from module import name`` works; a module that fails for another reason raises."""
    try:
        exec(f"import {module}" if name == "(module)" else f"from {module} import {name}", {})
    except ImportError as error:
        if error.name is not None and not error.name.startswith("verl"):
            raise  # a library that is not installed
        return False
    return True


def report(counted: Count) -> str:
    """Describe a count in lines of text."""
    return "\n".join(
        [
            f"{counted.resolved_uses} of {counted.uses} uses resolve ({counted.share:.1%}), "
            f"{counted.resolved_names} of {counted.names} names",
            *counted.reasons(),
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path)
    print(report(count(parser.parse_args().list.read_text().splitlines())))
