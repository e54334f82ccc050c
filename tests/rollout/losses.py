"""An engine's process is killed or stopped while it generates; the real engines' tests share this."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.rollout.conformance import PROMPTS, EngineUnderTest, weights_of
from verl.workers.rollout.base import RolloutRequest, SamplingParams
from verl.workers.rollout.restarting import RestartingRollout

_MAX_TOKENS = 300


@contextmanager
def _struck(engine: RestartingRollout, name: str, number: int) -> Iterator[None]:
    """A moment after the start, the process whose command has ``name`` gets the signal."""

    def strike() -> None:
        time.sleep(0.5)
        family = psutil.Process().children(recursive=True)
        (victim,) = [process for process in family if name in " ".join([process.name(), *process.cmdline()])]
        os.kill(victim.pid, number)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def check_a_lost_process(under_test: EngineUnderTest, name: str, number: int = signal.SIGKILL) -> RestartingRollout:
    """Responses and log-probs are those that the engine gave before, with the weights of before.

    Returns:
        the rollout, with an engine that runs.
    """
    engine = under_test.build(response_length=_MAX_TOKENS)
    assert isinstance(engine, RestartingRollout)
    requests = [
        RolloutRequest(prompt, SamplingParams(max_tokens=_MAX_TOKENS, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(PROMPTS)
    ]
    with engine.awake(weights_of, 0):
        undisturbed = engine.generate(requests)
    with engine.awake(weights_of, 0), _struck(engine, name, number):
        outputs = engine.generate(requests)
    assert engine.restarts == 1
    under_test.assert_same(outputs, undisturbed)
    return engine
