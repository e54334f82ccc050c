"""Public name of scoring programs on a SandboxFusion service; see :mod:`verl.plugins.sandbox.prime_code`."""

from __future__ import annotations

from verl.plugins.sandbox.prime_code import score_and_metadata


def compute_score(
    sandbox_fusion_url: str,
    concurrent_semaphore: object,
    memory_limit_mb: int,
    completion: str,
    test_cases: object,
    continuous: bool = False,
    timeout: float = 10.0,
) -> tuple[float, list[dict[str, object]]]:
    """Score a program by running the tests of its task on a service.

    Args:
        sandbox_fusion_url: address of the service.
        concurrent_semaphore: bounds concurrent requests; None sends one after the other.
        memory_limit_mb: MiB per test.
        completion: the response, with the program in a fenced block.
        test_cases: see :func:`verl.plugins.sandbox.prime_code.cases.read_cases`.
        continuous: score the fraction of the first 10 tests that pass; else 1 if all tests pass, 0 otherwise.
        timeout: seconds per test.

    Returns:
        the score, and a dict per test with ``status``, ``reason`` and ``seconds``.

    Raises:
        SandboxError: the service cannot be reached or failed.
        RewardError: the tests cannot be read.
    """
    return score_and_metadata(
        completion, test_cases, continuous, timeout, memory_limit_mb, sandbox_fusion_url, concurrent_semaphore
    )
