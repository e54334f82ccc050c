"""The same task in one Python program with verl and one with TRL: lines, seconds, score after ten steps.

    python -m benchmarks.one_call [--model FOLDER]

Without a model it takes one of two layers with random weights. TRL is left out, with the reason, where it is not
installed (extra ``peers``). Lines are those that hold code.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from verl.testing.models import tiny_model_dir

EXAMPLES = Path(__file__).parents[1] / "examples/python"
PROGRAMS = {"verl": EXAMPLES / "addition.py", "trl": EXAMPLES / "addition_trl.py"}


def code_lines(path: Path) -> int:
    """Count the lines of a program that are neither empty nor comments."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in path.read_text().splitlines())


def main() -> None:
    """Run both programs and write a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model, by default a tiny one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or tiny_model_dir(Path(folder) / "model", family="qwen3")
        for library, program in PROGRAMS.items():
            words = f"{library}: {code_lines(program)} lines"
            if importlib.util.find_spec(library) is None:
                sys.stdout.write(f"{words}; not run, {library} is not installed\n")
                continue
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, str(program), str(model)], cwd=folder, capture_output=True, text=True, check=True
            )
            seconds = time.monotonic() - began
            sys.stdout.write(f"{words}, {seconds:.1f} s; {done.stdout.splitlines()[-1]}\n")


if __name__ == "__main__":
    main()
