"""Run a program against the tests of its task, and summarize the results."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.plugins.sandbox import Limits, ProgramResult
from verl.plugins.sandbox.prime_code.cases import Case, ValueCase, extract_code
from verl.plugins.sandbox.prime_code.harness import with_harness

PASSED, NO_CODE, WRONG_ANSWER, NOT_RUN = "passed", "no_code", "wrong_answer", "not_run"


class ProgramRunner(Protocol):
    """Interface of the sandbox of this machine and of the client of a service."""

    def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> ProgramResult:
        """Run a program until it ends or reaches a limit."""
        ...


@dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """Limits of a program in its tests."""

    time_limit_s: float
    """Seconds of CPU time per test; the wall-clock limit is three times that."""
    total_time_limit_s: float
    """Wall-clock seconds for all tests together."""
    memory_limit_mb: int
    """MiB per test."""

    def limits(self, left_s: float) -> Limits:
        """Limits of the next test, if ``left_s`` seconds are left for all tests."""
        return Limits(
            wall_s=min(3 * self.time_limit_s, left_s),  # three times, because the machine may be busy
            cpu_s=math.ceil(self.time_limit_s),
            memory_mb=self.memory_limit_mb,
        )


@dataclass(frozen=True)
class CaseResult:
    """Result of one test."""

    status: str
    """``passed``, ``wrong_answer``, ``not_run``, or why the program failed (:class:`verl.plugins.sandbox.Status`)."""
    reason: str = ""
    """The status with details."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the test passed."""
        return self.status == PASSED


@dataclass(frozen=True)
class CaseResults:
    """Results of all tests that were run; ``total`` also counts the others."""

    results: Sequence[CaseResult] = field(default_factory=tuple)
    total: int = 0

    @property
    def passed(self) -> int:
        """Number of tests that passed."""
        return sum(result.passed for result in self.results)

    @property
    def status(self) -> str:
        """``passed``, ``no_code``, or the status of the first test that did not pass."""
        if not self.results:
            return NO_CODE
        return next((result.status for result in self.results if not result.passed), PASSED)

    def score(self, continuous: bool) -> float:
        """Fraction of the tests that passed; if not ``continuous``, 1 if all passed and 0 otherwise."""
        if not continuous:
            return float(self.total > 0 and self.passed == self.total)
        return self.passed / self.total if self.total else 0.0

    def metadata(self) -> list[dict[str, Any]]:
        """One dict per test."""
        return [vars(result) for result in self.results]


def check_response(
    response: str,
    cases: Sequence[Case],
    runner: ProgramRunner,
    budget: TimeBudget,
    *,
    stop_early: bool,
    at_once: int = 1,
) -> CaseResults:
    """Run the program of a response against tests, each in a separate run.

    Args:
        response: text with the program in a fenced block.
        cases: the tests.
        runner: runs the program.
        budget: limits; tests for which no time is left are not run and count as not passed.
        stop_early: end after a group of ``at_once`` tests whose last one did not pass.
        at_once: number of tests that run in parallel.

    Raises:
        SandboxError: the runner failed; this says nothing about the program.
    """
    program = extract_code(response)
    if program is None:
        return CaseResults(total=len(cases))
    return check_program(program, cases, runner, budget, stop_early=stop_early, at_once=at_once)


def check_program(
    program: str,
    cases: Sequence[Case],
    runner: ProgramRunner,
    budget: TimeBudget,
    *,
    stop_early: bool,
    at_once: int = 1,
) -> CaseResults:
    """Run a program against tests; see :func:`check_response`."""
    deadline = time.monotonic() + budget.total_time_limit_s
    results: list[CaseResult] = []
    with ThreadPoolExecutor(at_once) as pool:
        for start in range(0, len(cases), at_once):
            group = cases[start : start + at_once]
            results += pool.map(lambda case: _run_case(program, case, runner, budget, deadline), group)
            if stop_early and not results[-1].passed:
                break
    return CaseResults(results, len(cases))


def _run_case(program: str, case: Case, runner: ProgramRunner, budget: TimeBudget, deadline: float) -> CaseResult:
    left = deadline - time.monotonic()
    if left <= 0:
        return CaseResult(NOT_RUN, f"no time was left of total_time_limit_s={budget.total_time_limit_s}")
    source = with_harness(program) if isinstance(case, ValueCase) else program
    result = runner.run(source, case.stdin, budget.limits(left))
    if not result.ok:
        return CaseResult(str(result.status), result.reason, result.seconds)
    if case.is_answered_by(result.stdout):
        return CaseResult(PASSED, PASSED, result.seconds)
    return CaseResult(WRONG_ANSWER, f"answered {result.stdout.strip()!r:.200}", result.seconds)
