"""Memory cgroups of runs: files as the kernel lays them out, and groups that killed processes left behind.

The files of both versions are ordinary ones here, so this tests names and formats, not the kernel's limit.
"""

import os

import pytest

from verl.plugins.sandbox.memory_group import MemoryGroup, _is_usable, _remove_leftovers, _set_limit


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({"memory.max": "max\n", "memory.swap.max": "max\n"}, {"memory.max": "1024", "memory.swap.max": "0"}),
        ({"memory.max": "max\n"}, {"memory.max": "1024"}),  # a kernel without swap
        (
            {"memory.limit_in_bytes": "9223372036854771712\n", "memory.memsw.limit_in_bytes": "9223372036854771712\n"},
            {"memory.limit_in_bytes": "1024", "memory.memsw.limit_in_bytes": "1024"},
        ),
    ],
)
def test_limits_are_written_to_the_files_that_exist(tmp_path, files, limits):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    _set_limit(tmp_path, 1024)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == limits


@pytest.mark.parametrize(
    ("name", "text", "ran_out"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\noom_group_kill 0\n", True),
        ("memory.events", "low 0\nhigh 0\nmax 9\noom 0\noom_kill 0\n", False),  # the kernel reclaimed enough
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", True),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", False),  # before Linux 4.13
    ],
)
def test_kills_at_the_limit_are_counted(tmp_path, name, text, ran_out):
    (tmp_path / name).write_text(text)
    assert MemoryGroup(tmp_path).ran_out() is ran_out


def test_a_group_that_does_not_hand_on_the_controller_is_not_used(tmp_path):
    (tmp_path / "cgroup.subtree_control").write_text("cpu pids\n")
    assert not _is_usable(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["cgroup.subtree_control"]


def test_groups_of_killed_processes_are_removed(tmp_path):
    alive = tmp_path / f"verl-sandbox-{os.getpid()}-0a"
    for folder in (alive, tmp_path / "verl-sandbox-4194305-0a", tmp_path / "others"):  # Linux has no such pid
        folder.mkdir()
    (tmp_path / "verl-sandbox-4194306-0a").mkdir()
    (tmp_path / "verl-sandbox-4194306-0a" / "busy").mkdir()
    _remove_leftovers(tmp_path)
    assert {folder.name for folder in tmp_path.iterdir()} == {"others", "verl-sandbox-4194306-0a", alive.name}
