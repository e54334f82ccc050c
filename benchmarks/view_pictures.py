"""Write screenshots of `verl view` on made-up runs: at three sizes, light and dark, or those of the documentation.

To be looked at after a change of the page.

python -m benchmarks.view_pictures --output_dir outputs/view
python -m benchmarks.view_pictures --documentation          # into docs/images/view
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

from benchmarks.shape import ROOT
from tests.support.made_up_run import make_up_run

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


def take_pictures_for_documentation(browser: Any, output: Path) -> None:
    """Pictures of docs/plugins/view.md, and of the gap that docs/debugging.md follows from its alert to its tokens."""
    page = browser.new_context(viewport={"width": 1100, "height": 1500}, color_scheme="light").new_page()
    page.goto(f"http://127.0.0.1:{PORT}/?token={TOKEN}")
    for run, is_shown in (("first", True), ("second", True), ("gap", False)):
        page.locator("#runs li", has_text=run).locator("input").set_checked(is_shown)
    page.fill("#search", "actor")
    page.locator("input[type=range]").fill("0.5")
    page.locator("input[type=range]").blur()
    page.wait_for_timeout(800)  # as above
    page.screenshot(path=output / "runs.png", clip={"x": 0, "y": 0, "width": 1100, "height": 456})

    page.locator("#runs li", has_text="gap").locator("button.only").click()
    page.locator("main h2", has_text="About gap").wait_for()
    page.goto(f"http://127.0.0.1:{PORT}/#health")
    alert = page.locator(".alert", has_text="Gap growing")
    alert.screenshot(path=output / "gap_alert.png")
    alert.get_by_text("Samples of this step").click()
    page.locator(".samples th", has_text="gap of rollout").wait_for()
    page.locator("tr[data-sample] button").first.click()
    page.locator("select[name=colour]").select_option("log_prob_gap")
    page.locator(".token").nth(12).hover()
    page.locator(".about-token").get_by_text("13 of 24").wait_for()
    page.locator(".tokens-place").screenshot(path=output / "gap_tokens.png")
    page.context.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/view"))
    parser.add_argument("--documentation", action="store_true", help="write the pictures of the documentation instead")
    args = parser.parse_args()
    output = ROOT / "docs/images/view" if args.documentation else args.output_dir
    from playwright.sync_api import sync_playwright

    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_up_run(Path(folder) / "first", tokens_every=10, validation_every=10)
        make_up_run(Path(folder) / "second", seed=3, steps=45, tokens_every=5, ended=False)
        if args.documentation:
            make_up_run(Path(folder) / "gap", seed=7, tokens_every=1, gap_from=35)
        command = [sys.executable, "-m", "verl", "view", folder, "--port", str(PORT)]
        server = subprocess.Popen(command, env=os.environ | {"VERL_VIEW_TOKEN": TOKEN})
        try:
            time.sleep(4)
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                (take_pictures_for_documentation if args.documentation else take_pictures)(browser, output)
                browser.close()
        finally:
            server.terminate()
            server.wait()
    print(f"pictures are in {output}")


if __name__ == "__main__":
    main()
