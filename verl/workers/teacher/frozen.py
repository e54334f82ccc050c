"""Teachers that are forward passes of frozen training engines, in one process: beside others, or with the policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from verl.algorithms.distillation import DivergenceKind, distillation_loss_info
from verl.config import (
    ActorRolloutRefConfig,
    DistillationConfig,
    DistillationTeacherModelConfig,
    FSDPEngineConfig,
    McoreEngineConfig,
)
from verl.config.megatron import with_own_files
from verl.protocol import DataProto
from verl.utils.metric import Metrics
from verl.utils.model import hf_config_of
from verl.vision.families import VisionConfig
from verl.workers.engine import BaseEngine, MicroBatchConfig
from verl.workers.engine.model.divergence import FullDivergence
from verl.workers.teacher.alignment import TextAlignment, spans_of_tokens
from verl.workers.teacher.forward import teacher_columns
from verl.workers.teacher.prompts import rows_for_teacher
from verl.workers.teacher.tokenizers import teacher_model


class FrozenTeachers:
    """The teachers of this rank; back end, precision and sizes of passes are those of ``actor_rollout_ref.ref``.

    A policy that teaches itself has passes of the size of its other ones without gradients (``rollout.log_prob_*``).

    Args:
        config: ``distillation``.
        roles: ``actor_rollout_ref``.
        make_engine: as :meth:`EngineWorker.make_engine`, which loads a model.
        policy: the only teacher, of a policy that teaches itself; nothing is loaded.
    """

    def __init__(
        self,
        config: DistillationConfig,
        roles: ActorRolloutRefConfig,
        make_engine: Callable[..., BaseEngine],
        policy: BaseEngine | None = None,
    ) -> None:
        ref = roles.ref
        passes = ref if policy is None else roles.rollout
        self.config = config
        hf_config = hf_config_of(roles.model)
        vocab_size, self.vision = hf_config.get_text_config().vocab_size, VisionConfig.from_config(hf_config)
        self.micro = MicroBatchConfig(
            micro_batch_size_per_gpu=passes.log_prob_micro_batch_size_per_gpu,
            use_dynamic_bsz=passes.log_prob_use_dynamic_bsz,
            max_token_len_per_gpu=passes.log_prob_max_token_len_per_gpu,
            shares_prompts=roles.actor.use_prefix_grouper and policy is None,  # as teacher it has prompts for each row
        )
        self.alignments = TextAlignment.for_teachers(config, roles.model)
        self.engines: dict[str, BaseEngine] = {} if policy is None else dict.fromkeys(config.teachers, policy)
        for name, teacher in config.teachers.items() if policy is None else ():
            model = teacher_model(teacher.model_path, roles.model)
            model = replace(model, use_remove_padding=roles.model.use_remove_padding)
            engine = make_engine("language_model", ref.strategy, model, _placement(teacher, config, ref.placement))
            if roles.actor.use_prefix_grouper:
                engine.check_shared_prompts("actor.use_prefix_grouper")
            if name not in self.alignments:  # which have ids of their own
                engine.ids_below = vocab_size
            self.engines[name] = engine

    def _temperature(self, name: str) -> float:
        return self.config.teachers[name].inference.temperature or 1.0  # 0 is greedy

    def columns(self, name: str, data: DataProto) -> DataProto:
        """Compute the columns of :func:`teacher_columns` under one teacher; collective.

        With ``distillation.alignment=text`` also those of :meth:`AlignedRows.columns`.
        """
        loss, engine = self.config.distillation_loss, self.engines[name]
        reads, temperature = distillation_loss_info(loss.loss_mode).reads, self._temperature(name)
        if name not in self.alignments:
            columns = teacher_columns(engine, data, reads, self.micro, temperature, loss.topk)
            return columns | spans_of_tokens(data.batch["response_mask"]) if self.config.aligns_text else columns
        aligned, micro = self.alignments[name].rows(data), self.micro
        longest = int(aligned.rows.batch["attention_mask"].sum(-1).max())
        if micro.max_token_len_per_gpu is not None:  # which has room for the longest text in the policy's tokens
            micro = replace(micro, max_token_len_per_gpu=max(micro.max_token_len_per_gpu, longest))
        return aligned.columns(teacher_columns(engine, aligned.rows, reads, micro, temperature))

    def whole_vocabulary(self, data: DataProto) -> tuple[DataProto, FullDivergence, Metrics]:
        """Compute what a divergence of the whole vocabulary reads; collective.

        Each teacher computes all rows, because ranks have different numbers of rows of each.

        Args:
            data: this rank's rows, with ``teacher_index`` if there are several teachers.

        Returns:
            ``teacher_hidden``, (bsz, response_length, largest hidden size), ``teacher_logprobs`` and
            ``teacher_entropys``, each row by its teacher; the teachers' output matrices; and the
            seconds of the slowest rank.
        """
        started, tensors, matrices = time.perf_counter(), dict[str, torch.Tensor](), []
        rows = rows_for_teacher(data, self.vision)
        names = {"hidden": "teacher_hidden", "log_probs": "teacher_logprobs", "entropy": "teacher_entropys"}
        for teacher_index, (name, engine) in enumerate(self.engines.items()):
            with engine.eval_mode():
                outputs = engine.infer_batch(rows, set(names), self.micro, self._temperature(name))
                matrices.append(engine.output_matrix().at(self._temperature(name)))
            for output, column in names.items():
                values, before = outputs[output], tensors.get(column)
                if before is None:
                    tensors[column] = values
                    continue
                if output == "hidden":
                    width = max(values.shape[-1], before.shape[-1])
                    values, before = (pad(tensor, (0, width - tensor.shape[-1])) for tensor in (values, before))
                is_its_row = (data.batch["teacher_index"] == teacher_index).view(-1, *[1] * (values.dim() - 1))
                tensors[column] = torch.where(is_its_row, values, before)
        loss = self.config.distillation_loss
        kind = cast(DivergenceKind, loss.loss_mode)
        divergence = FullDivergence(kind=kind, teachers=matrices, beta=loss.beta, log_prob_min=loss.log_prob_min_clamp)
        seconds = torch.tensor(time.perf_counter() - started, device=next(iter(self.engines.values())).device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return DataProto.from_dict(tensors=tensors), divergence, {"timing_s/teacher": seconds.item()}


def _placement(
    teacher: DistillationTeacherModelConfig,
    config: DistillationConfig,
    placement: FSDPEngineConfig | McoreEngineConfig,
) -> FSDPEngineConfig | McoreEngineConfig:
    is_alone = config.ranks > 0 and len(config.teachers) == 1
    offloads = teacher.inference.free_cache_engine and not is_alone
    return with_own_files(replace(placement, param_offload=placement.param_offload or offloads))
