"""Write screenshots of `verl view` on a made-up run at three sizes, light and dark.

To be looked at after a change of the page.

python -m benchmarks.view_pictures --output_dir outputs/view
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from verl.testing.made_up_run import make_up_run

SIZES = {"desk": (1440, 900, "light"), "tablet": (900, 1100, "dark"), "phone": (390, 844, "light")}
VIEWS = ("runs", "samples", "time", "health")
PORT, TOKEN = 8765, "pictures"


def take_pictures(browser: Any, output: Path) -> None:
    """One picture per size and view; of the samples, with one that is open."""
    for name, (width, height, scheme) in SIZES.items():
        page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
        page.goto(f"http://127.0.0.1:{PORT}/?token={TOKEN}")
        for view in VIEWS:
            page.goto(f"http://127.0.0.1:{PORT}/#{view}")
            page.locator("main :is(figure, tbody tr, .timeline, .alert, .empty)").first.wait_for()
            if view == "samples":
                page.locator("tr[data-sample] button").first.click()
                page.locator(".token").first.wait_for()
            page.wait_for_timeout(800)  # curves are drawn when they come into sight
            page.screenshot(path=output / f"{name}-{view}.png")
        page.context.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/view"))
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    args.output_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_up_run(Path(folder) / "first", tokens_every=10, validation_every=10)
        make_up_run(Path(folder) / "second", seed=3, steps=45, tokens_every=5, ended=False)
        command = [sys.executable, "-m", "verl", "view", folder, "--port", str(PORT)]
        server = subprocess.Popen(command, env=os.environ | {"VERL_VIEW_TOKEN": TOKEN})
        try:
            time.sleep(4)
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                take_pictures(browser, args.output_dir)
                browser.close()
        finally:
            server.terminate()
            server.wait()
    print(f"pictures are in {args.output_dir}")


if __name__ == "__main__":
    main()
