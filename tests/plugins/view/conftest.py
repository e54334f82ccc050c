"""A server of the view on made-up runs, and a real Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

from tests.support.ports import reserved_port
from verl.plugins.view.guard import Guard
from verl.plugins.view.index import Index, place_of_index
from verl.plugins.view.runs import Library
from verl.plugins.view.server import make_app
from verl.tools.loopback import LoopbackConfig, listen

ROOT = Path(__file__).parents[3]
TOKEN = "the-token-of-the-tests"


@dataclass
class Server:
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, headers: dict[str, str] | None = None, **parameters: Any) -> httpx2.Response:
        own = {"authorization": f"Bearer {TOKEN}"} if headers is None else headers
        return httpx2.get(self.address + path, params=parameters, headers=own, timeout=20)

    def wait(self, has_runs: bool, lives: Callable[[], bool]) -> Server:
        """Wait until it answers, and has read what is there."""
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            try:
                found = self.get("/api/runs").json()
                if not found["indexing"] and bool(found["runs"]) == has_runs:
                    return self
            except httpx2.TransportError:
                assert lives(), "the server ended"
            time.sleep(0.05)
        raise AssertionError("the server did not come up in 60 s")


@pytest.fixture(scope="module")
def command() -> Iterator[Callable[..., Server]]:
    """Start `verl view` on folders, as a user does."""
    started: list[subprocess.Popen] = []

    def start(*folders: Path) -> Server:
        port = reserved_port()
        words = [sys.executable, "-m", "verl", "view", *map(str, folders), "--port", str(port)]
        environment = os.environ | {"VERL_VIEW_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
        started.append(process)
        return Server(port).wait(True, lambda: process.poll() is None)

    yield start
    for process in started:
        process.terminate()
    for process in started:
        process.wait(timeout=20)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Serve folders from a thread of this process, which has loaded all of it."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(*folders: Path, has_runs: bool = True) -> Server:
        port = reserved_port()
        library = Library(list(folders), Index(place_of_index(list(folders))))
        library.find()
        app = Guard(make_app(library), TOKEN, port)
        one = uvicorn.Server(LoopbackConfig(app, graceful_s=1))
        thread = threading.Thread(target=one.run, args=([listen(port)],))
        thread.start()
        started.append((one, thread))
        return Server(port).wait(has_runs, thread.is_alive)

    yield start
    for one, _ in started:
        one.should_exit = True
    for _, thread in started:
        thread.join(timeout=20)


# Of a module: while Playwright runs, its event loop is the thread's, and no other test could run one of its own.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install playwright")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page of the view, and what it complained about."""

    page: Any
    server: Server
    complaints: list[str]

    def show(self, view: str) -> None:
        """Go to a view by its address, and wait until it is shown."""
        self.page.goto(f"{self.server.address}/#{view}")
        self.page.locator(f"#tabs a[data-view={view.partition('?')[0]}][aria-current=page]").wait_for()
        self.page.locator("main[aria-busy=false]").wait_for()


@pytest.fixture
def open_view(chromium: Any) -> Iterator[Callable[..., Tab]]:
    """Open the view in a new context; at the end nothing may have been complained about."""
    contexts, tabs = [], []

    def open_tab(server: Server, width: int = 1400, height: int = 900, **settings: Any) -> Tab:
        context = chromium.new_context(viewport={"width": width, "height": height}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        tab = Tab(page, server, [])
        page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        page.on("console", lambda said: tab.complaints.append(said.text) if said.type == "error" else None)
        page.goto(f"{server.address}/?token={TOKEN}")
        tabs.append(tab)
        return tab

    yield open_tab
    for context in contexts:
        context.close()
    assert [tab.complaints for tab in tabs if tab.complaints] == []
