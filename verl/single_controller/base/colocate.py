"""Several workers in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.errors import WorkerError
from verl.single_controller.base.worker import Worker


class ClassWithInitArgs:
    """A class and the arguments of its constructor, to be called where the object shall live."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        """The object."""
        return self.cls(*self.args, **self.kwargs)

    @property
    def members(self) -> Mapping[str, ClassWithInitArgs]:
        """The workers that will share one process, by name; empty if it is one worker alone."""
        return self.kwargs["members"] if self.cls is WorkerHost else {}

    @property
    def fused(self) -> bool:
        """Whether the workers of one process will see each other."""
        return self.cls is WorkerHost and self.kwargs["fused"]


class WorkerHost(Worker):
    """One process that holds a worker for each role; the roles' groups are views of the same ranks.

    Args:
        members: the workers, by name; they are made in this order.
        fused: let them find each other with ``get_fused_worker_by_name``.
    """

    def __init__(self, members: Mapping[str, ClassWithInitArgs], fused: bool) -> None:
        super().__init__()
        self.workers: dict[str, Any] = {name: make() for name, make in members.items()}
        if fused:
            for worker in self.workers.values():
                worker.fused_worker_dict = self.workers

    def invoke(self, member: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one of the workers."""
        return getattr(self.workers[member], method)(*args, **kwargs)


def host_arguments(members: Mapping[str, ClassWithInitArgs], fused: bool) -> dict[str, Any]:
    """Arguments of a :class:`WorkerHost`, checked.

    Raises:
        WorkerError: there are no members, or one of them is no Worker.
    """
    if not members:
        raise WorkerError("colocated workers: there are none. Give a dict from name to class with arguments.")
    for name, member in members.items():
        if not issubclass(member.cls, Worker):
            raise WorkerError(f"colocated worker '{name}': {member.cls.__name__} is no subclass of Worker.")
    return {"members": dict(members), "fused": fused}
