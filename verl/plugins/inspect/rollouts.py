"""``python -m verl.trainer.inspect_rollouts``: read the dumps of a run in the terminal.

::

    python -m verl.trainer.inspect_rollouts rollouts/12.jsonl
    python -m verl.trainer.inspect_rollouts rollouts/12.jsonl --status timeout tool_error
    python -m verl.trainer.inspect_rollouts rollouts/12.jsonl --id 12-3/0 --tokens

The file is one of ``trainer.rollout_data_dir`` or ``trainer.validation_data_dir``. First comes how many samples ended
with each status and their mean score, then the samples themselves; those of agent loops with the turns of their
conversations, what each took, tool calls and results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from verl.utils.console import show

if TYPE_CHECKING:
    from verl.base.types import JsonMapping, JsonObject

STYLES = {"assistant": "green", "tool": "cyan", "system": "dim"}
FILE_HINT = "Name a file {step}.jsonl of trainer.rollout_data_dir."
SINGLE = "(one turn)"
"""Status of a sample that no agent loop drew."""


def read_records(path: Path) -> list[JsonObject]:
    """Read a file of records.

    Raises:
        SystemExit: the file cannot be read, or is none of records.
    """
    if path.is_dir():
        steps = sorted(
            (file for file in path.glob("*.jsonl") if file.stem.isdecimal()), key=lambda file: int(file.stem)
        )
        files = f"it has {len(steps)}, the newest is {steps[-1]}" if steps else "it has none"
        raise SystemExit(f"{path} is a folder. Name one of its files {{step}}.jsonl: {files}.")
    try:
        records = [json.loads(line) for line in path.read_text().split("\n") if line]
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}. {FILE_HINT}") from error
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"{path} cannot be read: {error}. {FILE_HINT}") from error
    if not all(isinstance(record, dict) and {"input", "output", "score"} <= set(record) for record in records):
        raise SystemExit(f"{path} has lines without input, output and score: it is no dump of samples.")
    return records


def summary(records: Sequence[JsonMapping]) -> Table:
    """Make a table of the statuses: how many samples have each, and their mean score."""
    table = Table("status", "samples", "mean score")
    scores: dict[str, list[float]] = {}
    for record in records:
        scores.setdefault(status_of(record), []).append(_score(record["score"]))
    for status, values in sorted(scores.items()):
        table.add_row(Text(status), f"{len(values):,}", f"{sum(values) / len(values):.3g}")
    return table


def status_of(record: JsonMapping) -> str:
    """Return how the trajectory of a record ended."""
    return record["trajectory"]["status"] if "trajectory" in record else SINGLE


def described(record: JsonMapping, with_tokens: bool = False) -> Iterator[Text]:
    """Yield the lines that show one sample."""
    trajectory = record.get("trajectory")
    if trajectory is None:
        yield Text(f"--- score {_score(record['score']):g}", style="bold")
        yield Text(record["input"], style="dim")
        yield Text(record["output"], style=STYLES["assistant"])
        return
    agent, score = f"{trajectory['agent_name']}, {trajectory['agent']}", _score(record["score"])
    yield Text(f"--- {trajectory['id']} ({agent}): {trajectory['status']}, score {score:g}", style="bold")
    if trajectory["message"]:
        yield Text(trajectory["message"], style="red")
    conversation = trajectory["conversation"]
    # Messages of the prompt have no ``seconds``, unless no message has.
    begins = next((index for index, message in enumerate(conversation) if "seconds" in message), 0)
    turns = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
    turns = [index for index in turns if index >= begins]
    # A turn that another sequence of the trajectory trains has no score here.
    is_complete = len(turns) == len(trajectory["turn_scores"])
    scores = dict(zip(turns, map(_score, trajectory["turn_scores"]), strict=True)) if is_complete else {}
    if not is_complete:
        yield Text(f"scores of the turns that it trains: {trajectory['turn_scores']}")
    for index, message in enumerate(conversation):
        score = scores.get(index)
        yield Text(_heading(message, score), style="bold")
        yield Text(_text(message), style=STYLES.get(message["role"], ""))
    if with_tokens:
        for name in ("prompt_ids", "response_ids", "response_mask"):
            yield Text(f"{name}: {trajectory[name]}", style="dim")


def _score(value: float | None) -> float:
    """Read a score: null in the file is one that was not finite."""
    return math.nan if value is None else value


def _heading(message: JsonMapping, score: float | None) -> str:
    speaker = message["role"] + (f" {message['name']}" if message.get("name") else "")
    notes = [f"{message['seconds']:.2f} s"] if "seconds" in message else []
    notes += [f"score {score:g}"] if score is not None else []
    notes += [str(message["failure"])] if message.get("failure") else []
    notes += ["no room left for it"] if message.get("is_left_out") else []
    return f"[{speaker}]" + (f" ({', '.join(notes)})" if notes else "")


def _text(message: JsonMapping) -> str:
    content = message.get("content")
    lines = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)] if content else []
    for call in message.get("tool_calls") or []:
        lines.append(f"→ {call['function']['name']}({call['function']['arguments']})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="verl inspect rollouts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, help="a file {step}.jsonl")
    parser.add_argument("--status", nargs="+", default=[], help="show only samples that ended so")
    parser.add_argument("--id", default="", help="show only the trajectory with this id, or the prompt's, as 12-3")
    parser.add_argument("--limit", type=int, default=3, help="show at most so many samples (default: 3)")
    parser.add_argument("--tokens", action="store_true", help="show token ids and the mask, too")
    options = parser.parse_args(arguments)
    records = read_records(options.file)
    try:
        _show_samples(records, options)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Records have many fields, and a damaged file may lack any of them.
        raise SystemExit(
            f"{options.file} has a damaged record: {type(error).__name__}: {error}. {FILE_HINT}"
        ) from error


def _show_samples(records: Sequence[JsonMapping], options: argparse.Namespace) -> None:
    show(summary(records))
    selected = [record for record in records if not options.status or status_of(record) in options.status]
    if options.id:
        ids = [(record, record.get("trajectory", {}).get("id", "")) for record in selected]
        selected = [record for record, name in ids if options.id in (name, name.partition("/")[0])]
    if not selected:
        sys.stderr.write("no sample of the file is like that.\n")
        raise SystemExit(1)
    for record in selected[: options.limit]:
        for line in described(record, options.tokens):
            show(line)
    if len(selected) > options.limit:
        show(f"\n{len(selected) - options.limit:,} more; --limit shows them")
