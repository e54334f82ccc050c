"""Agent loops on Ray whose processes die or hang in the middle of a rollout: the run goes on, and its numbers stay."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from tests.support.scripted_agent import STOP_TOKEN_IDS, call
from tests.support.tiny_run import countdown_rows, make_tiny_run, overrides, same, write_jsonl
from verl.agents.ray_trajectories import AgentProcesses
from verl.agents.worker import TrajectoryProgress
from verl.config import RolloutConfig
from verl.protocol import DataProto
from verl.single_controller.ray.watched_actor import WatchedActor
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.trainer import PPOTrainer

LOOPS = """
import http.client, json, os, pathlib, time
from urllib.parse import urlsplit
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.tools.function_tool import function_tool

FOLDER = pathlib.Path(__file__).parent

class Twice(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt = row["raw_prompt_ids"]
        few = {**sampling_params, "max_tokens": 3}
        first = (await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=few)).token_ids
        strike("twice")
        second = (await self.server_manager.generate("a", prompt_ids=prompt + first, sampling_params=few)).token_ids
        ids = first + second
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=[1] * len(ids))

@function_tool
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: the one.
        b: the other.
    '''
    strike("scripted")
    return a + b

def program(task):
    '''Call twice, the second time with the first answer; a strike meets the second call under way.'''
    where = urlsplit(task.base_url)
    messages = list(task.messages)
    for call in range(2):
        connection = http.client.HTTPConnection(where.hostname, where.port)
        body = json.dumps({"model": task.model, "messages": messages, "max_tokens": 3})
        connection.request("POST", where.path + "/chat/completions", body, {"Authorization": "Bearer " + task.api_key})
        if call:
            strike("program")
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        text = json.loads(answer.read())["choices"][0]["message"]["content"]
        connection.close()
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "More."}]
    return text

def strike(where):
    try:
        os.rename(FOLDER / f"order_{where}", FOLDER / "done")  # one of the trajectories alone
    except FileNotFoundError:
        return
    pid, number = (FOLDER / "done").read_text().split()
    time.sleep(0.05)
    os.kill(int(pid) or os.getpid(), int(number))
"""
STEPS = 5
LOOPS_OF_A_STEP = ("twice", "twice", "scripted", "program")


class OrderingTrainer(PPOTrainer):
    """Orders a process to be hit in the middle of a trajectory; ``orders`` says in which step which, and where."""

    folder: Path
    orders: dict[int, tuple[str, str, signal.Signals]]
    actors: list[Any]

    def step(self, context: Any) -> Any:
        order = self.orders.pop(self.global_steps, None)
        if order is not None:
            who, where, number = order
            (self.folder / "new").write_text(f"{self._pid(who)} {int(number)}")
            (self.folder / "new").rename(self.folder / f"order_{where}")
        batch = super().step(context)
        self.actors += [watched.actor for watched in [self._agents()._session.router, *self._agents()._processes]]
        return batch

    def _agents(self) -> Any:
        manager: Any = self.response_source.agent_loops
        return manager._agents

    def _pid(self, who: str) -> int:
        if who == "worker":
            return 0
        actor = self.policy_workers.workers[1] if who == "rank" else self._agents()._session.router.actor
        return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


class OrderingRunner(TaskRunner):
    def trainer_class(self) -> type[PPOTrainer]:
        return OrderingTrainer


Run = tuple[dict[int, dict], dict[str, Any]]
"""The metrics of every step, and what the last checkpoint holds of each rank."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Callable[..., Run]:
    """Train on two ranks while processes are hit."""
    root = tmp_path_factory.mktemp("agents")
    rows = countdown_rows(4 * STEPS)
    for number, row in enumerate(rows):
        row["agent_name"] = LOOPS_OF_A_STEP[number % 4]
        row["script"] = json.dumps([[call("add", a=number, b=1)], [call("add", a=1, b=1)]])
    paths = make_tiny_run(root) | {"train": write_jsonl(root / "rows.jsonl", rows)}
    (root / "loops.py").write_text(LOOPS)
    (root / "loops.yaml").write_text(
        f"- {{name: twice, _target_: Twice, path: {root}/loops.py}}\n"
        "- {name: scripted, _target_: tests.support.scripted_agent.ScriptedAgent}\n"
        f"- {{name: program, _target_: program_agent, program: '{root}/loops.py:program'}}\n"
    )
    (root / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(c.isdigit() for c in solution_str) / 8\n"
    )

    def train(name: str, orders: dict[int, tuple[str, str, signal.Signals]], **changes: object) -> Run:
        log = root / f"{name}.jsonl"
        OrderingTrainer.folder, OrderingTrainer.orders, OrderingTrainer.actors = root, dict(orders), []
        settings = {
            "trainer__controller": "ray",
            "trainer__n_gpus_per_node": 2,
            "trainer__total_training_steps": STEPS,
            "trainer__save_freq": STEPS,
            "data__shuffle": "false",
            "data__max_response_length": 48,
            "custom_reward_function__path": root / "reward.py",
            "trainer__val_before_train": "false",
            "trainer__recovery__backoff_s": 0,
            "actor_rollout_ref__rollout__name": "native",
            "actor_rollout_ref__rollout__stop_token_ids": STOP_TOKEN_IDS,
            "actor_rollout_ref__rollout__multi_turn__function_tool_path": root / "loops.py",
            "actor_rollout_ref__rollout__multi_turn__tokenization_sanity_check_mode": "disable",
            "actor_rollout_ref__rollout__agent__agent_loop_config_path": root / "loops.yaml",
            "actor_rollout_ref__rollout__agent__default_agent_loop": "twice",
            "actor_rollout_ref__rollout__agent__num_workers": 2,
            "actor_rollout_ref__rollout__agent__hang_timeout_s": 10,
        } | changes
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VERL_FILE_LOGGER_PATH", str(log))
            run_ppo(compose(overrides(paths, root / name, **settings)), OrderingRunner)
        assert not OrderingTrainer.orders
        assert not list(root.glob("order_*")), "a process was to be hit and was not"
        records = [json.loads(line) for line in log.read_text().splitlines()]
        last = root / name / "checkpoints" / f"global_step_{STEPS}" / "actor"
        saved = {path.name: torch.load(path, weights_only=True) for path in last.glob("*.pt")}
        return {record["step"]: record["data"] for record in records}, saved

    return train


class StartsLater:
    """What a checkpoint asks of a process of agent loops; it starts when a file is there."""

    def __init__(self, file: Path | None) -> None:
        while file is not None and not file.exists():
            time.sleep(0.02)

    async def silences(self) -> list[float | None]:
        return []

    async def report(self) -> tuple[int, TrajectoryProgress]:
        return 0, TrajectoryProgress()

    async def partial_responses(self) -> DataProto:
        return DataProto.from_dict(tensors={"rows": torch.ones(1)})


@pytest.mark.slow
def test_a_checkpoint_does_not_wait_for_a_process_that_starts(tmp_path: Path, ray_cluster: None) -> None:
    files = iter([None, tmp_path / "go"])

    def start() -> WatchedActor:
        return WatchedActor("a process", StartsLater, "silences", 60.0, next(files))

    async def ask() -> list[int]:
        processes = AgentProcesses(RolloutConfig(), start, lambda actor: None, WatchedActor.end)
        processes.start(2)
        counts = [0]
        while counts[-1] < 2:
            counts.append(len(await asyncio.wait_for(processes.partial_responses(), 60)))
            if counts[-1] == 1:
                (tmp_path / "go").touch()
            await asyncio.sleep(0.02)
        return sorted({*counts})

    assert asyncio.run(ask()) == [0, 1, 2]


NOT_COMPARED = ("timing", "perf/", "recovery/", "rollout_corr/", "training/rollout_")
"""The last two measure rounding errors of the engine, which depend on what is computed together."""


@pytest.mark.slow
def test_processes_that_die_or_hang_in_a_rollout_leave_no_trace_in_the_run(run):
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    undisturbed, weights = run("undisturbed", {})
    for actor in OrderingTrainer.actors:
        with pytest.raises(RayActorError):
            ray.get(actor.__ray_call__.remote(lambda _: None))
    assert {name.partition("_world")[0] for name in weights} == {"model", "optim", "extra_state"}
    assert {undisturbed[step]["agent/status/done"] for step in undisturbed} == {1.0}
    hits = {1: ("worker", "twice"), 2: ("router", "twice"), 3: ("rank", "scripted")}
    hits |= {4: ("worker", "scripted"), 5: ("worker", "program")}
    for name, number, changes in [("killed", kill, {}), ("stopped", stop, {"trainer__recovery__hang_timeout_s": 15})]:
        found, ended = run(name, {step: (*hit, number) for step, hit in hits.items()}, **changes)
        assert [found[step].get("recovery/restarts", 0) for step in range(1, STEPS + 1)] == [0, 1, 2, 2, 2]
        for step, expected in undisturbed.items():
            names = {name for name in found[step].keys() | expected.keys() if not name.startswith(NOT_COMPARED)}
            assert [n for n in sorted(names) if not same(found[step].get(n), expected.get(n))] == [], f"step {step}"
        assert ended.keys() == weights.keys()
        assert [file for file in sorted(weights) if not same(ended[file], weights[file])] == []
