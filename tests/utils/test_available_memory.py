"""Memory that is left, by files as control groups have them."""

from __future__ import annotations

from pathlib import Path

import psutil

from verl.utils.available_memory import available_memory

MIB = 2**20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def group(limit: str, used: int, cache: int) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon {used - cache}\ninactive_file {cache}\nactive_file 5\n",
    }


def within(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"sys/fs/cgroup/{folder}{name}": text for name, text in files.items()}


def is_the_machines(found: int) -> bool:
    return abs(found - psutil.virtual_memory().available) < 2**30 and found > 256 * MIB


def test_the_limit_of_the_group_less_what_it_uses_and_cannot_give_up(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/pod/own\n"} | within("pod/own/", group(str(64 * MIB), 40 * MIB, 8 * MIB)))
    assert available_memory(tmp_path) == 32 * MIB  # 64 - (40 - 8)


def test_a_group_around_it_may_have_less(tmp_path: Path) -> None:
    files = within("pod/own/", group("max", MIB, 0)) | within("pod/", group(str(10 * MIB), 3 * MIB, 0))
    write(tmp_path, {"proc/self/cgroup": "0::/pod/own\n"} | files)
    assert available_memory(tmp_path) == 7 * MIB


def test_a_mount_that_begins_at_the_group(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/../outside\n"} | within("", group(str(9 * MIB), 4 * MIB, 0)))
    assert available_memory(tmp_path) == 5 * MIB


def test_more_than_is_allowed_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/\n"} | within("", group(str(MIB), 2 * MIB, 0)))
    assert available_memory(tmp_path) == 0


def test_version_1(tmp_path: Path) -> None:
    files = {
        "memory.limit_in_bytes": f"{20 * MIB}\n",
        "memory.usage_in_bytes": f"{15 * MIB}\n",
        "memory.stat": f"cache 1\ninactive_file 1\ntotal_inactive_file {2 * MIB}\n",
    }
    membership = "5:cpu,cpuacct:/elsewhere\n4:memory:/job/7\n0::/\n"
    write(tmp_path, {"proc/self/cgroup": membership} | within("memory/job/7/", files))
    assert available_memory(tmp_path) == 7 * MIB  # 20 - (15 - 2)


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    assert is_the_machines(available_memory(tmp_path))  # no control groups at all
    write(tmp_path, {"proc/self/cgroup": "0::/own\n"} | within("own/", group("max", MIB, 0)))
    assert is_the_machines(available_memory(tmp_path))
    unlimited = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "1", "memory.stat": ""}
    write(tmp_path, {"proc/self/cgroup": "4:memory:/own\n"} | within("memory/own/", unlimited))
    assert is_the_machines(available_memory(tmp_path))
