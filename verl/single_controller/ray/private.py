"""All uses of Ray's private interfaces and of the wording of its messages, behind named functions.

``tests/single_controller/test_private_parts.py`` fails, and names the part, on a version of Ray that changed one.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import ObjectRef
from ray._private import state
from ray._private import worker as ray_worker
from ray._private.utils import read_ray_address
from ray.actor import ActorClass, ActorHandle

# Environment of a Ray that is started here; variables that the user has set are kept.
SETTINGS = {
    # Ray would otherwise hide GPUs from actors that ask for none, and warn about it.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # By default Ray frees objects once per second. Batches of that second could not reuse freed shared memory, and the
    # first write to a new page costs far more than the copy.
    "RAY_free_objects_period_milliseconds": "10",
    # By default Ray starts a worker for each core at once. They take time from the ranks, which cannot use them: ranks
    # have an environment of their own.
    "RAY_prestart_worker_first_driver": "0",
}


# ---- this node and the Ray that runs here ---------------------------------------------------------


def logs_folder() -> Path:
    """Folder of the logs of Ray's processes on this node."""
    assert ray_worker._global_node is not None, "Ray is not initialised"
    return Path(ray_worker._global_node.get_logs_dir_path())


def is_own_head() -> bool:
    """Return whether this process started the head node of the Ray cluster that it is connected to."""
    return ray_worker._global_node is not None and ray_worker._global_node.is_head()


def own_raylet() -> int | None:
    """Process id of the raylet that this process started; None if it started none, or it has ended."""
    node = ray_worker._global_node
    started = node.all_processes.get("raylet", []) if node is not None else []
    return next((info.process.pid for info in started if info.process.poll() is None), None)


def address_left_behind(temp_dir: str | None) -> str | None:
    """Address that a Ray of this machine wrote into its folder; it may be stale, as a killed Ray leaves it there."""
    return read_ray_address(temp_dir)


def silence_token_notice() -> None:
    """Drop Ray's notice that a Ray started here requires a token, which is what verl arranges for.

    The opposite, that no token is required, is still shown.
    """
    notices = logging.getLogger("ray._private.authentication.authentication_token_setup")
    notices.addFilter(_is_no_token_notice)


def _is_no_token_notice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Token authentication is enabled for this Ray cluster")


# ---- actors ---------------------------------------------------------------------------------------

CONSTRUCTOR_RAISED = "its constructor raised"  # value of ActorRow.how for an actor that was never created


@dataclass(frozen=True, kw_only=True)
class ActorRow:
    """Ray's record of an actor, alive or dead."""

    name: str
    pid: int
    """Process id; 0 while the actor has no process."""
    node_id: str
    address: str
    is_dead: bool
    died_at_ms: float
    how: str
    """Ray's description of the cause of death; empty while the actor is alive."""


def actor_row(actor: ActorHandle) -> ActorRow:
    """Look up the record of an actor by its handle."""
    row = state.actors(actor._actor_id.hex())
    address = row.get("Address", {})  # an actor that was just created has no record yet
    is_dead = row.get("State") == "DEAD"
    return ActorRow(
        name=row.get("Name", ""),
        pid=row.get("Pid", 0),
        node_id=address.get("NodeID", ""),
        address=address.get("IPAddress", ""),
        is_dead=is_dead,
        died_at_ms=row.get("EndTime", 0),
        how=_cause(row["DeathCause"]) if is_dead else "",
    )


def _cause(cause: Any) -> str:
    context = next((field.name for field, _ in cause.ListFields()), None)
    if context == "creation_task_failure_context":
        return CONSTRUCTOR_RAISED
    return brief(getattr(getattr(cause, context), "error_message", "")) if context else "Ray names no cause."


def has_started(actor: ActorHandle) -> ObjectRef:
    """Return a reference that resolves when the actor's constructor has returned, and fails if it raised."""
    return actor.__ray_ready__.remote()


def unwrapped(cls: type | ActorClass) -> tuple[type, dict[str, Any]]:
    """Return the class inside ``ray.remote(cls)`` and the options given there; any other class with no options."""
    if not isinstance(cls, ActorClass):
        return cls, {}
    wrapped: Any = cls
    return wrapped.__ray_actor_class__, {
        name: value for name, value in wrapped._default_options.items() if value is not None
    }


# ---- wording of messages --------------------------------------------------------------------------

TITLE = "ray::"  # prefix of the process titles of Ray's workers


def is_end_on_purpose(how: str) -> bool:
    """Return whether ``ray.kill`` ended the actor."""
    return "killed by `ray.kill`" in how


def is_silent_end(how: str) -> bool:
    """Return whether the only recorded cause of death is that the connection to the process broke."""
    return "End of file" in how


def signal_in_log(text: str) -> str:
    """Name of the signal that ended a process, if the process could still log it; else empty."""
    return next(iter(re.findall(r"\*\*\* (SIG[A-Z]+) received", text)), "")


def brief(message: str) -> str:
    """Remove general advice and the lines that identify the actor from a message of Ray."""
    message = re.split(r"Some common causes include|There are some potential root causes", message)[0]
    lines = [line.strip() for line in message.splitlines() if line.strip() and not line.startswith("\t")]
    return " ".join(lines).removeprefix("The actor is dead because ").removeprefix("its worker process has died. ")
