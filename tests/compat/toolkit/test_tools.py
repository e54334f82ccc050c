"""Small tools of users' scripts: files, calls, dicts, imports, names, addresses, unpadding, metrics."""

from __future__ import annotations

import asyncio
import logging
import math
import time

import fsspec
import pytest
import torch
from omegaconf import OmegaConf

from verl.algorithms.groups import as_torch_index, group_mean_std
from verl.compat.toolkit import files
from verl.compat.toolkit.attention import index_first_axis, pad_input, unpad_input
from verl.compat.toolkit.calls import auto_await, deprecated, get_event_loop, timeout_limit
from verl.compat.toolkit.checkpoints import find_latest_ckpt_path, should_save_ckpt_esi
from verl.compat.toolkit.dicts import (
    NestedNamespace,
    append_to_dict,
    convert_to_regular_types,
    rename_dict,
    union_two_dict,
)
from verl.compat.toolkit.imports import (
    import_external_libs,
    is_installed,
    is_version_ge,
    is_vllm_available,
    load_extern_object,
    load_extern_type,
)
from verl.compat.toolkit.metrics import LocalLogger, calculate_debug_metrics, log_with_rank
from verl.compat.toolkit.names import DatasetPadMode, PrecisionType
from verl.compat.toolkit.processes import get_free_port, is_ipv6, parse_cores
from verl.compat.toolkit.scoring import parallel_compute_score_async
from verl.compat.toolkit.traces import rollout_trace_op
from verl.errors import CheckpointError, ConfigError, DataError, SchemaError
from verl.protocol import DataProto
from verl.scorers import default_compute_score

# ---- files ----------------------------------------------------------------------------------------


def test_files_and_folders_are_copied_here_and_there(tmp_path):
    """As public preprocessing scripts end: ``makedirs(hdfs_dir); copy(src=local_dir, dst=hdfs_dir)``."""
    files.makedirs(str(tmp_path / "a/b"), exist_ok=True)
    (tmp_path / "a/b/train.parquet").write_text("rows")
    assert files.copy(str(tmp_path / "a"), str(tmp_path / "c"))
    assert (tmp_path / "c/b/train.parquet").read_text() == "rows"
    (tmp_path / "a/b/test.parquet").write_text("more")
    files.makedirs(str(tmp_path / "c"), exist_ok=True)
    assert files.copy(src=str(tmp_path / "a"), dst=str(tmp_path / "c"))  # into the folder that makedirs made
    assert (tmp_path / "c/b/test.parquet").read_text() == "more"
    with pytest.raises(FileExistsError):
        files.copy(str(tmp_path / "a"), str(tmp_path / "c"), dirs_exist_ok=False)

    files.makedirs("memory://store/data", exist_ok=True)
    assert files.copy(src=str(tmp_path / "a/b/train.parquet"), dst="memory://store/data")
    assert files.exists("memory://store/data/train.parquet")
    assert files.copy("memory://store/data", str(tmp_path / "back"))
    assert (tmp_path / "back/train.parquet").read_text() == "rows"
    assert files.copy("memory://store/data/train.parquet", "memory://store/other.parquet")
    assert fsspec.filesystem("memory").cat("/store/other.parquet") == b"rows"

    for src in (str(tmp_path / "nothing"), "memory://store/nothing"):
        assert not files.exists(src)
        with pytest.raises(FileNotFoundError):
            files.copy(src, "memory://store/x")
    with pytest.raises(DataError, match="there is no file system nosuch://"):
        files.exists("nosuch://host/file")
    assert files.local_mkdir_safe(str(tmp_path / "d/e")) == files.local_mkdir_safe(str(tmp_path / "d/e"))
    assert files.copy_local_path_from_hdfs(str(tmp_path / "d")) == str(tmp_path / "d")


def test_the_newest_checkpoint(tmp_path, monkeypatch):
    assert find_latest_ckpt_path(str(tmp_path)) is None
    assert find_latest_ckpt_path(None) is None
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    assert find_latest_ckpt_path(str(tmp_path)) is None  # it names a folder that is not there
    (tmp_path / "global_step_12").mkdir()
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_12")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("twelve")
    with pytest.raises(CheckpointError, match="names no step"):
        find_latest_ckpt_path(str(tmp_path))

    assert not should_save_ckpt_esi(100)
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", str(time.time() + 1000))
    # A step of 900 s and a save of 60 s fit into 1000 s, with 100 s to spare they do not.
    assert [should_save_ckpt_esi(900), should_save_ckpt_esi(900, redundant_time=100)] == [False, True]
    assert not should_save_ckpt_esi(0, redundant_time=2000)  # no step yet
    monkeypatch.setenv("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", "tomorrow")
    with pytest.raises(ConfigError, match="'tomorrow' is no number of seconds"):
        should_save_ckpt_esi(900)


# ---- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_signals", [True, False])
def test_a_call_has_a_time_limit(use_signals):
    @timeout_limit(seconds=0.2, use_signals=use_signals)
    def sleep(seconds, *, value):
        time.sleep(seconds)
        if value is None:
            raise LookupError("nothing")
        return value

    assert sleep(0, value=[1]) == [1]
    with pytest.raises(LookupError, match="nothing"):
        sleep(0, value=None)
    with pytest.raises(TimeoutError, match=r"sleep took longer than 0.2 s"):
        sleep(60, value=1)


def test_traced_calls_are_logged(caplog):
    class Tool:
        @rollout_trace_op
        async def execute(self, x, **kwargs):
            await asyncio.sleep(0)
            return 10 // x + kwargs["more"]

        @rollout_trace_op
        def plain(self):
            return 3

    with caplog.at_level(logging.DEBUG, "verl"):
        assert (asyncio.run(Tool().execute(5, more=1)), Tool().plain()) == (3, 3)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(Tool().execute(0))
    said = [record.message.split(" after ")[0].split(".<locals>.")[1] for record in caplog.records[-3:]]
    assert said == ["Tool.execute returned", "Tool.plain returned", "Tool.execute raised"]


def test_a_coroutine_runs_in_plain_code_and_is_awaited_in_a_loop():
    @auto_await
    async def double(x):
        await asyncio.sleep(0)
        return 2 * x

    async def inside():
        return await double(3)

    assert double(2) == 4
    assert asyncio.run(inside()) == 6
    assert double(4) == 8  # asyncio.run took the loop of the thread away
    assert not get_event_loop().is_closed()


def test_deprecated_functions_and_classes_say_what_replaces_them():
    @deprecated("verl.new")
    def old(x):
        return x

    @deprecated()
    class Old:
        def __init__(self, x):
            self.x = x

    with pytest.warns(FutureWarning, match=r"old is deprecated; use verl\.new instead"):
        assert old(1) == 1
    with pytest.warns(FutureWarning, match="Old is deprecated"):
        assert isinstance(Old(2), Old)


# ---- dicts, imports, names ------------------------------------------------------------------------


def test_dicts():
    found = {"actor/loss": [1]}
    append_to_dict(found, {"loss": 2, "kl": 3}, prefix="actor/")
    assert found == {"actor/loss": [1, 2], "actor/kl": [3]}
    assert rename_dict({"a": 1, "val/b": 2}, "val/") == {"val/a": 1, "val/b": 2}
    nested = {"a": OmegaConf.create({"b": [1, {"c": "${d}"}], "d": 2}), "e": (OmegaConf.create([3]),)}
    assert convert_to_regular_types(nested) == {"a": {"b": [1, {"c": 2}], "d": 2}, "e": ([3],)}
    assert NestedNamespace({"a": {"b": 1}}).a.b == 1
    both = {"a": 1}
    assert union_two_dict(both, {"a": 1, "b": 2}) is both
    with pytest.raises(SchemaError, match="entry 'b'"):
        union_two_dict(both, {"b": 3})


def test_objects_of_users_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    pass\n")
    assert load_extern_type(str(file), "Mine") is load_extern_object(str(file), "Mine")
    assert load_extern_object("pkg://math", "pi") == math.pi
    assert load_extern_type(None, "Mine") is None
    with pytest.raises(ConfigError, match="no such name"):
        load_extern_type(str(file), "Yours")
    import_external_libs("json")
    import_external_libs(["math", "json"])
    import_external_libs(None)
    with pytest.raises(ModuleNotFoundError):
        import_external_libs("no_such_module")
    assert [is_version_ge("torch", "2.0"), is_version_ge("torch", "99"), is_version_ge("nothing", "0")] == [
        True,
        False,
        False,
    ]


def test_names_of_number_formats_and_paddings():
    for precision in ("bf16", "bfloat16", torch.bfloat16):
        assert PrecisionType.is_bf16(precision)
        assert PrecisionType.to_dtype(precision) is torch.bfloat16
    assert PrecisionType.is_fp16(16)
    assert PrecisionType.is_fp32("float")
    assert not PrecisionType.is_fp16("bf16")
    assert PrecisionType.to_str(torch.float32) == "fp32"
    assert not PrecisionType.supported_type("int8")
    with pytest.raises(ConfigError, match="dtype 'int8' is unknown"):
        PrecisionType.to_dtype("int8")
    assert DatasetPadMode("no_padding") is DatasetPadMode.NO_PADDING
    assert DatasetPadMode.RIGHT == "right"


def test_ports_and_cores():
    port, holder = get_free_port("127.0.0.1")
    assert holder.getsockname()[1] == port
    holder.close()
    assert get_free_port("127.0.0.1", with_alive_sock=False)[1] is None
    assert [is_ipv6(text) for text in ("::1", "127.0.0.1", "host")] == [True, False, False]
    assert parse_cores("0-2,8\n") == {0, 1, 2, 8}
    assert parse_cores("\n") == set()


# ---- numbers --------------------------------------------------------------------------------------


def test_padding_is_removed_and_put_back():
    x = torch.arange(12, dtype=torch.float).view(2, 3, 2).requires_grad_()
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    tokens, indices, boundaries, longest, lengths = unpad_input(x, mask)
    assert indices.tolist() == [1, 2, 3]
    assert (boundaries.tolist(), longest, lengths.tolist()) == ([0, 2, 3], 2, [2, 1])
    assert tokens.tolist() == [[2, 3], [4, 5], [6, 7]]
    assert torch.equal(pad_input(tokens, indices, 2, 3), x * mask[..., None])
    index_first_axis(x.flatten(0, 1), indices).sum().backward()
    assert torch.equal(x.grad, mask[..., None].expand(2, 3, 2).float())


def test_groups_of_any_ids():
    assert as_torch_index(["b", "a", "b"]).tolist() == [0, 1, 0]
    assert as_torch_index(torch.tensor([7, 3, 7])).tolist() == [1, 0, 1]
    scores = torch.tensor([1.0, 5.0, 3.0, 2.0, 2.0])
    mean, std, size = group_mean_std(scores, torch.tensor([0, 1, 0, 2, 2]))
    # group 0: mean 2, variance (1 + 1) / 1; group 1 has one member; group 2 varies not at all: sqrt(1e-6)
    torch.testing.assert_close(mean, torch.tensor([2.0, 0.0, 2.0]))
    torch.testing.assert_close(std, torch.tensor([2**0.5, 1.0, 1e-3]))
    assert size.tolist() == [2, 1, 2]


def test_probabilities_of_engine_and_trainer_are_compared():
    p, q = torch.tensor([[0.5, 0.25, 0.1]]), torch.tensor([[0.4, 0.45, 0.9]])
    batch = {"rollout_log_probs": p.log(), "old_log_probs": q.log(), "responses": torch.ones(1, 3, dtype=torch.long)}
    batch["attention_mask"] = torch.tensor([[1, 1, 1, 1, 0]])  # two prompt tokens, two response tokens
    found = calculate_debug_metrics(DataProto.from_dict(batch))
    # |p - q| is 0.1 and 0.2 at the two tokens
    assert found["training/rollout_probs_diff_valid"] == 1
    assert found["training/rollout_probs_diff_max"] == pytest.approx(0.2)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.15)
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(-1)


def test_metrics_and_messages_are_written(capsys, caplog):
    LocalLogger().log({"loss": 0.5}, step=3)
    LocalLogger(print_to_console=False).log({"loss": 0.5}, step=4)
    assert capsys.readouterr().out == "step:3 - loss:0.5\n"
    logger = logging.getLogger("a script")
    caplog.set_level("INFO", "a script")
    for rank in (0, 1):
        log_with_rank("ready", rank, logger, log_only_rank_0=True)
    log_with_rank("ready", 1, logger)
    assert caplog.messages == ["[Rank 0] ready", "[Rank 1] ready"]


def test_what_is_installed():
    assert is_installed("json.tool")
    assert not is_installed("json.no_such_module")
    assert not is_installed("no_such_package.core")  # nor its parent
    assert is_vllm_available() == is_installed("vllm")


def test_texts_are_scored_in_parallel():
    texts, truths, tasks = (
        ["#### 5", "#### 6", r"\boxed{5}", "x"],
        ["5", "5", 5, None],
        ["gsm8k"] * 2 + ["math_reward", "no"],
    )
    scored = parallel_compute_score_async(default_compute_score, texts[:3], truths[:3], tasks[:3], num_processes=2)
    assert asyncio.run(scored) == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="shorter"):
        asyncio.run(parallel_compute_score_async(default_compute_score, texts, truths[:3], tasks))
