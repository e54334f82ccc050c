"""Validation: sample responses to held-out prompts, score them, write them to files and compute metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from verl.base.redact import secrets_in
from verl.config import PPOConfig
from verl.datasets.loading import batches
from verl.experience.prompts import repeat_prompts
from verl.experience.records import RecordFolder, generation_records
from verl.experience.sequences import Trajectories, trajectory_scores, with_prompts
from verl.experience.trajectories import how_trajectories_ended, validation_trajectory_metrics
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.token_dump import TokenDump, token_table
from verl.utils.metric import number_or_nan
from verl.utils.token_page import TokenPage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Validator:
    """Generate with ``rollout.val_kwargs``, score, and compute ``val-core/`` and ``val-aux/`` metrics.

    Args:
        generate: answers a batch of prompts.
        score: ``(batch, reward_fn) -> (token scores (bsz, response_length), other values by name)``.
        reward_fn: reward manager for validation.
        dataloader: batches of held-out prompts.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        generate: Callable[[DataProto], DataProto],
        score: Callable[[DataProto, object], tuple[torch.Tensor, dict[str, list]]],
        reward_fn: object,
        dataloader: Iterable[dict],
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.generate = generate
        self.score = score
        self.reward_fn = reward_fn
        self.dataloader = dataloader
        self.dump = RecordFolder(config.trainer.validation_data_dir, secrets_in(config.to_dict()))
        self.token_dump = TokenDump(config.trainer.validation_data_dir, tokenizer, frequency=1)
        self.samples: list[dict[str, Any]] = []
        """Samples of the last validation: input, output, gts, score."""
        self.shown_tokens: list[pa.Table] = []
        """Tokens of its first ``trainer.log_val_generations`` sequences, in tables of :func:`token_table`."""

    def run(self, step: int) -> dict[str, float]:
        """Validate the current policy, write the samples, and return the metrics of :func:`validation_metrics`."""
        columns: dict[str, list] = defaultdict(list)
        samples: list[dict[str, Any]] = []
        ends: list[DataProto] = []
        dumped: list[DataProto] = []
        self.shown_tokens, left = [], self.config.trainer.log_val_generations
        for index, rows in enumerate(batches(self.dataloader)):
            batch, scores, extra = self._generate_and_score(DataProto.from_single_dict(rows), step, index)
            before, scored = len(columns["uid"]), Trajectories.from_batch(batch).scored_rows
            columns["uid"] += batch.non_tensor_batch["uid"][scored].tolist()
            columns["data_source"] += _data_sources(batch.select_idxs(scored))
            # A value may be missing in some batches, which is filled with None. `reward` is always the sum of the token
            # scores, even if the reward function returns a value of that name.
            trajectory_values = {name: [values[row] for row in scored] for name, values in extra.items()}
            trajectory_values["reward"] = trajectory_scores(batch, scores).tolist()
            for key, values in trajectory_values.items():
                columns[key] += [None] * (before - len(columns[key])) + values
            for values in columns.values():
                values += [None] * (len(columns["uid"]) - len(values))
            samples += generation_records(step, self.tokenizer, batch, scores, extra, self.reward_fn)
            ends.append(how_trajectories_ended(batch))
            if self.token_dump.is_due(step):
                dumped.append(batch)
            if left > 0:
                self.shown_tokens.append(token_table(batch[:left]))
                left -= len(self.shown_tokens[-1])
        self.samples = samples
        self.dump.write(step, samples)
        self.token_dump.write(step, *dumped)
        sources, uids = columns.pop("data_source"), columns.pop("uid")
        return validation_metrics(sources, uids, columns) | validation_trajectory_metrics(ends)

    def tokens_page(self, step: int) -> TokenPage:
        """Return ``shown_tokens`` as a page for trackers."""
        table = pa.concat_tables(self.shown_tokens, promote_options="default")
        return self.token_dump.page(f"Validation at step {step}", table)

    def _generate_and_score(
        self, prompts: DataProto, step: int, index: int
    ) -> tuple[DataProto, torch.Tensor, dict[str, list]]:
        uids = np.array([f"val-{index}-{row}" for row in range(len(prompts))], dtype=object)
        meta = {"global_steps": step, "validate": True}
        prompts = prompts | DataProto.from_dict(non_tensors={"uid": uids}, meta_info=meta)
        repeated = repeat_prompts(prompts, self.config.actor_rollout_ref.rollout.val_kwargs.n)
        batch = with_prompts(repeated.select(batch_keys=[]), self.generate(repeated))
        scores, extra = self.score(batch, self.reward_fn)
        return batch, scores, extra


def validation_metrics(data_sources: list[str], uids: list[str], columns: dict[str, list]) -> dict[str, float]:
    """Reduce the values of all samples to metrics ``val-{core|aux}/{data_source}/{variable}/{metric}``.

    Core metrics are mean@N, maj@N/mean, best@N/mean and pass@N of the core variable, with N samples per prompt: ``acc``
    if the reward function returns it, else ``reward``. A variable is used for a data source if its values there are
    numbers or texts.

    Samples that could not be scored, those of failed trajectories that ``rollout.agent.on_failure`` leaves out, and
    samples whose value of a variable is None or not finite, are missing data
    (:mod:`verl.trainer.ppo.validation_metrics`). They change no name, and are counted: ``val-aux/error_rate`` is the
    share of samples without a score, and of each data source ``val-aux/{data_source}/failed_samples`` is their number,
    ``.../unscored_prompts`` that of prompts without any score, and ``.../{core variable}/missing`` that of scored
    samples without a value of the core variable.
    """
    status = columns.get("reward_status", ["ok"] * len(uids))
    is_scored = [value == "ok" for value in status]
    metrics = {"val-aux/error_rate": is_scored.count(False) / max(len(status), 1)}
    for source in dict.fromkeys(data_sources):
        rows = [row for row, name in enumerate(data_sources) if name == source]
        scored = [row for row in rows if is_scored[row]]
        prefix = f"val-aux/{source}"
        metrics[f"{prefix}/failed_samples"] = len(rows) - len(scored)
        metrics[f"{prefix}/unscored_prompts"] = len({uids[row] for row in rows} - {uids[row] for row in scored})
        scored_columns = {
            name: [values[row] if is_scored[row] else None for row in rows]
            for name, values in columns.items()
            if name != "reward_status" and all(isinstance(values[row], int | float | str | None) for row in scored)
        }
        by_source = process_validation_metrics([source] * len(rows), [uids[row] for row in rows], scored_columns)
        variables = by_source.get(source, {})
        core = "acc" if "acc" in variables else "reward"
        if core in variables:
            present = ~np.isnan(list(map(number_or_nan, scored_columns[core])))
            metrics[f"{prefix}/{core}/missing"] = len(scored) - int(present.sum())
        for variable, numbers in variables.items():
            largest = max(_responses(name) for name in numbers)
            for name, value in numbers.items():
                group = "val-core" if variable == core and _is_core(name, largest) else "val-aux"
                metrics[f"{group}/{source}/{variable}/{name}"] = value
    return metrics


def _responses(name: str) -> int:
    """N of ``mean@N`` or ``best@N/mean``."""
    return int(name.split("@")[1].split("/")[0])


def _is_core(name: str, largest: int) -> bool:
    return (
        name.startswith(("mean@", "maj@", "best@", "pass@"))
        and _responses(name) == largest
        and not name.endswith("/std")
    )


def _data_sources(batch: DataProto) -> list[str]:
    sources = batch.non_tensor_batch.get("data_source")
    return ["unknown"] * len(batch) if sources is None else [str(source) for source in sources]
