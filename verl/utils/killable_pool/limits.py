"""How many calls, or how many tokens, a service takes per minute."""

from __future__ import annotations


class RateLimit:
    """A token bucket: it fills at a steady rate, holds what one second brings, and a call takes its part.

    A call that costs more than the bucket holds starts when it is full and leaves it in debt, so the
    rate holds for calls of any size.

    Args:
        per_minute: what may be taken in a minute.
        counts_tokens: whether a call costs its tokens; else it costs 1.

    >>> limit = RateLimit(per_minute=60)
    >>> limit.take(1, now=0.0)
    >>> limit.delay(1, now=0.25)
    0.75
    """

    def __init__(self, per_minute: float, counts_tokens: bool = False) -> None:
        self.per_second = per_minute / 60
        self.counts_tokens = counts_tokens
        self.capacity = max(self.per_second, 1.0)
        self.level = self.capacity
        self.filled_at: float | None = None

    def delay(self, tokens: float, now: float) -> float:
        """Seconds until a call of so many tokens may start; 0 if it may start now."""
        self._fill(now)
        missing = min(self._cost(tokens), self.capacity) - self.level
        return max(missing / self.per_second, 0.0)

    def take(self, tokens: float, now: float) -> None:
        """Count a call that starts now."""
        self._fill(now)
        self.level -= self._cost(tokens)

    def _cost(self, tokens: float) -> float:
        return tokens if self.counts_tokens else 1.0

    def _fill(self, now: float) -> None:
        if self.filled_at is not None:
            self.level = min(self.level + (now - self.filled_at) * self.per_second, self.capacity)
        self.filled_at = now
