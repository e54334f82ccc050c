"""Errors that a client gets with an HTTP status."""

from __future__ import annotations

from verl.errors import VerlError

GONE = 410
"""Status of what was there and is lost."""


class RefusedError(VerlError):
    """A request that cannot be served.

    Args:
        message: what is wrong, and what to do.
        status: of HTTP: 400 for wrong values, 401 without the key, 404 for what is not there, 410 for what is lost.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
