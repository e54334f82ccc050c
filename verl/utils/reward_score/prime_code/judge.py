"""A program against the tests of its task, wherever it runs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.utils.reward_score.prime_code.cases import Case, ValueCase, extract_code
from verl.utils.reward_score.prime_code.harness import with_harness
from verl.utils.sandbox import Limits, Outcome

PASSED, NO_CODE, WRONG_ANSWER, NOT_RUN = "passed", "no_code", "wrong_answer", "not_run"


class Runner(Protocol):
    """Where programs run: the sandbox of this machine, or a service."""

    def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
        """Run a program to its end or to its limits."""
        ...


@dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """What a program may take."""

    time_limit_s: float
    """Seconds of computing per test; by the clock it may take three times that, for the machine may be busy."""
    total_time_limit_s: float
    """Seconds by the clock for all tests together."""
    memory_limit_mb: int
    """MiB."""

    def limits(self, left_s: float) -> Limits:
        """Limits of the next test, of which there is so much time left."""
        return Limits(
            wall_s=min(3 * self.time_limit_s, left_s),
            cpu_s=math.ceil(self.time_limit_s),
            memory_mb=self.memory_limit_mb,
        )


@dataclass(frozen=True)
class Verdict:
    """What came of one test."""

    status: str
    """``passed``, ``wrong_answer``, ``not_run``, or why the program failed (:class:`verl.utils.sandbox.Status`)."""
    reason: str = ""
    """The same with details."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the answer was right."""
        return self.status == PASSED


@dataclass(frozen=True)
class Judgement:
    """What came of all tests."""

    verdicts: Sequence[Verdict] = field(default_factory=tuple)
    total: int = 0

    @property
    def passed(self) -> int:
        """Tests that passed."""
        return sum(verdict.passed for verdict in self.verdicts)

    @property
    def status(self) -> str:
        """``passed``, or the status of the first test that did not pass."""
        if not self.verdicts:
            return NO_CODE
        return next((verdict.status for verdict in self.verdicts if not verdict.passed), PASSED)

    def score(self, continuous: bool) -> float:
        """Fraction of the tests that passed; if not ``continuous``, 1 for all and 0 otherwise."""
        if not continuous:
            return float(self.total > 0 and self.passed == self.total)
        return self.passed / self.total if self.total else 0.0

    def metadata(self) -> list[dict[str, Any]]:
        """One dict per test."""
        return [vars(verdict) for verdict in self.verdicts]


def judge(
    response: str, cases: Sequence[Case], runner: Runner, budget: TimeBudget, *, stop_early: bool, at_once: int = 1
) -> Judgement:
    """Run the program of a response against tests, each in a run of its own.

    Args:
        response: text with the program in a fenced block.
        cases: the tests.
        runner: where it runs.
        budget: what it may take; tests for which no time is left are not run and count as not passed.
        stop_early: end with the first test that does not pass.
        at_once: tests at the same time.

    Raises:
        SandboxError: the runner failed, so that the program has not been judged.
    """
    program = extract_code(response)
    if program is None:
        return Judgement(total=len(cases))
    deadline = time.monotonic() + budget.total_time_limit_s
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(at_once) as pool:
        for start in range(0, len(cases), at_once):
            group = cases[start : start + at_once]
            verdicts += pool.map(lambda case: _verdict(program, case, runner, budget, deadline), group)
            if stop_early and not verdicts[-1].passed:
                break
    return Judgement(verdicts, len(cases))


def _verdict(program: str, case: Case, runner: Runner, budget: TimeBudget, deadline: float) -> Verdict:
    left = deadline - time.monotonic()
    if left <= 0:
        return Verdict(NOT_RUN, f"no time was left of total_time_limit_s={budget.total_time_limit_s}")
    source = with_harness(program) if isinstance(case, ValueCase) else program
    outcome = runner.run(source, case.stdin, budget.limits(left))
    if not outcome.ok:
        return Verdict(str(outcome.status), outcome.reason, outcome.seconds)
    if case.is_answered_by(outcome.stdout):
        return Verdict(PASSED, PASSED, outcome.seconds)
    return Verdict(WRONG_ANSWER, f"answered {outcome.stdout.strip()!r:.200}", outcome.seconds)
