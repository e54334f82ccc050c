"""Programming tasks on a SandboxFusion service, by the public name; see :mod:`verl.utils.reward_score.prime_code`."""

from __future__ import annotations

from typing import Any

from verl.utils.reward_score.prime_code import CONTINUOUS_TESTS, run_tests
from verl.utils.reward_score.prime_code.judge import TimeBudget

__all__ = ["compute_score"]


def compute_score(
    sandbox_fusion_url: str,
    concurrent_semaphore: Any,
    memory_limit_mb: int,
    completion: str,
    test_cases: Any,
    continuous: bool = False,
    timeout: float = 10.0,
) -> tuple[float, list[dict[str, Any]]]:
    """Score a program by the tests of its task on a service.

    Args:
        sandbox_fusion_url: address of the service.
        concurrent_semaphore: bounds requests at once; None sends one after the other.
        memory_limit_mb: MiB per test.
        completion: the response, with the program in a fenced block.
        test_cases: see :func:`verl.utils.reward_score.prime_code.cases.read_cases`.
        continuous: score the fraction of the first 10 tests; else 1 if all pass and 0 otherwise.
        timeout: seconds per test.

    Returns:
        the score, and a dict per test with ``status``, ``reason`` and ``seconds``.

    Raises:
        SandboxError: the service cannot be reached or failed; that is no score of 0.
        RewardError: the tests cannot be read.
    """
    budget = TimeBudget(time_limit_s=timeout, total_time_limit_s=10 * timeout, memory_limit_mb=memory_limit_mb)
    judgement = run_tests(
        completion,
        test_cases,
        budget,
        CONTINUOUS_TESTS if continuous else None,
        sandbox_fusion_url,
        concurrent_semaphore,
        stop_early=not continuous,
    )
    return judgement.score(continuous), judgement.metadata()
