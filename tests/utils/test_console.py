"""The live display on a terminal, the plain lines in a log."""

from __future__ import annotations

import io
import logging
import math
import time

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl.tracking import Tracking
from verl.utils.console import (
    LogFormatter,
    Progress,
    clock,
    metrics_line,
    show,
    showing_stage,
    status,
    working,
    write_step,
)

METRICS = {
    "critic/score/mean": 0.43125,
    "response_length/mean": 118.2,
    "perf/throughput": 4210.4,
    "val-core/gsm8k/acc/mean@4": 0.48,
    "val-core/gsm8k/acc/best@4/mean": 0.7,
}


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


def test_line_per_step_by_hand():
    assert metrics_line(12, {"actor/pg_loss": 0.1, "n": 12345678, "x": math.nan, "y": 1234567.0}) == (
        "step:12 - actor/pg_loss:0.1 - n:12345678 - x:nan - y:1.23457e+06"
    )


def test_a_log_gets_whole_lines(capsys: pytest.CaptureFixture):
    show("y" * 300)
    assert capsys.readouterr().out == "y" * 300 + "\n"


def test_texts_of_models_cannot_write_the_clipboard(capsys: pytest.CaptureFixture):
    table = Table("\x1b]0;title\x07")
    table.add_row("\x1b]52;c;cm0=\x07", "\u202e")
    for content in (table, Text("\x1b]52;c;cm0=\x07\tø", style="red"), "\x9b2J"):
        show(content)
    shown = capsys.readouterr().out
    assert "[U+001B]]52;c;cm0=" in shown
    assert "[U+009B]2J" in shown
    assert "ø" in shown
    assert all(one.isprintable() or one == "\n" for one in shown)


def test_log_records_have_the_style_of_a_status():
    def line(name: str, level: int) -> str:
        return LogFormatter().format(logging.LogRecord(name, level, "", 0, "%d rows", (3,), None)).partition("  ")[2]

    assert line("verl.datasets", logging.INFO) == "3 rows"
    assert line("verl.datasets", logging.WARNING) == "warning: 3 rows"
    assert line("httpx", logging.ERROR) == "error: httpx: 3 rows"


def test_a_long_wait_is_told_again_until_it_ends(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.utils.console.REMINDERS_S", (0.01, 0.01))
    with working("loading"):
        seen = ""
        while seen.count("still loading (") < 3:  # the last pause repeats
            time.sleep(0.01)
            seen += capsys.readouterr().out
    assert seen.splitlines()[0].endswith("  loading")
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().out == ""


def test_a_short_wait_is_told_once(capsys: pytest.CaptureFixture):
    with working("loading"):
        pass
    assert capsys.readouterr().out.count("loading") == 1


def test_a_table_is_drawn(capsys: pytest.CaptureFixture):
    table = Table()
    table.add_column("ranks")
    table.add_row("2")
    show(table)
    out = capsys.readouterr().out
    assert "ranks" in out
    assert "2" in out


def test_markup_is_not_interpreted(capsys: pytest.CaptureFixture):
    show("[bold]x[/bold]")
    write_step(1, {"[red]y": 2})
    assert capsys.readouterr().out == "[bold]x[/bold]\nstep:1 - [red]y:2\n"


def test_live_display_shows_what_matters():
    screen = terminal()
    with Progress(10, first_step=3, enabled="on", console=screen) as progress:
        progress.update(4, METRICS)
        status("checkpoint saved")
    out = screen.file.getvalue()
    assert "step 4  reward 0.431  length 118.2  tokens/s 4,210" in out
    assert "4/10 steps" in out
    assert "val gsm8k 0.480" in out
    assert "checkpoint saved" in out
    assert "left" in out


def test_the_stage_of_the_step_stands_beside_the_bar():
    screen = terminal()
    with Progress(10, enabled="on", console=screen) as progress, showing_stage("step"):
        with showing_stage("update_actor"):
            progress._live.refresh()
        assert progress.stage == "step"
    assert "0/10 steps" in screen.file.getvalue()  # type: ignore[attr-defined]
    assert "update_actor" in screen.file.getvalue()  # type: ignore[attr-defined]
    with showing_stage("gen"):
        pass  # without a display nothing is shown


def test_supervised_runs_show_their_loss():
    screen = terminal()
    with Progress(2, enabled="on", console=screen) as progress:
        progress.update(1, {"train/loss": 1.23456, "val/loss": 2.0})
    assert "loss 1.2346" in screen.file.getvalue()
    assert "val loss 2.0000" in screen.file.getvalue()


def test_data_sources_are_named_whole_and_unknown_ones_left_out():
    screen = terminal()
    with Progress(2, enabled="on", console=screen) as progress:
        progress.update(1, {"val-core/openai/gsm8k/reward/mean@1": 0.5, "val-core/unknown/reward/mean@1": 0.25})
        progress.update(2, {"actor/pg_loss": 0.0125, "actor/kl_loss": 0.5, "actor/ppo_kl": 0.001})
    out = screen.file.getvalue()
    assert "val openai/gsm8k 0.500  val 0.250" in out
    assert "step 2  loss 0.0125  kl 0.5000  ppo_kl 0.001" in out
    assert "elapsed" in out


def test_without_a_terminal_a_step_is_a_short_line(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """The order of the metrics does not depend on the step, and what a run has many of is left to other trackers."""
    now = [100.0]
    monkeypatch.setattr("verl.utils.console.time.monotonic", lambda: now[0])
    monkeypatch.setattr("verl.utils.console._began", 93.0)
    with Tracking("p", "e", "console", {}) as tracking, Progress(10) as progress:
        tracking.log({"val-core/gsm8k/acc/mean@4": 0.25}, step=0)
        now[0] = 103.5
        for step, metrics in ((1, METRICS | {"actor/pg_clipfrac": 0.5}), (2, dict(reversed(METRICS.items())))):
            progress.update(step, metrics)
            tracking.log(metrics, step)
            now[0] += 3.5
        status("checkpoint saved")
    assert capsys.readouterr().out.splitlines() == [
        "step 0/10  val gsm8k 0.250",
        "step 1/10  reward 0.431  length 118.2  tokens/s 4,210  val gsm8k 0.480  3.5 s  0:32 left",
        "step 2/10  reward 0.431  length 118.2  tokens/s 4,210  val gsm8k 0.480  3.5 s  0:28 left",
        "0:18  checkpoint saved",
    ]


def test_all_metrics_in_one_line_sorted_by_name(capsys: pytest.CaptureFixture):
    with Tracking("p", "e", "console_full", {}) as tracking, Progress(10):
        tracking.log({"b": 1.0, "a": 0.25}, step=1)
    assert capsys.readouterr().out == "step:1 - a:0.25 - b:1\n"


@pytest.mark.parametrize("enabled", ["off", False])
def test_it_can_be_turned_off(enabled: str | bool):
    screen = terminal()
    with Progress(2, enabled=enabled, console=screen) as progress:
        progress.update(1, METRICS)
    assert screen.file.getvalue() == ""


def test_the_console_tracker_is_quiet_under_a_live_display(capsys: pytest.CaptureFixture):
    tracking = Tracking("p", "e", "console", {})
    with Progress(2, enabled="on", console=terminal()):
        tracking.log({"a": 1.0}, step=1)
    tracking.log({"a": 2.0}, step=2)
    assert capsys.readouterr().out == "step:2 - a:2\n"


def test_an_error_inside_takes_the_display_down(capsys: pytest.CaptureFixture):
    with pytest.raises(KeyError), Progress(2, enabled="on", console=terminal()):
        raise KeyError
    write_step(1, {"a": 2})
    assert capsys.readouterr().out == "step:1 - a:2\n"


def test_time_left_follows_the_recent_pace(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("verl.utils.console.time.monotonic", lambda: now[0])
    progress = Progress(10, first_step=4, enabled="off")
    assert math.isnan(progress.seconds_left())
    now[0] = 30.0
    progress.update(5, {})
    now[0] = 40.0
    progress.update(6, {})
    assert progress.seconds_left() == 80.0  # 20 s a step, 4 to go
    now[0] = 45.0
    assert progress.seconds_left() == 75.0
    now[0] = 1000.0
    assert progress.seconds_left() == 0.0


def test_clock_by_hand():
    assert [clock(seconds) for seconds in (0, 59.6, 125, 3723, math.nan)] == ["0:00", "1:00", "2:05", "1:02:03", "-:--"]
