"""Commands that are started without standard input, output or error, as some service managers do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from verl.utils.processes import open_closed_streams
open_closed_streams()
with open(sys.argv[1], "w") as file:
    print("shown")
    sys.stdout.flush()
    sys.stderr.write("shown too")
    sys.stderr.flush()
    file.write(f"{file.fileno() > 2} {sys.stdin.read()!r}")
"""


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_they_lead_to_nowhere(tmp_path: Path, closed: str) -> None:
    command = ["sh", "-c", f'"$0" -c "$1" "$2" {closed}', sys.executable, PROGRAM, str(tmp_path / "file")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "True ''"
    assert done.stdout == ("" if ">&-" in closed.replace("2>&-", "") else "shown\n")
