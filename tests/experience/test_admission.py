"""Which prompts may start, and the proof that a bound on ages does not favour short responses."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl.errors import ConfigError
from verl.experience.admission import Admission


def test_capacity_by_hand():
    bound = Admission.by_versions(batch_size=4, max_staleness=2)
    # (version + 1) * 4 + 2 * 4 groups in all
    assert [bound.capacity(version, started=10) for version in range(3)] == [2, 6, 10]
    assert bound.capacity(0, started=12) == 0
    assert bound.capacity(0, started=13) == 0
    # no group ahead: those of the next step only
    assert Admission.by_versions(4, 0).capacity(version=3, started=14) == 2


def test_volume_of_the_fully_async_front_by_hand():
    bound = Admission.by_volume(
        ppo_mini_batch_size=25, require_batches=2, trigger_parameter_sync_step=2, staleness_threshold=0.29
    )
    # 2 * 2 * 25 = 100 between two transfers, 29 more may start; 0.29 * 100 is 28.999999999999996 as a float
    assert bound == Admission(batch_size=100, groups_ahead=29, max_staleness=None)
    # 110 of the first 129 finished: 100 were trained on, 29 are left over, so 129 - 29 = 100 may start
    assert bound.capacity(version=1, started=129) == 100


def test_next_batch_by_hand():
    bound = Admission.by_versions(batch_size=2, max_staleness=1)
    assert bound.next_batch(3, {}, [3]) is None  # one is missing
    assert bound.next_batch(3, {3: 1}, [3, 2, 3]) == [1, 0]  # the older first
    assert bound.next_batch(3, {2: 1}, [3, 3]) is None  # with version 4 the one of version 2 would be too old
    assert Admission(2, 2, None).next_batch(3, {2: 1}, [3, 3]) == [0, 1]  # no bound, no wait


def test_a_step_waits_early_enough_for_several_slow_groups():
    bound = Admission.by_versions(batch_size=1, max_staleness=2)
    # Version 0 started 3 groups, for the steps of versions 0, 1 and 2. One of them may be overtaken never: after the
    # step of version 1 only the one of version 2 is left for them.
    assert bound.next_batch(0, {0: 2}, [0]) == [0]
    assert bound.next_batch(1, {0: 2}, [1]) is None
    assert bound.next_batch(1, {0: 1}, [1, 0]) == [1]
    assert bound.next_batch(1, {0: 1}, [1]) == [0]


def test_more_ahead_than_the_bound_can_train_on_is_refused():
    with pytest.raises(ConfigError, match=r"at most 1 \* 4 = 4 may start ahead"):
        Admission(batch_size=4, groups_ahead=5, max_staleness=1)


@dataclass(eq=False)
class Group:
    length: int
    reward: int
    started_at: int
    age: int | None = None
    is_rejected: bool = False


@dataclass
class Outcome:
    started: list[Group] = field(default_factory=list)
    batches: list[list[Group]] = field(default_factory=list)
    discarded: int = 0


def simulate(
    bound: Admission,
    *,
    steps: int,
    seed: int,
    slots: int,
    training: float,
    rejected: float = 0.0,
    in_order: bool = False,
    drop: bool = False,
) -> Outcome:
    """Sample and train at the same time. Long responses get higher rewards.

    A filter rejects ``rejected`` of the groups with a reward. ``in_order`` trains in the order in which groups started.
    ``drop`` does not wait for slow groups, but discards those older than the bound, and starts others in their place.
    """
    draw, outcome = random.Random(seed), Outcome()
    running: list[tuple[float, int, Group]] = []
    finished: list[Group] = []
    version, now, trained_at = 0, 0.0, 0.0
    limit = bound.max_staleness
    while len(outcome.batches) < steps:
        count = bound.capacity(version, len(outcome.started) - outcome.discarded)
        for _ in range(min(count, slots - len(running))):
            length = int(draw.lognormvariate(3, 1)) + 1
            group = Group(length, reward=int(draw.random() < length / (length + 20)), started_at=version)
            heapq.heappush(running, (now + length, len(outcome.started), group))
            outcome.started.append(group)
        if drop:
            assert limit is not None
            old = [group for group in finished if version - group.started_at > limit]
            outcome.discarded += len(old)
            finished = [group for group in finished if group not in old]
        batch = None
        if now >= trained_at:
            unfinished = [group for _, _, group in running]
            under_way = {} if drop else Counter(group.started_at for group in unfinished)
            chosen = bound.next_batch(version, under_way, [group.started_at for group in finished])
            if in_order:
                first = [group for group in outcome.started if group.age is None and not group.is_rejected][
                    : bound.batch_size
                ]
                ready = len(first) == bound.batch_size and not any(group in unfinished for group in first)
                batch = first if ready else None
            elif chosen is not None:
                batch = [finished[position] for position in chosen]
        if batch is not None:
            for group in batch:
                group.age = version - group.started_at
                finished.remove(group)
            outcome.batches.append(batch)
            version += 1  # its weights, at once
            trained_at = now + training
        elif running and (trained_at <= now or running[0][0] < trained_at):
            now, _, group = heapq.heappop(running)
            group.is_rejected = bool(group.reward) and draw.random() < rejected
            outcome.discarded += group.is_rejected
            finished += [] if group.is_rejected else [group]
        else:
            assert trained_at > now, "nothing runs, and the step waits for ever"
            now = trained_at
    return outcome


@settings(max_examples=40)
@given(
    batch_size=st.integers(1, 5),
    limit=st.integers(0, 8),
    share=st.floats(0, 1),
    slots=st.integers(1, 30),
    training=st.sampled_from([0.0, 20.0, 200.0]),
    rejected=st.sampled_from([0.0, 0.5]),
    in_order=st.booleans(),
    seed=st.integers(0, 999),
)
@example(batch_size=1, limit=0, share=0, slots=1, training=0.0, rejected=0, in_order=False, seed=0)
def test_every_started_group_is_trained_on_once_and_within_the_bound(
    batch_size: int,
    limit: int,
    share: float,
    slots: int,
    training: float,
    rejected: float,
    in_order: bool,
    seed: int,
):
    bound = Admission(batch_size, int(share * limit * batch_size), limit)
    outcome = simulate(bound, steps=20, seed=seed, slots=slots, training=training, rejected=rejected, in_order=in_order)
    trained = [group for batch in outcome.batches for group in batch]
    assert len({id(group) for group in trained}) == len(trained) == 20 * batch_size
    assert max(group.age for group in trained) <= limit
    # Step 20 trains with version 19: whoever started with version 19 - limit or before has been trained on. So lengths
    # and rewards of these are exactly those that were drawn.
    first = [group for group in outcome.started if group.started_at <= 19 - limit]
    assert all(group.age is not None or group.is_rejected for group in first)


def test_the_rule_for_starting_alone_does_not_bound_the_age():
    def oldest(limit: int | None) -> int:
        outcome = simulate(Admission(4, 8, limit), steps=100, seed=1, slots=16, training=1.0)
        return max(group.age for batch in outcome.batches for group in batch)

    assert oldest(None) == 25  # 8 groups ahead are 2 batches
    assert oldest(2) == 2


def test_discarding_by_age_favours_short_responses_and_admission_does_not():
    def means(drop: bool, limit: int) -> tuple[float, float, float]:
        bound = Admission.by_versions(4, limit)
        outcome = simulate(bound, steps=1500, seed=1, slots=16, training=1.0, drop=drop)
        counted = [group for group in outcome.started if group.started_at <= 1499 - limit]
        trained = [group for group in counted if group.age is not None]
        length = sum(group.length for group in trained) / sum(group.length for group in counted)
        reward = sum(group.reward for group in trained) / sum(group.reward for group in counted)
        return len(trained) / len(counted), length * len(counted) / len(trained), reward * len(counted) / len(trained)

    # share of the groups that is trained on; mean length and mean reward of these against those of all that started
    for limit in range(4):
        assert means(drop=False, limit=limit) == (1, 1, 1)
    assert means(drop=True, limit=1) == pytest.approx((0.826, 0.627, 0.899), abs=0.001)
