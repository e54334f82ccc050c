"""A curriculum sampler that prefers prompts of medium difficulty for the current policy."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.datasets.sampler import AbstractCurriculumSampler, BatchSampler, require_rows
from verl.errors import SchemaError

if TYPE_CHECKING:
    from verl.config import DataConfig
    from verl.protocol import DataProto


class DifficultyCurriculum(BatchSampler, AbstractCurriculumSampler):
    """Draw rows whose success rate is near a target more often.

    A group of responses that are all right or all wrong has no advantage under a group baseline; the success variance p
    (1 - p) measures how far a prompt is from that (arXiv:2504.03380 filters by p, arXiv:2502.12272 samples by p (1 -
    p)). With target t and sharpness k a row is drawn with a weight proportional to

        w(p) = (p / t)^(k t) ((1 - p) / (1 - t))^(k (1 - t))

    which has its maximum 1 at p = t; t = 1/2 and k = 2 give 4 p (1 - p). p is estimated as the mean of the row's
    outcomes and one prior outcome of value t. Each visit multiplies the count of earlier outcomes by ``decay``, since
    the policy changes. So a row that was never drawn has the maximal weight.

    Rows that were not drawn for ``revisit_epochs`` epochs come first, the longest waiting ahead. Rows of one batch are
    distinct. The order is a function of ``data.seed`` and the batches given to :meth:`update`.

    Settings: ``data.curriculum``.
    """

    def __init__(self, data_source: Sized, data_config: DataConfig) -> None:
        super().__init__(data_source, data_config)
        self.config = data_config.curriculum
        self.successes = np.zeros(len(data_source))
        self.trials = np.zeros(len(data_source))
        self.last_batch = np.zeros(len(data_source), dtype=np.int64)
        """(rows,) number of the batch that used a row last, counted from 1; 0 means never."""

    @property
    def success_rates(self) -> np.ndarray:
        """(rows,) estimates of p."""
        return (self.successes + self.config.target_success) / (self.trials + 1)

    @property
    def weights(self) -> np.ndarray:
        """(rows,) relative weight of each row in a draw, at most 1."""
        return np.exp(self._log_weights())

    def _log_weights(self) -> np.ndarray:
        rates, target = self.success_rates, self.config.target_success
        right = target * np.log(rates / target)
        log_odds_of_failure = (1 - target) * np.log((1 - rates) / (1 - target))
        return self.config.sharpness * (right + log_odds_of_failure)

    def draw(self) -> list[int]:
        """Rows that have waited too long, then others by weight, without replacement."""
        self._grow()
        generator = np.random.default_rng([self.seed, self.batches])
        # The smallest of exponential variables with rates w are a sample by weight w without replacement
        # (Efraimidis and Spirakis 2006); computed with logarithms, as small weights would underflow.
        keys = np.log(generator.exponential(size=len(self.last_batch))) - self._log_weights()
        batches_per_epoch = max(1, len(self.dataset) // self.batch_size)
        waited = self.batches + 1 - self.last_batch
        is_due = waited > self.config.revisit_epochs * batches_per_epoch
        order = np.lexsort((keys, np.where(is_due, -waited, 0)))
        rows = order[: self.batch_size]
        self.last_batch[rows] = self.batches + 1
        return rows.tolist()

    def update(self, batch: DataProto) -> None:
        """Count the outcomes of a batch.

        Args:
            batch: ``row_index`` (bsz,), ``token_level_scores`` (bsz, response_len), and optionally ``reward_status``
                (bsz,): rows other than ``ok`` could not be scored and are not counted.

        Raises:
            SchemaError: a column is missing.
        """
        extra = batch.non_tensor_batch
        if "row_index" not in extra or "token_level_scores" not in batch.batch.keys():
            raise SchemaError(
                "DifficultyCurriculum.update needs the columns 'row_index' and 'token_level_scores' (batch has: "
                f"{', '.join(sorted([*extra, *batch.batch.keys()]))}). A custom dataset must return each item's "
                "index as 'row_index'."
            )
        self._grow()
        rows = extra["row_index"].astype(np.int64)
        is_success = batch.batch["token_level_scores"].sum(-1).numpy() >= self.config.success_score
        if "reward_status" in extra:
            is_scored = extra["reward_status"] == "ok"
            rows, is_success = rows[is_scored], is_success[is_scored]
        for row in np.unique(rows):
            outcomes = is_success[rows == row]
            self.successes[row] = self.config.decay * self.successes[row] + outcomes.sum()
            self.trials[row] = self.config.decay * self.trials[row] + len(outcomes)

    def progress(self) -> dict[str, object]:
        """Outcomes and last draw of every row."""
        return {
            "successes": torch.from_numpy(self.successes.copy()),
            "trials": torch.from_numpy(self.trials.copy()),
            "drawn": torch.from_numpy(self.last_batch.copy()),
        }

    def restore(self, progress: dict[str, Any]) -> None:
        """Restore a saved :meth:`progress`."""
        self.successes = progress["successes"].numpy().copy()
        self.trials = progress["trials"].numpy().copy()
        self.last_batch = progress["drawn"].numpy().copy()

    def _grow(self) -> None:
        """Extend the arrays for new rows of a growing data set, whose waiting time starts now."""
        require_rows(self.dataset, len(self.last_batch))
        more = len(self.dataset) - len(self.last_batch)
        if more:
            self.successes = np.append(self.successes, np.zeros(more))
            self.trials = np.append(self.trials, np.zeros(more))
            self.last_batch = np.append(self.last_batch, np.full(more, self.batches))
