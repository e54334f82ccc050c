"""How long each stage takes, measured from outside so that the stages stay a story."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Stopwatch:
    """Seconds by name; a name timed twice adds up.

    Example:
        >>> watch = Stopwatch()
        >>> with watch("gen"):
        ...     pass
        >>> list(watch.seconds)
        ['gen']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the wall-clock time of the block to ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def stage(name: str) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Decorator for a trainer method: times it as ``timing_s/{name}`` and signs its errors.

    An exception that leaves the stage carries a note with the stage and the step, so that a
    traceback from deep inside a worker still says where in the run it happened.
    """

    def wrap(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def timed(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                with self.stopwatch(name):
                    return method(self, *args, **kwargs)
            except Exception as error:
                error.add_note(f"This happened in stage '{name}' of step {self.global_steps}.")
                raise

        return timed

    return wrap
