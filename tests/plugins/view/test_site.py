"""The search of the built documentation, in a real Chromium; it needs workers and files that only a server can show."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[str]:
    """Address of the documentation, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_the_search_finds_a_page_and_leads_to_its_section(site, chromium):
    page = chromium.new_context(viewport={"width": 1400, "height": 900}).new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{site}/")
    page.get_by_role("textbox", name="Search").fill("find a bug with the view")
    found = page.locator(".md-search-result__item", has_text="Debug a run").first
    found.locator("a[href*='/debugging/#example-find-a-bug-with-the-view']").click()
    page.get_by_role("heading", name="Example: find a bug with the view").wait_for()
    assert "/debugging/" in page.url
    page.get_by_role("textbox", name="Search").fill("qqzzxxyy")
    page.locator(".md-search-result__meta", has_text="No matching documents").wait_for()
    assert [url for url in asked if not url.startswith((site, "blob:", "data:"))] == []  # it works without a network
    page.context.close()
