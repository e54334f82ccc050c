"""Whole GRPO runs with the real vLLM; run by ``make test-vllm``, skipped where vLLM cannot be imported."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_run import make_tiny_run, overrides, same
from tests.trainer.test_run import assert_same_steps
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

pytestmark = pytest.mark.skipif(
    os.environ.get("VERL_TEST_VLLM") != "1" and importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed here: make test-vllm",
)


KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def steps_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> dict[int, dict[str, float]]:
    """The metrics of two steps."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "metrics.jsonl"))
    paths = make_tiny_run(folder)
    paths["model"] = tiny_model_dir(folder / "model32", "qwen3", head_dim=32)
    settings = {
        "actor_rollout_ref__rollout__name": "vllm",
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 1,
        "actor_rollout_ref__rollout__enforce_eager": "true",
        "trainer__save_freq": -1,
        "trainer__test_freq": -1,
    }
    memory = f"+{KWARGS}.kv_cache_memory_bytes={64 * 2**20}"
    run_ppo(compose([*overrides(paths, folder, **(settings | changes)), memory]))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["data"] for record in records if "training/rollout_probs_diff_max" in record["data"]}


def gaps_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> list[float]:
    """Of each of two steps: the largest difference between what vLLM and the trainer say of a sampled token."""
    steps = steps_of_a_run(folder, monkeypatch, **changes)
    return [step["training/rollout_probs_diff_max"] for step in steps.values()]


def test_grpo_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM says of its tokens is what the trainer computes over those that it kept, before and after an update."""
    rollout = "actor_rollout_ref__rollout__"
    cut = {f"{rollout}top_p": 0.9, f"{rollout}keep_sampling_mask": "true"}
    steps = steps_of_a_run(tmp_path, monkeypatch, **{f"{rollout}mode": "sync"}, **cut)
    assert len(steps) == 2
    assert max(step["training/rollout_probs_diff_max"] for step in steps.values()) < 1e-5
    assert max(step["training/sampling_mask/unknown"] for step in steps.values()) == 0
    assert 10 < steps[1]["training/sampling_mask/size"] <= 64


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_engine", [1, 2])
def test_grpo_on_two_ranks(
    ranks_per_engine: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    """Two ranks with an engine each, or with one that is split over both and fed by both."""
    changes = {
        "trainer__controller": "ray",
        "trainer__n_gpus_per_node": 2,
        "actor_rollout_ref__rollout__tensor_model_parallel_size": ranks_per_engine,
    }
    gaps = gaps_of_a_run(tmp_path, monkeypatch, **changes)
    assert len(gaps) == 2
    assert max(gaps) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks_per_engine", [1, 2])
def test_megatron_trains_what_vllm_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None, ranks_per_engine: int
) -> None:
    """Two tensor-parallel ranks, which stream their weights to an engine each, or to one of both.

    The numbers are those of FSDP2 with vLLM.
    """
    pytest.importorskip("megatron.core", reason="vLLM's environment has no megatron-core: docs/internals/megatron.md")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(c.isdigit() for c in solution_str) / 8\n"
    )
    common = {
        "trainer__controller": "ray",
        "trainer__n_gpus_per_node": 2,
        "custom_reward_function__path": tmp_path / "reward.py",
        "actor_rollout_ref__actor__use_kl_loss": "true",
        "actor_rollout_ref__actor__optim__lr": 1e-3,
        # AdamW's step is lr · m / (√v + ε): with the usual tiny ε the rounding of a gradient near 0 becomes one of lr.
        "actor_rollout_ref__actor__optim__override_optimizer_config": "{eps:1e-4}",
        "actor_rollout_ref__rollout__tensor_model_parallel_size": ranks_per_engine,
    }
    megatron = {
        "actor_rollout_ref__actor__strategy": "megatron",
        "actor_rollout_ref__actor__megatron__tensor_model_parallel_size": 2,
        "actor_rollout_ref__actor__megatron__dtype": "float32",
        "actor_rollout_ref__ref__megatron__dtype": "float32",
    }
    fsdp = steps_of_a_run(tmp_path / "fsdp", monkeypatch, **common)
    found = steps_of_a_run(tmp_path / "megatron", monkeypatch, **common, **megatron)
    assert_same_steps(fsdp, found, rel=1e-5)
    assert found.keys() == {1, 2}
    assert found[2]["actor/kl_loss"] > 1e-6  # the second step was generated by other weights than the first
    assert max(step["training/rollout_probs_diff_max"] for step in found.values()) < 1e-5


LOOPS = """
import asyncio, os, pathlib, signal, psutil
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

FOLDER = pathlib.Path(__file__).parent

class Twice(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt = row["raw_prompt_ids"]
        few = {**sampling_params, "max_tokens": 4}
        first = (await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=few)).token_ids
        many = {**sampling_params, "max_tokens": 200}
        call = asyncio.create_task(
            self.server_manager.generate("a", prompt_ids=prompt + first, sampling_params=many))
        await asyncio.sleep(0.3)
        strike()
        ids = first + (await call).token_ids
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=[1] * len(ids))

def strike():
    try:
        os.rename(FOLDER / "order", FOLDER / "done")  # one of the trajectories alone
    except FileNotFoundError:
        return
    mine = psutil.Process().children(recursive=True)
    [core] = [one for one in mine if "EngineCore" in " ".join([one.name(), *one.cmdline()])]
    core.send_signal(signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)  # two starts of a server and a third in place of the killed one
def test_a_server_that_dies_in_a_turn_of_agent_loops_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process that computes is killed while it draws second turns: the same weights after two steps."""

    def weights_after(name: str, is_struck: bool) -> dict[str, Any]:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "loops.py").write_text(LOOPS)
        (folder / "loops.yaml").write_text(f"- {{name: twice, _target_: Twice, path: {folder}/loops.py}}\n")
        if is_struck:
            (folder / "order").touch()
        changes = {
            "actor_rollout_ref__rollout__ignore_eos": "true",
            "data__max_response_length": 204,
            "actor_rollout_ref__rollout__agent__agent_loop_config_path": folder / "loops.yaml",
            "actor_rollout_ref__rollout__agent__default_agent_loop": "twice",
            "trainer__save_freq": 2,
        }
        gaps = gaps_of_a_run(folder, monkeypatch, **changes)
        assert len(gaps) == 2
        assert max(gaps) < 1e-5
        assert (folder / "done").exists() == is_struck
        saved = folder / "checkpoints" / "global_step_2" / "actor"
        return {path.name: torch.load(path, weights_only=True) for path in saved.glob("*.pt")}

    undisturbed = weights_after("undisturbed", False)
    assert "engine lost" not in caplog.text
    struck = weights_after("struck", True)
    assert "engine lost; restart 1 of 3" in caplog.text
    assert any(name.startswith("model") for name in undisturbed)
    assert undisturbed.keys() == struck.keys()
    assert [name for name in sorted(undisturbed) if not same(struck[name], undisturbed[name])] == []
