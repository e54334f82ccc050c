"""Trackers of experiment services, each run for real in its offline mode and read back from its files.

A test is skipped where the service's package is not installed. Each runs in a process of its own,
because these clients leave threads behind.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from verl.tracking import TRACKERS, Tracker, Tracking
from verl.utils.token_page import TokenPage

ROOT = Path(__file__).parents[2]

SEQUENCE = {
    "prompt": [{"text": "what is 2+2"}], "response": [{"text": "it"}, {"text": " is four"}], "mask": [1, 1],
    "numbers": {"rollout_log_probs": [-0.5, -3.0]}, "images": [],
}  # fmt: skip
PAGE = TokenPage("Step 2", [SEQUENCE], 10)
# The secret comes by the environment: ClearML stores the text of a script.
RUN = """
import os, sys
from pathlib import Path
from verl.utils.token_page import TokenPage
from verl.tracking import Tracking, ValidationGenerationsLogger

with Tracking("proj", "exp", sys.argv[1], {"optim": {"lr": 1e-6}, "hf_token": os.environ["OUR_TOKEN"]}) as tracking:
    for step in (1, 2):
        tracking.log({"critic/score/mean": 0.25 * step, "val-core/s/acc/mean@4": float("nan")}, step=step)
    folder = Path("checkpoints/global_step_2")
    (folder / "actor").mkdir(parents=True)
    (folder / "actor/weights").write_text("these are the weights")
    tracking.log_checkpoint(2, folder)
    tracking.log_alert(2, "entropy_collapse", "the entropy fell from 3 to 0.01")
    sample = {"input": "what is 2+2", "output": "it is four", "gts": "4", "score": 1.0}
    ValidationGenerationsLogger("proj", "exp").log([sys.argv[1]], [sample], step=2)
    if tracking.takes_pages:
        tracking.log_page("val/tokens", TokenPage("Step 2", [SEQUENCE], 10), step=2)
""".replace("SEQUENCE", repr(SEQUENCE))


@pytest.fixture
def run(tmp_path: Path):
    """Run the little training above with one tracker; everything it writes is below the returned folder."""

    def start(name: str, **environment: str) -> Path:
        pytest.importorskip(name)
        own = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PYTHONWARNINGS": "ignore", "OUR_TOKEN": "hf_hidden"}
        env = os.environ | own | environment
        script = tmp_path / "train.py"
        script.write_text(RUN)
        done = subprocess.run(
            [sys.executable, str(script), name], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert "failed" not in done.stderr, done.stderr
        return tmp_path

    return start


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_tensorboard(run):
    folder = run("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html

    events = EventAccumulator(str(folder / "tensorboard_log" / "proj" / "exp")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(1, 0.25), (2, 0.5)]
    assert all(e.value != e.value for e in events.Scalars("val-core/s/acc/mean@4"))
    text = events.Tensors("val/generations/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| 2 | what is 2+2 | it is four | 4 | 1.0 |" in text
    alert = events.Tensors("alerts/entropy_collapse/text_summary")[0]
    assert (alert.step, alert.tensor_proto.string_val[0]) == (2, b"the entropy fell from 3 to 0.01")
    page = events.Tensors("val/tokens/text_summary")[0]
    assert (page.step, page.tensor_proto.string_val[0].decode()) == (2, PAGE.markdown)
    shown = markdown_to_safe_html(PAGE.markdown)  # what TensorBoard's page makes of it
    assert "<pre>it<strong> is four</strong></pre>" in shown
    assert "<code> is four</code></td>\n<td>-3.00</td>" in shown
    assert "hf_hidden" not in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def test_tensorboard_shows_a_step_that_is_done_again_once(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from verl.tracking import Tracking

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    for resumed, values in ((0, {1: 1.0, 2: 2.0, 3: 3.0}), (2, {3: 30.0, 4: 40.0})):
        with Tracking("proj", "exp", "tensorboard", {}, resumed) as tracking:
            for step, value in values.items():
                tracking.log({"x": value}, step=step)
    events = EventAccumulator(str(tmp_path / "proj" / "exp")).Reload().Scalars("x")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


@pytest.mark.slow
def test_wandb(run):
    folder = run("wandb", WANDB_MODE="offline")
    written = everything(folder / "wandb")
    for piece in (b"critic/score/mean", b"val-core/s/acc/mean@4", b"NaN", b"it is four", b"optim", b"entropy_collapse"):
        assert piece in written
    assert b"hf_hidden" not in written
    assert b"step_2" in written  # alias of the checkpoint
    assert b"actor/weights" in written
    assert b"html-file" in written
    pages = [path.read_text() for path in folder.glob("wandb/offline-run-*/files/media/html/**/*.html")]
    assert pages == [PAGE.html]
    copies = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes() == b"these are the weights"]
    assert len(copies) == 2, "the checkpoint itself, and what wandb will upload"


@pytest.mark.slow
def test_mlflow(run):
    folder = run("mlflow", MLFLOW_TRACKING_URI="file:mlruns", MLFLOW_ALLOW_FILE_STORE="true")
    (metric,) = folder.rglob("metrics/critic/score/mean")
    assert [line.split()[1:3] for line in metric.read_text().splitlines()] == [["0.25", "1"], ["0.5", "2"]]
    assert len(list(folder.rglob("metrics/val-core/s/acc/mean_at_4"))) == 1
    (parameter,) = folder.rglob("params/optim.lr")
    assert parameter.read_text() == "1e-06"
    (table,) = folder.rglob("artifacts/val/generations/step_2.json")
    assert "it is four" in table.read_text()
    (page,) = folder.rglob("artifacts/val/tokens/step_2.html")
    assert page.read_text() == PAGE.html
    (alert,) = folder.rglob("tags/alert.entropy_collapse")
    assert alert.read_text() == "step 2: the entropy fell from 3 to 0.01"
    (weights,) = folder.rglob("artifacts/checkpoints/global_step_2/actor/weights")
    assert weights.read_text() == "these are the weights"
    assert b"hf_hidden" not in everything(folder / "mlruns")


@pytest.mark.slow
def test_a_run_gives_its_checkpoints_and_tokens_to_mlflow(tmp_path: Path):
    pytest.importorskip("mlflow")
    changes = {
        "trainer.logger": "[mlflow]", "trainer.log_checkpoints": True, "trainer.total_training_steps": 2,
        "trainer.save_freq": 1, "trainer.test_freq": 1, "trainer.log_val_generations": 3,
    }  # fmt: skip
    settings = overrides(make_tiny_run(tmp_path), tmp_path, **changes)
    own = {"MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_ALLOW_FILE_STORE": "true", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (kept,) = tmp_path.glob("mlruns/*/*/artifacts/checkpoints")

    def files(folder: Path) -> dict[str, int]:
        return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}

    for step in ("global_step_1", "global_step_2"):
        assert files(kept / step) == files(tmp_path / "checkpoints" / step) != {}
    pages = {path.stem: path.read_text() for path in tmp_path.glob("mlruns/*/*/artifacts/val/tokens/*.html")}
    assert sorted(pages) == ["step_1", "step_2"]
    for page in pages.values():
        assert page.count("<p>Tokens by rollout_log_probs</p>") == 3
        titles = re.findall(
            r"<span style=\"background:rgb\(230 110 20 / ([0-9.]+)\)\" title=\"rollout_log_probs (-[0-9.]+)\">", page
        )
        assert len(titles) > 3


def test_checkpoints_go_to_the_trackers_that_keep_files_and_their_failures_stop_nothing(caplog, tmp_path, monkeypatch):
    got: list[tuple[int, Path]] = []

    @TRACKERS.register("keeper")
    class Keeper(Tracker):
        def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> None:
            pass

        def log(self, metrics: Mapping[str, float], step: int) -> None:
            pass

        def log_checkpoint(self, step: int, folder: Path) -> None:
            got.append((step, folder))
            if step == 2:
                raise OSError("no room")

    monkeypatch.chdir(tmp_path)
    with Tracking("p", "e", ["console", "keeper"], {}) as tracking:
        for step in (1, 2, 3):
            tracking.log_checkpoint(step, tmp_path)
    assert got == [(1, tmp_path), (2, tmp_path), (3, tmp_path)]
    assert "no room" in caplog.text
    assert "tracker 'keeper' failed in 1 of 4 calls" in caplog.text  # three checkpoints and the end


def test_swanlab(run):
    folder = run("swanlab", SWANLAB_MODE="offline")
    written = everything(folder / "swanlog")
    for piece in (b"critic/score/mean", b"val-core/s/acc/mean@4", b"it is four", b"optim", PAGE.html.encode()):
        assert piece in written
    assert b"hf_hidden" not in written


def test_trackio(run, tmp_path: Path):
    run("trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    database = sqlite3.connect(tmp_path / "trackio" / "proj.db")
    rows = [
        (step, json.loads(data)) for step, data in database.execute("select step, metrics from metrics order by id")
    ]
    assert rows[0] == (1, {"critic/score/mean": 0.25, "val-core/s/acc/mean@4": "NaN"})
    assert rows[1][1]["critic/score/mean"] == 0.5
    assert "it is four" in json.dumps(rows[2][1])
    alerts = database.execute("select title, text, level from alerts").fetchall()
    assert alerts == [("entropy_collapse", "step 2: the entropy fell from 3 to 0.01", "warn")]
    written = everything(tmp_path / "trackio")
    assert PAGE.html.encode() in written
    assert b"hf_hidden" not in written


@pytest.mark.slow
def test_clearml(run):
    folder = run("clearml", CLEARML_OFFLINE_MODE="1")
    (events,) = folder.rglob("offline-*/metrics.jsonl")
    found = [event for line in events.read_text().splitlines() for event in json.loads(line)]
    scores = [(e["iter"], e["value"]) for e in found if (e["metric"], e.get("variant")) == ("critic", "score/mean")]
    assert scores == [(1, 0.25), (2, 0.5)]
    assert not any(e["metric"] == "val-core" for e in found)  # a NaN is not drawn as 0
    written = everything(events.parent)
    assert b"val-core/s/acc/mean@4 is nan" in written
    assert b"it is four" in written
    assert b"hf_hidden" not in written
    assert [path.read_text() for path in folder.rglob("*.html")] == [PAGE.html]
