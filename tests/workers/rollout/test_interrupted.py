"""A generation or an update of the weights that is interrupted: the engine goes on, or says what it needs."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor

from verl.errors import RolloutError
from verl.testing.rollout_conformance import PROMPTS, EngineUnderTest, request, tensor_bytes, weights_of
from verl.workers.rollout.request_queue import RequestQueue

LONG = 100
REQUESTS = [request(prompt, seed, max_tokens=LONG, ignore_eos=True) for seed, prompt in enumerate(PROMPTS)]


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Ctrl-C after so many seconds, wherever the main thread is then.

    Python drops an exception that comes inside of a destructor or a callback of the garbage collector, so the signal
    comes again every 5 seconds. The timer is also that of pytest-timeout, which gets back what was left of it.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before, timer = signal.signal(signal.SIGALRM, interrupt), signal.getitimer(signal.ITIMER_REAL)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # it may come before the block has begun
            signal.setitimer(signal.ITIMER_REAL, seconds, 5)
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@pytest.mark.parametrize("name", ["native", "hf"])
def test_after_an_interruption_the_responses_are_those_of_before(name: str, tmp_path: Path) -> None:
    engine = EngineUnderTest(name, tmp_path, settings={"response_length": LONG}).ready()
    started = time.perf_counter()
    undisturbed = engine.generate(REQUESTS)
    took = time.perf_counter() - started
    for share in (0.02, 0.1, 0.3, 0.5):
        with interrupted_after(took * share):
            while True:  # a machine that is faster now does not escape
                engine.generate(REQUESTS)
    engine.abort()  # of nothing: the interrupted call is not running any more
    assert engine.generate(REQUESTS) == undisturbed


@pytest.mark.parametrize("name", ["native", "hf"])
def test_an_interruption_inside_of_awake_gives_the_memory_back(name: str, tmp_path: Path) -> None:
    engine = EngineUnderTest(name, tmp_path, settings={"response_length": LONG, "free_cache_engine": True}).build()
    with engine.awake(weights_of, 0):
        undisturbed = engine.generate(REQUESTS)
    asleep = tensor_bytes(engine)
    with interrupted_after(0.2), engine.awake(weights_of, 1):
        while True:
            engine.generate(REQUESTS)
    assert tensor_bytes(engine) <= asleep
    with engine.awake(weights_of, 2):
        again = engine.generate(REQUESTS)
    assert [output.token_ids for output in again] == [output.token_ids for output in undisturbed]


@pytest.mark.parametrize("name", ["native", "hf"])
def test_an_interrupted_update_leaves_no_weights(name: str, tmp_path: Path) -> None:
    """Half of them are new: they cannot be used until all have come."""

    def half() -> Iterator[tuple[str, Tensor]]:
        weights = list(weights_of(seed=1))
        yield from weights[: len(weights) // 2]
        raise KeyboardInterrupt

    engine = EngineUnderTest(name, tmp_path).ready()
    short = [request([7], seed=3)]
    undisturbed = engine.generate(short)
    with pytest.raises(KeyboardInterrupt):
        engine.load_weights(half(), version=1)
    with pytest.raises(RolloutError, match="no weights"):
        engine.generate(short)
    engine.load_weights(weights_of(), version=2)
    assert engine.generate(short)[0].token_ids == undisturbed[0].token_ids
    torch.testing.assert_close(engine.generate(short)[0].log_probs, undisturbed[0].log_probs)


def test_a_signal_that_came_to_another_thread_ends_the_wait_for_requests() -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def take_signal() -> None:
        time.sleep(0.1)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    queue = RequestQueue(lambda number, answer: None)
    closing = threading.Timer(30, queue.close)  # would end the wait, and then comes the exception
    closing.start()
    threading.Thread(target=take_signal).start()
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            queue.wait()
        assert not closing.finished.is_set()
    finally:
        signal.signal(signal.SIGUSR1, before)
        closing.cancel()
