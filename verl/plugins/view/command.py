"""``verl view``: start the server and say where it is."""

from __future__ import annotations

import secrets
import sqlite3
import webbrowser
from pathlib import Path

import uvicorn

from verl.errors import ConfigError
from verl.plugins.view.discovery import metrics_problem
from verl.plugins.view.guard import Guard
from verl.plugins.view.index import Index, place_of_index
from verl.plugins.view.runs import Library
from verl.plugins.view.server import make_app
from verl.tools.loopback import LOOPBACK, LoopbackConfig, listen
from verl.utils.console import show

LAST_PORT = 65_535  # ports are 16-bit numbers


def view(folders: list[Path], port: int = 0, opens_browser: bool = False, token: str | None = None) -> None:
    """Serve the runs below folders until Ctrl-C.

    Args:
        folders: folders, or files of the tracker ``file``.
        port: of the loopback address; 0 takes a free one.
        opens_browser: open the page in the user's browser.
        token: what the page's address must have; by default a new random one.

    Raises:
        ConfigError: a folder is not there, a file holds no metrics, the port is taken or none, or the index cannot be
            written.
    """
    for folder in folders:
        if not folder.exists():
            raise ConfigError(f"there is no {folder}. Name folders with runs, or files of the tracker `file`.")
        if folder.is_file() and (problem := metrics_problem(folder)):
            raise ConfigError(problem)
    if not 0 <= port <= LAST_PORT:
        raise ConfigError(f"--port {port}: ports are 1 to {LAST_PORT}; 0, or no --port, takes a free one.")
    listener = listen(port)
    port = listener.getsockname()[1]
    token = token or secrets.token_urlsafe(24)
    index_file = place_of_index(folders)
    try:
        index = Index(index_file)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(
            f"the index {index_file} cannot be written: {error}. Make room or change permissions there; "
            "it may be deleted."
        ) from error
    library = Library(folders, index)
    library.find()
    address = f"http://{LOOPBACK}:{port}/?token={token}"
    count = len(library.runs)
    if not count:
        names = ", ".join(map(str, folders))
        show(f"No run lies below {names} yet: runs with `file` in trainer.logger appear as they start there.")
    show(f"{count} {'run' if count == 1 else 'runs'}; open {address}")
    show(f"It answers this machine only, until Ctrl-C. From elsewhere: ssh -L {port}:127.0.0.1:{port} HOST")
    if opens_browser:
        webbrowser.open(address)
    app = Guard(make_app(library), token, port)
    # Open streams of events would hold up the end of the server.
    uvicorn.Server(LoopbackConfig(app, graceful_s=1)).run(sockets=[listener])
