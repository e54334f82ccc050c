"""Scoring of programs, as far as runs without programming tasks need it; the plug-in ``sandbox`` runs the programs."""

from __future__ import annotations

from verl.scorers.registry import SCORERS, PluginScorer

CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")
TOTAL_TIME_LIMIT_S = 24.0

for name in (*CODE_SOURCES, "prime_code"):
    SCORERS.add(
        name,
        PluginScorer(
            address="sandbox.prime_code:SCORER",
            settings=(
                *("continuous", "max_tests", "time_limit_s", "total_time_limit_s", "memory_limit_mb"),
                *("sandbox_fusion_url", "concurrent_semaphore"),
            ),
        ),
    )


def code_settings(
    *, url: str | None, max_concurrent: int, memory_limit_mb: int, num_workers: int, timeout_s: float
) -> dict[str, object]:
    """Build the settings of the scorer for a pool of processes that each score one sample at a time.

    Args:
        url: ``reward_model.sandbox_fusion.url``.
        max_concurrent: ``reward_model.sandbox_fusion.max_concurrent``, divided evenly among the processes.
        memory_limit_mb: ``reward_model.sandbox_fusion.memory_limit_mb``.
        num_workers: processes.
        timeout_s: timeout of a sample; its programs get at most four fifths of it, so that a slow program is a
            wrong answer and not a failed sample.

    >>> code_settings(url="http://x", max_concurrent=64, memory_limit_mb=512, num_workers=8, timeout_s=10)
    {'sandbox_fusion_url': 'http://x', 'concurrent_semaphore': 8, 'memory_limit_mb': 512, 'total_time_limit_s': 8.0}
    """
    return {
        "sandbox_fusion_url": url,
        "concurrent_semaphore": max(1, max_concurrent // num_workers),
        "memory_limit_mb": memory_limit_mb,
        "total_time_limit_s": min(TOTAL_TIME_LIMIT_S, 0.8 * timeout_s),
    }
