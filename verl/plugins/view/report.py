"""``verl report``: one HTML file about a run, without scripts and without anything that it loads from elsewhere."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl.config.problems import shown
from verl.errors import DataError
from verl.plugins.view.discovery import Kind, metrics_problem
from verl.plugins.view.drawing import curve
from verl.plugins.view.index import Index
from verl.plugins.view.runs import Library, Run, main_metrics
from verl.plugins.view.samples import SampleFilter, find_samples, one_sample, place_of_sample
from verl.plugins.view.tokens import tokens_of
from verl.utils.token_page import PAGE_BEGINS, STYLE, escaped, token_spans, whole_page

if TYPE_CHECKING:
    from verl.base.types import JsonMapping
    from verl.plugins.view.timeline import Mark

SAMPLES = 3
"""Best samples, and worst, of the last step."""
SAMPLES_WITH_TOKENS = 2  # of each list: a table of tokens is far longer than the texts
REPORT_STYLE = """
h1 { font-size: 1.5rem; } h2 { margin-top: 2rem; font-size: 1.15rem; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 320px), 1fr)); gap: 1rem; }
figure { margin: 0; border: 1px solid #8886; border-radius: 8px; padding: .6rem; min-width: 0; }
figcaption { font-weight: 600; font-size: .85rem; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; } svg text { fill: currentColor; font: 10px system-ui; }
svg line { stroke: #8885; } svg :is(.resumed, .checkpoint) { stroke: currentColor; }
svg .resumed { stroke-dasharray: 5 3; }
svg polyline { fill: none; stroke: #2f7fbf; stroke-width: 1.6; }
.note { font-size: .85rem; opacity: .8; }
table { border-collapse: collapse; font-size: .88rem; }
th, td { text-align: start; padding: .2rem .7rem .2rem 0; vertical-align: top; }
td { overflow-wrap: anywhere; }
article { border-inline-start: 4px solid #8886; padding-inline-start: .8rem; margin: 1rem 0; }
.alert { border-color: #c80; }
"""


def write_report(folder: Path, output: Path) -> None:
    """Write the report of the run below a folder, or of a file of the tracker ``file``.

    Raises:
        DataError: there is no run there, or there are several, or the report cannot be written.
    """
    if not folder.exists():
        raise DataError(f"there is no {folder}. Name the folder of a run, or its file of metrics.")
    if folder.is_file() and (problem := metrics_problem(folder)):
        raise DataError(problem)
    if output.is_file() and not _is_page(output):
        raise DataError(f"{output} is no report, and would be lost. Name another file by -o.")
    with tempfile.TemporaryDirectory() as scratch:
        library = Library([folder], Index(Path(scratch) / "index.sqlite"))
        library.find()
        names = [run.files.name for run in library.runs.values()]
        if len(names) != 1:
            if not names:
                raise DataError(
                    f"there is no run below {folder}. Runs with `file` in trainer.logger leave a file of metrics: name "
                    "it, or its folder."
                )
            several = f"{len(names)} runs ({', '.join(names[:8])})"
            raise DataError(f"there are {several} below {folder}: name the folder of one, or its file of metrics.")
        library.refresh()
        library.refresh_samples()
        (run,) = library.runs.values()
        if run.metrics.last_step is None and not run.starts:
            raise DataError(
                f"{run.files.metrics} has no complete step, and {run.files.events.name}, which records the start of "
                "the run, does not exist: there is nothing to report. Name another run, or wait for its first step."
            )
        page = page_of(run, library.summaries()[run.files.id] | run.details(), library.index)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(page, encoding="utf-8", errors="replace")
        except OSError as error:
            raise DataError(f"{output} cannot be written: {error.strerror}. Name another file by -o.") from error


def _is_page(file: Path) -> bool:
    """Return whether a file is empty or begins as reports do."""
    beginning = PAGE_BEGINS.encode()
    try:
        with file.open("rb") as opened:
            return opened.read(len(beginning)) in (b"", beginning)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}. Name another file by -o.") from error


def page_of(run: Run, about: JsonMapping, index: Index) -> str:
    """Return the report as HTML, of a run with its summary and details."""
    step = "no step was made" if about["step"] is None else f"step {about['step']}"
    state = f"{about['state']}, recovered" if about["recovered"] else about["state"]
    title = f"{about['name']}: {state}, {step}"
    resumed = ", ".join(str(mark["step"]) for mark in about["marks"] if mark["kind"] == "resumed")
    facts = {
        "command": about["command"],
        "machine": about["host"],
        "resumed after step": resumed,
        **about["environment"],
    }
    parts = [
        f"<h1>{escaped(title)}</h1>",
        table({name: value for name, value in facts.items() if value}),
        ending(about),
        alerts(run.alerts(index), run.rules()),
        curves(run, index, about["marks"]),
        *(samples(run, index, kind) for kind in about["kinds"]),
        f"<h2>Samples</h2><p>{escaped(about['no_samples'])}</p>" if about["no_samples"] else "",
        f"<h2>Settings</h2><details><summary>{len(about['config'])} keys</summary>{table(about['config'])}</details>",
    ]
    return whole_page(title, STYLE + REPORT_STYLE, "".join(parts))


def ending(about: JsonMapping) -> str:
    """Why the run ended, with the stage, if its last end was no good one; empty for others and for runs that go on."""
    state = about["state"]
    if state == "lost":
        return "<h2>End</h2><article class=alert>Its process is gone, and left no word why.</article>"
    if state not in ("failed", "stopped"):
        return ""
    why = about["ends"][-1].get("why") or "No reason was recorded."
    return f"<h2>End</h2><article class=alert><strong>{escaped(state)}</strong><br>{escaped(why)}</article>"


def alerts(alert_list: Sequence[Mapping[str, object]], rules: Sequence[JsonMapping]) -> str:
    """The alerts of a run, and the rules that its metrics are tested by."""
    items = [
        f"<article class=alert><strong>{escaped(alert['title'])}, step {alert['step']}</strong><br>"
        f"{escaped(alert['reason'])}</article>"
        for alert in alert_list
    ]
    tested = [rule for rule in rules if rule["metrics"]]
    listed = table({rule["title"]: rule["condition"] for rule in tested})
    folded = f"<details><summary>{len(tested)} of {len(rules)} rules tested</summary>{listed}</details>"
    return f"<h2>Health</h2>{''.join(items) or '<p>No alert.</p>'}{folded}"


def curves(run: Run, index: Index, marks: Sequence[Mark]) -> str:
    """All curves; the usual ones open."""
    names = sorted(run.metrics.names)
    if not names:
        return "<h2>Curves</h2><p>No metrics were written.</p>"
    first = main_metrics(names)
    rest = [name for name in names if name not in first]
    series = run.metrics.series(index, names)

    def figures(shown: Iterable[str]) -> str:
        plots = [
            f"<figure><figcaption>{escaped(name)}</figcaption>{curve(points.steps, points.values, marks)}</figure>"
            for name in shown
            for points in [series[name]]
        ]
        return f"<div class=curves>{''.join(plots)}</div>"

    more = f"<details><summary>{len(rest)} more curves</summary>{figures(rest)}</details>" if rest else ""
    words = {"checkpoint": "A tick at the bottom is a checkpoint.", "resumed": "A dashed line is a resumption."}
    notes = [sentence for kind, sentence in words.items() if any(mark["kind"] == kind for mark in marks)]
    if any(np.isnan(metric.values).any() for metric in series.values()):
        notes.append("A cross is a value that is not finite.")
    note = " ".join(notes)
    return f"<h2>Curves</h2>{f'<p class=note>{note}</p>' if note else ''}{figures(first)}{more}"


def samples(run: Run, index: Index, kind: Kind) -> str:
    """Best and worst samples of the last step; the first of each with tokens, if these were written."""
    parts = [f"<h2>Samples of {'validation' if kind == 'validation' else 'training'}, step "]
    newest = find_samples(index, SampleFilter(run=run.files.id, kind=kind, limit=1))["rows"]
    if not newest:
        return ""
    step = newest[0]["step"]
    parts.append(f"{step}</h2>")
    for title, descending in (("Best", True), ("Worst", False)):
        selection = SampleFilter(
            run=run.files.id,
            kind=kind,
            step_from=step,
            step_to=step,
            sort="score",
            descending=descending,
            limit=SAMPLES,
        )
        rows = find_samples(index, selection)["rows"]
        shown = [sample(index, row["id"], position < SAMPLES_WITH_TOKENS) for position, row in enumerate(rows)]
        parts.append(f"<h3>{title}</h3>{''.join(shown)}")
    return "".join(parts)


def sample(index: Index, sample_id: int, with_tokens: bool) -> str:
    """One sample."""
    details = one_sample(index, sample_id)
    record = details["record"]
    trajectory = record.get("trajectory")
    body = f"<pre>{escaped(record.get('input', ''))}</pre><pre>{escaped(record.get('output', ''))}</pre>"
    if isinstance(trajectory, Mapping):
        why = f"<p>{escaped(trajectory['message'])}</p>" if trajectory.get("message") else ""
        messages = trajectory.get("conversation") or []
        body = why + (conversation(messages) if messages else body)
    columns = table(record["columns"]) if isinstance(record.get("columns"), Mapping) else ""
    status = f", {escaped(details['status'])}" if details["status"] else ""
    tokens = token_line(index, sample_id) if with_tokens else ""
    score = "not finite" if details["score"] is None else f"{details['score']:g}"
    return (
        f"<article><strong>Score {score}</strong>, {details['length']} tokens{status}, truth "
        f"{escaped(details['gts'])}{columns}{body}{tokens}</article>"
    )


def conversation(messages: Sequence[Mapping[str, object]]) -> str:
    """The messages of a trajectory: the prompt, the last of them, and folded what is between."""
    shown = []
    for message in messages:
        notes = [str(message[name]) for name in ("role", "name", "failure") if message.get(name)]
        shown.append(f"<p><strong>{escaped(', '.join(notes))}</strong></p><pre>{escaped(content_of(message))}</pre>")
    roles = [message.get("role") for message in messages]
    prompt = min(roles.index("assistant") if "assistant" in roles else len(roles), len(roles) - 1)
    between = shown[prompt:-1]
    folded = f"<details><summary>{len(between)} messages between</summary>{''.join(between)}</details>"
    return "".join(shown[:prompt]) + (folded if between else "") + shown[-1]


def content_of(message: JsonMapping) -> str:
    """Return the text of a message, with its images named, and its tool calls."""
    content = message.get("content") or ""
    if isinstance(content, list) and all(part in ({"type": "image"},) or "text" in part for part in content):
        content = "".join(part.get("text", "<image>") for part in content)
    calls = message.get("tool_calls") or []
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    called = [call_of(call) for call in calls]
    return "\n".join([text, *called] if text else called)


def call_of(call: object) -> str:
    """A tool call in a line; one of another form as JSON."""
    match call:
        case {"function": {"name": name, "arguments": arguments}}:
            return f"→ {name}({arguments})"
    return json.dumps(call, ensure_ascii=False)


def token_line(index: Index, sample_id: int) -> str:
    """The response as tokens, coloured by advantage, else by log-prob; empty if no tokens were written."""
    tokens = tokens_of(place_of_sample(index, sample_id))
    if tokens is None:
        return ""
    spans, name = token_spans(tokens)
    return f"<details><summary>Tokens by {name}</summary><pre class=tokens>{spans}</pre></details>"


def table(rows: Mapping[str, object]) -> str:
    """Two columns."""
    cells = [
        f"<tr><th scope=row>{escaped(name)}</th><td>{escaped(shown(value))}</td></tr>" for name, value in rows.items()
    ]
    return f"<table>{''.join(cells)}</table>"
