"""Judges on Ray, on ranks of their own or on the policy's: the same rewards, also if their processes die or hang."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.plugins.endpoint.judge.test_judge_in_a_run import ASKS, dumped, settings
from tests.support.tiny_run import make_tiny_run, overrides, same
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.trainer import PPOTrainer

STRIKES = """
import os, pathlib
FOLDER = pathlib.Path(__file__).parent

def prompt_of(text):
    strike()
    return [{"role": "system", "content": "grade"}, {"role": "user", "content": text}]

def strike():
    try:
        os.rename(FOLDER / "order", FOLDER / "done")  # one of the samples alone
    except FileNotFoundError:
        return
    pid, number = (FOLDER / "done").read_text().split()
    os.kill(int(pid), int(number))
"""


class OrderingTrainer(PPOTrainer):
    """Orders a process of the judge to be hit by a sample that is scored; ``orders`` says in which step which."""

    folder: Path
    orders: dict[int, tuple[str, signal.Signals]]

    def step(self, context: Any) -> Any:
        order = self.orders.pop(self.global_steps, None)
        if order is not None:
            assert self.judge is not None
            # A rank that serves answers nothing else, so it is asked before.
            actor = self.reward_workers.workers[0] if order[0] == "rank" else self.judge._session.router.actor
            pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
            (self.folder / "new").write_text(f"{pid} {int(order[1])}")
            (self.folder / "new").rename(self.folder / "order")
        return super().step(context)


class OrderingRunner(TaskRunner):
    def trainer_class(self) -> type[PPOTrainer]:
        return OrderingTrainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Callable[..., dict[int, dict]]:
    """Train with a judge while its processes are hit; the metrics of every step."""
    root = tmp_path_factory.mktemp("judges")
    paths = make_tiny_run(root)
    head, _, tail = ASKS.partition("def prompt_of")
    judged = settings(root, head + STRIKES + tail[tail.index("async def") :])

    def train(name: str, orders: dict[int, tuple[str, signal.Signals]], **changes: object) -> dict[int, dict]:
        log = root / f"{name}.jsonl"
        OrderingTrainer.folder, OrderingTrainer.orders = root, dict(orders)
        own = {
            "trainer__controller": "ray",
            "trainer__total_training_steps": 3,
            "trainer__recovery__backoff_s": 0,
            "trainer__rollout_data_dir": "null",
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VERL_FILE_LOGGER_PATH", str(log))
            run_ppo(compose(overrides(paths, root / name, **(judged | own | changes))), OrderingRunner)
        assert not OrderingTrainer.orders
        assert not (root / "order").exists(), "a process was to be hit and was not"
        records = [json.loads(line) for line in log.read_text().splitlines()]
        return {record["step"]: record["data"] for record in records}

    return train


LOOP = """
import httpx2
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class AsksJudge(AgentLoopBase):
    async def run(self, sampling_params, *, reward_router_address, raw_prompt_ids, **kwargs):
        drawn = await self.server_manager.generate("me", prompt_ids=raw_prompt_ids, sampling_params=sampling_params)
        text = self.tokenizer.decode(drawn.token_ids, skip_special_tokens=True)
        messages = [{"role": "system", "content": "grade"}, {"role": "user", "content": text}]
        body = {"model": "any", "messages": messages, "temperature": 0, "max_tokens": 6}
        async with httpx2.AsyncClient(timeout=60, trust_env=False) as client:
            reply = await client.post(f"http://{reward_router_address}/v1/chat/completions", json=body)
        said = reply.raise_for_status().json()["choices"][0]["message"]["content"]
        return AgentLoopOutput(
            prompt_ids=raw_prompt_ids,
            response_ids=drawn.token_ids,
            response_mask=[1] * len(drawn.token_ids),
            metrics=AgentLoopMetrics(),
            conversation=[{"role": "assistant", "content": text}, {"role": "judge", "content": said}],
        )
"""
NOT_COMPARED = ("timing", "perf/", "recovery/", "judge/")
OWN_RANKS = {
    "reward_model__enable_resource_pool": "true",
    "reward_model__nnodes": 1,
    "reward_model__n_gpus_per_node": 1,
}


def assert_same_numbers(found: dict[int, dict], expected: dict[int, dict]) -> None:
    for step, numbers in expected.items():
        names = {name for name in found[step].keys() | numbers.keys() if not name.startswith(NOT_COMPARED)}
        assert [n for n in sorted(names) if not same(found[step].get(n), numbers.get(n))] == [], step


@pytest.fixture(scope="module")
def colocated(run: Callable[..., dict[int, dict]]) -> dict[int, dict]:
    return run("colocated", {})


@pytest.mark.slow
def test_rewards_are_the_same_wherever_the_judge_runs(run, colocated: dict[int, dict]):
    assert [colocated[step]["judge/calls"] for step in (1, 2, 3)] == [16, 16, 16]
    assert_same_numbers(run("own_ranks", {}, **OWN_RANKS), colocated)
    assert_same_numbers(run("beside", {}, **OWN_RANKS, reward_model__launch_reward_fn_async="true"), colocated)


@pytest.mark.slow
def test_a_judge_on_ranks_of_its_own_answers_agent_loops_and_rewards(run, tmp_path: Path):
    (tmp_path / "loops.yaml").write_text(f"- {{name: asks, _target_: AsksJudge, path: {tmp_path / 'asks.py'}}}")
    (tmp_path / "asks.py").write_text(LOOP)
    agent = {"agent_loop_config_path": tmp_path / "loops.yaml", "default_agent_loop": "asks", "num_workers": 1}
    changes = {f"actor_rollout_ref__rollout__agent__{key}": value for key, value in agent.items()}
    dumps = {"trainer__rollout_data_dir": tmp_path / "dumps", "trainer__total_training_steps": 2}
    found = run("asked", {}, **OWN_RANKS, **changes, **dumps)
    assert [found[step]["judge/calls"] for step in (1, 2)] == [32, 32]
    samples = dumped(tmp_path / "dumps")
    # The reward function asks the same of the same judge.
    assert [row["trajectory"]["conversation"][-1]["content"] for row in samples] == [row["reply"] for row in samples]
    assert len({row["reply"] for row in samples}) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, orders, changes",
    [
        ("killed", {1: "rank", 2: "router", 3: "rank"}, OWN_RANKS),
        ("killed_colocated", {2: "rank"}, {}),
        ("hung", {2: "rank"}, OWN_RANKS | {"trainer__recovery__hang_timeout_s": 15}),
    ],
)
def test_what_happens_to_the_judge_leaves_no_trace_in_the_run(
    run, colocated: dict[int, dict], name: str, orders: dict[int, str], changes: dict[str, Any]
):
    number = signal.SIGSTOP if name == "hung" else signal.SIGKILL
    found = run(name, {step: (who, number) for step, who in orders.items()}, **changes)
    assert found[3]["recovery/restarts"] == len(orders)
    assert_same_numbers(found, colocated)
