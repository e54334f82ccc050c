"""Rates of calls."""

from __future__ import annotations

import asyncio
import time


class AsyncTokenBucket:
    """Limits the rate of coroutines: each takes tokens from a bucket that fills at a constant rate, and waits for them.

    Tokens are given in the order in which they were asked for. A coroutine may take more than the bucket holds; it
    waits until so many have come.

    Args:
        rate_limit: tokens that come per second.
        max_tokens: tokens that a full bucket holds, which is how many can be taken at once after a pause; by default
            those of one second.

    Raises:
        ValueError: one of them is not positive.
    """

    def __init__(self, rate_limit: float, max_tokens: float | None = None) -> None:
        self.rate_limit = rate_limit
        self.max_tokens = rate_limit if max_tokens is None else max_tokens
        if not (self.rate_limit > 0 and self.max_tokens > 0):
            raise ValueError(f"rate_limit={rate_limit} and max_tokens={max_tokens} must be positive.")
        self.tokens = float(self.max_tokens)
        self.last_update: float | None = None

    async def acquire(self, num_tokens: float = 1.0) -> None:
        """Take tokens, and return when all of them have come."""
        now = time.monotonic()
        if self.last_update is not None:
            self.tokens = min(self.max_tokens, self.tokens + (now - self.last_update) * self.rate_limit)
        self.last_update = now
        # Below zero are tokens that others wait for: who asks later waits longer. Nothing is awaited before this line,
        # so no other coroutine comes in between.
        self.tokens -= num_tokens
        if self.tokens < 0:
            await asyncio.sleep(-self.tokens / self.rate_limit)
