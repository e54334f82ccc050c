"""Which faults the tests find: ``python -m benchmarks.mutants [--only WORD]``.

Each mutant of :data:`benchmarks.mutant_table.MUTANTS` changes one line of a copy of the repository, and the tests that
should find it run there until one fails. The table names few test files, so that all of it takes half an hour on two
cores; a mutant that survives them may still be found by others, but then by chance: sharpen a test of that file.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
"""Time for the tests of one mutant. One that makes them hang is found: pytest's own limit would end them in a run."""
_written = itertools.count(int(time.time()))


def copy_repository(target: Path) -> None:
    """Copy the files that git tracks, as they are now."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    archive = ["tar", "--create", "--null", "--ignore-failed-read", "--files-from=-"]
    with subprocess.Popen(archive, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as packed:
        unpacked = subprocess.Popen(["tar", "--extract"], cwd=target, stdin=packed.stdout)
        assert packed.stdin is not None
        packed.stdin.write(names)
        packed.stdin.close()
        if unpacked.wait():
            raise SystemExit(f"the files of {ROOT} could not be copied to {target}.")


def find_file(copy: Path, mutant: Mutant) -> Path | None:
    """Return the file with the mutant's text: the one it names, or the only one that has it if it was moved."""
    named = copy / "verl" / mutant.file
    if named.is_file() and named.read_text().count(mutant.old) == 1:
        return named
    having = [path for path in (copy / "verl").rglob("*.py") if mutant.old in path.read_text()]
    return having[0] if len(having) == 1 and having[0].read_text().count(mutant.old) == 1 else None


def write(path: Path, text: str) -> None:
    """Write a module. Python knows compiled modules by size and second, so each text gets a second of its own."""
    path.write_text(text)
    second = next(_written)
    os.utime(path, (second, second))


def test_files(copy: Path, mutant: Mutant) -> list[str] | None:
    """Return the test files of a mutant; None if one of them is neither where the table says nor the only one there."""
    files: list[str] = []
    for one in mutant.tests.split():
        folder, _, name = one.rpartition("/")
        named = copy / "tests" / folder / f"test_{name}.py"
        having = [named] if named.is_file() else [*(copy / "tests").rglob(named.name)]
        if len(having) != 1:
            return None
        files.append(str(having[0].relative_to(copy)))
    return files


def failing_test(copy: Path, files: list[str]) -> str | None:
    """Return the first test of these files that fails, None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", *files]
    # Also the processes that tests start import the copy, and not the repository that is installed.
    variables = os.environ | {"PYTHONPATH": str(copy)}
    try:
        ended = subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"none ended within {LIMIT_S:g} s"
    if ended.returncode == 0:
        return None
    if ended.returncode != 1:
        return f"pytest ended with {ended.returncode}: {ended.stdout[-200:]}{ended.stderr[-200:]}"
    failed = [line.split(" ")[1] for line in ended.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else "a test"


def main() -> None:
    """Run the mutants and print what became of each; exits with 1 if one survived or was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="those whose area, file or text has it")
    parser.add_argument("--list", action="store_true", help="only say where each text stands")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if arguments.only in f"{m.area} {m.file} {m.old}"]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="verl-mutants-") as folder:
        copy = Path(folder)
        copy_repository(copy)
        for mutant in chosen:
            path, files = find_file(copy, mutant), test_files(copy, mutant)
            if path is None or files is None:
                what = (
                    "its text does not stand in exactly one file once"
                    if path is None
                    else f"{mutant.tests}: no such files"
                )
                outcome, more = "lost", f"{what}: bring the table up to date"
            elif arguments.list:
                outcome, more = "there", f"{path.relative_to(copy)}: {' '.join(files)}"
            else:
                began, text = time.monotonic(), path.read_text()
                write(path, text.replace(mutant.old, mutant.new))
                killer = failing_test(copy, files)
                write(path, text)
                outcome = "SURVIVED" if killer is None else "killed"
                more = f"{killer or mutant.tests} ({time.monotonic() - began:.0f} s)"
            counts[outcome] += 1
            print(
                f"{outcome:8} {mutant.area:10} {mutant.file}: {mutant.old.strip().splitlines()[0][:70]}\n{'':9}{more}",
                flush=True,
            )
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    if counts["SURVIVED"] or counts["lost"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
