"""Connect a run to a Ray cluster or start one, protect it with a token, and shut it down."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import ObjectRef

from verl.backends.cpu.allocator import keep_freed_memory
from verl.base import env
from verl.base.ray_address import answers, left_behind
from verl.base.redact import is_secret
from verl.errors import ResourceError
from verl.single_controller.ray.private import SETTINGS, address_left_behind, is_own_head, silence_token_notice
from verl.single_controller.ray.processes import dead_nodes
from verl.single_controller.ray.watch import END_TIMEOUT_S, START_TIMEOUT_S, NodeWatch, ending_if_late
from verl.supervision.processes import children_in_own_group

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0  # for a cluster to accept a connection, and to answer
LONGEST_FOLDER = 40  # of 107 characters of a socket's path; Ray appends "/ray/session_.../sockets/plasma_store"
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"

FULL_COLLECTIONS = 1000
"""Collections of younger objects before one of all objects; Python's default is 10."""
_started: list[dict[str, object]] = []  # arguments of ray.init, if this process started Ray
_watches: list[NodeWatch] = []  # at most one


def prepare_for_batches() -> None:
    """Let this process keep freed memory of any size, and rarely look through all objects for cycles, until it ends.

    A full garbage collection looks at every row and every result of a call that is alive. By default their number in a
    step grows with the ranks, and so does the time of each.
    """
    keep_freed_memory(all_sizes=True)
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, max(old, FULL_COLLECTIONS))


@contextmanager
def ray_session(ray_kwargs: Any, nodes: int = 1) -> Iterator[None]:
    """Initialise Ray for the duration of the block; the driver stays in this process, so that it has the terminal.

    An existing Ray is used if ``ray.init`` was called before, or if ``RAY_ADDRESS`` is set. In the first case the
    connection stays open afterwards.

    Args:
        ray_kwargs: ``ray_init`` holds arguments of ``ray.init`` (None: not given); ``timeline_json_file`` is the file
            for Ray's timeline, if any.
        nodes: number of machines that the run is to use.

    Raises:
        ResourceError: the requested cluster does not answer or has fewer machines, or Ray cannot start.
    """
    prepare_for_batches()
    starts_ray = not ray.is_initialized()
    if starts_ray:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        arguments = init_arguments(ray_kwargs.ray_init)
        if not os.environ.get("RAY_ADDRESS") and arguments.get("address", "local") == "local":
            if arguments.get("address") or not address_left_behind(arguments.get("_temp_dir")):
                _require_nodes(nodes, 1, "no cluster is named (RAY_ADDRESS), and the Ray of a run has one")
            prepare_token()
            silence_token_notice()
            arguments = secrets_to_environment(arguments)
        _start(arguments)
    else:
        _watch()
    try:
        alive = sum(node["Alive"] for node in ray.nodes())
        _require_nodes(nodes, alive, f"the Ray cluster at {ray.get_runtime_context().gcs_address} has {alive}")
        yield
    finally:
        _started.clear()
        if ray_kwargs.timeline_json_file:
            ray.timeline(filename=ray_kwargs.timeline_json_file)
        if starts_ray:
            _stop()
        else:
            _stop_watching()


def _require_nodes(needed: int, joined: int, why: str) -> None:
    if needed > joined:
        raise ResourceError(
            f"{needed} machines are asked for (nnodes={needed}); {why}. Start Ray on each (ray start --head on the "
            "first, ray start --address=FIRST:6379 on the others) and run this on the first, without torchrun, with "
            f"RAY_ADDRESS=auto and nnodes={needed}; or set nnodes=1, with all ranks on one machine."
        )


def run_task(runner_class: type, config: object, ray_kwargs: object) -> None:
    """Call ``runner_class().run(config)`` within a :func:`ray_session`."""
    with ray_session(ray_kwargs):
        runner_class().run(config)


def start_task(function: Callable[..., object], *arguments: object) -> ObjectRef:
    """Call ``function`` in a process of Ray and return the reference of its result; Ray must be running.

    It reserves no CPU, since the ranks of a run may hold them all and the task would then wait for ever.
    """
    return ray.remote(num_cpus=0)(_call).remote(function, *arguments)


def _call(function: Callable[..., object], *arguments: object) -> object:
    return function(*arguments)


def restart_if_lost() -> None:
    """Restart Ray if :func:`ray_session` started it and its process on this node has died.

    All workers and the contents of the object store are lost. A cluster that was started elsewhere is not restarted.
    """
    if not _started or ray.get_runtime_context().get_node_id() not in dead_nodes():
        return
    logger.warning("the process of Ray on this node died; Ray is started anew, and what it held is lost")
    arguments = _started.pop()
    _stop()
    _start(arguments)


def _start(arguments: dict[str, Any]) -> None:
    try:
        # A SIGTERM for all processes of the run must not end Ray before the driver has saved.
        with ending_if_late("ray.init", START_TIMEOUT_S), children_in_own_group(), env.without_launcher():
            ray.init(**arguments)
    except (OSError, RuntimeError, ValueError) as error:
        raise ResourceError(_no_start(error, arguments)) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit_on_sigterm)  # Ray's own handler exits with code 15
    if is_own_head():
        _started.append({**arguments, "address": "local"})
    _watch()


def _exit_on_sigterm(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _no_start(error: Exception, arguments: Mapping[str, object]) -> str:
    text = f"Ray does not start: {type(error).__name__}: {error}."
    if not isinstance(error, OSError) or isinstance(error, ConnectionError):
        return f"{text} Its arguments are those of ray.init (ray_kwargs.ray_init) and the variables RAY_*."
    folder = arguments.get("_temp_dir") or os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return (
        f"{text} It keeps its files and sockets below {folder}: set RAY_TMPDIR to a folder that can be written and has "
        f"at most {LONGEST_FOLDER} characters."
    )


def _stop() -> None:
    _stop_watching()
    with ending_if_late("ray.shutdown", END_TIMEOUT_S):
        ray.shutdown()


def _watch() -> None:
    watch = NodeWatch()
    watch.start()
    _watches.append(watch)


def _stop_watching() -> None:
    while _watches:
        _watches.pop().stop()


# ---- address and arguments ------------------------------------------------------------------------------------


def init_arguments(configured: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the arguments of ``ray.init`` so that Ray connects to a live cluster or starts a new one.

    Values of None count as not given. Without an address, ``num_cpus``, ``num_gpus`` or ``resources`` start a new Ray.

    Raises:
        ResourceError: no Ray answers at the given address or at ``RAY_ADDRESS``.
    """
    # Without these checks Ray tries for minutes to reach a cluster that is gone, and then ends the process.
    arguments = {str(name): value for name, value in configured.items() if value is not None}
    address = arguments.get("address", "auto")
    named = (os.environ.get("RAY_ADDRESS") or "auto") if address == "auto" else address
    if named not in ("auto", "local") and not answers(named, CONNECT_TIMEOUT_S):
        raise ResourceError(
            f"no Ray answers at {named} (from RAY_ADDRESS or the argument address): the cluster has ended, hangs, "
            "or cannot be reached from here. Start it (ray start --head), or unset the address: the run then "
            "starts its own Ray."
        )
    if named != "auto" or "address" in arguments:
        return arguments
    if arguments.keys() & {"num_cpus", "num_gpus", "resources"}:
        # Ray refuses these arguments when it connects to a running cluster.
        return {**arguments, "address": "local"}
    address = address_left_behind(arguments.get("_temp_dir"))
    if address and left_behind(arguments) != address:  # it has said why
        return {**arguments, "address": "local"}
    if address and not answers(address, CONNECT_TIMEOUT_S):
        logger.warning("a Ray at %s left its address behind and is gone; a new one is started", address)
        return {**arguments, "address": "local"}
    # Ray itself would read the file again, which others may have exchanged.
    return {**arguments, "address": address} if address else arguments


# ---- authentication and secrets ---------------------------------------------------------------------------


def prepare_token() -> None:
    """Make sure that a Ray started next has an authentication token, readable by this user only.

    Ray's servers listen on all interfaces. A Ray that is started here requires the token unless ``RAY_AUTH_MODE`` is
    set otherwise, which Ray reads at import. The token is the user's (``RAY_AUTH_TOKEN``, ``RAY_AUTH_TOKEN_PATH``) or
    the one in ``~/.ray/auth_token``, where Ray's command-line tools look for it.
    """
    if os.environ.get(MODE, "token") != "token" or os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH):
        return
    # Created here because Ray itself would make the file readable for all users.
    path = Path.home() / ".ray" / "auth_token"
    try:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "r+") as file:
            os.fchmod(descriptor, 0o600)
            if not file.read().strip():
                file.write(secrets.token_hex(32))
    except OSError as error:
        logger.warning("Ray's token cannot be stored in %s (%s): this run uses its own token.", path, error)
        os.environ[TOKEN] = secrets.token_hex(32)


def secrets_to_environment(arguments: Mapping[str, object]) -> dict[str, object]:
    """Move secrets from ``runtime_env.env_vars`` to this process's environment and return the other arguments.

    Ray would write them into its logs. The processes of a Ray that is started here inherit the environment.
    """
    runtime = arguments.get("runtime_env")
    if not isinstance(runtime, Mapping) or not isinstance(variables := runtime.get("env_vars"), Mapping):
        return dict(arguments)
    hidden = {name: str(value) for name, value in variables.items() if is_secret(name, value)}
    os.environ.update(hidden)
    shown = {name: value for name, value in variables.items() if name not in hidden}
    return {**arguments, "runtime_env": {**runtime, "env_vars": shown}}
