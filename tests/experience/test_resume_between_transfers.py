"""A run with its rollout engines on a pool of their own, resumed, or without its router; nothing is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl.config.async_plan import AsyncPlan
from verl.experience.background import SerialThread
from verl.experience.free_running import FreeRunning
from verl.protocol import DataProto
from verl.utils.deferred import Deferred
from verl.utils.run_log import ENGINES
from verl.utils.step_context import StepContext

LAST = 9


class Engines:
    """A pool and its agents in one: samples are there at once, and have the version of the newest weights."""

    def __init__(self) -> None:
        self.thread, self.version = SerialThread("engines"), 0
        self.is_starting = self.has_ended = False

    def update(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def partial_responses(self) -> list[DataProto]:
        return []

    def submit(self, prompts: DataProto, resume_from: object = None) -> Future[DataProto]:
        done: Future[DataProto] = Future()
        versions = torch.full((len(prompts), 2), self.version)
        done.set_result(DataProto.from_dict(tensors={"weight_versions": versions}))
        return done

    def serve_until(self, group: object, is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            time.sleep(0.01)

    def cancel(self, futures: Iterable[object]) -> None:
        assert not list(futures)


def make_run(
    plan: AsyncPlan, agents: Callable[[], Any] | None = None, pool: Any = None, is_colocated: bool = False
) -> FreeRunning:
    rollout = SimpleNamespace(n=1, agent=None)
    config = SimpleNamespace(
        trainer=SimpleNamespace(async_=SimpleNamespace(record_dir=None)),
        actor_rollout_ref=SimpleNamespace(rollout=rollout),
        algorithm=SimpleNamespace(filter_groups=SimpleNamespace(enable=False)),
    )

    def next_prompts() -> DataProto:
        return DataProto.from_dict(tensors={"input_ids": torch.zeros(2, 2)}, non_tensors={"row": np.arange(2)})

    source: Any = SimpleNamespace(
        config=config,
        next_prompts=next_prompts,
        score=lambda *_: Deferred.from_value(DataProto()),
        scorer=SimpleNamespace(scores_any_time=lambda _: False),
        reward_fn=None,
    )
    engines: Any = pool or Engines()
    workers: Any = lambda: SimpleNamespace(policy=None)  # noqa: E731
    return FreeRunning(source, plan, agents or (lambda: engines), workers, LAST, None if is_colocated else engines)


def train(run: FreeRunning, first: int, last: int, warmup: int = 0) -> list[tuple[str, int]]:
    """Names and ages of what each step trained on; the first ``warmup`` steps make no update of the policy."""
    samples = []
    for step in range(first, last + 1):
        context = StepContext(step)
        batch = run.next(context).batch
        if step > warmup:
            run.updated(step)
        run.trained(context)
        samples += zip(batch.non_tensor_batch["uid"], batch.batch["updates_behind"].amax(-1).tolist(), strict=True)
    return samples


@pytest.mark.parametrize("resumed_after", range(1, LAST))
@pytest.mark.parametrize(("volume", "bound", "warmup"), [(0.1, None, 1), (None, 3, 0), (None, 4, 1)])
def test_a_run_resumed_between_two_transfers_takes_every_prompt_once(
    resumed_after: int, volume: float | None, bound: int | None, warmup: int
) -> None:
    plan = AsyncPlan(
        mode="separate",
        lag=0,
        bound=bound,
        volume=volume,
        strategy="admit",
        sync_every=4,
        batch_prompts=2,
        warmup_batches=warmup,
    )
    first = make_run(plan)
    samples = train(first, 1, resumed_after)
    state, pending = first.state_dict(), first.pending().result()
    second = make_run(plan)
    second.load_state_dict(state)
    second.load_pending(pending)
    samples += train(second, resumed_after + 1, LAST)
    assert sorted(name for name, _ in samples) == [f"{step}-{row}" for step in range(1, LAST + 1) for row in range(2)]
    assert bound is None or max(age for _, age in samples) <= bound
    assert "prompts" not in second.pending().result()  # nothing was started for a step after the last one


ONE_AHEAD = AsyncPlan(
    mode="separate",
    lag=0,
    bound=1,
    volume=None,
    strategy="admit",
    sync_every=1,
    batch_prompts=2,
    warmup_batches=1,
)


class Colocated(Engines):
    """Engines on the ranks of the policy, which answer only while a step lets them serve."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[Future[DataProto], DataProto]] = []

    @property
    def weight_version(self) -> int:
        return self.version

    def submit(self, prompts: DataProto, resume_from: object = None) -> Future[DataProto]:
        self.waiting.append((Future(), prompts))
        return self.waiting[-1][0]

    def serve_until(self, group: object, is_enough: Callable[[], bool]) -> None:
        for response, prompts in self.waiting:
            response.set_result(super().submit(prompts).result())
        self.waiting.clear()
        assert is_enough()


def test_age_is_counted_in_updates_of_the_policy() -> None:
    """Steps 1 and 2 train the critic alone (``critic_warmup=2``) and update nothing."""
    run = make_run(ONE_AHEAD)
    ages = [age for step in range(1, 6) for _, age in train(run, step, step, warmup=2)]
    assert ages == [0, 0] * 3 + [1, 1] * 2  # of what began a step before
    engines, ages = Colocated(), []
    run = make_run(ONE_AHEAD, lambda: engines, is_colocated=True)
    for step in range(1, 6):
        ages += [age for _, age in train(run, step, step, warmup=2)]
        engines.version = max(0, step - 2)
    # The batches 1 and 2, 3 and 4, and 5 are answered in the steps 1, 3 and 5, after 0, 0 and 2 updates.
    assert ages == [0, 0] * 3 + [1, 1] + [0, 0]


class Agents(Engines):
    """Agents whose fourth group never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def submit(self, prompts: DataProto, resume_from: object = None) -> Future[DataProto]:
        self.names += prompts.non_tensor_batch["uid"].tolist()
        return Future() if self.names[3:] == prompts.non_tensor_batch["uid"].tolist() else super().submit(prompts)


def test_groups_of_agents_that_ended_are_taken_before_others_ask_for_agents() -> None:
    """Validation asks for agents too; the processes of those that ended, with the tokens of their groups, end then."""
    made: list[Agents] = []

    def agents() -> Agents:
        if not made or made[-1].has_ended:
            made.append(Agents())
        return made[-1]

    run = make_run(ONE_AHEAD, agents)
    train(run, 1, 1)
    assert made[0].names == ["1-0", "1-1", "2-0", "2-1"]
    made[0].has_ended = True
    with run.rest():
        assert [each.names for each in made[1:]] == [["2-1"]]
    assert {name for name, _ in train(run, 2, 2)} == {"2-0", "2-1"}


def test_engines_that_are_started_anew_do_not_count_as_serving() -> None:
    engines = Engines()
    run, steps = make_run(ONE_AHEAD, lambda: engines, engines), [StepContext(1), StepContext(2)]
    for context in steps:
        run.next(context)
        engines.is_starting = context.number == 2
        run.trained(context)
    # In the second step until they got new weights.
    assert [[name for name, *_ in context.spans].count(ENGINES) for context in steps] == [1, 1]
