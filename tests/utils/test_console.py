"""The live display on a terminal, the plain lines in a log."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console
from rich.table import Table

from verl.utils.console import Progress, clock, metrics_line, show, write_line
from verl.utils.tracking import Tracking

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
    write_line("x" * 500)
    show("y" * 300)
    assert capsys.readouterr().out == "x" * 500 + "\n" + "y" * 300 + "\n"


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
    write_line("[red]y")
    assert capsys.readouterr().out == "[bold]x[/bold]\n[red]y\n"


def test_live_display_shows_what_matters():
    screen = terminal()
    with Progress(10, first_step=3, enabled="on", console=screen) as progress:
        progress.update(4, METRICS)
        progress.message("checkpoint saved")
    out = screen.file.getvalue()
    assert "step 4  reward 0.431  length 118.2  tokens/s 4,210" in out
    assert "4/10 steps" in out
    assert "val gsm8k 0.480" in out
    assert "checkpoint saved" in out
    assert "left" in out


def test_supervised_runs_show_their_loss():
    screen = terminal()
    with Progress(2, enabled="on", console=screen) as progress:
        progress.update(1, {"train/loss": 1.23456, "val/loss": 2.0})
    assert "loss 1.2346" in screen.file.getvalue()
    assert "val loss 2.0000" in screen.file.getvalue()


def test_without_a_terminal_there_is_no_display(capsys: pytest.CaptureFixture):
    with Progress(2) as progress:
        progress.update(1, METRICS)
        progress.message("checkpoint saved")
    assert capsys.readouterr().out == "checkpoint saved\n"
    assert progress.step == 1


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
    write_line("after")
    assert capsys.readouterr().out == "after\n"


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
