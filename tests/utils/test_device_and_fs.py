"""Devices, the process group of one process, local copies of remote files, folders that appear whole."""

import random

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from verl.errors import CheckpointError, DataError, ResourceError
from verl.utils.checkpoint import LocalFolder, on_all_ranks, rng_state, set_rng_state
from verl.utils.device import backend_for, ensure_process_group, get_device, memory_metrics
from verl.utils.fs import copy_to_local, is_remote

CPU = torch.device("cpu")


def test_devices():
    assert get_device("cpu") == CPU
    assert backend_for(CPU) == "gloo"
    with pytest.raises(ResourceError, match="Use one of: cpu, cuda"):
        get_device("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ResourceError, match=r"Set trainer.device=cpu"):
        get_device("cuda")


def test_one_process_is_a_group_of_its_own():
    ensure_process_group(CPU)
    ensure_process_group(CPU)  # the second worker of a process joins what there is
    assert dist.get_world_size() == 1
    assert memory_metrics(CPU)["perf/cpu_memory_used_gb"] > 0.01


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
    copy = copy_to_local("memory://store/train.jsonl", str(tmp_path))
    remote.pipe("/store/train.jsonl", b"second")
    assert copy_to_local("memory://store/train.jsonl", str(tmp_path)) == copy
    with open(copy) as file:
        assert file.read() == "first"


def test_what_cannot_be_copied_is_said(tmp_path):
    with pytest.raises(DataError, match="there is nothing at memory://nowhere/x"):
        copy_to_local("memory://nowhere/x", str(tmp_path))
    with pytest.raises(DataError, match="nosuch://a/b cannot be read"):
        copy_to_local("nosuch://a/b", str(tmp_path))


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    ensure_process_group(CPU)
    folder = LocalFolder(tmp_path / "save")
    folder.open()
    (folder.partial / "a").write_text("1")
    assert not folder.final.exists()
    folder.commit()
    assert (folder.final / "a").read_text() == "1"
    assert not folder.partial.exists()


def test_an_error_is_raised_with_the_task_and_the_rank():
    ensure_process_group(CPU)
    with pytest.raises(CheckpointError, match=r"cannot write x: .*No space.*\(rank 0\)"), on_all_ranks("write x"):
        raise OSError("No space left on device")
    with pytest.raises(CheckpointError, match="division by zero"), on_all_ranks("write x"):
        1 / 0  # noqa: B018
    with pytest.raises(KeyboardInterrupt), on_all_ranks("write x"):
        raise KeyboardInterrupt


def test_all_random_numbers_continue(tmp_path):
    def draw():
        return torch.rand(2).tolist() + np.random.rand(2).tolist() + [random.random(), random.gauss(0, 1)]

    random.gauss(0, 1)  # leaves a second number in store
    torch.save(rng_state(), tmp_path / "rng.pt")
    expected = draw()
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draw() == expected
