"""Which groups a step trains on."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from verl.experience.admission import Admission
from verl.experience.scoring import PartScores
from verl.experience.store import GroupScores, GroupStore, PromptGroup
from verl.protocol import DataProto

NOTHING = DataProto()


def started(store: GroupStore, *versions: int) -> list[PromptGroup]:
    groups = [PromptGroup(len(store) + index, NOTHING, version) for index, version in enumerate(versions)]
    for group in groups:
        store.add(group)
    return groups


def indices(groups: list[PromptGroup] | None) -> list[int] | None:
    return None if groups is None else [group.index for group in groups]


def test_the_groups_that_finished_first_are_taken():
    store = GroupStore(Admission(batch_size=2, groups_ahead=2, max_staleness=None))
    groups = started(store, 0, 0, 0, 0)
    groups[3].responses.set_result(NOTHING)
    assert store.choice(0) is None
    groups[1].responses.set_result(NOTHING)
    groups[0].responses.set_result(NOTHING)
    assert indices(store.choice(0)) == [1, 3]
    store.take(store.choice(0) or [])
    assert store.choice(1) is None
    assert [group.index for group in store.groups()] == [0, 2]


def test_a_group_that_is_due_is_waited_for_though_others_are_there():
    store = GroupStore(Admission(batch_size=1, groups_ahead=1, max_staleness=1))
    slow, fast = started(store, 0, 1)
    fast.responses.set_result(NOTHING)
    assert store.choice(1) is None
    slow.responses.set_result(NOTHING)
    assert indices(store.choice(1)) == [0]


def test_groups_that_are_too_old_are_dropped_if_that_is_asked_for():
    store = GroupStore(Admission(batch_size=1, groups_ahead=1, max_staleness=None), drop_after=1)
    _, fast = started(store, 0, 1)
    fast.responses.set_result(NOTHING)
    assert indices(store.choice(1)) == [1]
    assert indices(store.drop_late(1)) == []
    assert indices(store.drop_late(2)) == [0]


def test_the_error_of_a_group_is_raised():
    store = GroupStore(Admission(batch_size=1, groups_ahead=0, max_staleness=None))
    [group] = started(store, 0)
    group.responses.set_exception(ValueError("no answer"))
    assert store.choice(0) is None
    with pytest.raises(ValueError, match="no answer"):
        store.raise_failure()


def test_the_error_of_a_score_is_raised():
    store, scores = GroupStore(Admission(batch_size=1, groups_ahead=0, max_staleness=None)), Future[GroupScores]()
    store.add(PromptGroup(0, NOTHING, 0, scores=scores))
    scores.set_exception(ValueError("no score"))
    with pytest.raises(ValueError, match="no score"):
        store.raise_failure()


def test_a_group_at_the_age_to_wait_at_is_waited_for_and_others_may_become_older():
    store = GroupStore(Admission(batch_size=1, groups_ahead=0, max_staleness=None), wait_at=1)
    slow, other = started(store, 0, 0)
    other.responses.set_result(NOTHING)
    assert indices(store.choice(0)) == [1]
    assert store.choice(1) is None
    slow.responses.set_result(NOTHING)
    assert indices(store.choice(1)) == [1]  # it finished first
    store.take([other])
    assert indices(store.choice(2)) == [0]


def test_a_dropped_group_that_ends_before_it_is_cancelled_is_not_taken():
    store = GroupStore(Admission(batch_size=1, groups_ahead=1, max_staleness=None), drop_after=0)
    [late] = started(store, 0)
    assert indices(store.drop_late(1)) == [0]
    late.responses.set_result(NOTHING)
    assert store.choice(1) is None


def test_with_none_under_way_a_step_does_not_wait():
    """As after a resume with a lower bound or larger batches."""
    store = GroupStore(Admission(batch_size=1, groups_ahead=0, max_staleness=1))
    for group in started(store, 0, 0, 0):
        group.responses.set_result(NOTHING)
    assert indices(store.choice(5)) == [0]


def test_a_group_that_dynamic_sampling_has_yet_to_drop_is_not_taken():
    store = GroupStore(Admission(batch_size=1, groups_ahead=1, max_staleness=None))
    groups = [PromptGroup(index, NOTHING, version, scores=Future()) for index, version in enumerate((0, 1))]
    for group, is_informative in zip(groups, (False, True), strict=True):
        store.add(group)
        assert store.choice(1) is None
        assert group.scores is not None
        group.scores.set_result(GroupScores(PartScores((torch.zeros(1, 1), {})), is_informative))
    assert indices(store.choice(1)) == [1]
    assert indices(store.drop_uninformative()) == [0]


def test_a_group_that_was_begun_anew_is_finished_by_its_new_responses_alone():
    store = GroupStore(Admission(batch_size=1, groups_ahead=1, max_staleness=None))
    [lost] = started(store, 0)
    again = PromptGroup(lost.index, NOTHING, 0)
    store.add(again)
    lost.responses.set_result(NOTHING)
    assert store.choice(0) is None
    again.responses.set_result(NOTHING)
    assert store.choice(0) == [again]
