"""Ray's workers with PyTorch, Transformers and verl loaded from the start: forks of one process that has done it.

Ray starts an interpreter for each worker, and each of them loads Ray twice and then what the worker's class needs: six
seconds of a core for a rank that trains. :func:`install` lets Ray start a small program instead, which asks the process
of this file for a fork and ends with it. Ray itself is loaded in the fork: it reads the environment as it is loaded.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import inspect
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PRELOADED = ("torch", "tensordict", "verl.workers.fsdp_workers", "verl.workers.training_workers")

ASKS = """
import array, json, os, signal, socket, sys

server = socket.socket(socket.AF_UNIX)
try:
    server.connect({address!r})
    asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    standard = array.array("i", [0, 1, 2])
    server.sendmsg([len(asked).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, standard)])
    server.sendall(asked)
    fork = int.from_bytes(server.recv(8), "little")
except OSError:
    fork = 0
if not fork:  # there is nobody who forks: as ever
    os.execv(sys.executable, [sys.executable, {setup!r}, *sys.argv[1:]])
signal.signal(signal.SIGTERM, lambda *_: os.kill(fork, signal.SIGTERM))
server.recv(1)  # the fork has the other end, and nothing to say
"""


def install() -> None:
    """For every Ray that this process starts."""
    from ray._private import services

    start = services.start_raylet
    signature = inspect.signature(start)

    @functools.wraps(start)
    def with_forks(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.arguments["setup_worker_path"] = program(given.arguments["setup_worker_path"])
        return start(*given.args, **given.kwargs)

    services.start_raylet = with_forks


@functools.cache
def program(setup: str) -> str:
    """What Ray starts for a worker, instead of ``setup``. The process that it asks ends with this one."""
    folder = Path(tempfile.mkdtemp(prefix="ray-forks-", dir="/tmp"))  # the address must be short
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = str(folder / "address")
    (folder / "worker.py").write_text(ASKS.format(address=address, setup=setup))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno()), str(os.getpid())],
            pass_fds=[listening.fileno()],
            stderr=(folder / "errors").open("w"),
            start_new_session=True,
        )
    return str(folder / "worker.py")


def received(connection: socket.socket) -> tuple[list[str], str, dict[str, str], array.array]:
    """Arguments, folder, environment and standard streams of the one that asks.

    Raises:
        ConnectionError: it has ended meanwhile.
    """
    streams = array.array("i")
    size, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(3 * streams.itemsize))
    for _, _, data in ancillary:
        streams.frombytes(data)
    left, body = int.from_bytes(size, "little"), b""
    while len(body) < left:
        if not (part := connection.recv(left - len(body))):
            break
        body += part
    if len(streams) != 3 or len(body) < left:
        raise ConnectionError("the one that asks has ended")
    return *json.loads(body), streams


def serve(listening: socket.socket) -> tuple[list[str], str, dict[str, str], array.array, socket.socket]:
    """Returns in forks alone, with what each was asked for."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(ConnectionError):
            asked = received(connection)
            if (fork := os.fork()) == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return *asked, connection.dup()
            for stream in asked[-1]:
                os.close(stream)
            try:
                connection.sendall(fork.to_bytes(8, "little"))
            except ConnectionError:
                os.kill(fork, signal.SIGKILL)


def become(words: list[str], folder: str, environment: dict[str, str], streams: array.array) -> list[str]:
    """As the interpreter that Ray would have started; the program to run, and its arguments."""
    os.setpgid(0, 0)  # Ray kills the group of a worker that it ends
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    context: dict[str, Any] = {}
    rest = []
    for word in words:
        name, _, value = word.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value)
        elif name != "--language":
            rest.append(word)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update({key: os.path.expandvars(value) for key, value in (context.get("env_vars") or {}).items()})
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    return rest


def main() -> None:
    """Arguments: the descriptor to listen on, and the process to end with."""
    sys.path[0] = str(Path(__file__).parents[1])
    from verl.supervision.prctl import die_with_parent

    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        return
    for name in PRELOADED:
        __import__(name)
    words, folder, environment, streams, _connection = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = become(words, folder, environment, streams)
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
