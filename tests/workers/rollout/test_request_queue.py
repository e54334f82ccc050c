"""The queue of requests to one engine, without an engine."""

from __future__ import annotations

import pytest

from verl.errors import RolloutError
from verl.workers.rollout.request import RolloutOutput, RolloutRequest, SamplingParams
from verl.workers.rollout.request_queue import RequestQueue


def test_a_closed_queue_answers_what_was_taken_and_drops_the_rest():
    answers: dict[int, object] = {}
    queue = RequestQueue(answers.__setitem__)
    request = RolloutRequest([5], SamplingParams(max_tokens=1, seed=0))
    for number in range(4):
        queue.put(number, request)
    assert [number for number, _ in queue.take(2)] == [0, 1]
    queue.cancel(1)
    queue.cancel(2)
    assert queue.waiting == 1
    queue.close()
    assert (queue.wait(), queue.take(wait=True), queue.waiting) == (False, [], 0)
    assert (queue.take_cancelled(), queue.take_cancelled()) == ({1}, set())
    output = RolloutOutput([7], [-0.5], "stop", 3)
    for number in range(4):
        queue.answer(number, output)
    assert answers == {0: output}
    with pytest.raises(RolloutError, match="takes no more requests"):
        queue.put(4, request)
