"""Paths stay in their folders, whatever a configuration, an archive, a checkpoint or a model says."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.trainer.config.support import Run
from verl.base import env
from verl.base.fs import below, copy_to_local, name_problem
from verl.checkpoint import steps
from verl.checkpoint.resume import CheckpointPlan
from verl.checkpoint.run import TrainerCheckpoint
from verl.checkpoint.shards import read_shards, saved_world_size
from verl.errors import CheckpointError, ConfigError, DataError
from verl.model_merger import merge
from verl.model_merger.fsdp import saved_weights
from verl.testing.models import tiny_model_dir
from verl.tracking import Tracking
from verl.trainer.config import load_config
from verl.trainer.config.command_line import compose

ESCAPES = ["..", "../x", "a/../../x", "a/..", "/etc/x", "/", "", ".", "./x", "a/./b", "x\0y", "a" * 300]
NAMES = ["x", "a/b", "run-1", "qwen2.5_7b..v2", "...", "ünï", "a b", "-x", "~x", "a\\..\\b"]


@pytest.mark.parametrize("name", ESCAPES)
def test_names_that_are_none(name: str, tmp_path: Path):
    assert name_problem(name)
    with pytest.raises(ConfigError, match="cannot be a name below"):
        below(tmp_path, "a", name)


@pytest.mark.parametrize("name", NAMES)
def test_names_that_stay_where_they_are(name: str, tmp_path: Path):
    assert name_problem(name) is None
    path = below(tmp_path, "a", name)
    assert path == tmp_path / "a" / name
    assert os.path.realpath(path).startswith(f"{tmp_path}/a/")


# ---- names of runs -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["project_name", "experiment_name"])
def test_the_name_of_a_run_cannot_leave_the_folder(tmp_path: Path, key: str):
    settings = [f"{name}={value}" for name, value in Run(tmp_path).ppo.items()]
    with pytest.raises(ConfigError, match=rf"trainer\.{key}=\.\./\.\./x: it leads out of the folder"):
        load_config(compose([*settings, f"trainer.{key}=../../x"]))
    config = load_config(compose([*settings, f"trainer.{key}=team/x"]))
    assert config.trainer[key] == "team/x"


def test_trackers_write_below_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "logs"))
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "logs"))
    for tracker in ("file", "tensorboard"):
        for names in (("p", "../../e"), ("../p", "e"), ("/p", "e"), ("p", "/e")):
            with pytest.raises(ConfigError, match="cannot be a name below"):
                Tracking(*names, tracker)
    assert not (tmp_path / "logs").exists()
    assert env.file_logger_path("p", "team/e") == tmp_path / "logs/p/team/e.jsonl"


# ---- remote files and archives -------------------------------------------------------------------


def archive(path: Path, member: str) -> str:
    """An archive with one honest file and one that wants to lie elsewhere; its address."""
    names = ["m/honest", f"m/{member}"]
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as file:
            for name in names:
                file.writestr(name, "x")
    else:
        with tarfile.open(path, "w") as file:
            for name in names:
                info = tarfile.TarInfo(name)
                info.size = 1
                file.addfile(info, io.BytesIO(b"x"))
    return f"{path.suffix[1:]}://m::file://{path}"


@pytest.mark.parametrize("kind", [".zip", ".tar"])
@pytest.mark.parametrize("member", ["../../../evil", "sub/../../../../evil", "..", "/evil"])
def test_an_archive_stays_in_its_folder(tmp_path: Path, kind: str, member: str):
    source = archive(tmp_path / f"a{kind}", member)
    cache = tmp_path / "one" / "two" / "cache"
    try:
        copy_to_local(source, str(cache))
    except DataError as error:
        assert "outside the destination" in str(error)  # noqa: PT017  (either is right: refused, or kept inside)
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - {tmp_path / f"a{kind}"}
    assert all(path.is_relative_to(cache) for path in written), written


@pytest.mark.parametrize("source", ["memory://store/..", "memory://.."])
def test_an_address_without_a_name(tmp_path: Path, source: str):
    with pytest.raises(ConfigError, match="leads out of the folder"):
        copy_to_local(source, str(tmp_path))


def test_copies_lie_where_nobody_else_can_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder below /tmp could have been filled by anybody beforehand."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fsspec.filesystem("memory").pipe("/store/mine.jsonl", b"{}")
    copy = Path(copy_to_local("memory://store/mine.jsonl"))
    assert copy.is_relative_to(tmp_path / "cache/verl/files")
    assert copy.parent.stat().st_mode & 0o077 == 0


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["../../evil", "1/../../evil", "/etc", "", "-1", "1e3", "0x1", "1 2", "1\n2", "nan", "9" * 5000, "\0", "1;rm",
     "１２"],
)  # fmt: skip
def test_a_made_up_latest_step_leads_nowhere(tmp_path: Path, text: str):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "evil").mkdir()
    (root / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration\.txt names no step"):
        steps.read_latest(root)
    with pytest.raises(CheckpointError):
        TrainerCheckpoint(CheckpointPlan(root=str(root)), {}).load()


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "a/../../../secret", ".."])
def test_a_manifest_that_names_files_elsewhere_is_damaged(tmp_path: Path, name: str):
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "root" / "global_step_1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"files": {name: {"size": 1, "sha256": "0"}}}))
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: .*(leads out|begins with /)"):
        steps.read_manifest(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "null", '{"world_size": "2"}', '{"world_size": 0}', '{"world_size": -1}', '{"world_size": true}',
     '{"world_size": 1e400}', '{"world_size": 2.0}', '{"world_size": [1]}', '{"world_size": null}', "[" * 100_000,
     '{"world_size": ' + "9" * 5000 + "}", "\ud800"],
)  # fmt: skip
def test_a_made_up_number_of_ranks(tmp_path: Path, text: str):
    (tmp_path / "fsdp_config.json").write_text(text, errors="replace")
    with pytest.raises(CheckpointError, match=r"fsdp_config\.json"):
        saved_world_size(tmp_path)


def test_a_huge_number_of_ranks_ends_at_the_first_file_that_is_missing(tmp_path: Path):
    ranks = 10**12
    (tmp_path / "fsdp_config.json").write_text(json.dumps({"world_size": ranks}))
    shard(tmp_path, ranks=ranks)
    with pytest.raises(CheckpointError, match=f"model_world_size_{ranks}_rank_1.pt is missing"):
        read_shards(tmp_path, "model", saved_world_size(tmp_path))


def shard(folder: Path, ranks: int = 1, **changes: Any) -> None:
    state = {"format": 1, "tensors": {"w": torch.zeros(2, 3)}, "shapes": {"w": [2, 3]}, "first_rows": {"w": 0}}
    torch.save(state | changes, folder / f"model_world_size_{ranks}_rank_0.pt")


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": {"w": torch.zeros(1, 3).expand(10**12, 3)}, "shapes": {"w": [10**12, 3]}},  # 4 bytes on the disk
        {"shapes": {"w": [2, 4]}},
        {"shapes": {"w": [-2, 3]}},
        {"shapes": {"w": "23"}},
        {"shapes": {"w": [2, 3, 1]}},
        {"shapes": {}},
        {"shapes": 5},
        {"first_rows": {"w": 1}},
        {"first_rows": {"w": -1}},
        {"first_rows": {"w": 0.0}},
        {"first_rows": {"w": True}},
        {"first_rows": {"v": 0}},
        {"tensors": {"w": "text"}},
        {"tensors": None},
    ],
)
def test_a_made_up_shard_is_damaged(tmp_path: Path, changes: dict[str, Any]):
    shard(tmp_path)
    assert read_shards(tmp_path, "model", 1)[0]["tensors"]["w"].shape == (2, 3)
    shard(tmp_path, **changes)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_shards(tmp_path, "model", 1)


def test_a_shape_of_which_the_rows_are_missing_takes_no_memory(tmp_path: Path):
    """A million times a million rows are promised, and two are there."""
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "fsdp_config.json").write_text(json.dumps({"world_size": 1}))
    shard(tmp_path / "actor", shapes={"w": [10**12, 3]})
    with pytest.raises(CheckpointError, match=r"hold rows up to 2 of 'w', which has 1000000000000"):
        saved_weights(tmp_path / "actor")["w"]


def test_the_merger_writes_nothing_outside_its_folder(tmp_path: Path):
    """Names of weights become no paths, and what lies in the target by a link is not written through it."""
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "fsdp_config.json").write_text(json.dumps({"world_size": 1}))
    name = "../../evil"
    parts = {"tensors": {name: torch.zeros(2, 3)}, "shapes": {name: [2, 3]}, "first_rows": {name: 0}}
    shard(tmp_path / "actor", **parts)
    assert list(saved_weights(tmp_path / "actor")) == [name]
    tiny_model_dir(tmp_path / "actor" / "huggingface")
    with pytest.raises(CheckpointError, match=r"unknown \['\.\./\.\./evil'\]"):
        merge(tmp_path / "actor", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["", ".partial"])
def test_a_link_among_the_checkpoints_is_not_followed_when_old_ones_go(tmp_path: Path, suffix: str):
    precious, root = tmp_path / "precious", tmp_path / "root"
    for folder in (precious / "actor", root):
        folder.mkdir(parents=True)
    (precious / "actor" / "file").write_text("x")
    (root / f"global_step_1{suffix}").symlink_to(precious)
    checkpoint = TrainerCheckpoint(CheckpointPlan(root=str(root), keep={"actor": 1}), {})
    try:
        steps.begin(root, 2)
    except OSError as error:
        assert "symbolic link" in str(error)  # noqa: PT017
    checkpoint._drop_old(2)
    assert (precious / "actor" / "file").read_text() == "x"
