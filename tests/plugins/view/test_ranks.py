"""What ranks did in a step: the file, the waits by stage, the trace; and that real runs write it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from tests.trainer.test_run import assert_ranks_are_recorded
from verl.plugins.view.ranks import RanksFile, lanes_of, summary_of, waits_of
from verl.plugins.view.timeline import chrome_trace, spans_of
from verl.single_controller.base.call_times import take_call_times, timed_call
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.utils.run_log import rank_columns

# One step from 10 to 20 s: gen 10-14, reward 14-18 with dump 17-18 inside, update 18-20.
SPANS = [
    ["gen", 10.0, 14.0],
    ["dump", 17.0, 18.0],
    ["reward", 14.0, 18.0],
    ["update", 18.0, 20.0],
    ["step", 10.0, 20.0],
]
CALLS = {
    "pool 0": [("W.generate", 10.0, 13.0, 100.4, None), ("W.update", 18.5, 20.0, 300.0, None)],
    "pool 1": [
        ("W.init", 2.0, 9.0, 50.0, 7.0),
        ("W.generate", 10.0, 14.0, 120.0, 9.6),
        ("W.update", 18.5, 20.0, 90.0, 8.0),
    ],
}


def write(path: Path, step: int, calls: dict, more: str = "\n") -> None:
    with path.open("a") as file:
        file.write(json.dumps({"event": "ranks", "time": 1.0, "run": "a", "step": step, **rank_columns(calls)}) + more)


def test_waits_are_the_times_of_the_innermost_stage_without_a_call(tmp_path):
    write(tmp_path / "ranks.jsonl", 3, CALLS)
    file = RanksFile(tmp_path / "ranks.jsonl")
    assert file.steps(None, None) == [3]
    steps = spans_of([{"event": "step", "step": 3, "spans": SPANS}], None, None)
    first, second = lanes_of(file.calls(3), 10.0, 20.0)
    assert [call["name"] for call in second["calls"]] == ["W.generate", "W.update"]  # W.init ended before the step
    # rank 0: gen 13-14, reward 14-17, the dump inside of it 17-18, update 18-18.5; rank 1 has no wait in gen
    assert waits_of(first["calls"], steps[0]["spans"]) == pytest.approx(
        {"gen": 1.0, "reward": 3.0, "dump": 1.0, "update": 0.5}
    )
    assert waits_of(second["calls"], steps[0]["spans"]) == pytest.approx({"reward": 3.0, "dump": 1.0, "update": 0.5})
    means = summary_of(file, steps, [3])
    assert means["steps"] == 1
    assert [(one["rank"], round(one["busy"], 3), one["rss_mb"], one["device_mb"]) for one in means["ranks"]] == [
        ("pool 0", 4.5, 300, None), ("pool 1", 5.5, 120, 10)
    ]  # fmt: skip


def test_a_trace_has_a_process_for_each_rank_and_its_memory(tmp_path):
    write(tmp_path / "ranks.jsonl", 3, CALLS)
    file = RanksFile(tmp_path / "ranks.jsonl")
    assert file.steps(3, 3) == [3]
    events = chrome_trace("run", [], ((3, call) for call in file.calls(3)))["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["verl run: driver", "pool 0", "pool 1"]
    complete = [(event["name"], event["pid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert complete[-1] == ("W.update", 3, 18_500_000, 1_500_000)
    counters = [(event["pid"], event["ts"], event["args"]) for event in events if event["ph"] == "C"]
    assert counters[0] == (2, 13_000_000, {"resident": 100})
    assert counters[-1] == (3, 20_000_000, {"resident": 90, "GPU": 8})


def test_a_file_that_grows_is_cut_or_broken_is_read_as_far_as_it_is_whole(tmp_path):
    path = tmp_path / "ranks.jsonl"
    file = RanksFile(path)
    assert file.steps(None, None) == []
    write(path, 1, CALLS)
    write(path, 2, CALLS, more="")  # the process is writing, or was killed
    assert file.steps(None, None) == [1]
    with path.open("a") as end:
        end.write("\n")
    write(path, 1, {"pool 0": CALLS["pool 0"][:1]})  # repeated after a resumption
    assert file.steps(None, None) == [1, 2]
    assert [call["name"] for call in file.calls(1)] == ["W.generate"]
    with path.open("a") as end:
        end.write('{"event": "ranks", "step": 4, "rows": [[0]], "ranks": []}\n')
    assert file.steps(4, None) == [4]
    assert file.calls(4) == file.calls(5) == []
    path.write_text("")
    assert file.steps(None, None) == []


def test_a_call_that_raises_is_timed_too_and_taken_once():
    take_call_times()
    with pytest.raises(ValueError, match="wrong"), timed_call("W.raises"):
        raise ValueError("wrong")
    ((name, begin, end, rss_mb, _),) = take_call_times()
    assert name == "W.raises"
    assert end >= begin
    assert rss_mb > 50
    assert take_call_times() == []


def test_a_run_of_the_local_controller_writes_what_its_rank_did(tmp_path, monkeypatch):
    log = tmp_path / "log.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    run_ppo(compose(overrides(make_tiny_run(tmp_path), tmp_path)))
    assert_ranks_are_recorded(log, ["global_pool 0"], {"generate_sequences": "gen", "update_actor": "update_actor"})
