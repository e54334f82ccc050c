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
from typing import Any

import numpy as np
import psutil
import pyarrow.feather
import pytest

from tests.support.made_up_run import make_up_run, write_numbers, write_samples
from verl.plugins.view.curves import CHUNK, Curve, extremes, thinned
from verl.plugins.view.index import VERSION, Index, place_of_index
from verl.plugins.view.report import write_report
from verl.plugins.view.runs import Library, marks_of, state_of
from verl.plugins.view.samples import SampleFilter, find_samples, one_sample, place_of_sample
from verl.plugins.view.timeline import chrome_trace, spans_of
from verl.plugins.view.tokens import tokens_of
from verl.utils.run_log import clock


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
    curve = run.metrics.series(made.index, [name])[name]
    assert curve.times.tolist() == [1000.0 + step for step in curve.steps.tolist()]
    return curve.steps.tolist(), curve.values.tolist()


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
        log.read_text() + "\n".join(odd) + "\n" + '{"step": 5, "data": {"x": NaN, "y": "text"}, "time": 1005}\n'
    )
    made = library(tmp_path)
    assert series(made, "x")[0] == [1, 2, 5]
    assert "y" not in next(iter(made.runs.values())).metrics.names


@pytest.mark.parametrize("written", ["null", "NaN", "Infinity"])
def test_a_value_that_is_not_finite_is_a_gap_in_index_and_tail_and_an_alert(tmp_path, written):
    log = tmp_path / "metrics.jsonl"
    lines = [
        f'{{"step": {step}, "data": {{"actor/loss": 0.5}}, "time": {1000 + step}}}\n' for step in range(1, CHUNK + 4)
    ]
    lines[1] = lines[1].replace("0.5", written)
    lines[3] = lines[3].replace('"actor/loss": 0.5', "")  # a step without the metric is no gap
    lines[-1] = lines[-1].replace("0.5", written)
    log.write_text("".join(lines))
    for _ in range(2):
        made = library(tmp_path)
        steps, values = series(made, "actor/loss")
        assert steps[:4] == [1, 2, 3, 5]
        assert [step for step, value in zip(steps, values, strict=True) if math.isnan(value)] == [2, CHUNK + 3]
        (run,) = made.runs.values()
        assert run.metrics.latest == {"actor/loss": 0.5}
        alerts = [(alert["step"], alert["rule"]) for alert in run.alerts(made.index)]
        assert alerts == [(CHUNK + 3, "not_finite"), (2, "not_finite")]


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
    # Null, as it is written now, and NaN and infinities of older files are the largest.
    assert order("gap", step_from=2) == [(2, "17", 0, None), (2, "16", 1, None), (2, "17", 1, 0.5), (2, "16", 0, 0.0)]
    columns["gap"][1] = None
    (rollouts / "2.numbers.json").write_text(json.dumps(columns))
    made.refresh_samples()
    assert order("gap", step_from=2)[1] == (2, "16", 1, None)
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


def samples_by_run(*folders: Path) -> dict[str, set[tuple]]:
    """Name of each run: folder and step of its samples, and their kind."""
    made = Library(list(folders), Index(folders[0] / ".verl_view/index.sqlite"))
    made.find()
    made.refresh_samples()
    with made.index.reading() as database:
        rows = list(
            database.execute("SELECT DISTINCT sample.run, path, sample.kind FROM dump JOIN sample ON dump.id = dump")
        )
    names = {run.files.id: run.files.name for run in made.runs.values()} | {"": "nobody"}
    found: dict[str, set[tuple]] = {}
    for run, path, kind in rows:
        found.setdefault(names[run], set()).add((Path(path).parent, int(Path(path).stem), kind))
    return found


def write_log(path: Path, **start: Any) -> None:
    write_lines(path, range(1, 3), "w")
    path.with_suffix(".run.jsonl").write_text(json.dumps({"event": "start", **start}) + "\n")


def settings(**folders: str | None) -> dict[str, Any]:
    return {"trainer": {"rollout_data_dir": None, "validation_data_dir": None} | folders}


def write_dump(folder: Path, steps: range, run: str | None = None) -> None:
    for step in steps:
        write_samples(folder, step, 1, 1, random.Random(step), run=run)


def test_runs_are_found_with_their_samples(tmp_path):
    make_up_run(tmp_path / "a", steps=1, validation_every=1)
    make_up_run(tmp_path / "b", steps=1)
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "global_step_1/metrics.jsonl").write_text('{"step": 1, "data": {}}\n')
    (tmp_path / "notes.jsonl").write_text('{"a": 1}\n')
    a, b = tmp_path / "a", tmp_path / "b"
    expected = {
        "a": {(a / "rollouts", 1, "train"), (a / "validation", 1, "validation")},
        "b": {(b / "rollouts", 1, "train")},
    }
    assert samples_by_run(tmp_path) == expected
    (b / "rollouts").rename(tmp_path / "elsewhere")
    assert samples_by_run(tmp_path)["b"] == {(tmp_path / "elsewhere", 1, "train")}, "by the id in its lines"


@pytest.mark.parametrize("run", [None, "id"])
def test_relative_folders_begin_where_each_run_was_started_and_are_found_outside_of_the_view(
    tmp_path, monkeypatch, run
):
    """Seven runs of one command, each in its folder; the view starts elsewhere and is shown the metrics alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "work")
    for name in "abcdefg":
        cwd = tmp_path / ("link" if name == "g" else "work") / name
        own = run and f"{run}-{name}"
        config = settings(rollout_data_dir="out/rollouts", validation_data_dir="out/held_out")
        write_log(tmp_path / f"logs/{name}.jsonl", run=own, cwd=str(cwd), config=config)
        write_dump(tmp_path / "work" / name / "out/rollouts", range(1, 3), own)
        write_dump(tmp_path / "work" / name / "out/held_out", range(2, 3), own)
    assert samples_by_run(tmp_path / "logs") == {
        name: {
            (tmp_path / "work" / name / "out/rollouts", 1, "train"),
            (tmp_path / "work" / name / "out/rollouts", 2, "train"),
            (tmp_path / "work" / name / "out/held_out", 2, "validation"),
        }
        for name in "abcdefg"
    }


def test_of_one_folder_each_run_has_the_files_that_it_wrote(tmp_path):
    for name in ("first", "second"):
        write_log(tmp_path / f"{name}.jsonl", run=name, cwd=str(tmp_path), config=settings(rollout_data_dir="out"))
    write_dump(tmp_path / "out", range(1, 4), "first")
    write_dump(tmp_path / "out", range(1, 3), "second")  # it was shorter
    write_dump(tmp_path / "out", range(7, 8), "another")
    out = tmp_path / "out"
    expected = {"first": {(out, 3, "train")}, "second": {(out, 1, "train"), (out, 2, "train")}}
    assert samples_by_run(tmp_path) == expected | {"nobody": {(out, 7, "")}}
    write_log(tmp_path / "third.jsonl", run="another", cwd="/nowhere", config=settings())
    assert samples_by_run(tmp_path) == expected | {"third": {(out, 7, "train")}}, "its metrics came later"


def test_files_of_another_run_beside_samples_are_not_theirs(tmp_path):
    make_up_run(tmp_path / "one", steps=2, tokens_every=1)
    rollouts = tmp_path / "one/rollouts"
    made = library(tmp_path)
    (run,) = made.runs
    for step in (1, 2):
        writer = ("another", "one")[step - 1]
        columns = json.loads((rollouts / f"{step}.numbers.json").read_text())
        (rollouts / f"{step}.numbers.json").write_text(json.dumps(columns | {"run": writer}))
        table = pyarrow.feather.read_table(rollouts / f"{step}.arrow", memory_map=False)
        table = table.replace_schema_metadata({**table.schema.metadata, b"run": writer.encode()})
        pyarrow.feather.write_feather(table, str(rollouts / f"{step}.arrow"), compression="uncompressed")
    made.refresh_samples()
    rows = find_samples(made.index, SampleFilter(run, limit=500))["rows"]
    assert {row["step"] for row in rows if row.get("gap") is not None} == {2}
    by_step = {row["step"]: row["id"] for row in rows}
    assert tokens_of(place_of_sample(made.index, by_step[1])) is None
    assert tokens_of(place_of_sample(made.index, by_step[2])) is not None


def test_older_records_name_neither_run_nor_folder(tmp_path):
    for name in ("a", "b"):
        folder = tmp_path / name
        (folder / "logs").mkdir(parents=True)
        write_log(folder / "logs/metrics.jsonl", config=settings(rollout_data_dir="out"))
        write_dump(folder / "out", range(1, 2))
    write_dump(tmp_path / "c/out", range(1, 2))  # of no run with a record: both are as near, so it is nobody's
    (tmp_path / "c/logs").mkdir()
    write_log(tmp_path / "c/logs/metrics.jsonl", config=settings())  # this one says that it wrote none
    expected = {f"{name}/logs": {(tmp_path / name / "out", 1, "train")} for name in ("a", "b")}
    assert samples_by_run(tmp_path) == expected | {"nobody": {(tmp_path / "c/out", 1, "")}}
    (tmp_path / "c/logs/metrics.run.jsonl").unlink()
    assert samples_by_run(tmp_path) == expected | {"c/logs": {(tmp_path / "c/out", 1, "train")}}


def test_a_copy_of_a_run_has_its_own_samples(tmp_path):
    make_up_run(tmp_path / "here/run", steps=1)
    shutil.copytree(tmp_path / "here/run", tmp_path / "copy/run")
    assert samples_by_run(tmp_path) == {
        name: {(tmp_path / name / "rollouts", 1, "train")} for name in ("here/run", "copy/run")
    }


def test_a_run_without_samples_says_why(tmp_path):
    write_log(tmp_path / "none.jsonl", config=settings())
    write_log(tmp_path / "gone.jsonl", cwd="/nowhere", config=settings(validation_data_dir="held_out"))
    (tmp_path / "out").mkdir()
    write_log(tmp_path / "empty.jsonl", cwd=str(tmp_path), config=settings(rollout_data_dir="out"))
    write_lines(tmp_path / "bare.jsonl", range(1, 3), "w")
    why = {run["name"]: run["no_samples"] for run in library(tmp_path).summaries().values()}
    assert why["none"] == "It wrote none: trainer.rollout_data_dir and trainer.validation_data_dir were not set."
    assert why["gone"].startswith("trainer.validation_data_dir=/nowhere/held_out is not here, or not written yet.")
    assert why["empty"].startswith(f"trainer.rollout_data_dir={tmp_path / 'out'} has no samples of it:")
    assert why["bare"].endswith("there is no bare.run.jsonl beside its metrics that says where it wrote them.")
    write_report(tmp_path / "gone.jsonl", tmp_path / "report.html")
    assert "trainer.validation_data_dir=/nowhere/held_out is not here" in (tmp_path / "report.html").read_text()


def test_odd_records_are_passed_over(tmp_path):
    odd = [
        None,
        "x",
        {"trainer": 5},
        *({"trainer": {"rollout_data_dir": name}} for name in (5, "", "a\0b", "~nobody/x", "y" * 5000)),
    ]
    for number, config in enumerate(odd):
        write_log(
            tmp_path / f"run{number}.jsonl",
            config=config,
            run=7,
            cwd=(3, "/a\0")[number % 2],
            time=(None, "then")[number % 2],
        )
    write_dump(tmp_path / "out", range(1, 2))
    assert len(library(tmp_path).summaries()) == len(odd)


def test_colours_stay_when_runs_come_and_go(tmp_path):
    def places() -> dict[str, int]:
        return {run["name"]: run["place"] for run in library(tmp_path).summaries().values()}

    for name, began in (("b", 1), ("c", 2)):
        write_log(tmp_path / f"{name}.jsonl", time=began)
    assert places() == {"b": 0, "c": 1}
    write_log(tmp_path / "a.jsonl", time=0)
    assert places() == {"a": 2, "b": 0, "c": 1}
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "b.run.jsonl").unlink()
    write_log(tmp_path / "d.jsonl", time=3)
    assert places() == {"a": 2, "c": 1, "d": 3}


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


def test_a_long_curve_keeps_its_peaks():
    values = np.zeros(10_000)
    values[[1234, 7777]] = 5.0, -3.0
    values[[42, 43]] = np.nan
    rows = extremes(values, 200)
    assert len(rows) <= 203
    assert {0, 42, 1234, 7777, 9999} <= set(rows.tolist())
    assert extremes(values, 0).tolist() == [0, 42, 1234, 7777, 9999]  # of very many curves each keeps that much
    assert extremes(np.array([np.nan, np.inf, 1.0, -np.inf, 2.0, 3.0, np.nan]), 2).tolist() == [0, 2, 5, 6]
    thin = thinned(Curve(np.arange(3.0), np.array([np.nan, 1, 2]), np.array([1.0, np.inf, 2])), 10)
    assert thin == {"steps": [0.0, 1.0, 2.0], "times": [None, 1.0, 2.0], "values": [1.0, None, 2.0], "runs": 1}


def test_stages_within_stages_are_deeper_and_a_trace_has_microseconds():
    events = [{"event": "step", "step": 7, "spans": [["dump", 2.0, 2.5], ["reward", 1.0, 3.0], ["step", 0.0, 4.0]]}]
    (step,) = spans_of(events, None, None)
    assert [(span["name"], span["depth"]) for span in step["spans"]] == [("step", 0), ("reward", 1), ("dump", 2)]
    complete = chrome_trace("run", [step])["traceEvents"][1:]
    assert [(event["name"], event["ts"], event["dur"]) for event in complete] == [
        ("step", 0, 4_000_000), ("reward", 1_000_000, 2_000_000), ("dump", 2_000_000, 500_000)
    ]  # fmt: skip
    assert spans_of(events, 8, None) == []
