"""Devices, the process group of one process, local copies of remote files."""

import datetime
import logging
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import fsspec
import psutil
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from verl.base import fs
from verl.base.fs import copy_to_local, is_remote
from verl.config import HFModelConfig, SFTDataConfig, local_copies
from verl.errors import DataError, ResourceError
from verl.utils.device import (
    auto_set_device,
    backend_for,
    ensure_process_group,
    get_device,
    get_device_id,
    get_nccl_backend,
    get_resource_name,
    get_torch_device,
    is_cuda_available,
    memory_metrics,
    one_allocation,
    set_expandable_segments,
    use_interface_to,
)

CPU = torch.device("cpu")


def test_devices():
    assert get_device("cpu") == CPU
    assert backend_for(CPU) == "gloo"
    with pytest.raises(ResourceError, match="Use one of: cpu, cuda"):
        get_device("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ResourceError, match=r"Set device=cpu"):
        get_device("cuda")


def test_one_process_is_a_group_of_its_own():
    ensure_process_group(CPU)
    ensure_process_group(CPU)  # the second worker of a process joins what there is
    assert dist.get_world_size() == 1
    in_use = psutil.virtual_memory().used / 2**30  # of the machine, not of this process
    assert memory_metrics(CPU)["perf/cpu_memory_used_gb"] == pytest.approx(in_use, rel=0.2)


class _CountedStore(dist.Store):
    """What ranks write where they meet, and the bytes that they read there."""

    def __init__(self) -> None:
        super().__init__()
        self.values = dist.HashStore()
        self.read_bytes = 0

    def set(self, key: str, value: bytes) -> None:
        self.values.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.values.get(key)
        self.read_bytes += len(value)
        return value

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self.values.wait(keys)


def test_ranks_connect_only_to_those_with_which_they_exchange():
    ensure_process_group(CPU)
    read = {}
    for ranks in (4, 16):
        store = _CountedStore()
        with ThreadPoolExecutor(ranks) as threads:
            groups = list(threads.map(partial(_gloo, store, ranks), range(ranks)))
            assert store.read_bytes == 0
            sums = list(threads.map(_sum_of_ones, groups))
        assert sums == [ranks] * ranks
        read[ranks] = store.read_bytes
    assert read[16] < 1.1 * 4 * read[4], "a constant for each rank; without lazy connections n³"


def _gloo(store: dist.Store, ranks: int, rank: int) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, ranks, datetime.timedelta(seconds=60))


def _sum_of_ones(group: dist.ProcessGroupGloo) -> float:
    ones = torch.ones(1)
    group.allreduce([ones]).wait()
    return ones.item()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_ranks_of_several_machines_use_the_interface_that_reaches_the_first(monkeypatch, caplog):
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    use_interface_to("localhost")
    loopback = os.environ["GLOO_SOCKET_IFNAME"]
    assert "127.0.0.1" in {entry.address for entry in psutil.net_if_addrs()[loopback]}
    assert os.environ["NCCL_SOCKET_IFNAME"] == loopback
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "chosen")
    use_interface_to("localhost")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "chosen"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    use_interface_to("localhost")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert "no network interface has the address 127.0.0.1" in caplog.text


def test_workers_of_users_find_the_cpu(caplog):
    assert torch.zeros(1).to(get_device_id()).device == CPU
    assert (get_nccl_backend(), get_resource_name(), get_torch_device()) == ("gloo", "CPU", torch.cpu)
    assert not is_cuda_available
    config = OmegaConf.create({"trainer": {"device": "cuda"}})
    OmegaConf.set_struct(config, True)
    auto_set_device(config)
    assert config.trainer.device == "cpu"
    assert "this machine has no such device" in caplog.text


def test_settings_of_the_allocator_survive_a_single_allocation():
    settings = torch._C._accelerator_getAllocatorSettings
    before = settings()
    try:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True,max_split_size_mb:512")
        with one_allocation():
            assert settings() == "max_split_size_mb:512,expandable_segments:False"
        assert settings() == "expandable_segments:True,max_split_size_mb:512"
        set_expandable_segments(False)
        assert settings() == "max_split_size_mb:512,expandable_segments:False"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def test_a_copy_that_another_account_prepared_is_not_read(tmp_path, caplog):
    model, shared = tmp_path / "model", tmp_path / "shm"
    model.mkdir()
    shared.mkdir()
    (model / "config.json").write_text("{}")
    copy = Path(fs.in_shared_memory(str(model), shared=shared))
    for level in (copy.parent, copy.parent.parent):
        assert stat.S_IMODE(level.stat().st_mode) == 0o700
        level.chmod(0o777)
        assert fs.in_shared_memory(str(model), shared=shared) == str(model)
        assert f"others may write {level}" in caplog.text
        level.chmod(0o700)
        if os.getuid() == 0:
            os.chown(level, 1, -1)
            assert fs.in_shared_memory(str(model), shared=shared) == str(model)
            os.chown(level, 0, -1)
        level.rename(tmp_path / "elsewhere")
        level.symlink_to(tmp_path / "elsewhere")
        assert fs.in_shared_memory(str(model), shared=shared) == str(model)
        level.unlink()
        (tmp_path / "elsewhere").rename(level)
    assert fs.in_shared_memory(str(model), shared=shared) == str(copy)
    record = copy.parent / ".verl-copy-of"
    if os.getuid() == 0:
        os.chown(record, 1, -1)
        assert fs.source_of(str(copy)) == str(copy)
    kept = copy.rename(tmp_path / "kept")
    copy.symlink_to(kept)
    assert fs.in_shared_memory(str(model), shared=shared) == str(model)
    for in_the_way in (lambda path: path.write_text(""), lambda path: path.symlink_to("/nowhere/verl"), os.mkfifo):
        shutil.rmtree(copy.parent.parent) if copy.parent.parent.is_dir() else copy.parent.parent.unlink()
        in_the_way(copy.parent.parent)
        assert fs.in_shared_memory(str(model), shared=shared) == str(model)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_a_model_is_copied_into_shared_memory_once(tmp_path, monkeypatch, caplog):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    shared = tmp_path / "shm"
    shared.mkdir()
    place = fs.in_shared_memory(str(model), shared=shared)
    assert Path(place).is_relative_to(shared)
    assert (Path(place) / "config.json").read_text() == "{}"
    assert fs.in_shared_memory(str(model), shared=shared) == place
    assert fs.source_of(place) == str(model) == fs.source_of(str(model))
    (model / "config.json").write_text('{"changed": 1}')
    assert (Path(fs.in_shared_memory(str(model), shared=shared)) / "config.json").read_text() == '{"changed": 1}'
    assert copy_to_local("Qwen/Qwen3-0.6B", use_shm=True) == "Qwen/Qwen3-0.6B"  # a name on the hub
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(fs.shutil, "disk_usage", lambda _: fs.shutil._ntuple_diskusage(9, 8, 1))
    (model / "config.json").write_text('{"changed": 2}')
    assert fs.in_shared_memory(str(model), shared=shared) == str(model)
    assert "it is read where it is" in caplog.text


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_sections_with_use_shm_are_read_from_shared_memory(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    files = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for file in files:
        file.write_text(file.name)
    names = tuple(map(str, files))
    plain = HFModelConfig(path=str(tmp_path / "model"))
    assert local_copies(plain) is plain
    model = local_copies(replace(plain, use_shm=True))
    data = local_copies(SFTDataConfig(train_files=names, use_shm=True))
    places = [Path(model.path), *map(Path, data.train_files)]
    try:
        assert all(place.is_relative_to("/dev/shm") for place in places)
        assert [place.name for place in places] == ["model", "a.jsonl", "b.jsonl"]
        assert [place.read_text() for place in places[1:]] == ["a.jsonl", "b.jsonl"]
        assert model.tokenizer_path is None
    finally:
        for place in places:
            shutil.rmtree(place.parent)


def test_local_paths_stay_where_they_are(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA", "gsm8k")
    assert copy_to_local("~/data/$DATA/train.parquet") == str(tmp_path / "data/gsm8k/train.parquet")
    assert copy_to_local("file:///a/b") == "/a/b"
    assert not is_remote("/a/b")
    assert is_remote("hdfs://a/b")


def test_remote_files_are_copied_once(tmp_path):
    remote = fsspec.filesystem("memory")
    remote.pipe("/store/model/config.json", b"{}")
    remote.pipe("/store/train.jsonl", b"first")
    folder = copy_to_local("memory://store/model", str(tmp_path))
    assert folder.endswith("/model")
    with open(f"{folder}/config.json") as file:
        assert file.read() == "{}"
    (tmp_path / "shm").mkdir()
    assert fs.source_of(fs.in_shared_memory(folder, shared=tmp_path / "shm")) == "memory://store/model"
    copy = copy_to_local("memory://store/train.jsonl", str(tmp_path))
    Path(copy).write_text("mark")
    assert Path(copy_to_local("memory://store/train.jsonl", str(tmp_path))).read_text() == "mark"
    assert Path(copy_to_local("memory://store/train.jsonl", str(tmp_path), always_recopy=True)).read_text() == "first"
    remote.pipe("/store/train.jsonl", b"again")  # as long as before
    assert Path(copy_to_local("memory://store/train.jsonl", str(tmp_path))).read_text() == "again"
    assert Path(copy).read_text() == "first"  # which another process may be reading


def test_what_cannot_be_copied_is_said(tmp_path):
    with pytest.raises(DataError, match="memory://nowhere/x does not exist"):
        copy_to_local("memory://nowhere/x", str(tmp_path))
    with pytest.raises(DataError, match="nosuch://a/b cannot be reached: there is no file system nosuch://"):
        copy_to_local("nosuch://a/b", str(tmp_path))
