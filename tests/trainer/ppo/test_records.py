"""Samples on a disk that does not take them."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from verl.trainer.ppo.records import RecordFolder


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """What a full disk does to a file that grows: a part of it is written, then an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def records(count: int) -> list[dict]:
    return [{"input": "x" * 60, "n": n} for n in range(count)]


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def test_lines_are_whole_and_the_run_is_told_once(tmp_path, caplog):
    folder = RecordFolder(str(tmp_path / "new" / "dump"))
    folder.write(1, records(2))
    with largest_file(400), caplog.at_level(logging.WARNING):
        folder.write(1, records(9), append=True)  # 160 bytes are there, 80 to a line: it breaks off inside of a line
        folder.write(2, records(9))
    file = tmp_path / "new" / "dump" / "1.jsonl"
    assert numbers(file) == [0, 1]
    assert folder.failed == 2
    assert caplog.text.count("samples cannot be written") == 1
    assert "File too large" in caplog.text
    folder.write(1, records(3), append=True)  # there is room again
    assert numbers(file) == [0, 1, 0, 1, 2]
    folder.write(1, records(1))
    assert numbers(file) == [0]


@pytest.mark.parametrize("there", ["a file", "nothing"])
def test_no_folder(tmp_path, there):
    (tmp_path / "file").write_text("")
    folder = RecordFolder(str(tmp_path / "file" / "dump") if there == "a file" else None)
    folder.write(1, records(1))
    assert folder.failed == (there == "a file")
