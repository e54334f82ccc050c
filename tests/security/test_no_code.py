"""Nothing that is loaded from a disk or a network runs code: the sources, and a malicious file for every loader."""

from __future__ import annotations

import ast
import functools
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from tests.security.malicious import pickle_bomb, torch_bomb
from tests.trainer.config.support import Run
from verl.checkpoint.resume import CheckpointPlan
from verl.checkpoint.run import TrainerCheckpoint
from verl.checkpoint.shards import read_state
from verl.datasets.files import open_files
from verl.errors import CheckpointError, ConfigError, DataError, VerlError
from verl.model_merger import merge
from verl.plugins.sandbox import Sandbox, SandboxUnavailableError
from verl.plugins.sandbox.fusion import outcome_of
from verl.plugins.sandbox.types import Limits
from verl.protocol import DataProto
from verl.supervision.killable_pool.calls import Reply
from verl.testing.models import tiny_model_dir
from verl.trainer.config import load_config
from verl.trainer.config.command_line import compose

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "verl").rglob("*.py"))


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """What a malicious file would leave behind."""
    mark = tmp_path / "code-ran"
    yield mark
    assert not mark.exists()


def test_the_bombs_go_off_where_somebody_trusts_them(tmp_path: Path):
    pickle.loads(pickle_bomb(tmp_path / "a", tmp_path / "one").read_bytes())
    torch.load(torch_bomb(tmp_path / "b", tmp_path / "two"), weights_only=False)
    assert (tmp_path / "one").is_dir()
    assert (tmp_path / "two").is_dir()


# ---- the sources ---------------------------------------------------------------------------------

RUNS_CODE = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "dill.load",
    "dill.loads", "joblib.load", "marshal.load", "marshal.loads", "shelve.open", "pandas.read_pickle", "pd.read_pickle",
    "yaml.load", "yaml.full_load", "yaml.unsafe_load", "eval", "exec", "compile", "__import__", "os.system", "os.popen",
    "sympy.sympify", "sympify", "parse_expr", "hydra.utils.instantiate", "instantiate", "hydra.utils.call",
    "hydra.utils.get_class", "hydra.utils.get_object", "importlib.import_module",
    "importlib.util.spec_from_file_location",
    "torch.hub.load", "torch.jit.load", "torch.package.PackageImporter", "torch.serialization.add_safe_globals",
    "shutil.unpack_archive", "tarfile.open", "zipfile.ZipFile", "ctypes.CDLL", "tempfile.mktemp",
}  # fmt: skip

ALLOWED = {
    # What the parent of these processes wrote; the way back is JSON.
    ("supervision/killable_pool/child.py", "pickle.loads"): 4,
    # A handle of GPU memory that the trainer made, in an order with the token of its own engine.
    ("workers/rollout/engine_side/verl_engine.py", "pickle.loads"): 1,
    # A name in our own code, or from a fixed list.
    ("supervision/killable_pool/child.py", "importlib.import_module"): 1,
    ("tracking/base.py", "importlib.import_module"): 1,
    ("workers/rollout/base.py", "importlib.import_module"): 2,
    ("trainer/driver.py", "importlib.import_module"): 1,
    ("base/lazy.py", "importlib.import_module"): 1,
    ("compat/import_hooks.py", "importlib.import_module"): 3,
    ("cli/main.py", "importlib.import_module"): 1,
    ("base/plugins.py", "importlib.import_module"): 1,  # and of base/import_utils.py, which the user names
    ("plugins/megatron/library.py", "importlib.import_module"): 1,  # megatron.core
    ("plugins/megatron/library.py", "torch.serialization.add_safe_globals"): 1,  # without megatron-core's
    # Code that the user names in the configuration or the environment.
    ("compat/toolkit/imports.py", "importlib.import_module"): 2,  # import_external_libs, load_class_from_fqn
    ("trainer/config/translate.py", "importlib.import_module"): 1,  # _target_, of a program's own configuration alone
    ("compat/toolkit/config.py", "importlib.import_module"): 1,  # _target_
    ("base/import_utils.py", "importlib.util.spec_from_file_location"): 1,
    ("workers/engine/model/headed.py", "importlib.import_module"): 1,  # model.external_lib
    ("workers/engine/optimizer.py", "importlib.import_module"): 1,  # optim.optimizer_impl
    # By a loader that makes numbers, texts, paths, lists and dicts alone: see tests of omegaconf_private.py.
    ("trainer/config/flags.py", "yaml.load"): 1,
    # What the policy wrote for its Python tool; this file runs inside the sandbox alone.
    ("plugins/sandbox/cells.py", "exec"): 1,
    ("plugins/sandbox/cells.py", "eval"): 1,
    ("plugins/sandbox/cells.py", "compile"): 2,
    # Files of this package, from an interpreter that need not have it.
    ("workers/rollout/engine_side/verl_sglang.py", "importlib.util.spec_from_file_location"): 1,
    # The library that was compiled here, into a folder that nobody else may write to.
    ("backends/cpu/kernels/__init__.py", "ctypes.CDLL"): 1,
}


class Call(NamedTuple):
    """A call in a file, its dotted name with the module that it was imported from in front."""

    name: str
    line: int
    keywords: dict[str | None, str]
    """Source of each argument by name, if it is one of ``WATCHED``; ``None`` stands for ``**``."""


WATCHED = {"shell", "verify", "allow_pickle", "allow_all_kernels", "weights_only", "trust_remote_code", None}


@functools.cache
def calls(path: Path) -> list[Call]:
    """Every call in a file."""
    tree = ast.parse(path.read_text())
    origin: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            origin |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            origin |= {alias.asname: alias.name for alias in node.names if alias.asname}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            head, *rest = ast.unparse(node.func).split(".")
            name = ".".join([origin.get(head, head), *rest])
            if name == "ctypes.CDLL" and ast.unparse(node.args[0]) == "None":
                continue  # the C library, which every process has
            keywords = {item.arg: ast.unparse(item.value) for item in node.keywords if item.arg in WATCHED}
            found.append(Call(name, node.lineno, keywords))
    return found


def test_nothing_in_the_sources_runs_what_it_reads():
    found: dict[tuple[str, str], int] = {}
    for path in SOURCES:
        for call in calls(path):
            if call.name in RUNS_CODE:
                key = (path.relative_to(ROOT / "verl").as_posix(), call.name)
                found[key] = found.get(key, 0) + 1
    new = {key: count for key, count in found.items() if count > ALLOWED.get(key, 0)}
    assert not new, f"say in ALLOWED why these are safe: {new}"


def test_the_list_of_what_is_allowed_is_no_longer_than_needed():
    found = {(path.relative_to(ROOT / "verl").as_posix(), call.name) for path in SOURCES for call in calls(path)}
    assert not ALLOWED.keys() - found


@pytest.mark.parametrize(
    "wanted, argument, must_be",
    [
        ("torch.load", "weights_only", "True"),
        ("numpy.load", "allow_pickle", "False"),
    ],
)
def test_loaders_are_called_the_safe_way(wanted: str, argument: str, must_be: str):
    for path in SOURCES:
        for call in calls(path):
            assert call.name != wanted or call.keywords.get(argument) == must_be, f"{path}:{call.line}"


def test_no_shell_no_unchecked_certificate_no_pickle_by_argument():
    for path in SOURCES:
        for call in calls(path):
            place = f"{path}:{call.line}: {call.name}"
            assert call.keywords.get("shell") in (None, "False"), place
            assert call.keywords.get("verify") in (None, "True"), place
            assert call.keywords.get("allow_pickle") in (None, "False"), place
            assert call.keywords.get("allow_all_kernels") is None, place
            assert call.keywords.get("weights_only") in (None, "True"), place


AUTO_CLASSES = ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor", "auto", "loader", "_auto_class")


def test_whoever_loads_from_a_model_folder_says_whether_code_may_run():
    seen = 0
    for path in SOURCES:
        for call in calls(path):
            owner, _, method = call.name.rpartition(".")
            is_auto = owner.rpartition(".")[2].startswith(AUTO_CLASSES)
            if method in ("from_pretrained", "from_config") and is_auto:
                said = call.keywords.get("trust_remote_code")
                in_kwargs = None in call.keywords  # set before: see hf_tokenizer
                assert said is not None or in_kwargs, f"{path}:{call.line}: {call.name}"
                assert said != "True", f"{path}:{call.line}: {call.name}"
                seen += 1
    assert seen >= 8  # the rule still finds its calls


# ---- batches -------------------------------------------------------------------------------------


def test_a_batch_is_not_read_from_a_pickle(tmp_path: Path, mark: Path):
    for write in (pickle_bomb, torch_bomb):
        with pytest.raises(DataError, match="Pickle files are never read, as they could run code"):
            DataProto.load_from_disk(write(tmp_path / "batch", mark))


def test_a_numpy_file_with_objects_is_no_batch(tmp_path: Path):
    np.save(tmp_path / "batch.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError):
        DataProto.load_from_disk(tmp_path / "batch.npy")


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [pickle_bomb, torch_bomb])
def test_a_shard_runs_nothing(tmp_path: Path, mark: Path, write: Callable[[Path, Path], Path]):
    path = write(tmp_path / "model_world_size_1_rank_0.pt", mark)
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        read_state(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("write", [pickle_bomb, torch_bomb])
@pytest.mark.parametrize("name", ["data.pt", "driver_rng.pt"])
def test_the_state_of_the_driver_runs_nothing(
    tmp_path: Path, mark: Path, name: str, write: Callable[[Path, Path], Path]
):
    folder = tmp_path / "global_step_1"
    folder.mkdir()
    for file in ("data.pt", "driver_rng.pt"):
        torch.save({}, folder / file)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    write(folder / name, mark)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        TrainerCheckpoint(CheckpointPlan(root=str(tmp_path)), {})._read(folder)


@pytest.mark.parametrize("write", [pickle_bomb, torch_bomb])
def test_the_merger_runs_nothing(tmp_path: Path, mark: Path, write: Callable[[Path, Path], Path]):
    tiny_model_dir(tmp_path / "actor" / "huggingface")
    (tmp_path / "actor" / "fsdp_config.json").write_text(json.dumps({"world_size": 1}))
    write(tmp_path / "actor" / "model_world_size_1_rank_0.pt", mark)
    with pytest.raises(CheckpointError, match="cannot be read"):
        merge(tmp_path / "actor", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- data ----------------------------------------------------------------------------------------


def test_a_parquet_file_runs_nothing(tmp_path: Path, mark: Path):
    bomb = pickle_bomb(tmp_path / "p", mark).read_bytes()
    for name in ("arrow.py_extension_type", "pandas", "verl"):
        metadata = {b"ARROW:extension:name": name.encode(), b"ARROW:extension:metadata": bomb, b"pandas": bomb}
        field = pa.field("prompt", pa.binary(), metadata=metadata)
        table = pa.table([pa.array([bomb])], schema=pa.schema([field], metadata={b"pandas": bomb}))
        pq.write_table(table, tmp_path / "rows.parquet")
        (file,) = open_files(str(tmp_path / "rows.parquet"), "data.train_files")
        assert file.row(0) == {"prompt": bomb}  # bytes, as any others
        assert list(file.column("prompt")) == [bomb]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.json", "rows.jsonl"])
def test_a_pickle_by_the_name_of_a_data_file_is_refused(tmp_path: Path, mark: Path, name: str):
    for write in (pickle_bomb, torch_bomb):
        with pytest.raises(DataError, match=r"rows\."):
            open_files(str(write(tmp_path / name, mark)), "data.train_files")


@pytest.mark.parametrize("name", ["rows.pkl", "rows.pt", "rows.npy", "rows.py", "rows.arrow", "rows.zip"])
def test_other_files_are_no_data(tmp_path: Path, mark: Path, name: str):
    pickle_bomb(tmp_path / name, mark)
    with pytest.raises(DataError, match="must end in one of"):
        open_files(str(tmp_path / name), "data.train_files")


# ---- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["trainer: !!python/object/apply:os.mkdir [{mark}]", "trainer: !!python/name:os.system ''",
     "trainer: !!python/object/new:os.mkdir {{args: [{mark}]}}"],
)  # fmt: skip
def test_a_yaml_file_runs_nothing(tmp_path: Path, mark: Path, text: str):
    path = tmp_path / "evil.yaml"
    path.write_text(text.format(mark=mark))
    with pytest.raises(yaml.YAMLError, match="could not determine a constructor"):
        OmegaConf.load(path)


def overridden(run: Run, *overrides: str) -> Any:
    return load_config(compose([*(f"{key}={value}" for key, value in run.ppo.items()), *overrides]))


@pytest.mark.parametrize("place", ["trainer", "actor_rollout_ref.actor.optim", "data"])
def test_a_target_is_refused(tmp_path: Path, mark: Path, place: str):
    with pytest.raises(ConfigError, match=r"_args_=.*there is no such key"):
        overridden(Run(tmp_path), f"{place}._target_=os.mkdir", f"+{place}._args_=[{mark}]")


def test_a_target_among_the_arguments_of_a_function_is_handed_over_as_it_is(tmp_path: Path, mark: Path):
    place = "custom_reward_function.reward_kwargs"
    config = overridden(Run(tmp_path), f"{place}._target_=os.mkdir", f"+{place}._args_=[{mark}]")
    assert config.custom_reward_function.reward_kwargs == {"_target_": "os.mkdir", "_args_": [str(mark)]}


@pytest.mark.parametrize("value", ["${eval:1+1}", "${python:1}", "${__import__:os}", "${os.getcwd}"])
def test_no_resolver_evaluates(tmp_path: Path, value: str):
    with pytest.raises(ConfigError, match=r"trainer\.experiment_name"):
        overridden(Run(tmp_path), f"trainer.experiment_name='{value}'")


# ---- other processes and services ----------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"1", b'{"status": 1}', b'{"status": ["ok"]}', b'{"status": "ok", "pid": "x"}',
     b'{"status": "ok", "fatal": 0.0}', b'{"status": "ok", "fatal": "x"}', b'{"status": "ok", "fatal": true}',
     b'{"status": "ok", "more": 1}', b'{"status": "ok", "message": {}}', b"\x80\x05.", b"[" * 100_000,
     b'{"status": "ok", "memory": 1e400}', b'{"status":"ok","pid":' + b"9" * 5000 + b"}", b"\xff\xfe"],
)  # fmt: skip
def test_what_a_child_says_is_no_reply(body: bytes):
    with pytest.raises(ValueError, match=r"."):
        Reply.read(body)


def test_what_a_child_says_is_never_unpickled(tmp_path: Path, mark: Path):
    with pytest.raises(ValueError, match="codec can't decode"):
        Reply.read(pickle_bomb(tmp_path / "p", mark).read_bytes())


@pytest.mark.parametrize(
    "answer", [{}, {"status": "Success"}, {"status": "Success", "run_result": [1]}, {"status": []}]
)
def test_a_code_service_that_lies_is_an_error(answer: dict[str, Any]):
    with pytest.raises(VerlError):
        outcome_of(answer, Limits())


def test_a_program_in_the_sandbox_has_nothing_of_ours_in_hand():
    """The stream on which the walls report how it ended, for one: whoever wrote there could name any process."""
    try:
        sandbox = Sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    outcome = sandbox.run("import os\nfor n in range(256):\n  try: os.fstat(n), print(n)\n  except OSError: pass")
    assert outcome.stdout.split() == ["0", "1", "2"]


# ---- the user's own code -------------------------------------------------------------------------


def test_no_code_is_picked_up_from_where_the_run_is_or_from_the_data(
    tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only a file that the configuration names is imported."""
    run = Run(tmp_path)
    for folder in (tmp_path, tmp_path / "model"):
        for name in ("reward", "compute_score", "custom_reward", "dataset", "custom_cls", "conftest", "__init__"):
            (folder / f"{name}.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    monkeypatch.chdir(tmp_path)
    config = load_config(compose([f"{key}={value}" for key, value in run.ppo.items()]))
    assert config.custom_reward_function.path is None
    assert config.data.custom_cls.path is None
    assert SimpleNamespace(**config.reward_manager.to_dict()).source == "register"
