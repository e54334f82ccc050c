"""A fit that a subclass writes by hand makes the numbers of verl's own, bit by bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_run import make_tiny_run, overrides, same
from tests.trainer.own_fit import OwnFitRunner, OwnFitTrainer, OwnRunner
from verl.errors import ConfigError
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

PAGE = Path(__file__).parents[2] / "docs" / "custom_trainers.md"
CLOCKS = ("timing", "perf/", "global_seqlen/")
READ_BY_THE_FIT = {
    # as the command line gives them
    "agents": 3,
    "calculate_log_probs": True,
    "wait": 77,
    "use_legacy_worker_impl": "disable",
    # as composed
    "multi_turn": False,
    "skip_rollout": False,
    "esi_redundant_time": 0,
    "default_hdfs_dir": None,
    "remove_previous_ckpt_in_save": False,
    "profile_steps": None,
    "profiled": None,
    "hybrid_engine": True,
    "lora_rank": 0,
    "use_shm": False,
    "trust_remote_code": False,
    "use_reward_loop": True,
    "router_replay": "disabled",
    "num_cpus": None,
    # what is read, by the tiny run
    "lr": 1e-3,
    "mini_batch": 4,
    "own": True,
    "unknown": (7, False),
}
Run = Callable[..., tuple[dict[int, dict[str, float]], dict[str, Any]]]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Train with a runner; the metrics of each step, and the tensors of the last checkpoint."""
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(c.isdigit() for c in solution_str) / 8\n"
    )

    def run(runner: Any, name: str, **changes: object) -> tuple[dict, dict]:
        folder, log = tmp_path / name, tmp_path / f"{name}.jsonl"
        log.unlink(missing_ok=True)
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
        settings = {"custom_reward_function__path": str(tmp_path / "reward.py"), "trainer__save_freq": 2} | changes
        run_ppo(compose(overrides(paths, folder, **settings)), runner)
        records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        steps = {record["step"]: record["data"] for record in records}
        root = folder / "checkpoints"
        last = root / f"global_step_{(root / 'latest_checkpointed_iteration.txt').read_text()}"
        files = {str(p.relative_to(last)): torch.load(p, weights_only=True) for p in sorted(last.rglob("*.pt"))}
        return steps, files

    return run


def assert_same(own: tuple[dict, dict], ours: tuple[dict, dict]) -> None:
    """Every metric that both have, and all of the checkpoint, bit by bit."""
    assert own[0].keys() == ours[0].keys()
    for step, metrics in own[0].items():
        both = {name for name in metrics.keys() & ours[0][step].keys() if not name.startswith(CLOCKS)}
        assert {"critic/score/mean", "actor/grad_norm", "actor/pg_loss", "actor/entropy"} <= both
        assert {name: metrics[name] for name in both} == {name: ours[0][step][name] for name in both}
    assert any(name.startswith("actor/model") for name in own[1])
    assert same(trained(own), trained(ours))


def trained(run: tuple[dict, dict]) -> dict[str, Any]:
    """The states of the workers in a checkpoint."""
    return {name: state for name, state in run[1].items() if "/" in name}


def runner_of_the_page() -> type[TaskRunner]:
    """The runner that docs/custom_trainers.md shows."""
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], names)
    return names["MyRunner"]


@pytest.mark.parametrize("prompts_per_optimizer_step", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_grpo(train: Run, tmp_path: Path, prompts_per_optimizer_step: int) -> None:
    """With several optimizer steps in a batch, and with one, whose forward pass gives verl's own old_log_probs."""
    settings = {
        "trainer__total_training_steps": 2,
        "trainer__test_freq": 2,
        "actor_rollout_ref__actor__ppo_mini_batch_size": prompts_per_optimizer_step,
        "actor_rollout_ref__rollout__agent__num_workers": 3,
        "actor_rollout_ref__rollout__calculate_log_probs": "true",
        "trainer__ray_wait_register_center_timeout": 77,
        "trainer__use_legacy_worker_impl": "disable",
    }
    own, ours = train(OwnFitRunner, "own", **settings), train(TaskRunner, "ours", **settings)
    assert_same(own, ours)
    assert "val-core/countdown/reward/mean@1" in own[0][2]
    assert OwnFitTrainer.found == READ_BY_THE_FIT
    # Of the two steps, the fit has the second one profiled.
    trace = json.loads((tmp_path / "own" / "profile" / "actor_rollout_rank0_0.json").read_text())
    assert "aten::mm" in {event.get("name") for event in trace["traceEvents"]}
    assert len(list((tmp_path / "own" / "profile").iterdir())) == 1
    if prompts_per_optimizer_step == 2:
        assert same(trained(train(runner_of_the_page(), "page", **settings)), trained(ours))


def test_what_public_trainers_have_and_this_one_has_not() -> None:
    trainer: Any = object.__new__(RayPPOTrainer)
    with pytest.raises(AttributeError, match=r"tq_client is not in this version.*batches travel as verl.DataProto"):
        _ = trainer.tq_client
    with pytest.raises(AttributeError, match="has no attribute '_configured_needs'"):
        _ = trainer.use_critic  # an error inside of a property names what is missing there


@pytest.mark.slow
def test_ppo_with_all_models_on_two_ranks(train: Run, ray_cluster: None) -> None:
    """Assembled by hand too: a runner of its own, workers of its own, configuration as Hydra composes it."""
    settings = {
        "algorithm__adv_estimator": "gae",
        "algorithm__use_kl_in_reward": "true",
        "reward_model__enable": "true",
        "trainer__controller": "ray",
        "trainer__n_gpus_per_node": 2,
        "trainer__total_training_steps": 1,
    }
    own, ours = train(OwnRunner, "own", **settings), train(TaskRunner, "ours", **settings)
    assert_same(own, ours)
    assert {"critic/vf_loss", "actor/reward_kl_penalty"} <= own[0][1].keys()


def test_a_fit_that_samples_by_itself_does_not_sample_ahead(train: Run) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.async\.lag=1 samples ahead in verl's own step"):
        train(OwnFitRunner, "ahead", trainer__total_training_steps=1, trainer__async__lag=1)
