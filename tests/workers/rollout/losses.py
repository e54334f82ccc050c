"""An engine's process is killed or stopped while it generates; the real engines' tests share this."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import psutil

from verl.testing.rollout_conformance import PROMPTS, EngineUnderTest, weights_of
from verl.workers.rollout.base import RolloutRequest, SamplingParams
from verl.workers.rollout.remote import RemoteRollout

_MAX_TOKENS = 300
_WORK_S = 0.2
"""What the processes of an engine compute before one of them is struck: a fraction of what the requests take."""
_LOOK_EVERY_S = 0.01


def _family() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _computed_s(processes: set[psutil.Process]) -> float:
    """Seconds of the processor that they had."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def _named(name: str, processes: set[psutil.Process]) -> psutil.Process:
    (found,) = [process for process in processes if name in " ".join([process.name(), *process.cmdline()])]
    return found


def struck(name: str, processes: set[psutil.Process]) -> AbstractContextManager[None]:
    """Kill the one process with that name once an engine is at work."""
    return _struck(_named(name, processes), signal.SIGKILL, lambda: _computed_s(processes))


@contextmanager
def _struck(victim: psutil.Process, number: int, computed_s: Callable[[], float]) -> Iterator[None]:
    """The victim gets the signal once the engine is at work, however long that takes."""
    begun, over = computed_s(), threading.Event()

    def strike() -> None:
        while not over.wait(_LOOK_EVERY_S):
            if computed_s() >= begun + _WORK_S:
                break
        victim.send_signal(number)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def check_a_lost_process(under_test: EngineUnderTest, name: str, number: int = signal.SIGKILL) -> RemoteRollout:
    """Responses and log-probs are those that the engine gave before, with the weights of before.

    Returns:
        the rollout, with an engine that runs.
    """
    others = _family()
    engine = under_test.build(response_length=_MAX_TOKENS)
    assert isinstance(engine, RemoteRollout)
    requests = [
        RolloutRequest(prompt, SamplingParams(max_tokens=_MAX_TOKENS, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(PROMPTS)
    ]
    with engine.awake(weights_of, 0):
        undisturbed = engine.generate(requests)
    own = _family() - others
    with engine.awake(weights_of, 0), _struck(_named(name, own), number, lambda: _computed_s(own)):
        outputs = engine.generate(requests)
    under_test.assert_same(outputs, undisturbed)
    if (
        engine.restarts == 0
    ):  # on a machine that held this process up, all was answered before: the next step must see it
        with engine.awake(weights_of, 0):
            under_test.assert_same(engine.generate(requests), undisturbed)
    assert engine.restarts == 1
    return engine
