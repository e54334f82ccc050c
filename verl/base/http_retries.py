"""Retry rule for requests to services: the same for all that score responses or run programs."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx2
from tenacity import RetryCallState, retry_if_exception, stop_after_attempt, wait_random_exponential

RETRIED = (408, 429, 500, 502, 503, 504)
"""Status codes of a service that is busy or fails for now."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Bounds of the random pause: before the first repetition, and at most."""


def retry_rule(retries: int, first_pause_s: float = FIRST_PAUSE_S) -> dict[str, Any]:
    """Return the arguments of tenacity's ``Retrying`` and ``AsyncRetrying``.

    A request is repeated after a status of ``RETRIED``, raised by ``raise_for_status()``, a broken connection or a
    timeout. Pauses are random up to a bound that doubles, and as long as the service's Retry-After asks, up to
    ``LONGEST_PAUSE_S``. After the last attempt its exception is raised.

    Args:
        retries: attempts after the first.
        first_pause_s: bound of the first pause.
    """
    return {
        "stop": stop_after_attempt(retries + 1),
        "wait": partial(_pause_s, first_pause_s),
        "retry": retry_if_exception(_may_pass),
        "reraise": True,
    }


def _may_pass(error: BaseException) -> bool:
    """Return whether another attempt may succeed."""
    if isinstance(error, httpx2.HTTPStatusError):
        return error.response.status_code in RETRIED
    return isinstance(error, httpx2.TransportError)


def _pause_s(first_pause_s: float, state: RetryCallState) -> float:
    pause_s = wait_random_exponential(first_pause_s, LONGEST_PAUSE_S)(state)
    error = state.outcome.exception() if state.outcome else None
    retry_after = error.response.headers.get("Retry-After", "") if isinstance(error, httpx2.HTTPStatusError) else ""
    return min(max(pause_s, float(retry_after)), LONGEST_PAUSE_S) if retry_after.isdecimal() else pause_s
