"""A run whose data, model and checkpoints lie in a store; fsspec's memory takes the store's place."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from tests.trainer.config.support import Run
from tests.trainer.test_run import assert_same_steps, train  # noqa: F401
from verl.base import fs
from verl.config import PPOConfig, local_copies
from verl.testing.tiny_run import make_tiny_run

STORE = "memory://store"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The store, with the data and the model of a tiny run."""
    monkeypatch.setattr(fs, "own_copies", lambda: tmp_path / "copies")
    memory = fsspec.filesystem("memory")
    for name, path in make_tiny_run(tmp_path / "made").items():
        memory.put(path, f"/store/{name}" if Path(path).is_dir() else f"/store/{name}.jsonl", recursive=True)
    yield memory
    memory.rm("/store", recursive=True)


def test_data_model_and_checkpoints_in_a_store(train, tmp_path, store):  # noqa: F811
    common = {"trainer__save_freq": 1, "trainer__val_before_train": "true"}
    remote = {
        "actor_rollout_ref__model__path": f"{STORE}/model",
        "data__train_files": f"{STORE}/tr*.jsonl",
        "data__val_files": f"{STORE}/val.jsonl",
        "trainer__default_hdfs_dir": f"{STORE}/checkpoints",
    }
    local = train(trainer__total_training_steps=2, **common)
    first = train(trainer__total_training_steps=1, trainer__default_local_dir=tmp_path / "a", **common, **remote)
    second = train(trainer__total_training_steps=2, trainer__default_local_dir=tmp_path / "b", **common, **remote)
    assert_same_steps({1: local[1]}, {1: first[1]}, rel=0)
    assert_same_steps({2: local[2]}, {2: second[2]}, rel=0)
    assert store.cat("/store/checkpoints/latest_checkpointed_iteration.txt") == b"2"


def test_what_is_not_there_is_refused_before_anything_loads(tmp_path, store):
    run = Run(tmp_path)
    for key, value, wrong in [
        ("actor_rollout_ref.model.path", f"{STORE}/nothing", "there is nothing at memory://store/nothing/config.json"),
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
