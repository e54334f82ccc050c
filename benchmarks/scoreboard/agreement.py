"""Whether two frameworks computed the same: losses of all steps, or the first update's tokens, computed again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.scoreboard.run import CLIP_HIGH, CLIP_LOW, CLIP_NEGATIVE, Run
from verl.config import ActorConfig
from verl.protocol import DataProto
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import BatchTotals, EngineRegistry, MicroBatchConfig
from verl.workers.losses import PolicyLoss


@dataclass(frozen=True)
class Agreement:
    """The largest difference, and of what."""

    what: str
    difference: float

    def __str__(self) -> str:
        return f"{self.what}: {self.difference:.1g}"


def compare_losses(losses: dict[str, list[float]]) -> list[Agreement]:
    """The largest difference of the loss between any two frameworks: in the first step, and in any."""
    differences = [max(step) - min(step) for step in zip(*losses.values(), strict=True)]
    return [
        Agreement("loss of the first batch, difference", differences[0]),
        Agreement(f"loss of {len(differences)} batches, largest difference", max(differences)),
    ]


def compare_first_pass(name: str, run: Run, path: Path) -> list[Agreement]:
    """Compute the first pass of framework ``name`` by verl's engine: log-probs of its tokens, and its loss."""
    first = torch.load(path)
    mask = first["completion_mask"].long()
    attention = torch.cat([first["prompt_mask"].long(), mask], dim=1)
    ids = torch.cat([first["prompt_ids"], first["completion_ids"]], dim=1)
    columns = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "responses": first["completion_ids"],
        "response_mask": mask,
        "advantages": first["advantages"][:, None] * mask,
    }
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(path=run.model, enable_gradient_checkpointing=False),
        engine_config=FSDPEngineConfig(dtype="float32"),
        optimizer_config=FSDPOptimizerConfig(lr=run.learning_rate),
        device_name="cpu",
    )
    engine.initialize()
    log_probs = engine.infer_batch(DataProto.from_dict(tensors=columns), {"log_probs"}, MicroBatchConfig())["log_probs"]
    difference = ((log_probs - first["log_probs"]) * mask).abs().max().item()
    actor = ActorConfig(clip_ratio_low=CLIP_LOW, clip_ratio_high=CLIP_HIGH, clip_ratio_c=CLIP_NEGATIVE)
    batch = DataProto.from_dict(tensors=columns | {"old_log_probs": log_probs})
    totals = BatchTotals(dp_size=1, batch_num_tokens=first["tokens"], global_batch_size=len(mask))
    loss, _ = PolicyLoss(actor)({"log_probs": log_probs}, batch, totals)
    return [
        Agreement(f"{name}'s first pass, log-probs of its sampled tokens, largest difference", difference),
        Agreement(f"{name}'s first pass, loss, difference", abs(loss.item() - first["loss"])),
    ]
