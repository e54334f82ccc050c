"""The queue of requests to one engine, without an engine."""

from __future__ import annotations

import pytest

from verl.errors import RolloutError
from verl.workers.rollout.client import PartialResponse
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


def test_an_interruption_hands_back_what_is_not_begun_and_aborts_the_rest():
    answers: dict[int, object] = {}
    queue, aborted = RequestQueue(answers.__setitem__), []
    queue.on_abort = lambda: aborted.append(queue.waiting)
    request = RolloutRequest([5], SamplingParams(max_tokens=4, seed=0))
    for number in range(3):
        queue.put(number, request)
    queue.take(1)
    queue.interrupt()
    assert aborted == [0]
    assert answers == dict.fromkeys((1, 2), RolloutOutput([], [], "abort", -1))
    queue.put(1, request.after([8, 9]))  # the rest, under the same id
    [(number, rest)] = queue.take()
    assert (number, rest.prompt_ids, rest.drawn_ids, rest.sampling.max_tokens) == (1, [5, 8, 9], [8, 9], 2)
    assert (rest.response_sampling.max_tokens, rest.places_of_text) == (4, [1, 2])


@pytest.mark.parametrize(
    ("tokens", "reason"), [([7, 1], "stop"), ([7, 7, 7, 7], "length"), ([7, 7], "abort"), ([], "abort")]
)
def test_a_server_that_is_told_to_abort_after_the_last_token_has_ended_the_response(tokens, reason):
    request = RolloutRequest([5], SamplingParams(max_tokens=4, seed=0))
    response = PartialResponse(request, {}, end_ids=frozenset({1}))
    assert response.take(tokens, [-1.0] * len(tokens), "abort")
    assert response.finish_reason == reason
