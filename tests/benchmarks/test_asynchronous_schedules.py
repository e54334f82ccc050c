"""The simulation of schedules, against times worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.asynchronous_schedules import Group, Pool, Run, Schedule, Trace

# Every response has 10 tokens, one a second; a step trains for 6 s, on two ranks.
TRACE = Trace(
    prompts=2, responses=1, mean=10, sigma=1e-9, limit=100,
    read_s=1, context_s=0, row_s=0, slots=8, engine_ranks=1,
    train_fixed_s=4, train_rank_s=4, old_log_probs=0, transfer_s=1, switch_s=2,
)  # fmt: skip


def run(schedule: Schedule, trace: Trace = TRACE) -> tuple[float, float, float, float]:
    result = Run(schedule, trace, trainer_ranks=2, rollout_ranks=2).simulate(steps=12, warm_up=4)
    return result.step_s, result.training, result.generating, result.age


@pytest.mark.parametrize(
    ("schedule", "step_s", "age"),
    [
        (Schedule("sync", is_shared=True), 10 + 6 + 2, 0),
        (Schedule("two pools"), 10 + 6 + 1, 0),
        (Schedule("lag", by_batch=True, staleness=1, ahead=1), 1 + 10, 1),  # training is hidden; weights, then tokens
        (
            Schedule("halves", by_batch=True, staleness=2, ahead=2, pools=2),
            6 + 1,
            2,
        ),  # 2 batches in 11 s: 6 + 1 is more
    ],
)
def test_steps_by_hand(schedule: Schedule, step_s: float, age: float):
    assert run(schedule) == pytest.approx((step_s, 6 / step_s, 10 / step_s if schedule.pools == 1 else 5 / 7, age))


def test_an_engine_slows_down_with_its_responses_and_their_context():
    # 2 engines, 4 responses of 10 tokens: token i takes 1 + 2 * 0.5 + (0 .. 2 * i) * 0.1 s, in all 10 * 2 + 0.1 * 100
    trace = replace(TRACE, prompts=4, row_s=0.5, context_s=0.1)
    assert run(Schedule("sync", is_shared=True), trace)[0] == pytest.approx(30 + 6 + 2)


def test_context_is_computed_again_after_a_pause():
    trace = replace(TRACE, row_s=0.5)
    pool, group = Pool(trace, ranks=1), Group(lengths=[10], started_at=0, left=1)
    pool.start(group, now=100)
    assert pool.next_end() == pytest.approx(100 + 10 * 1.5)
    pool.pause(now=106, seconds=3)  # after 4 tokens
    assert pool.next_end() == pytest.approx(115 + 3 + 4 * 0.5)
    assert pool.end_one() is group


def test_free_running_never_exceeds_the_bound_and_takes_all_lengths():
    trace = replace(TRACE, prompts=8, responses=2, sigma=1.5, mean=20)
    result = Run(Schedule("free", staleness=2, ahead=2), trace, 2, 2).simulate(steps=60, warm_up=10)
    assert (result.oldest, result.length) == (2, 1)
    dropping = Run(Schedule("drop", staleness=1, ahead=1, drops=True), trace, 2, 2).simulate(steps=60, warm_up=10)
    assert dropping.length == pytest.approx(0.520, abs=0.001)
