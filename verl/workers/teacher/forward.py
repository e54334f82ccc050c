"""The columns of a teacher that is a forward pass of a training engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from verl.algorithms.distillation import DivergenceKind, Reads
from verl.config import DivergenceConfig
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.vision.families import VisionConfig
from verl.workers.engine import BaseEngine, MicroBatchConfig
from verl.workers.engine.model.divergence import FullDivergence
from verl.workers.teacher.prompts import rows_for_teacher

COLUMNS: Mapping[Reads, Mapping[str, str]] = {
    "sampled": {"log_probs": "teacher_logprobs", "entropy": "teacher_entropys"},
    "topk": {
        "log_probs": "teacher_logprobs",
        "entropy": "teacher_entropys",
        "top_ids": "teacher_topk_ids",
        "top_log_probs": "teacher_topk_logprobs",
    },
    "full": {"hidden": "teacher_hidden"},
}
"""Outputs of the teacher's engine and the batch columns that they become, for each kind of distillation loss."""


def teacher_columns(
    engine: BaseEngine,
    batch: DataProto,
    reads: Reads,
    micro: MicroBatchConfig,
    temperature: float = 1.0,
    topk: int | None = None,
    vision: VisionConfig | None = None,
) -> DataProto:
    """Compute the columns of the teacher that a distillation loss reads; collective.

    Args:
        engine: the teacher.
        batch: this rank's rows, with the prompts of the policy or also with those of the teacher.
        reads: of the loss.
        micro: size of the passes.
        temperature: divisor of the teacher's logits.
        topk: most likely tokens, for a loss of them.
        vision: of a model with images.

    Raises:
        ConfigError: the loss reads the most likely tokens, and ``topk`` is None.
    """
    if reads == "topk" and topk is None:
        raise ConfigError("a distillation loss of the teacher's most likely tokens needs their number: set topk.")
    columns = COLUMNS[reads]
    with engine.eval_mode():
        outputs = engine.infer_batch(rows_for_teacher(batch, vision), set(columns), micro, temperature, topk or 0)
    return DataProto.from_dict(tensors={column: outputs[name] for name, column in columns.items()})


def full_divergence(config: DivergenceConfig, teachers: Sequence[tuple[BaseEngine, float]]) -> FullDivergence:
    """Return what a policy's engine compares itself with, for a loss of the whole vocabulary. Collective.

    Args:
        config: the loss.
        teachers: engines as they are now, in the order of ``teacher_index``, each with its temperature.
    """
    matrices = []
    for engine, temperature in teachers:
        with engine.eval_mode():
            matrices.append(engine.output_matrix().at(temperature))
    return FullDivergence(
        kind=cast(DivergenceKind, config.loss_mode),
        teachers=matrices,
        beta=config.beta,
        log_prob_min=config.log_prob_min_clamp,
    )
