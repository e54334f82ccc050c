"""The generative reward model of a run, as the trainer and the scoring of responses use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from verl.base.types import JsonObject
from verl.utils.deferred import Deferred
from verl.utils.metric import Metrics

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup

T = TypeVar("T")


class ServedJudge(Protocol):
    """A language model that reward functions ask; the plug-in ``endpoint`` has the implementation."""

    @property
    def reward_router_address(self) -> str:
        """Address of its endpoint, as ``127.0.0.1:PORT``."""
        ...

    @property
    def arguments(self) -> JsonObject:
        """Arguments for reward functions and reward managers whose signature names them."""
        ...

    def serve_while(self, group: WorkerGroup, step: int, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        """Answer calls on the engines of ``group`` while the work that ``start`` begins is in progress."""
        ...

    def cancel(self) -> None:
        """Cancel scoring whose result is not needed, because the ranks have ended."""

    def metrics(self) -> Metrics:
        """Return counts of calls and tokens since the last call of this method."""
        ...

    def close(self) -> None:
        """Stop the endpoint."""
