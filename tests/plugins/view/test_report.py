"""The report of a run: one file, whole, without scripts and without anything from elsewhere."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.support.made_up_run import make_up_run
from verl.errors import ConfigError, DataError
from verl.plugins.view.command import view
from verl.plugins.view.drawing import curve
from verl.plugins.view.index import Index
from verl.plugins.view.report import write_report
from verl.utils.token_page import escaped


def test_a_report_has_curves_alerts_samples_tokens_and_settings(tmp_path):
    make_up_run(tmp_path / "run", steps=45, tokens_every=9, validation_every=15)
    write_report(tmp_path / "run", tmp_path / "out/report.html")
    page = (tmp_path / "out/report.html").read_text()
    assert page.count("<svg") == 12
    assert "45 points" in page
    assert "<p class=note>A tick at the bottom is a checkpoint. A dashed line is a resumption.</p>" in page
    assert page.count('class="resumed"') == 12
    assert "Gradient spike, step 40" in page
    assert page.count("<h3>Best</h3>") == page.count("<h3>Worst</h3>") == 2
    assert page.count("Tokens by advantages") == 4  # two of the best, two of the worst; validation has none
    assert "train_batch_size" in page
    assert not re.search(r"<script|<img|<link|src=|https?://|@import|url\(", page)


def test_damaged_files_are_left_out(tmp_path):
    log = make_up_run(tmp_path, steps=3, prompts=1, siblings=2)
    deep = "[" * 100_000
    for file in (log, log.with_suffix(".run.jsonl"), tmp_path / "rollouts/3.jsonl"):
        file.write_text(f"{file.read_text()}{deep}\n")
    numbers = tmp_path / "rollouts/3.numbers.json"
    columns = json.loads(numbers.read_text())
    for text in (deep, json.dumps(columns | {"kl": [10**400] * len(columns["uid"])})):
        numbers.write_text(text)
        write_report(tmp_path, tmp_path / "report.html")
    with (tmp_path / "rollouts/3.jsonl").open("a") as file:
        file.write(json.dumps({"input": "", "output": "", "score": 10**400}))
    write_report(tmp_path, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().count("<h3>Best</h3>") == 1


def test_values_that_are_not_finite_are_marked(tmp_path):
    log = make_up_run(tmp_path, steps=3, prompts=1, siblings=2)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[1]["data"]["actor/pg_loss"] = None
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [json.loads(line) | {"score": None} for line in (tmp_path / "rollouts/3.jsonl").read_text().splitlines()]
    (tmp_path / "rollouts/3.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "actor/pg_loss is nan" in page
    assert "A cross is a value that is not finite." in page
    assert page.count("<strong>Score not finite</strong>") == 4  # two best, two worst
    drawn = curve(np.array([1.0, 2, 3, 4]), np.array([1.0, 2, np.nan, 4]))
    assert "3 points from 1 to 4, 1 not finite" in drawn
    assert (drawn.count("<polyline"), drawn.count("<circle"), drawn.count(">×<")) == (2, 1, 1)
    assert curve(np.array([1.0]), np.array([np.nan])) == "<p>no finite value</p>"


def test_what_a_run_says_stays_text(tmp_path):
    make_up_run(tmp_path, steps=1)
    file = tmp_path / "rollouts/1.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records:
        record |= {"input": "<script>x</script>", "output": "\u202egpj\ud800</pre><img src=x>", "gts": "<b>"}
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    write_report(tmp_path / "metrics.jsonl", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "&lt;script&gt;x&lt;/script&gt;" in page
    assert "<script" not in page
    assert "<img" not in page
    assert escaped("\u202ea<") == "[U+202E]a&lt;"


def test_no_run_or_several_are_told(tmp_path):
    with pytest.raises(DataError, match="there is no run below"):
        write_report(tmp_path, tmp_path / "report.html")
    with pytest.raises(DataError, match=r"there is no .*nowhere\. Name the folder"):
        write_report(tmp_path / "nowhere", tmp_path / "report.html")
    make_up_run(tmp_path / "a", steps=1)
    make_up_run(tmp_path / "b", steps=1)
    with pytest.raises(DataError, match=r"there are 2 runs \(a, b\)"):
        write_report(tmp_path, tmp_path / "report.html")


def test_other_files_are_no_runs_and_a_report_that_cannot_be_written_is_told(tmp_path):
    make_up_run(tmp_path / "run", steps=1)
    with pytest.raises(DataError, match=r"report\.html cannot be written: .*Name another file by -o"):
        write_report(tmp_path / "run", tmp_path / "run/metrics.jsonl/report.html")
    other = tmp_path / "other.yaml"
    for text in ("<!doctype html><html lang=en><p>mine</p>", "a: 1\n"):
        other.write_text(text)
        with pytest.raises(DataError, match=r"other\.yaml is no report, and would be lost"):
            write_report(tmp_path / "run", other)
        assert other.read_text() == text
    for _ in range(2):  # an older report is replaced
        write_report(tmp_path / "run", tmp_path / "report.html")
    with pytest.raises(DataError, match=r"other\.yaml holds no metrics"):
        write_report(other, tmp_path / "report.html")
    with pytest.raises(DataError, match=r"Name .*/run/metrics\.jsonl, or the folder"):
        write_report(tmp_path / "run/metrics.run.jsonl", tmp_path / "report.html")
    with pytest.raises(ConfigError, match=r"other\.yaml holds no metrics"):
        view([other])
    with pytest.raises(ConfigError, match=r"--port 65536: ports are 1 to 65535"):
        view([tmp_path], port=65_536)


@pytest.mark.parametrize("content", ["", '{"step": 1, "da', '{"step": 1e400, "data": {"a": 1}}\n'])
def test_a_file_without_a_whole_step_and_without_a_start_makes_no_report(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"has no complete step|holds no|there is no run"):
        write_report(tmp_path / "metrics.jsonl", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            {"status": "failed", "why": "WorkerError: <rank 3>"},
            "<strong>failed</strong><br>WorkerError: &lt;rank 3&gt;",
        ),
        ({"status": "failed"}, "<strong>failed</strong><br>No reason was recorded."),
        ({"status": "stopped", "why": "SystemExit: 75"}, "<strong>stopped</strong><br>SystemExit: 75"),
        ({"status": "done", "why": ""}, None),
    ],
)
def test_a_run_that_failed_says_why(tmp_path, end, said):
    make_up_run(tmp_path, steps=2, ended=False)
    with (tmp_path / "metrics.run.jsonl").open("a") as file:
        file.write(json.dumps({"event": "end", "time": 1.0, **end}) + "\n")
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert ("<h2>End</h2>" in page) == (said is not None)
    assert said is None or said in page


def test_a_recovered_run_says_where_it_went_on_and_a_conversation_is_folded(tmp_path):
    make_up_run(tmp_path, steps=1, prompts=1, siblings=1)
    events = tmp_path / "metrics.run.jsonl"
    start = events.read_text().splitlines()[0]
    more = [{"event": "resume", "step": 7, "time": 2.0}, {"event": "end", "status": "done", "why": "", "time": 3.0}]
    events.write_text("".join(f"{line}\n" for line in [start, start, *map(json.dumps, more)]))
    file = tmp_path / "rollouts/1.jsonl"
    call = {"function": {"name": "double", "arguments": '{"n": 21}'}}
    said = [
        {"role": "user", "content": "2*21?"},
        {"role": "assistant", "content": "", "tool_calls": [call, "odd"]},
        {"role": "tool", "name": "double", "content": "", "failure": "tool_timeout"},
        {"role": "assistant", "content": "It is 42."},
    ]
    trajectory = {"status": "timeout", "message": "9 s < 10 s", "conversation": said}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"trajectory": trajectory}) + "\n")
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert ": done, recovered, step 1</h1>" in page
    assert "resumed after step</th><td>7</td>" in page
    assert " tokens, timeout, truth " in page
    assert "<p>9 s &lt; 10 s</p><p><strong>user</strong></p><pre>2*21?</pre><details>" in page
    both = re.search(r"<summary>2 messages between</summary>(.*?)</details>(.*?)</article>", page, re.DOTALL)
    assert both is not None
    folded, last = both.groups()
    who = ["assistant", "tool, double, tool_timeout"]
    assert re.findall(r"<strong>(.*?)</strong>", folded) == who
    assert "<pre>→ double({&quot;n&quot;: 21})\n&quot;odd&quot;</pre>" in page
    assert "make 16 from" not in page, "the prompt is the conversation's, once"
    assert page.count("2*21?") == 2  # among the best, and among the worst
    assert last == "<p><strong>assistant</strong></p><pre>It is 42.</pre>"


@pytest.mark.parametrize(
    ("steps", "values", "texts", "points"),
    [
        # 320 x 150, axes at 46 and 132, 8 above and 6 beside: 314 is the last step, 70 the middle.
        ([3], [0.5], ["0.5", "3"], "46.0,70.0"),
        ([3, 5], [2.0, 2.0], ["2", "3", "5"], "46.0,70.0 314.0,70.0"),
        ([3, 5], [1.0, 2.0], ["2", "1", "3", "5"], "46.0,132.0 314.0,8.0"),
    ],
)
def test_a_curve_without_height_lies_in_the_middle_and_says_its_value_once(steps, values, texts, points):
    drawn = curve(np.array(steps, float), np.array(values))
    assert re.findall(r"<text [^>]*>(.*?)</text>", drawn) == texts
    assert f'points="{points}"' in drawn


def test_marks_stand_at_their_steps_and_checkpoints_of_one_place_once():
    marks = [("resumed", 4), ("checkpoint", 5), ("checkpoint", 5), ("checkpoint", 9), ("resumed", 2), ("resumed", None)]
    drawn = curve(np.array([3.0, 5.0]), np.array([1.0, 2.0]), [{"kind": kind, "step": step} for kind, step in marks])
    # 134 of a step, from 46 on.
    assert re.findall(r'class="(\w+)" x1="(\d+)" y1="(\d+)" x2="(\d+)" y2="132"', drawn) == [
        ("resumed", "180", "8", "180"),
        ("checkpoint", "314", "126", "314"),
    ]


@pytest.mark.parametrize("has_metrics", [True, False])
def test_a_run_that_never_made_a_step_is_found_and_reported(tmp_path, has_metrics):
    start = {"event": "start", "command": "verl train x", "config": {"data": {"seed": 17}}, "host": "elsewhere"}
    (tmp_path / "metrics.run.jsonl").write_text(json.dumps(start) + "\n" + '{"event": "en')
    if has_metrics:
        (tmp_path / "metrics.jsonl").write_text("")
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "no step was made" in page
    assert "No metrics were written" in page
    assert "<td>17</td>" in page


def test_lines_that_are_no_metrics_are_passed_over(tmp_path):
    lines = [
        '{"step": 1, "data": {"a": 1}}',
        '\0\0{"step": 2}',
        "[1]",
        '{"step": null, "data": {}}',
        '{"step": 1e400, "data":',
    ]
    lines += [
        '{"step": 1e400, "data": {"a": 3}}',
        '{"step": 5, "data": {"a": 7}, "time": "now"}',
        '{"step": 9, "data": {"a": 2}}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n" + '{"step": 10, "da')
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "step 9" in page
    assert "2 points" in page


def test_a_damaged_index_is_made_anew_and_one_that_cannot_be_written_is_told(tmp_path):
    file = tmp_path / "index.sqlite"
    file.write_bytes(b"no database at all" * 100)
    with Index(file).reading() as database:
        assert database.execute("SELECT count(*) FROM sample").fetchone()[0] == 0
    (tmp_path / ".verl_view").write_text("a file where the folder of the index is to be")
    with pytest.raises(ConfigError, match=r"the index .*\.verl_view/index-.* cannot be written: .*Make room"):
        view([tmp_path])
