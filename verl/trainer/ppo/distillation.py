"""The driver's part of distillation: which teacher scores which rows, and the metrics of their divergence.

::

    batch ──► rows of each teacher ──► one call per teacher ──► teacher_logprobs, ... of all rows

A batch with prompts of the teachers' own (``teacher_prompts``) has the policy's responses scored under those. A teacher
with another tokenizer (``distillation.alignment=text``) has its prompts in its own tokens and chat template.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl.config import local_copies
from verl.config.agent import SINGLE_TURN
from verl.datasets import RLHFDataset
from verl.datasets.chat import encode, render_prompt
from verl.datasets.row_conversation import row_template_kwargs
from verl.errors import DataError
from verl.protocol import DataProto
from verl.protocol.future import wait_for
from verl.schema import require
from verl.trainer.balance import deal
from verl.trainer.ppo.stages import ACTOR_COLUMNS
from verl.utils.metric import Metrics
from verl.utils.torch_functional import masked_mean
from verl.workers.teacher.prompts import TEACHER_PROMPTS
from verl.workers.teacher.tokenizers import tokenizers_by_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import DataConfig, DistillationConfig, PPOConfig
    from verl.single_controller.base.worker_group import WorkerGroup


class Teachers:
    """Lets teachers score the responses of a step.

    Args:
        config: the whole configuration.
    """

    def __init__(self, config: PPOConfig) -> None:
        self._config = config.distillation
        self._data = config.data
        self._tokenizers = tokenizers_by_text(config.distillation, local_copies(config.actor_rollout_ref.model))
        self._balance = config.trainer.balance_batch
        self._shares_prompts = config.actor_rollout_ref.actor.use_prefix_grouper

    def columns(self, batch: DataProto, workers: WorkerGroup | None) -> DataProto:
        """Return the teachers' columns of all rows, in their order, and ``teacher_index`` of several teachers.

        Without ``workers`` only the latter: the teachers are in the workers of the policy, and compute in its update.

        Raises:
            DataError: a row names no teacher.
        """
        names, index = list(self._config.teachers), teacher_index(batch, self._config)
        tensors: dict[str, torch.Tensor] = {}
        for position, name in enumerate(names):
            if workers is None:
                break
            members = (index == position).nonzero()[0].tolist()
            if not members:
                continue
            rows = batch.select_idxs(members)
            if name in self._tokenizers:
                rows = rows | prompts_of_messages(rows, self._tokenizers[name], self._data)
            dealt = deal(
                rows,
                workers.num_parts("compute_teacher_log_prob"),
                balance=self._balance,
                columns=[column for column in (*ACTOR_COLUMNS, *TEACHER_PROMPTS) if column in rows.batch.keys()],
                pads=True,
                shares_prompts=self._shares_prompts,
            )
            teacher_output = dealt.restore(wait_for(workers.compute_teacher_log_prob(dealt.rows, teacher=name)))
            for column, values in teacher_output.batch.items():
                column_values = tensors.setdefault(column, values.new_zeros((len(batch), *values.shape[1:])))
                column_values[members] = values
        if len(names) > 1:
            tensors["teacher_index"] = torch.from_numpy(index)
        return DataProto.from_dict(tensors=tensors)


def prompts_of_messages(batch: DataProto, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> DataProto:
    """Render the prompts of a batch in the chat template of another tokenizer, with the variables of the policy's.

    Args:
        batch: with ``raw_prompt`` and ``uid``; rows with the same uid have the same prompt.
        tokenizer: the teacher's.
        data: the section ``data``.

    Returns:
        ``teacher_prompts`` and ``teacher_prompts_mask``, (bsz, longest prompt), padded on the left.

    Raises:
        DataError: the template refuses the messages.
    """
    require(batch, ("raw_prompt", "uid"), "a teacher with another tokenizer (data.return_raw_chat=true);")
    columns, ids_by_uid = batch.non_tensor_batch, dict[object, list[int]]()
    for row, uid in enumerate(columns["uid"].tolist()):
        if uid not in ids_by_uid:
            variables = {name: values[row] for name, values in columns.items()}
            where = f"the row with index {variables.get('index')} of data source {variables.get('data_source')}"
            kwargs = dict(data.apply_chat_template_kwargs or {})
            kwargs |= row_template_kwargs(variables, data.tools_key, data.enable_thinking_key, tokenizer, where)
            rendered = render_prompt(list(columns["raw_prompt"][row]), tokenizer, where, **kwargs)
            ids_by_uid[uid] = encode(rendered, tokenizer)
    prompts = [ids_by_uid[uid] for uid in columns["uid"].tolist()]
    longest, pad = max(map(len, prompts)), tokenizer.pad_token_id
    tensors = {
        "teacher_prompts": torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts]),
        "teacher_prompts_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
    }
    return DataProto.from_dict(tensors=tensors)


def teacher_index(batch: DataProto, config: DistillationConfig) -> np.ndarray:
    """Return the position of each row's teacher in ``config.teachers``, (bsz,) int64.

    Raises:
        DataError: the batch has no column ``teacher_key``, or a row's value is no teacher's key.
    """
    teachers = config.teachers
    if len(teachers) == 1 and next(iter(teachers.values())).key is None:
        return np.zeros(len(batch), dtype=np.int64)
    if config.teacher_key not in batch.non_tensor_batch:
        raise DataError(
            f"distillation.teacher_key={config.teacher_key}: the rows have no such column, which says what teacher "
            f"scores them. They have {', '.join(sorted(batch.non_tensor_batch))}."
        )
    keys = batch.non_tensor_batch[config.teacher_key].tolist()
    check_teacher_keys(keys, config)
    positions = {teacher.key: position for position, teacher in enumerate(teachers.values())}
    return np.array([positions[str(key)] for key in keys], dtype=np.int64)


def check_teacher_keys(keys: Sequence[object], config: DistillationConfig) -> None:
    """Check that each of the rows' keys, which may be numbers, is that of a teacher.

    Raises:
        DataError: one is not; the message names the first such row.
    """
    teacher_keys = {teacher.key for teacher in config.teachers.values()}
    if teacher_keys == {None}:
        return
    unknown = next(((row, key) for row, key in enumerate(keys) if str(key) not in teacher_keys), None)
    if unknown is not None:
        raise DataError(
            f"row {unknown[0]} has {config.teacher_key}={unknown[1]!r}, and no teacher has this key: "
            f"{', '.join(f'{name}.key={teacher.key}' for name, teacher in config.teachers.items())} "
            "(distillation.teacher_models). Add a teacher for these rows, or leave them out."
        )


def check_teacher_data(config: DistillationConfig, dataset: object, aligned: Collection[str] = ()) -> None:
    """Check, before any model loads, that each row of the data has a teacher; own data sets are not checked.

    Args:
        config: ``distillation``.
        dataset: of training.
        aligned: names of the teachers with another tokenizer, which read single turns alone.

    Raises:
        DataError: a row names no teacher, or an agent loop answers it and its teacher has another tokenizer.
    """
    if not isinstance(dataset, RLHFDataset):
        return
    by_key = {teacher.key: name for name, teacher in config.teachers.items()}
    if by_key.keys() != {None}:
        dataset.require_columns({config.teacher_key: "distillation.teacher_key"})
        check_teacher_keys([*dataset.source_column(config.teacher_key)], config)
    if not aligned:
        return
    columns = dataset.source_column("agent_name"), dataset.source_column(config.teacher_key)
    for item, (agent, key) in enumerate(zip(*columns, strict=True)):
        name = by_key[None if None in by_key else str(key)]
        if (agent or SINGLE_TURN) != SINGLE_TURN and name in aligned:
            raise DataError(
                f"{dataset.place(item)}: the agent loop {agent} answers this row, and its teacher {name} has another "
                "tokenizer (distillation.alignment=text): results of tools are in the chat template of the policy "
                "alone. Leave such rows out, or give them a teacher with the policy's tokenizer."
            )


def distillation_metrics(batch: DataProto) -> Metrics:
    """Measure how far the policy is from its teachers on the tokens that it sampled.

    ``distillation/kl`` is the mean of log p - log q over the response tokens, an estimate of KL(p ‖ q), with p the
    policy before the update; ``distillation/kl/SOURCE`` that of the rows of one data source;
    ``distillation/teacher_entropy`` the teachers' mean entropy, in nats, of teachers that tell it. Where teachers are
    compared by text, ``distillation/aligned_tokens`` is the share of the policy's tokens that are in a span, which
    alone are measured, and ``distillation/tokens_per_span`` their number in each. Teachers of the
    whole vocabulary compute in the update of the policy, so that a step without one has none of these.
    """
    columns = batch.batch
    policy = next((columns[name] for name in ("old_log_probs", "rollout_log_probs") if name in columns.keys()), None)
    mask = columns["distillation_mask" if "distillation_mask" in columns.keys() else "response_mask"].bool()
    metrics: Metrics = {}
    if "span_ends" in columns.keys() and columns["response_mask"].any():
        metrics["distillation/aligned_tokens"] = masked_mean(mask.float(), columns["response_mask"]).item()
    if not mask.any():
        return metrics
    if "span_ends" in columns.keys():
        places = torch.arange(mask.shape[1], device=mask.device)
        metrics["distillation/tokens_per_span"] = (mask.sum() / (columns["span_ends"] == places).sum()).item()
    if "teacher_entropys" in columns.keys():
        metrics["distillation/teacher_entropy"] = masked_mean(columns["teacher_entropys"], mask).item()
    if policy is None or "teacher_logprobs" not in columns.keys():
        return metrics
    gap = policy - columns["teacher_logprobs"]
    metrics["distillation/kl"] = masked_mean(gap, mask).item()
    sources = batch.non_tensor_batch.get("data_source")
    for source in [] if sources is None else sorted(set(sources.tolist()), key=str):
        rows = torch.from_numpy(sources == source)
        if mask[rows].any():
            metrics[f"distillation/kl/{source}"] = masked_mean(gap[rows], mask[rows]).item()
    return metrics
