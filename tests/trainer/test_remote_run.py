"""A run whose data, model and checkpoints lie in a store: fsspec's memory, and S3 by moto's server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from tests.checkpoint.test_remote import s3  # noqa: F401
from tests.support.tiny_run import make_tiny_run, overrides
from tests.trainer.config.support import Run
from tests.trainer.test_run import assert_same_steps, train  # noqa: F401
from verl.base import fs
from verl.config import PPOConfig, local_copies
from verl.errors import ConfigError

STORE = "memory://store"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The store, with the data and the model of a tiny run."""
    monkeypatch.setattr(fs, "own_copies", lambda: tmp_path / "copies")
    memory = fsspec.filesystem("memory")
    for name, path in make_tiny_run(tmp_path / "made").items():
        memory.put(path, f"/store/{name}" if Path(path).is_dir() else f"/store/{name}.jsonl", recursive=True)
    return memory


COMMON = {"trainer__save_freq": 1, "trainer__val_before_train": "true"}


def below(store: str) -> dict[str, str]:
    """The settings that lead to the store."""
    return {
        "actor_rollout_ref__model__path": f"{store}/model",
        "data__train_files": f"{store}/tr*.jsonl",
        "data__val_files": f"{store}/val.jsonl",
        "trainer__default_hdfs_dir": f"{store}/checkpoints",
    }


def fill(folder: Path) -> tuple[fsspec.AbstractFileSystem, dict[str, str]]:
    """Put the data and the model of a tiny run on S3, below ``bucket/store``; return its files here too."""
    bucket, paths = fsspec.filesystem("s3"), make_tiny_run(folder)
    for name, path in paths.items():
        bucket.put(
            path, f"bucket/store/{name}" if Path(path).is_dir() else f"bucket/store/{name}.jsonl", recursive=True
        )
    return bucket, paths


@pytest.mark.slow
def test_a_run_on_s3_is_that_of_local_files(train, tmp_path, s3, monkeypatch):  # noqa: F811
    monkeypatch.setattr(fs, "own_copies", lambda: tmp_path / "copies")
    bucket, _ = fill(tmp_path / "made")
    remote = {"trainer__save_freq": 1, **below("s3://bucket/store")}
    (local,) = train(trainer__total_training_steps=1).values()
    (first,) = train(trainer__total_training_steps=1, trainer__default_local_dir=tmp_path / "a", **remote).values()
    assert_same_steps({1: local}, {1: first}, rel=0)
    # A machine without checkpoints goes on from those of the store.
    assert set(train(trainer__total_training_steps=2, trainer__default_local_dir=tmp_path / "b", **remote)) == {2}
    assert bucket.cat("bucket/store/checkpoints/latest_checkpointed_iteration.txt") == b"2"
    with pytest.raises(ConfigError, match="s3://bucket/store/nothing does not exist"):
        train(**remote | {"actor_rollout_ref__model__path": "s3://bucket/store/nothing"})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_of_ray_read_s3(tmp_path, s3):  # noqa: F811
    bucket, paths = fill(tmp_path / "made")
    metrics = {}
    for name, remote in (("local", {}), ("remote", below("s3://bucket/store"))):
        settings = {
            "trainer__controller": "ray", "trainer__n_gpus_per_node": 2, "trainer__total_training_steps": 2,
            "trainer__logger": "[file]", "trainer__default_local_dir": tmp_path / name,
        }  # fmt: skip
        log = tmp_path / f"{name}.jsonl"
        environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(log), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "verl.trainer.main_ppo"]
        command += overrides(paths, tmp_path, **settings, **COMMON | remote)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        metrics[name] = {line["step"]: line["data"] for line in lines if "data" in line and line["step"]}
    assert set(metrics["local"]) == {1, 2}
    assert_same_steps(metrics["local"], metrics["remote"], rel=0)
    assert bucket.cat("bucket/store/checkpoints/latest_checkpointed_iteration.txt") == b"2"
    copies = list((tmp_path / "cache/verl/files").rglob("config.json"))
    assert len(copies) == 1, "one copy for all processes of a machine"


def test_data_model_and_checkpoints_in_a_store(train, tmp_path, store):  # noqa: F811
    common, remote = COMMON, below(STORE)
    local = train(trainer__total_training_steps=2, **common)
    first = train(trainer__total_training_steps=1, trainer__default_local_dir=tmp_path / "a", **common, **remote)
    second = train(trainer__total_training_steps=2, trainer__default_local_dir=tmp_path / "b", **common, **remote)
    assert_same_steps({1: local[1]}, {1: first[1]}, rel=0)
    assert_same_steps({2: local[2]}, {2: second[2]}, rel=0)
    assert store.cat("/store/checkpoints/latest_checkpointed_iteration.txt") == b"2"


def test_what_is_not_there_is_refused_before_anything_loads(tmp_path, store):
    run = Run(tmp_path)
    for key, value, wrong in [
        ("actor_rollout_ref.model.path", f"{STORE}/nothing", "memory://store/nothing/config.json does not exist"),
        ("data.train_files", f"{STORE}/no*.jsonl", "nothing matches memory://store/no*.jsonl"),
        ("data.val_files", f"{STORE}/model/config.txt", "the format is not known"),
        ("data.val_files", "nosuch://a/b.jsonl", "there is no file system nosuch://"),
        ("trainer.default_hdfs_dir", "nosuch://a/b", "there is no file system nosuch://"),
        ("trainer.default_local_dir", f"{STORE}/c", "a run writes to local folders"),
    ]:
        message = run.refusal({key: value})
        assert key in message
        assert wrong in message
    pruned = run.refusal({"trainer.remove_previous_ckpt_in_save": True, "trainer.max_actor_ckpt_to_keep": 3})
    assert "remove_previous_ckpt_in_save=true keeps one" in pruned
    config: PPOConfig = run.load({"actor_rollout_ref.model.path": f"{STORE}/model"})
    assert config.actor_rollout_ref.model.path == f"{STORE}/model"
    here = local_copies(config)
    assert (Path(here.actor_rollout_ref.model.path) / "config.json").is_file()
    assert here.data is config.data
    (tmp_path / "mine.py").write_text("class Mine: ...")
    own = {"data.custom_cls.path": str(tmp_path / "mine.py"), "data.custom_cls.name": "Mine"}
    config = run.load(own | {"data.train_files": f"{STORE}/what/it/likes"})
    assert local_copies(config).data.train_files == (f"{STORE}/what/it/likes",)
