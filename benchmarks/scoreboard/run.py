"""What a framework is asked to train; its file is read in environments that have the standard library alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

CLIP_LOW, CLIP_HIGH, CLIP_NEGATIVE = 0.2, 0.28, 3.0
"""Bounds of the ratio in the policy loss, the last one where the advantage is negative."""
WEIGHT_DECAY, BETAS, GRADIENT_NORM = 0.01, (0.9, 0.999), 1.0
DPO_BETA = 0.1


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: AdamW at a constant rate, in fp32, on the rows in their order."""

    method: Literal["grpo", "sft", "dpo"]
    model: str
    """Folder of the model before."""
    rows: str
    """Prompts with answers, conversations, or pairs, as jsonl."""
    validation: str
    """Held-out prompts with answers, as jsonl; they are answered after the run."""
    output: str
    """Folder of ``metrics.jsonl`` and, after the run, ``model``."""
    seed: int
    steps: int
    """Batches."""
    batch_size: int
    """Prompts, conversations or pairs of a batch."""
    learning_rate: float
    prompt_length: int
    response_length: int
    responses: int = 1
    """To each prompt, by sampling from the whole distribution."""
    updates: int = 1
    """Optimizer steps for each batch, which is divided among them."""
    micro_batch: int = 0
    """Sequences of a pass, for frameworks that count these; 0 is all of an update."""
    micro_batch_tokens: int = 16384
    """Tokens of a pass, for frameworks that count these."""

    @property
    def update_size(self) -> int:
        """Sequences of an optimizer step; a pair counts as one."""
        return self.batch_size * self.responses // self.updates

    def write(self, path: Path) -> None:
        """Write all fields as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_run(path: Path) -> Run:
    """Read what :meth:`Run.write` wrote."""
    return Run(**json.loads(path.read_text()))


def read_rows(path: str | Path) -> list[dict]:
    """Read the objects of a jsonl file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_rows(rows: list[dict], path: Path) -> None:
    """Write objects as jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
