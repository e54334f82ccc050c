"""Programming tasks: the program of a response is run against tests, in a sandbox.

Programs run in the sandbox of this machine (:mod:`verl.utils.sandbox`), or on a SandboxFusion service
where ``reward_model.sandbox_fusion.url`` names one; nowhere else. The expected answers never get there:
the program's answer comes out and is compared here. Data formats: :func:`.cases.read_cases`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from verl.errors import ConfigError, RewardError
from verl.utils.reward_score import register_scorer
from verl.utils.reward_score.prime_code.cases import extract_code, limited, read_cases
from verl.utils.reward_score.prime_code.judge import Judgement, Runner, TimeBudget, judge
from verl.utils.sandbox import Sandbox, SandboxError, SandboxUnavailableError
from verl.utils.sandbox.types import SMALLEST_MEMORY_MB

CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")
MEMORY_LIMIT_MB = 1024
CONTINUOUS_TESTS = 10
TOTAL_TIME_LIMIT_S = 24.0

__all__ = [
    "CODE_SOURCES",
    "check_sandbox",
    "code_settings",
    "compute_score",
    "extract_code",
    "read_cases",
    "score_code",
]


def check_sandbox(settings: Mapping[str, Any]) -> None:
    """See before a run whether programs can be run: on a service, or in the sandbox of this machine.

    Args:
        settings: of :func:`score_code`; ``sandbox_fusion_url`` names the service.

    Raises:
        ConfigError: neither, and the message has the command that installs the sandbox; or a limit that makes
            no sense.
    """
    for name in ("time_limit_s", "total_time_limit_s", "memory_limit_mb", "max_tests"):
        if (value := settings.get(name)) is not None and not value > 0:
            raise ConfigError(f"scorer_kwargs.{name}={value}: it must be greater than 0.")
    if (memory := settings.get("memory_limit_mb") or MEMORY_LIMIT_MB) < SMALLEST_MEMORY_MB:
        raise ConfigError(f"memory_limit_mb={memory}: an interpreter needs at least {SMALLEST_MEMORY_MB} MiB to start.")
    url = settings.get("sandbox_fusion_url")
    try:
        if url:
            _fusion(url, None)
        else:
            _sandbox()
    except SandboxUnavailableError as error:
        raise ConfigError(
            f"the data have programming tasks, and programs run in a sandbox only; {error}\nOr set "
            "reward_model.sandbox_fusion.url to a SandboxFusion service."
        ) from error
    except SandboxError as error:
        raise ConfigError(str(error)) from error


def code_settings(
    *, url: str | None, max_concurrent: int, memory_limit_mb: int, num_workers: int, timeout_s: float
) -> dict[str, Any]:
    """Settings of :func:`score_code` in a pool of processes, of each of which one sample is scored at a time.

    Args:
        url: ``reward_model.sandbox_fusion.url``.
        max_concurrent: ``reward_model.sandbox_fusion.max_concurrent``; the processes share it evenly.
        memory_limit_mb: ``reward_model.sandbox_fusion.memory_limit_mb``.
        num_workers: processes.
        timeout_s: time of a sample; programs get at most four fifths, so that a slow one is a wrong answer.

    >>> code_settings(url="http://x", max_concurrent=64, memory_limit_mb=512, num_workers=8, timeout_s=10)
    {'sandbox_fusion_url': 'http://x', 'concurrent_semaphore': 8, 'memory_limit_mb': 512, 'total_time_limit_s': 8.0}
    """
    return {
        "sandbox_fusion_url": url,
        "concurrent_semaphore": max(1, max_concurrent // num_workers),
        "memory_limit_mb": memory_limit_mb,
        "total_time_limit_s": min(TOTAL_TIME_LIMIT_S, 0.8 * timeout_s),
    }


@register_scorer(*CODE_SOURCES, "prime_code", check=check_sandbox, is_timed=True)
def score_code(
    solution_str: str,
    ground_truth: Any,
    continuous: bool = True,
    max_tests: int | None = None,
    time_limit_s: float = 6.0,
    total_time_limit_s: float = TOTAL_TIME_LIMIT_S,
    memory_limit_mb: int | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
) -> dict[str, Any]:
    """Score a program by the tests of its task.

        score = tests passed / tests run              continuous
        score = 1 if all tests passed, else 0         otherwise

    A program that is too slow, crashes or takes too much memory has failed its test: that is its score,
    and ``code_status`` says why. Only a failure of the sandbox or of the data is an error.

    Args:
        solution_str: the response, with the program in a fenced block.
        ground_truth: the tests; see :func:`.cases.read_cases`.
        continuous: score the fraction of the tests.
        max_tests: only the first so many tests. Default: 10 if ``continuous``, else all.
        time_limit_s: seconds of computing per test; by the clock it may take three times that.
        total_time_limit_s: seconds by the clock for all tests; those that are left then count as not passed.
            It must stay below the time that the reward manager gives a sample.
        memory_limit_mb: MiB per test; None is 1024.
        sandbox_fusion_url: address of a service that runs the programs instead of this machine.
        concurrent_semaphore: bounds requests to the service at once: a semaphore, or a number for this
            process. With a number or a semaphore the tests of a program are sent side by side.

    Returns:
        ``score``; ``acc``, whether all tests passed; ``tests_passed``; ``tests_total``; ``code_status``:
        ``passed``, ``no_code``, or of the first test that did not pass ``wrong_answer``, ``not_run`` or a
        :class:`verl.utils.sandbox.Status`.

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
    judgement = run_tests(
        solution_str, ground_truth, budget, most, sandbox_fusion_url, concurrent_semaphore, stop_early=not continuous
    )
    return {
        "score": judgement.score(continuous),
        "acc": judgement.score(continuous=False) == 1.0,
        "tests_passed": judgement.passed,
        "tests_total": judgement.total,
        "code_status": judgement.status,
    }


def compute_score(
    completion: str, test_cases: Any, continuous: bool = False, timeout: float = 10.0
) -> tuple[float, list[dict[str, Any]]]:
    """:func:`score_code` by the public name and signature, in the sandbox of this machine.

    Args:
        completion: the response.
        test_cases: the tests.
        continuous: score the fraction of the first 10 tests.
        timeout: seconds of computing per test.

    Returns:
        the score, and a dict per test with ``status``, ``reason`` and ``seconds``.

    Raises:
        SandboxError: the sandbox failed.
        RewardError: the tests cannot be read.
    """
    budget = TimeBudget(time_limit_s=timeout, total_time_limit_s=10 * timeout, memory_limit_mb=MEMORY_LIMIT_MB)
    judgement = run_tests(
        completion, test_cases, budget, CONTINUOUS_TESTS if continuous else None, None, None, stop_early=not continuous
    )
    return judgement.score(continuous), judgement.metadata()


def run_tests(
    response: str,
    ground_truth: Any,
    budget: TimeBudget,
    max_tests: int | None,
    url: str | None,
    semaphore: Any,
    *,
    stop_early: bool,
) -> Judgement:
    """Judge a response on this machine, or on the service at ``url``; see :func:`.judge.judge`."""
    cases = limited(read_cases(ground_truth), max_tests)
    if not url:
        return judge(response, cases, _sandbox(), budget, stop_early=stop_early)
    runner = _fusion(url, semaphore)
    at_once = semaphore if isinstance(semaphore, int) else len(cases) if semaphore is not None else 1
    return judge(response, cases, runner, budget, stop_early=stop_early, at_once=max(1, min(at_once, len(cases))))


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox()


def _fusion(url: str, semaphore: Any) -> Runner:
    from verl.utils.sandbox.fusion import FusionSandbox  # only runs that use a service need its HTTP client

    if semaphore is None or isinstance(semaphore, int):
        return _shared_fusion(url)
    if not hasattr(semaphore, "__enter__"):
        raise RewardError(f"concurrent_semaphore is {type(semaphore).__name__}; expected a semaphore or a number.")
    return FusionSandbox(url, semaphore)


@functools.cache
def _shared_fusion(url: str) -> Runner:
    from verl.utils.sandbox.fusion import FusionSandbox

    return FusionSandbox(url)
