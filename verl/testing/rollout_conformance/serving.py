"""Requests that come one by one, and those that are cancelled."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from verl.errors import RolloutError
from verl.testing.rollout_conformance.engine_under_test import (
    PROMPTS,
    VOCAB,
    EngineUnderTest,
    greedy,
    oracle_greedy,
    request,
    tokens_of,
    weights_of,
)
from verl.testing.rollout_conformance.sampling import mixed_requests
from verl.workers.rollout.base import BaseRollout, RolloutOutput, RolloutRequest
from verl.workers.rollout.request import DrawnPart
from verl.workers.rollout.request_queue import Answer, RequestQueue

# ---- requests that come one by one


class Serving:
    """``serve`` of an engine in a thread of its own; leaving the context closes the queue and waits for the end.

    Attributes:
        queue: the requests.
        answers: by number, what came back so far.
        parts: by number, what was told of a response before it came.
    """

    def __init__(self, engine: BaseRollout) -> None:
        self.answers: dict[int, Answer] = {}
        self.parts: dict[int, list[DrawnPart]] = {}
        self.queue = RequestQueue(self._take)
        self._came = threading.Condition()
        self._failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._serve, args=(engine,), daemon=True)

    def _serve(self, engine: BaseRollout) -> None:
        try:
            engine.serve(self.queue)
        except RolloutError as error:
            self._failure.append(error)
            with self._came:
                self._came.notify_all()

    def _take(self, request_id: int, answer: Answer | DrawnPart) -> None:
        with self._came:
            assert request_id not in self.answers, f"request {request_id} was answered twice"
            if isinstance(answer, DrawnPart):
                self.parts.setdefault(request_id, []).append(answer)
                return
            self.answers[request_id] = answer
            self._came.notify_all()

    def __enter__(self) -> Serving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.close()
        self._thread.join(timeout=120)
        assert not self._thread.is_alive(), "serve did not return after close()"
        if self._failure:
            raise self._failure[0]

    def put(self, requests: list[RolloutRequest], first: int = 0) -> list[int]:
        """Put all requests, numbered from ``first`` on."""
        for request_id, sent in enumerate(requests, first):
            self.queue.put(request_id, sent)
        return list(range(first, first + len(requests)))

    def answered(self, numbers: list[int]) -> list[RolloutOutput]:
        """Wait for the responses to these requests."""
        with self._came:
            self._came.wait_for(lambda: self._failure or all(n in self.answers for n in numbers), timeout=120)
        if self._failure:
            raise self._failure[0]
        answers = [self.answers[request_id] for request_id in numbers]
        for answer in answers:
            assert isinstance(answer, RolloutOutput), answer
        return answers  # type: ignore[return-value]


def check_arrival_changes_no_response(engine: EngineUnderTest) -> None:
    """All at once, in another order, while others run, one after the other: the responses of ``generate``."""
    requests, running = mixed_requests(), engine.ready()
    expected = running.generate(requests)
    beside = [request([i + 4] * (i % 8 + 1), seed=100 + i) for i in range(20)]
    with Serving(running) as serving:
        engine.assert_same(serving.answered(serving.put(requests)), expected)
        order = [5, 0, 11, 3, 8, 1, 10, 2, 7]
        numbers = serving.put([requests[i] for i in order], first=100)
        engine.assert_same(serving.answered(numbers), [expected[i] for i in order])
        interleaved = [interleaved for pair in zip(beside, requests, strict=False) for interleaved in pair]
        for request_id, sent in enumerate(interleaved, 200):
            serving.queue.put(request_id, sent)
            time.sleep(0.003)
        engine.assert_same(serving.answered(list(range(201, 200 + len(interleaved), 2))), expected)
        alone = [serving.answered(serving.put([sent], first=300 + i))[0] for i, sent in enumerate(requests[:4])]
        engine.assert_same(alone, expected[:4])
    engine.assert_same(running.generate(requests), expected)
    with pytest.raises(RolloutError, match="takes no more requests"):
        serving.queue.put(400, requests[0])


def check_what_cannot_be_served_costs_only_itself(engine: EngineUnderTest) -> None:
    running = engine.ready()
    good = [greedy(p) for p in PROMPTS]
    bad = [request([]), request([5, VOCAB]), request([5] * 8, max_tokens=13)]
    expected = running.generate(good)
    with Serving(running) as serving:
        numbers = serving.put(good[:3]) + serving.put(bad, first=50) + serving.put(good[3:], first=3)
        engine.assert_same(serving.answered([n for n in numbers if n < 50]), expected)
    for request_id, words in ((50, "empty prompt"), (51, "vocabulary of 104"), (52, "there is room for 20")):
        assert isinstance(serving.answers[request_id], RolloutError)
        assert words in str(serving.answers[request_id])


def check_a_cancelled_request_is_dropped_and_others_go_on(engine: EngineUnderTest) -> None:
    """It runs, or still waits for a place, of which there are eight. What was taken is answered after ``close``."""
    running = engine.ready(response_length=600, max_num_seqs=8)
    long = [request(PROMPTS[i % 6], seed=i, ignore_eos=True, max_tokens=600) for i in range(8)]
    short = [greedy(p, max_tokens=6) for p in (PROMPTS[1], PROMPTS[3])]
    expected = running.generate(short)
    with Serving(running) as serving:
        serving.put(long)
        time.sleep(0.05)
        serving.put([short[0], long[2], short[1]], first=10)
        for request_id in (11, *range(8), 77):
            serving.queue.cancel(request_id)
        engine.assert_same(serving.answered([10, 12]), expected)
        serving.put(short[:1], first=20)
        time.sleep(0.05)
    # A request that still waited when the queue was closed has no answer.
    assert set(serving.answers) - {20} == {10, 12}


def check_abort_answers_what_runs_and_serves_what_comes(engine: EngineUnderTest) -> None:
    running = engine.ready(response_length=600)
    long = [request(PROMPTS[i], seed=i, ignore_eos=True, max_tokens=600) for i in range(3)]
    complete, expected = running.generate(long), oracle_greedy(PROMPTS[1], 6)
    delay = 0.05
    for _ in range(20):
        with Serving(running) as serving:
            serving.queue.on_abort = running.abort
            numbers = serving.put(long)
            time.sleep(delay)
            serving.queue.interrupt()
            cut = serving.answered(numbers)
            assert serving.answered(serving.put([greedy(PROMPTS[1], max_tokens=6)], first=9))[0].token_ids == expected
        if any(output.finish_reason == "abort" and output.token_ids for output in cut):
            break
        delay *= 1.5 if all(output.finish_reason == "abort" for output in cut) else 0.6
    else:
        pytest.fail("no abort came while a response had tokens")
    for part, all_ in zip(cut, complete, strict=True):
        count = len(part.token_ids)
        assert part.finish_reason == ("length" if count == 600 else "abort")
        assert part.token_ids == all_.token_ids[:count]
        engine.assert_close([part.log_probs], [all_.log_probs[:count]])
    interrupted = [pair for pair in zip(long, cut, complete, strict=True) if pair[1].finish_reason == "abort"]
    rest = running.generate([sent.after(part.token_ids) for sent, part, _ in interrupted])
    joined = [part.followed_by(remainder) for (_, part, _), remainder in zip(interrupted, rest, strict=True)]
    if not engine.draws_anew:
        engine.assert_same(joined, [all_ for *_, all_ in interrupted])
    assert {(len(output.token_ids), output.versions) for output in joined} == {(600, ((0, 600),))}


def check_a_response_that_streams_is_told_while_it_is_drawn(engine: EngineUnderTest) -> None:
    """Its parts are its beginning, in order, without a gap; nothing is told of a response that does not stream."""
    running = engine.ready(response_length=600)
    requests = [request(PROMPTS[i], seed=i, ignore_eos=True, max_tokens=600) for i in range(3)]
    expected = running.generate(requests)
    with Serving(running) as serving:
        numbers = serving.put([replace(requests[0], streams=True), requests[1], replace(requests[2], streams=True)])
        engine.assert_same(serving.answered(numbers), expected)
    for request_id, parts in serving.parts.items():
        token_ids: list[int] = []
        for part in parts:
            assert (part.start, bool(part.token_ids)) == (len(token_ids), True)
            token_ids += part.token_ids
        assert len(parts[0].token_ids) < 600
        assert token_ids == expected[request_id].token_ids[: len(token_ids)]
    assert set(serving.parts) == ({0, 2} if engine.streams else set())
    interrupted = {output.num_preempted for output in [*expected, *serving.answered(numbers)]}
    assert interrupted == ({0} if engine.counts_preemptions else {None})


def check_a_conversation_goes_on_with_the_newest_weights(engine: EngineUnderTest) -> None:
    """Turns that extend each other; nothing of a turn before an update is used after it."""
    running = engine.ready(prompt_length=160, response_length=24)
    texts = [[*range(4, 44), *prompt] for prompt in PROMPTS[:3]]
    for version, seed in ((0, 0), (0, 0), (2, 1), (2, 1), (4, 0)):
        if version != running.weight_version:
            running.load_weights(weights_of(seed=seed), version)
        requests = [request(text, seed=10 * version + i, max_tokens=12) for i, text in enumerate(texts)]
        with Serving(running) as serving:
            outputs = serving.answered(serving.put(requests))
        assert {output.weight_version for output in outputs} == {running.weight_version}
        engine.assert_of_the_model(requests, outputs, seed)
        texts = [text + output.token_ids + [50 + version, 60] for text, output in zip(texts, outputs, strict=True)]


# ---- cancellation


def check_an_interrupted_response_goes_on_as_if_it_had_not_been(engine: EngineUnderTest) -> None:
    """After any number of tokens: the same tokens, the same end, and log-probs of the same distribution."""
    running = engine.ready(prompt_length=20)
    greedy_ids = next(c for p in PROMPTS if len(set(c := oracle_greedy(p, 12))) > 6 and not set(c[:8]) & {0, 1, 2, 3})
    prompt = next(p for p in PROMPTS if oracle_greedy(p, 12) == greedy_ids)
    stop = "".join(map(running.tokenizer.decode, ([greedy_ids[4]], [greedy_ids[5]])))
    requests = [*mixed_requests(), greedy(prompt, stop=(stop,)), greedy(prompt, stop_token_ids=(greedy_ids[5],))]
    complete = running.generate(requests)
    assert [output.finish_reason for output in complete[-2:]] == ["stop", "stop"]
    for count in (1, 2, 5, 11):
        pairs = [
            (sent.after(output.token_ids[:count]), output)
            for sent, output in zip(requests, complete, strict=True)
            if len(output.token_ids) > count and (sent.sampling.is_greedy or not engine.draws_anew)
        ]
        rest = running.generate([sent for sent, _ in pairs])
        for (_, output), remainder in zip(pairs, rest, strict=True):
            assert (remainder.token_ids, remainder.finish_reason) == (output.token_ids[count:], output.finish_reason)
            engine.assert_close([remainder.log_probs], [output.log_probs[count:]])
    if engine.draws_anew:  # other random numbers than for the beginning, and twice the same
        cut = [request(PROMPTS[i], seed=i, ignore_eos=True).after([30, 31]) for i in range(6)]
        first, again = running.generate(cut), running.generate(cut)
        assert tokens_of(first) == tokens_of(again)
        repeated = running.generate([replace(sent, drawn_count=0) for sent in cut])
        assert all(sent != other for sent, other in zip(tokens_of(first), tokens_of(repeated), strict=True))


def check_abort_gives_back_what_there_is(engine: EngineUnderTest) -> None:
    """Ended responses are whole, others a first part of what they would have been; the next batch is as ever."""
    running = engine.ready(response_length=600, max_num_seqs=8)
    requests = [
        request(PROMPTS[i % 6], seed=i, ignore_eos=True, max_tokens=1 if i % 3 == 0 else 600) for i in range(24)
    ]
    complete = running.generate(requests)
    assert [len(output.token_ids) for output in complete] == [sent.sampling.max_tokens for sent in requests]
    delay, cut = 0.05, list(complete)
    for _ in range(40):
        cut = _generate_and_abort_after(running, requests, delay)
        some_tokens = any(output.finish_reason == "abort" and output.token_ids for output in cut)
        ended = any(output.finish_reason == "length" for output in cut)
        if some_tokens and ended:
            break
        delay *= 1.5 if any(output.finish_reason == "abort" for output in cut) else 0.6
    else:
        pytest.fail("no abort came while some responses had ended and others had tokens")
    for sent, part, all_ in zip(requests, cut, complete, strict=True):
        count = len(part.token_ids)
        assert len(part.log_probs) == count
        assert part.weight_version == 0
        assert part.finish_reason == ("length" if count == sent.sampling.max_tokens else "abort")
        assert part.token_ids == all_.token_ids[:count]
        engine.assert_close([part.log_probs], [all_.log_probs[:count]])
    assert sum(len(output.token_ids) for output in cut) < sum(len(output.token_ids) for output in complete)
    engine.assert_same(running.generate(requests[:4]), complete[:4])


def _generate_and_abort_after(
    running: BaseRollout, requests: list[RolloutRequest], delay: float
) -> list[RolloutOutput]:
    outputs: list[RolloutOutput] = []
    thread = threading.Thread(target=lambda: outputs.extend(running.generate(requests)))
    thread.start()
    time.sleep(delay)
    running.abort()
    thread.join(timeout=60)
    assert not thread.is_alive(), "generate did not return after abort()"
    assert len(outputs) == len(requests)
    return outputs


def check_abort_without_a_running_generate_does_nothing(engine: EngineUnderTest) -> None:
    asleep = engine.build()
    asleep.abort()
    running = engine.ready()
    running.abort()
    running.abort()
    outputs = running.generate([greedy(p) for p in PROMPTS])
    assert tokens_of(outputs) == [oracle_greedy(p, 12) for p in PROMPTS]
    running.abort()
    assert tokens_of(running.generate([greedy(PROMPTS[0])])) == [oracle_greedy(PROMPTS[0], 12)]
