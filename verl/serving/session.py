"""Sessions: engines of a worker group that answer requests one by one, from one training step to the next.

::

    session = LocalSession(room, loop)                    # or RaySession(...)
    session.serve_while(group, start_work).result()       # awake with the group's newest weights; work asks by `send`
    session.send("conversation 7", request, on_part)      # from any thread, at any time
    session.pause()                                       # requests wait from now on, also over new weights
    session.interrupt()                                   # what is drawn now waits too, with the tokens there are
    session.abort()                                       # what is drawn now ends with the tokens there are
    session.resume()

A session keeps its router and its connections; the engines of its group sleep between two calls of ``serve_while``,
where requests are refused, or wait if the session is paused.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeVar

from verl.serving.connection import Connection
from verl.serving.state import SessionState
from verl.utils.deferred import Deferred

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup

T = TypeVar("T")


class Session(Connection, Protocol):
    """Engines behind a router: :class:`~verl.serving.local.LocalSession` or :class:`~verl.serving.ray.RaySession`."""

    def serve_while(self, group: WorkerGroup, start: Callable[[], Future[T]]) -> Deferred[T]:
        """Wake the engines with their newest weights, start work that asks them, and let them sleep when it is done.

        Args:
            group: the worker group of the engines; another one may come with each call.
            start: starts the work; called once all engines are awake.

        Returns:
            the result of the work; waiting for it raises what ends the engines too.

        Raises:
            ProcessLostError: a rank or the router died, or a rank hangs.
            WorkerError: an engine failed.
        """
        ...

    def pause(self) -> None:
        """Let requests that no engine has yet wait, until :meth:`resume`. What runs goes on. Idempotent.

        If the engines fall asleep meanwhile, what they ran waits too, and is asked again with the next weights.
        """
        ...

    def interrupt(self) -> None:
        """Let all requests wait, those under way with the tokens drawn so far, until :meth:`resume`; blocks.

        It includes :meth:`pause`. When it returns, every engine has answered, so that nothing drawn is lost if the
        engines fall asleep. Responses go on with the weights that the engines have after :meth:`resume`, and those who
        wait for them get them whole (:attr:`~verl.workers.rollout.request.RolloutOutput.versions`). May be called
        again meanwhile, and without a request.

        Raises:
            ProcessLostError: a rank or the router died, or a rank hangs.
            WorkerError: an engine failed.
        """
        ...

    def resume(self) -> None:
        """Send what waits. Idempotent."""
        ...

    def abort(self) -> None:
        """Let the engines answer what they draw now with the tokens there are and ``finish_reason`` "abort"."""
        ...

    def state(self) -> SessionState:
        """Return what the engines do, of which :func:`verl.serving.state.described` makes a text."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of the weights that the engines have, or had when they were awake last; -1 before the first time."""
        ...

    def close(self) -> None:
        """Refuse requests, and end what the session has started. Idempotent."""
        ...
