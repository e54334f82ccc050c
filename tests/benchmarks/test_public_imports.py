"""Imports that other projects make from verl: how many resolve, and that the page says so."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.public_imports import UNEXPLAINED, count, report

ROOT = Path(__file__).resolve().parents[2]


def test_four_of_five_imports_of_public_projects_resolve():
    counted = count((ROOT / "tests" / "public_imports.txt").read_text().splitlines())
    assert (counted.uses, counted.names) == (1435, 376)
    assert counted.share >= 0.8
    assert [names for (kind, _), names in counted.rest.items() if kind == UNEXPLAINED] == []
    said = re.search(r"\*\*([\d,]+) of ([\d,]+)\*\*", (ROOT / "docs" / "compatibility.md").read_text())
    assert said is not None
    uses, of = (int(number.replace(",", "")) for number in said.groups())
    assert of == counted.uses
    assert uses == counted.resolved_uses, "docs/compatibility.md says another number"


def test_a_report_by_reason():
    lines = [
        "# a comment",
        "3\tverl\tDataProto",
        "2\tverl.workers.roles\t(module)",
        "4\tverl.models.mcore\tget_mcore_forward_fn",
        "5\tverl.no_such_module\tx",
    ]
    text = report(count(lines))
    assert text.splitlines()[0] == "5 of 14 uses resolve (35.7%), 2 of 4 names"  # 3 + 2 of 3 + 2 + 4 + 5
    assert "5 uses, missing, without a reason\n     5 verl.no_such_module.x" in text
    assert "4 uses, other design: verl.plugins.megatron" in text
