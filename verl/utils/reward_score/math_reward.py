r"""MATH (arXiv:2103.03874): the last ``\boxed{...}``, equal in value to the ground truth.

Equality is decided by the library math-verify, in a process of its own that is killed when it takes
too long (see :mod:`verl.utils.reward_score.math_worker`). So it works in any thread and any Ray
actor, it cannot hang a run, and a comparison that could not be finished is an error that names
both answers, never a zero that looks like a wrong answer.
"""

from __future__ import annotations

import atexit
import json
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from verl.errors import RewardError
from verl.utils.reward_score import register_scorer
from verl.utils.reward_score.notation import canonical, readings

WORKER = Path(__file__).with_name("math_worker.py")
START_TIMEOUT_S = 120.0
MAX_ANSWER_LENGTH = 2000
"""Longest answer that is compared by value, in characters; a longer one is wrong unless it is the same text."""


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` (or ``\fbox{...}``, ``\boxed 3``) of a text holds.

    Returns:
        None if there is none, or its brace is never closed.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    if not rest.startswith("{"):
        return rest.split("$")[0].split()[0] if rest.split("$")[0].split() else None
    depth = 0
    for place, character in enumerate(rest):
        escaped = place > 0 and rest[place - 1] == "\\"
        if character == "{" and not escaped:
            depth += 1
        elif character == "}" and not escaped:
            depth -= 1
            if depth == 0:
                return rest[1:place].strip()
    return None


@register_scorer("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math_reward")
def compute_score(
    solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0, timeout_s: float = 5.0
) -> float:
    r"""``score`` if the last boxed answer equals the truth, ``format_score`` if it does not, 0 without one.

    Args:
        solution_str: the response.
        ground_truth: the answer, with or without ``\boxed``.
        format_score: for a boxed answer that is wrong.
        score: for a right one.
        timeout_s: longest time for one comparison.

    Raises:
        RewardError: the ground truth cannot be read, or the comparison takes longer than ``timeout_s``.
    """
    answer = last_boxed(solution_str)
    if answer is None:
        return 0.0
    truth = str(ground_truth)
    return score if is_equivalent(answer, last_boxed(truth) or truth, timeout_s) else format_score


def is_equivalent(answer: str, truth: str, timeout_s: float = 5.0) -> bool:
    r"""Whether two answers have the same value: ``\frac{1}{2}``, ``0.5`` and ``1/2`` do.

    Raises:
        RewardError: as :func:`compute_score`.
    """
    if len(answer) > MAX_ANSWER_LENGTH:
        return _squeezed(answer) == _squeezed(truth)
    answer, truth = canonical(answer), canonical(truth)
    if _squeezed(answer) == _squeezed(truth):
        return True
    return any(_VERIFIER.equal(left, right, timeout_s) for left, right in readings(answer, truth))


def _squeezed(text: str) -> str:
    return "".join(text.strip().strip("$").split())


class _Verifier:
    """The worker process, started at the first comparison and again after every kill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.stop)

    def equal(self, answer: str, truth: str, timeout_s: float) -> bool:
        with self._lock:
            process = self._process if self._process and self._process.poll() is None else self._start()
            request = {"answer": answer, "truth": truth, "timeout_s": timeout_s}
            reply = self._exchange(process, json.dumps(request), timeout_s)
        if reply is None:
            raise RewardError(
                f"math: comparing {answer!r:.200} with {truth!r:.200} was given up after {timeout_s} s "
                "or ran out of memory. Raise the setting timeout_s if such answers are expected."
            )
        if "error" in reply:
            raise RewardError(f"math: {reply['error']}. Correct reward_model.ground_truth of this row.")
        return reply["equal"]

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self.stop()
        command = [sys.executable, "-P", str(WORKER)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        if self._exchange(self._process, None, START_TIMEOUT_S) is None:
            raise RewardError(
                f"math: the process that compares answers did not start. Try it by hand: {sys.executable} -P {WORKER}"
            )
        return self._process

    def _exchange(self, process: subprocess.Popen[str], request: str | None, timeout_s: float) -> dict[str, Any] | None:
        """Send a line and wait for one; on silence or death the process is killed and the answer is None."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if request is not None:
                process.stdin.write(request + "\n")
                process.stdin.flush()
            readable, _, _ = select.select([process.stdout], [], [], timeout_s)
            line = process.stdout.readline() if readable else ""
        except BrokenPipeError:
            line = ""
        if not line:
            self.stop()
            return None
        return json.loads(line)


_VERIFIER = _Verifier()
