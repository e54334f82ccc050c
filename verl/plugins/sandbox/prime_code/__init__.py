"""Scorer of programming tasks, which runs the program of a response against tests in a sandbox.

Programs run in the sandbox of this machine (:mod:`verl.plugins.sandbox`), or on the SandboxFusion service at
``reward_model.sandbox_fusion.url``. The expected answers are never sent to the sandbox: the program's answers are
compared here. Data formats: :func:`.cases.read_cases`.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

from verl.errors import ConfigError, RewardError
from verl.plugins.sandbox import Sandbox, SandboxError, SandboxUnavailableError
from verl.plugins.sandbox.prime_code.cases import extract_code, read_cases
from verl.plugins.sandbox.prime_code.program_tests import (
    PASSED,
    WRONG_ANSWER,
    CaseResults,
    ProgramRunner,
    TimeBudget,
    check_program,
    check_response,
)
from verl.plugins.sandbox.types import SMALLEST_MEMORY_MB
from verl.scorers.code import TOTAL_TIME_LIMIT_S
from verl.scorers.registry import ScorerInfo

MEMORY_LIMIT_MB = 1024  # of one program, with all its processes
CONTINUOUS_TESTS = 10  # the first so many are run where the score is the share that passes

__all__ = [
    "SCORER",
    "apps_check_correctness",
    "check_sandbox",
    "compute_score",
    "extract_code",
    "read_cases",
    "run_test",
    "score_code",
]


def check_sandbox(settings: Mapping[str, Any]) -> None:
    """Check, before training, the settings of :func:`score_code` and whether programs can be run.

    Raises:
        ConfigError: a limit or the service's address is invalid, or without a service this machine has no sandbox;
            the message then has the command that installs it.
    """
    for name in ("time_limit_s", "total_time_limit_s", "memory_limit_mb", "max_tests"):
        if (value := settings.get(name)) is not None and not value > 0:
            raise ConfigError(f"scorer_kwargs.{name}={value}: it must be greater than 0.")
    if (memory := settings.get("memory_limit_mb") or MEMORY_LIMIT_MB) < SMALLEST_MEMORY_MB:
        raise ConfigError(f"memory_limit_mb={memory}: an interpreter needs at least {SMALLEST_MEMORY_MB} MiB to start.")
    url = settings.get("sandbox_fusion_url")
    try:
        if url:
            _service(url, None)
        else:
            _sandbox()
    except SandboxUnavailableError as error:
        raise ConfigError(
            f"the data have programming tasks, and programs run in a sandbox only; {error}\nOr set "
            "sandbox_fusion.url to the address of a SandboxFusion service."
        ) from error
    except SandboxError as error:
        raise ConfigError(str(error)) from error


def score_code(
    solution_str: str,
    ground_truth: object,
    continuous: bool = True,
    max_tests: int | None = None,
    time_limit_s: float = 6.0,
    total_time_limit_s: float = TOTAL_TIME_LIMIT_S,
    memory_limit_mb: int | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: object = None,
) -> dict[str, object]:
    """Score a program by running the tests of its task.

        score = tests passed / tests                  continuous
        score = 1 if all tests passed, else 0         otherwise

    A program that is too slow, crashes or uses too much memory fails the test, and ``code_status`` gives the
    reason. Only a failure of the sandbox or of the data raises.

    Args:
        solution_str: the response, with the program in a fenced block.
        ground_truth: the tests; see :func:`.cases.read_cases`.
        continuous: score the fraction of the tests that pass.
        max_tests: number of tests used, the first ones. Default: 10 if ``continuous``, else all.
        time_limit_s: seconds of CPU time per test; the wall-clock limit is three times that.
        total_time_limit_s: wall-clock seconds for all tests; tests not run by then count as not passed.
            It must be below the reward manager's timeout of a sample.
        memory_limit_mb: MiB per test; None is 1024.
        sandbox_fusion_url: address of a service that runs the programs instead of this machine.
        concurrent_semaphore: bounds concurrent requests to the service: a semaphore, or a number for this
            process. With either, the tests of a program are sent in parallel.

    Returns:
        ``score``; ``acc``, whether all tests passed; ``tests_passed``; ``tests_total``; ``code_status``:
        ``passed``, ``no_code``, or the status of the first test that did not pass: ``wrong_answer``, ``not_run`` or a
        :class:`verl.plugins.sandbox.Status`.

    Raises:
        SandboxError: the sandbox failed.
        RewardError: the ground truth cannot be read.
    """
    most = max_tests or (CONTINUOUS_TESTS if continuous else None)
    budget = TimeBudget(
        time_limit_s=time_limit_s,
        total_time_limit_s=total_time_limit_s,
        memory_limit_mb=memory_limit_mb or MEMORY_LIMIT_MB,
    )
    results = run_tests(
        solution_str, ground_truth, budget, most, sandbox_fusion_url, concurrent_semaphore, stop_early=not continuous
    )
    return {
        "score": results.score(continuous),
        "acc": results.score(continuous=False) == 1.0,
        "tests_passed": results.passed,
        "tests_total": results.total,
        "code_status": results.status,
    }


SCORER = ScorerInfo(function=score_code, check=check_sandbox, truth=read_cases, is_timed=True)
"""The scorer of :data:`verl.scorers.code.CODE_SOURCES`."""


def compute_score(
    completion: str, test_cases: object, continuous: bool = False, timeout: float = 10.0
) -> tuple[float, list[dict[str, object]]]:
    """Score a program in the sandbox of this machine; the public form of :func:`score_code`.

    Args:
        completion: the response.
        test_cases: the tests; see :func:`.cases.read_cases`.
        continuous: score the fraction of the first 10 tests that pass.
        timeout: seconds of CPU time per test.

    Returns:
        the score, and a dict per test with ``status``, ``reason`` and ``seconds``.

    Raises:
        SandboxError: the sandbox failed.
        RewardError: the tests cannot be read.
    """
    return score_and_metadata(completion, test_cases, continuous, timeout)


def run_test(
    in_outs: object, test: str | None = None, debug: bool = False, timeout: float = 15.0
) -> tuple[list[bool | int], dict[str, object]]:
    """Run a program against tests, each in the sandbox of this machine.

    Args:
        in_outs: the tests; see :func:`.cases.read_cases`.
        test: the program, without a fence.
        debug: also log the result of each test.
        timeout: seconds of CPU time per test.

    Returns:
        for each test True (passed), False (another answer) or -1 (the program failed or took too long); and
        ``status``, ``reason`` and ``seconds`` of the first test that did not pass, or of the last one.

    Raises:
        ValueError: there is no program.
        SandboxError: the sandbox failed.
        RewardError: the tests cannot be read.
    """
    if not test:
        raise ValueError("run_test needs the program to run: test='print(input())'.")
    budget = TimeBudget(time_limit_s=timeout, total_time_limit_s=math.inf, memory_limit_mb=MEMORY_LIMIT_MB)
    results = check_program(test, read_cases(in_outs), _sandbox(), budget, stop_early=False).metadata()
    if debug:
        logging.getLogger(__name__).warning("run_test: %s", results)
    outcomes: dict[str, bool | int] = {PASSED: True, WRONG_ANSWER: False}
    shown = next((each for each in results if each["status"] != PASSED), results[-1])
    return [outcomes.get(each["status"], -1) for each in results], shown


def apps_check_correctness(
    in_outs: object, generation: str, timeout: float = 10.0, debug: bool = True
) -> tuple[list[bool | int], dict[str, object]]:
    """Run a program against tests: :func:`run_test` under another public name."""
    return run_test(in_outs, generation, debug, timeout)


def score_and_metadata(
    completion: str,
    test_cases: object,
    continuous: bool,
    timeout: float,
    memory_limit_mb: int = MEMORY_LIMIT_MB,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: object = None,
) -> tuple[float, list[dict[str, object]]]:
    """Implement :func:`compute_score`, here and in :mod:`verl.plugins.sandbox.sandbox_fusion`."""
    budget = TimeBudget(time_limit_s=timeout, total_time_limit_s=10 * timeout, memory_limit_mb=memory_limit_mb)
    most = CONTINUOUS_TESTS if continuous else None
    results = run_tests(
        completion, test_cases, budget, most, sandbox_fusion_url, concurrent_semaphore, stop_early=not continuous
    )
    return results.score(continuous), results.metadata()


def run_tests(
    response: str,
    ground_truth: object,
    budget: TimeBudget,
    max_tests: int | None,
    url: str | None,
    semaphore: object,
    *,
    stop_early: bool,
) -> CaseResults:
    """Run the tests on this machine, or on the service at ``url``; see :func:`.program_tests.check_response`."""
    cases = read_cases(ground_truth)[:max_tests]
    if not url:
        return check_response(response, cases, _sandbox(), budget, stop_early=stop_early)
    if isinstance(semaphore, int):
        runner, at_once = _service(url, None), semaphore
    elif semaphore is not None and not hasattr(semaphore, "__enter__"):
        raise RewardError(f"concurrent_semaphore is {type(semaphore).__name__}; expected a semaphore or a number.")
    else:
        runner, at_once = _service(url, semaphore), 1 if semaphore is None else len(cases)
    return check_response(
        response, cases, runner, budget, stop_early=stop_early, at_once=max(1, min(at_once, len(cases)))
    )


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox()


@functools.lru_cache(maxsize=16)
def _service(url: str, semaphore: Any) -> ProgramRunner:
    """Client of a service, cached so that its connections are reused."""
    from verl.plugins.sandbox.fusion import FusionSandbox  # only runs that use a service need its HTTP client

    return FusionSandbox(url, semaphore)
