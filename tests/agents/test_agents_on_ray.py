"""Agent loops on Ray whose processes die or hang in the middle of a rollout: the run goes on, and its numbers stay."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from verl.testing.tiny_run import make_tiny_run, overrides, same
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

LOOPS = """
import os, pathlib
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

FOLDER = pathlib.Path(__file__).parent

class Twice(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt = row["raw_prompt_ids"]
        few = {**sampling_params, "max_tokens": 3}
        first = (await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=few)).token_ids
        strike()
        second = (await self.server_manager.generate("a", prompt_ids=prompt + first, sampling_params=few)).token_ids
        ids = first + second
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=[1] * len(ids))

def strike():
    try:
        os.rename(FOLDER / "order", FOLDER / "done")  # one of the trajectories alone
    except FileNotFoundError:
        return
    pid, number = (FOLDER / "done").read_text().split()
    os.kill(int(pid) or os.getpid(), int(number))
"""


class OrderingTrainer(RayPPOTrainer):
    """Orders a process to be hit when a trajectory is between its turns; ``orders`` says in which step which."""

    folder: Path
    orders: dict[int, tuple[str, signal.Signals]]
    actors: list[Any]

    def rollout(self, *args: Any, **kwargs: Any) -> Any:
        order = self.orders.pop(self.global_steps, None)
        if order is not None:
            (self.folder / "new").write_text(f"{self._pid(order[0])} {int(order[1])}")
            (self.folder / "new").rename(self.folder / "order")
        batch = super().rollout(*args, **kwargs)
        agents = self.response_source.agent_loops._agents
        self.actors += [watched.actor for watched in [agents._router, *agents._workers]]
        return batch

    def _pid(self, who: str) -> int:
        if who == "worker":
            return 0
        actor = (
            self.actor_rollout_wg.workers[1]
            if who == "rank"
            else self.response_source.agent_loops._agents._router.actor
        )
        return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


class OrderingRunner(TaskRunner):
    def trainer_class(self) -> type[RayPPOTrainer]:
        return OrderingTrainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Callable[..., dict[int, dict]]:
    """Train on two ranks while processes are hit; the metrics of every step."""
    root = tmp_path_factory.mktemp("agents")
    paths = make_tiny_run(root)
    (root / "loops.py").write_text(LOOPS)
    (root / "loops.yaml").write_text(f"- {{name: twice, _target_: Twice, path: {root}/loops.py}}\n")
    (root / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(c.isdigit() for c in solution_str) / 8\n"
    )

    def train(name: str, orders: dict[int, tuple[str, signal.Signals]], **changes: object) -> dict[int, dict]:
        log = root / f"{name}.jsonl"
        OrderingTrainer.folder, OrderingTrainer.orders, OrderingTrainer.actors = root, dict(orders), []
        settings = {
            "trainer__controller": "ray",
            "trainer__n_gpus_per_node": 2,
            "trainer__total_training_steps": 3,
            "custom_reward_function__path": root / "reward.py",
            "trainer__val_before_train": "false",
            "trainer__recovery__backoff_s": 0,
            "actor_rollout_ref__rollout__name": "native",
            "actor_rollout_ref__rollout__agent__agent_loop_config_path": root / "loops.yaml",
            "actor_rollout_ref__rollout__agent__default_agent_loop": "twice",
            "actor_rollout_ref__rollout__agent__num_workers": 2,
            "actor_rollout_ref__rollout__agent__hang_timeout_s": 10,
        } | changes
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VERL_FILE_LOGGER_PATH", str(log))
            run_ppo(compose(overrides(paths, root / name, **settings)), OrderingRunner)
        assert not OrderingTrainer.orders
        assert not (root / "order").exists(), "a process was to be hit and was not"
        records = [json.loads(line) for line in log.read_text().splitlines()]
        return {record["step"]: record["data"] for record in records}

    return train


NOT_COMPARED = ("timing", "perf/", "recovery/", "rollout_corr/", "training/rollout_")
"""The last two measure rounding errors of the engine, which depend on what is computed together."""


@pytest.mark.slow
def test_processes_that_die_or_hang_in_a_rollout_leave_no_trace_in_the_run(run):
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    undisturbed = run("undisturbed", {})
    for actor in OrderingTrainer.actors:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.__ray_call__.remote(lambda _: None))
    orders = {1: ("worker", kill), 2: ("router", kill), 3: ("rank", kill)}
    disturbed = run("disturbed", orders)
    orders = {1: ("worker", stop), 2: ("rank", stop), 3: ("router", stop)}
    hung = run("hung", orders, trainer__recovery__hang_timeout_s=15)
    for found in (disturbed, hung):
        assert [found[step].get("recovery/restarts", 0) for step in (1, 2, 3)] == [0, 1, 2]
    for found in (disturbed, hung):
        for step, expected in undisturbed.items():
            names = {name for name in found[step].keys() | expected.keys() if not name.startswith(NOT_COMPARED)}
            assert [n for n in sorted(names) if not same(found[step].get(n), expected.get(n))] == [], f"step {step}"


@pytest.mark.slow
def test_ranks_that_share_a_model_serve_what_each_alone_does_also_after_one_is_killed(run):
    whole = run("an engine in each rank", {})
    split = {"actor_rollout_ref__rollout__tensor_model_parallel_size": 2}
    found = run("one engine", {2: ("rank", signal.SIGKILL)}, **split)
    assert [found[step].get("recovery/restarts", 0) for step in (1, 2, 3)] == [0, 1, 1]
    for step, expected in whole.items():
        names = {name for name in found[step].keys() & expected.keys() if not name.startswith(NOT_COMPARED)}
        assert "critic/score/mean" in names
        for name in names:
            assert found[step][name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6, nan_ok=True), (step, name)
        assert found[step]["training/rollout_probs_diff_max"] < 1e-5
