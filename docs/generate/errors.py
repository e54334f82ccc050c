"""Make every mistake of ``tests/support/bad_inputs.py`` and write what a user sees into docs/errors.md.

python -m docs.generate.errors

Each mistake is a run of `main_ppo` that ends before a model loads; all of them take some minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.bad_inputs import BAD_INPUTS

ROOT = Path(__file__).resolve().parents[2]

INTRO = (
    "# Errors\n\n"
    "The error messages of common mistakes, printed by `python -m docs.generate.errors`: it makes each mistake on the "
    "command line of `verl.trainer.main_ppo` and copies the error output. Folders are shortened to `…`.\n"
)


UNUSUAL = {
    "cut weight file",
    "weights with NaN",
    "folder without tokenizer",
    "tokenizer without chat template",
    "tokenizer of another model",
    "tokenizer without pad token and end token",
    "unwritable folder",
    "a scorer that returns NaN",
    "empty data set",
}
"""Mistakes that only the tests make: their messages say everything, and the page stays short."""


def message(arguments: list[str], folder: Path) -> str:
    """The error output of a run, without logs of other libraries."""
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode == 0:
        raise SystemExit(f"this should have failed: {arguments}")
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if re.match(r"[A-Z]\w*Error: ", line)), 0)
    return "\n".join(lines[start:]).replace(str(folder), "…").replace(f"{ROOT}/", "")


def main() -> None:
    """The command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    parts = [INTRO]
    for case in BAD_INPUTS:
        if case.title in UNUSUAL:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            text = message(case.make(folder), folder)
        print(f"--- {case.title}\n{text}\n", flush=True)
        parts.append(f"## {case.title[0].upper()}{case.title[1:]}\n\n```text\n{text}\n```\n")
    (ROOT / "docs/errors.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
