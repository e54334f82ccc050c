"""What the index holds is what the files say: after growth, cuts, broken lines and a new start."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from verl.testing.made_up_run import make_up_run, write_numbers, write_samples
from verl.trainer.health import RULES
from verl.utils.run_log import clock
from verl.view.curves import CHUNK, extremes, thinned
from verl.view.discovery import find_runs
from verl.view.index import VERSION, Index, place_of_index
from verl.view.runs import ALERT_TITLES, Library, marks_of, state_of
from verl.view.samples import SampleFilter, find_samples, one_sample
from verl.view.timeline import chrome_trace, spans_of


def library(folder: Path) -> Library:
    made = Library([folder], Index(folder / ".verl_view/index.sqlite"))
    made.find()
    made.refresh()
    made.refresh_samples()
    return made


def write_lines(path: Path, steps: range, mode: str = "a") -> None:
    with path.open(mode) as file:
        for step in steps:
            data = {"x": step / 2} | ({"rare": float(step)} if step % 700 == 0 else {})
            file.write(json.dumps({"step": step, "data": data, "time": 1000.0 + step}) + "\n")


def series(made: Library, name: str) -> tuple[list, list]:
    (run,) = made.runs.values()
    steps, times, values = run.metrics.series(made.index, [name])[name]
    assert times.tolist() == [1000.0 + step for step in steps.tolist()]
    return steps.tolist(), values.tolist()


def test_curves_come_whole_from_index_and_tail_after_every_change(tmp_path):
    log = tmp_path / "metrics.jsonl"
    write_lines(log, range(1, 2501), "w")
    first = library(tmp_path)
    assert series(first, "x") == (list(range(1, 2501)), [step / 2 for step in range(1, 2501)])
    assert series(first, "rare") == ([700, 1400, 2100], [700.0, 1400.0, 2100.0])
    second = library(tmp_path)  # another process: two chunks of the index, and the tail of the file
    assert CHUNK == 1000
    assert series(second, "x") == series(first, "x")
    assert next(iter(second.runs.values())).metrics.latest == {"x": 1250.0, "rare": 2100.0}
    with log.open("a") as file:
        file.write('{"step": 2501, "da')
    second.refresh()
    assert len(series(second, "x")[0]) == 2500, "half a line is none"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:1500]))  # a resumed run cuts its own end
    write_lines(log, range(1501, 1504))
    for made in (second, library(tmp_path)):
        made.refresh()
        assert series(made, "x")[0] == list(range(1, 1504))
        assert series(made, "rare")[0] == [700, 1400]


def test_an_index_that_is_deleted_while_the_view_runs_is_made_again(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", range(1, 1502), "w")
    write_samples(tmp_path / "rollouts", 1, 3, 2, random.Random(0))
    made = library(tmp_path)
    (run,) = made.runs
    before, samples = series(made, "x"), find_samples(made.index, SampleFilter(run=run, kind="train"))
    for wreck in (shutil.rmtree, lambda folder: (folder / "index.sqlite").write_bytes(b"no database")):
        wreck(tmp_path / ".verl_view")
        made.refresh()
        made.refresh_samples()
        assert series(made, "x") == before
        assert find_samples(made.index, SampleFilter(run=run, kind="train")) == samples


@pytest.mark.parametrize("found", [None, b"no database"])
def test_several_views_of_one_folder_share_the_index(tmp_path, found):
    """All begin at once, without an index: each makes its tables, or finds them, and adds what is not there yet."""
    if found is not None:
        (tmp_path / ".verl_view").mkdir()
        (tmp_path / ".verl_view/index.sqlite").write_bytes(found)
    write_lines(tmp_path / "metrics.jsonl", range(1, 1501), "w")
    for step in range(1, 31):
        write_samples(tmp_path / "rollouts", step, 2, 2, random.Random(step))
    with ThreadPoolExecutor(6) as threads:
        made = list(threads.map(library, [tmp_path] * 6))
    with made[0].index.reading() as database:
        assert database.execute("SELECT count(*), count(DISTINCT dump) FROM sample").fetchone()[:] == (120, 30)
    assert all(series(one, "x")[0] == list(range(1, 1501)) for one in made)
    write_lines(tmp_path / "metrics.jsonl", range(1501, 2101))
    made[0].refresh()  # it alone has seen what the second chunk of the index holds now
    assert series(made[0], "x")[0] == list(range(1, 2101))
    assert series(made[1], "x")[0] == list(range(1, 1501))


def test_lines_that_are_no_metrics_are_left_out(tmp_path):
    log = tmp_path / "metrics.jsonl"
    write_lines(log, range(1, 3), "w")
    odd = ["[]", "{", '{"step": "x", "data": {}}', '{"step": 3, "table": "t", "rows": []}', '{"step": 4, "data": [1]}']
    log.write_text(
        log.read_text() + "\n".join(odd) + "\n" + '{"step": 5, "data": {"x": NaN, "y": "text"}, "time": 1}\n'
    )
    made = library(tmp_path)
    assert series(made, "x")[0] == [1, 2]
    assert "y" not in next(iter(made.runs.values())).metrics.names


def test_files_of_samples_that_grow_or_change_are_read_anew(tmp_path):
    make_up_run(tmp_path, steps=3)
    made = library(tmp_path)
    (run,) = made.runs
    assert find_samples(made.index, SampleFilter(run))["total"] == 3 * 16
    file = tmp_path / "rollouts/2.jsonl"
    file.write_text(file.read_text() + "not JSON\n" + '{"score": "none"}\n' + file.read_text().splitlines()[0] + "\n")
    assert made.refresh_samples() == [run]
    assert find_samples(made.index, SampleFilter(run))["total"] == 3 * 16 + 1
    write_samples(tmp_path / "rollouts", 4, 1, 2, random.Random(0))
    made.refresh_samples()
    assert made.refresh_samples() == []
    newest = find_samples(made.index, SampleFilter(run, limit=2))["rows"]
    assert [row["step"] for row in newest] == [4, 4]
    line = file.read_text().splitlines()[0]
    oldest = find_samples(made.index, SampleFilter(run, step_from=2, step_to=2, descending=False))["rows"][0]
    assert one_sample(made.index, oldest["id"])["record"] == json.loads(line), "the place in the file is right"


def test_numbers_come_when_the_step_has_ended_and_sort_its_samples(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", range(1, 3), "w")
    rollouts = tmp_path / "rollouts"
    for step in (1, 2):
        write_samples(rollouts, step, 2, 2, random.Random(step))
    write_numbers(rollouts, 1, 2, 2)
    made = library(tmp_path)
    (run,) = made.runs

    def order(sort: str, descending: bool = True, step_from: int | None = None) -> list[tuple]:
        rows = find_samples(made.index, SampleFilter(run, sort=sort, descending=descending, step_from=step_from))[
            "rows"
        ]
        return [(row["step"], row["input"].split()[1], row["sibling"], row.get(sort)) for row in rows]

    # Places 0 to 3 are prompts 16, 16, 17, 17 and siblings 0, 1, 0, 1.
    largest = [(1, "17", 1, 0.04), (1, "17", 0, 0.03), (1, "16", 1, 0.02), (1, "16", 0, 0.01)]
    assert order("gap") == largest
    assert order("kl") == [(1, "16", 0, 0.5), (1, "16", 1, 0.25), (1, "17", 0, 0.5 / 3), (1, "17", 1, 0.125)]
    assert order("advantage", False)[0] == (1, "17", 0, 0.0)
    assert len(order("step")) == 8, "without numbers too"
    columns = json.loads((rollouts / "1.numbers.json").read_text())
    del columns["kl"]
    columns["gap"] = [0.0, math.inf, math.nan, 0.5]
    columns["uid"] = [uid.replace("1-", "2-") for uid in columns["uid"]]
    (rollouts / "2.numbers.json").write_text(json.dumps(columns))
    assert made.refresh_samples() == [run]
    assert order("gap", step_from=2) == [(2, "16", 1, None), (2, "17", 1, 0.5), (2, "16", 0, 0.0)]
    assert order("kl", step_from=2) == []
    (rollouts / "2.numbers.json").write_text('{"uid": ["2-0')
    made.refresh_samples()
    assert order("gap") == largest


def test_pages_of_samples_follow_each_other_in_order(tmp_path):
    make_up_run(tmp_path, steps=5)
    made = library(tmp_path)
    (run,) = made.runs
    for sort in ("step", "score", "length"):
        for descending in (True, False):
            seen, skip = [], 0
            while skip is not None:
                page = find_samples(made.index, SampleFilter(run, sort=sort, descending=descending, limit=7, skip=skip))
                seen += page["rows"]
                skip = page["next"]
            values = [row[sort] for row in seen]
            assert values == sorted(values, reverse=descending)
            assert len({row["id"] for row in seen}) == 80
    searched, skip = [], 0
    while skip is not None:
        page = find_samples(made.index, SampleFilter(run, text="TRY 1", limit=3, skip=skip))
        searched += page["rows"]
        skip = page["next"]
    all_rows = find_samples(made.index, SampleFilter(run, limit=500))["rows"]
    assert [row["id"] for row in searched] == [row["id"] for row in all_rows if "try 1" in row["output"]]


def test_an_index_of_another_version_is_made_anew_and_one_elsewhere_if_need_be(tmp_path, monkeypatch):
    path = tmp_path / "index.sqlite"
    with Index(path).writing() as database:
        database.execute("INSERT INTO metrics_file VALUES ('run', 1, 1, '')")
        database.execute(f"PRAGMA user_version = {VERSION + 1}")
    with Index(path).reading() as database:
        assert database.execute("SELECT * FROM metrics_file").fetchall() == []
    assert place_of_index([tmp_path]).parent == tmp_path / ".verl_view"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert place_of_index([tmp_path]).parent == tmp_path / "cache/verl/view"


def test_runs_are_found_with_their_samples(tmp_path):
    make_up_run(tmp_path / "a", steps=1, validation_every=1)
    make_up_run(tmp_path / "b", steps=1)
    moved = tmp_path / "elsewhere"
    (tmp_path / "b/rollouts").rename(moved)
    start = {"event": "start", "config": {"trainer": {"rollout_data_dir": str(moved)}}}
    (tmp_path / "b/metrics.run.jsonl").write_text(json.dumps(start) + "\n")
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "global_step_1/metrics.jsonl").write_text('{"step": 1, "data": {}}\n')
    (tmp_path / "notes.jsonl").write_text('{"a": 1}\n')
    found = {run.name: {folder.path: folder.kind for folder in run.dumps} for run in find_runs([tmp_path])}
    a = tmp_path / "a"
    assert found == {"a": {a / "rollouts": "train", a / "validation": "validation"}, "b": {moved: "train"}}


@pytest.mark.parametrize(
    ("events", "age", "state"),
    [
        ([{"event": "end", "status": "failed"}], 0, "failed"),
        ([{"event": "start", "host": "elsewhere"}], 0, "running"),
        ([{"event": "start", "host": "elsewhere"}], 5000, "lost"),
        ([{"event": "start", "host": socket.gethostname(), "pid": 2**22 + 1, "process_began": 0}], 0, "lost"),
        ([{"event": "end", "status": "failed"}, {"event": "start", "host": "elsewhere"}], 0, "running"),
        ([], 5000, "done"),
    ],
)
def test_states(events, age, state):
    assert state_of(events, clock() - age) == state


def test_a_run_whose_process_lives_is_running_and_one_with_its_number_is_not():
    process = psutil.Process()
    start = {"event": "start", "host": socket.gethostname(), "pid": process.pid}
    assert state_of([start | {"process_began": process.create_time()}], 0) == "running"
    assert state_of([start | {"process_began": process.create_time() - 100}], 0) == "lost"
    assert marks_of([{"event": "checkpoint", "step": 3, "time": 1.0}]) == [
        {"kind": "checkpoint", "step": 3, "time": 1.0}
    ]


def test_every_rule_of_health_has_a_title():
    assert set(ALERT_TITLES) == {"not_finite", *(rule.name for rule in RULES)}


def test_a_long_curve_keeps_its_peaks():
    values = np.zeros(10_000)
    values[[1234, 7777]] = 5.0, -3.0
    values[42] = np.nan
    rows = extremes(values, 200)
    assert len(rows) <= 202
    assert {0, 1234, 7777, 9999} <= set(rows.tolist())
    assert extremes(values, 0).tolist() == [0, 1234, 7777, 9999]  # of very many curves each keeps that much
    assert extremes(np.array([np.nan, np.inf, 1.0, -np.inf, 2.0, 3.0, np.nan]), 2).tolist() == [0, 2, 5, 6]
    thin = thinned((np.arange(3.0), np.array([np.nan, 1, 2]), np.array([1.0, np.inf, 2])), 10)
    assert thin == {"steps": [0.0, 1.0, 2.0], "times": [None, 1.0, 2.0], "values": [1.0, None, 2.0]}


def test_stages_within_stages_are_deeper_and_a_trace_has_microseconds():
    events = [{"event": "step", "step": 7, "spans": [["dump", 2.0, 2.5], ["reward", 1.0, 3.0], ["step", 0.0, 4.0]]}]
    (step,) = spans_of(events, None, None)
    assert [(span["name"], span["depth"]) for span in step["spans"]] == [("step", 0), ("reward", 1), ("dump", 2)]
    complete = chrome_trace("run", [step])["traceEvents"][1:]
    assert [(event["name"], event["ts"], event["dur"]) for event in complete] == [
        ("step", 0, 4_000_000), ("reward", 1_000_000, 2_000_000), ("dump", 2_000_000, 500_000)
    ]  # fmt: skip
    assert spans_of(events, 8, None) == []
