"""Code of an interaction in a trajectory: what it may answer, and what becomes of one that fails or hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from verl.agents.loop import TrajectoryError
from verl.agents.simulated_user import SimulatedUser, UserAnswer
from verl.errors import ConfigError
from verl.interactions.base import BaseInteraction
from verl.tools.threads import LoopThreads

THREADS = LoopThreads()
MESSAGES = [{"role": "assistant", "content": "4"}]


class Given(BaseInteraction):
    """Answers with the row's ``answer``, which it calls if it can be called."""

    def __init__(self) -> None:
        super().__init__({"name": "given"})
        self.closed: list[str] = []

    async def generate_response(self, instance_id: str, messages: list, answer: Any, **kwargs: Any) -> Any:
        messages.clear()  # the trajectory's own must stay
        return answer() if callable(answer) else answer

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.closed.append(instance_id)


class Scored(Given):
    """Calls the row's ``answer``, and always ends."""

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        kwargs["answer"]()
        return True, "", 0.0, {}


def answered(answer: Any, interaction: BaseInteraction | None = None, threads: LoopThreads = THREADS) -> UserAnswer:
    async def talk() -> UserAnswer:
        row = {"name": "given", "answer": answer}
        user = SimulatedUser.from_row({"given": interaction or Given()}, row, 0.2, threads)
        assert user is not None
        async with user:
            return await user.answer(MESSAGES)

    return asyncio.run(talk())


def test_what_a_user_answers():
    interaction = Given()
    assert answered((False, "And 3 + 3?", 1, {}), interaction) == UserAnswer(False, "And 3 + 3?", 1.0)
    assert answered((True, "", None, None), interaction) == UserAnswer(True, "", None)
    assert len(interaction.closed) == 2
    assert MESSAGES == [{"role": "assistant", "content": "4"}]


def sleeping() -> None:
    time.sleep(1.0)


def cancelled() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    "answer, problem",
    [
        (lambda: 1 / 0, "generate_response failed: ZeroDivisionError: division by zero."),
        (lambda: exit(3), "failed: RuntimeError: sys.exit(3)."),
        (sleeping, "generate_response took longer than tool_timeout_s=0.2 s."),
        (cancelled, "generate_response was cancelled by its own code."),
        (lambda: None, "returned None; generate_response returns (should_terminate, content, score, extra)."),
        ((True, 5, 0.0, {}), "returned (True, 5, 0.0, {});"),
        ((True, "", float("nan"), {}), "gave the score nan, which is no finite number."),
        ((True, "", "1", {}), "gave the score '1', which is no finite number."),
    ],
)
def test_a_user_that_fails_ends_the_trajectory_and_is_finalized(answer: Any, problem: str):
    interaction = Given()
    with pytest.raises(TrajectoryError) as error:
        answered(answer, interaction)
    assert problem in str(error.value)
    assert error.value.status == "environment_error"
    assert len(interaction.closed) == 1


def test_threads_of_users_are_used_again_and_end():
    threads, used = LoopThreads(), set()
    for _ in range(5):
        answered(lambda: used.add(threading.current_thread()), Scored(), threads)
        wait_until(lambda: all(thread.name == "idle" for thread in used))
    assert len(used) == 1
    with pytest.raises(TrajectoryError):  # its code blocks the thread, which is free again afterwards
        answered(lambda: used.add(threading.current_thread()) or sleeping(), Scored(), threads)
    wait_until(lambda: all(thread.name == "idle" for thread in used))
    threads.close()
    wait_until(lambda: not any(thread.is_alive() for thread in used))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_which_user_a_row_wants():
    users = {"given": Given(), "gsm8k": BaseInteraction({})}
    for nothing in (None, {}, {"name": None, "answer": None}):
        assert SimulatedUser.from_row(users, nothing, 1.0, THREADS) is None
    # Data of GSM8K with tools has arguments without a name, also for runs without users.
    unnamed = {"query": "2+2?", "ground_truth": "4", "level": None}
    assert SimulatedUser.from_row({}, unnamed, 1.0, THREADS) is None
    only = SimulatedUser.from_row({"gsm8k": users["gsm8k"]}, unnamed, 1.0, THREADS)
    assert only is not None
    assert only._kwargs == {**unnamed, "name": "gsm8k"}  # a null that the row has stays
    with pytest.raises(ConfigError, match=r"interaction_kwargs.name='': there is no such interaction.*given, gsm8k"):
        SimulatedUser.from_row(users, unnamed, 1.0, THREADS)
    with pytest.raises(
        ConfigError, match=r"name='gsm8': there is no such .* Did you mean 'gsm8k'\? There are: given, "
    ):
        SimulatedUser.from_row(users, {"name": "gsm8"}, 1.0, THREADS)
    with pytest.raises(ConfigError, match=r"There are none\. The file of .*interaction_config_path lists them"):
        SimulatedUser.from_row({}, {"name": "gsm8k"}, 1.0, THREADS)
    with pytest.raises(ConfigError, match=r"interaction_kwargs is 'gsm8k'; it is an object"):
        SimulatedUser.from_row(users, "gsm8k", 1.0, THREADS)
