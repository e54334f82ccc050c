"""Files of a run that never was, of any size: metrics, events, samples, tokens."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pyarrow as pa

from verl.utils.run_log import rank_columns

STAGES = (("gen", 0.5), ("reward", 0.1), ("old_log_prob", 0.1), ("adv", 0.02), ("update_actor", 0.28))
BEGAN = 1_790_000_000.0


def make_up_run(
    folder: Path, *, steps: int = 60, metrics: int = 12, prompts: int = 4, siblings: int = 4, tokens_every: int = 0,
    seed: int = 0, ended: bool = True, validation_every: int = 0, gap_from: int | None = None,
) -> Path:  # fmt: skip
    """Write the files of a run below a folder; return the file of metrics.

    Args:
        gap_from: step from which trainer and rollout differ on the tokens after a tool's result.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    log = folder / "metrics.jsonl"
    with log.open("w") as file:
        for step in range(1, steps + 1):
            line = metrics_line(step, metrics, draw)
            if gap_from is not None and step >= gap_from:
                line["data"]["training/rollout_probs_diff_mean"] += 0.03
            file.write(json.dumps(line | {"run": folder.name}) + "\n")
    write_events(folder, steps, seed, ended)
    write_ranks(folder, steps, random.Random(seed))
    for step in range(1, steps + 1):
        write_samples(folder / "rollouts", step, prompts, siblings, draw, run=folder.name)
        write_numbers(folder / "rollouts", step, prompts, siblings)
        if tokens_every and step % tokens_every == 0:
            differs = gap_from is not None and step >= gap_from
            write_tokens(folder / "rollouts", step, prompts, siblings, draw, differs)
        if validation_every and step % validation_every == 0:
            write_samples(folder / "validation", step, prompts, 1, draw, same_prompts=True, run=folder.name)
    return log


def metrics_line(step: int, metrics: int, draw: random.Random) -> dict:
    known = {
        "critic/score/mean": 1 - math.exp(-step / 40) + draw.gauss(0, 0.04),
        "actor/entropy": 2 * math.exp(-step / 60) + 0.3 + draw.gauss(0, 0.02),
        "actor/grad_norm": 1 + abs(draw.gauss(0, 0.2)) + (40 if step == 40 else 0),
        "actor/pg_loss": draw.gauss(0, 0.1),
        "response_length/mean": 120 + 2 * step + draw.gauss(0, 8),
        "response_length/clip_ratio": min(1.0, step / 100),
        "reward/error_rate": 0.0,
        "training/rollout_probs_diff_mean": 0.002 + abs(draw.gauss(0, 0.0002)),
        "timing_s/step": 10.0,
    }
    known |= {f"group_{i % 12}/metric_{i}": draw.gauss(i, 1) for i in range(max(0, metrics - len(known)))}
    return {"step": step, "data": known, "time": BEGAN + 10 * step, "run": "made-up"}


def write_events(folder: Path, steps: int, seed: int, ended: bool) -> None:
    config = {"data": {"seed": seed, "train_batch_size": 64}, "trainer": {"rollout_data_dir": str(folder / "rollouts")}}
    versions = {"verl": "0.1.0", "python": "3.11"}
    events: list[dict] = [
        {"event": "start", "config": config, "host": "elsewhere", "pid": 1, "process_began": BEGAN, "time": BEGAN,
         "command": "verl train data.seed=1", "environment": versions},
    ]  # fmt: skip
    for step in range(1, steps + 1):
        begin = BEGAN + 10 * step
        spans: list[tuple[str, float, float]] = []
        at = begin
        for name, share in STAGES:
            spans.append((name, at, at + 9.5 * share))
            at += 9.5 * share
        events.append({"event": "step", "step": step, "spans": [*spans, ("step", begin, at)], "time": at})
        if step % 20 == 0:
            events.append({"event": "checkpoint", "step": step, "folder": "checkpoints", "time": at})
    events += [{"event": "resume", "step": steps // 2, "time": BEGAN + 5 * steps}] if steps > 1 else []
    events += [{"event": "end", "status": "done", "why": "", "time": BEGAN + 10 * steps}] if ended else []
    (folder / "metrics.run.jsonl").write_text(
        "".join(json.dumps(event | {"run": folder.name}) + "\n" for event in events)
    )


CALLS = (
    ("ActorRolloutRefWorker.generate_sequences", 0.0, 0.47), ("ActorRolloutRefWorker.compute_log_prob", 0.6, 0.09),
    ("ActorRolloutRefWorker.update_actor", 0.73, 0.26),
)  # fmt: skip
"""Calls of a rank in a step: name, begin and duration as shares of the step."""


def write_ranks(folder: Path, steps: int, draw: random.Random, ranks: int = 2) -> None:
    """Write what the ranks did; of several the last one waits longest, because its answers end early."""
    with (folder / "metrics.ranks.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            calls = {
                f"global_pool {rank}": [
                    (name, at, at + 9.5 * share * (1 - 0.2 * rank / ranks), 2000 + 50 * rank + draw.randrange(40), None)
                    for name, first, share in CALLS
                    for at in [BEGAN + 10 * step + 9.5 * first]
                ]
                for rank in range(ranks)
            }
            line = {"event": "ranks", "time": BEGAN + 10 * step, "run": "made-up", "step": step, **rank_columns(calls)}
            file.write(json.dumps(line) + "\n")


def write_samples(
    folder: Path, step: int, prompts: int, siblings: int, draw: random.Random, same_prompts: bool = False,
    run: str | None = None,
) -> None:  # fmt: skip
    """Write the samples of a step, with the id of their run; those of older versions have none."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for prompt in range(prompts):
        for sibling in range(siblings):
            is_right = draw.random() < 1 - math.exp(-step / 40)
            records.append(
                {
                    "input": f"make {prompt + 16} from 7 12 3" + ("" if same_prompts else f" (step {step})"),
                    "output": f"{''.join(RESPONSE)} try {draw.randrange(1000)}",
                    "gts": {"target": prompt + 16},
                    "score": float(is_right),
                    "step": step,
                    "response_length": draw.randrange(5, 200),
                    "uid": f"{step}-{prompt}",
                    "sample_index": sibling,
                    "data_source": ("countdown", "gsm8k")[prompt % 2],
                    "finish_reason": "length" if draw.random() < 0.2 else "stop",
                    **({} if run is None else {"run": run}),
                }
            )
    (folder / f"{step}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def write_numbers(folder: Path, step: int, prompts: int, siblings: int) -> None:
    """Write what the update saw of samples; each number orders the samples of a step otherwise, all by their place."""
    places = [(prompt, sibling) for prompt in range(prompts) for sibling in range(siblings)]
    columns = {
        "uid": [f"{step}-{prompt}" for prompt, _ in places],
        "sample_index": [sibling for _, sibling in places],
        "gap": [0.01 * (place + 1) for place in range(len(places))],
        "kl": [0.5 / (place + 1) for place in range(len(places))],
        "advantage": [abs(place - len(places) // 2) / 2 for place in range(len(places))],
    }
    (folder / f"{step}.numbers.json").write_text(json.dumps(columns))


RESPONSE = (
    "first", " the", " sum", ":", " ", "<call>", "7 + 12", "</call>", "<result>", "19", "</result>", "\n", "then",
    " 19", " -", " 3", " is", " 16", ":", "\n", "<answer>", "7 + 12", " - 3", "</answer>",
)  # fmt: skip
"""Tokens of every response."""
TOOL = range(8, 12)
"""Places of the tool's tokens in it."""


def write_tokens(
    folder: Path, step: int, prompts: int, siblings: int, draw: random.Random, differs: bool = False
) -> None:
    """Write the tokens of a step; with ``differs`` the trainer's log-probs are lower after the tool's result."""
    words = list(dict.fromkeys(RESPONSE))
    ids = [words.index(token) for token in RESPONSE]
    mask = [int(place not in TOOL) for place in range(len(ids))]
    rows = []
    for prompt in range(prompts):
        for sibling in range(siblings):
            drawn = [-abs(draw.gauss(0, 0.7)) for _ in ids]
            numbers = {
                "rollout_log_probs": drawn,
                "old_log_probs": [
                    log_prob - abs(draw.gauss(0, 1.5 if differs and place >= TOOL.stop else 0.01))
                    for place, log_prob in enumerate(drawn)
                ],
                "ref_log_prob": [log_prob - abs(draw.gauss(0, 0.2)) for log_prob in drawn],
                "advantages": [draw.gauss(0, 1) for _ in ids],
                "entropys": [abs(draw.gauss(0.5, 0.3)) for _ in ids],
            }
            gaps = [
                random.Random(f"{step} {prompt} {sibling} {place}").gauss(0, 0.15) if own else math.nan
                for place, own in enumerate(mask)
            ]
            before = numbers["old_log_probs"]
            numbers["update_log_probs"] = [old + gap for old, gap in zip(before, gaps, strict=True)]
            numbers["update_clipped"] = [float(abs(math.exp(gap) - 1) > 0.2) if gap == gap else gap for gap in gaps]
            row = {"uid": f"{step}-{prompt}", "sample_index": sibling, "weight_version": step - 1}
            versions = [max(step - 2, 0) if place < 10 else step - 1 for place in range(len(ids))]  # interrupted once
            row["weight_versions"] = [version if own else -1 for version, own in zip(versions, mask, strict=True)]
            rows.append(row | {"prompt_ids": [1, 3, 5], "response_ids": ids, "response_mask": mask} | numbers)
    metadata = {"step": str(step), "tokens": json.dumps(dict(enumerate(words)))}
    table = pa.Table.from_pylist(rows).replace_schema_metadata(metadata)
    with pa.OSFile(str(folder / f"{step}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=8)
