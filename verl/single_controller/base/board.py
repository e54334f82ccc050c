"""Newest values by key that workers post while they answer a call, for the driver to read meanwhile."""

from __future__ import annotations

import threading


class Board:
    """Newest values of one process; its methods may be called from any thread.

    :class:`verl.single_controller.ray.board.RayBoard` does the same between processes.
    """

    def __init__(self) -> None:
        self._values: dict[int, object] = {}
        self._lock = threading.Lock()

    def post(self, key: int, value: object) -> None:
        """Replace the value of a key."""
        with self._lock:
            self._values[key] = value

    def values(self) -> dict[int, object]:
        """Return the newest value of each key; none if the board cannot be reached."""
        with self._lock:
            return dict(self._values)

    def close(self) -> None:
        """Free what the board holds; later posts are lost."""
        with self._lock:
            self._values.clear()
