"""What every reward manager is: a batch of responses in, scores out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.reward_manager.function import Pending

Result = dict[str, Any]
"""``{"reward_tensor": ..., "reward_extra_info": {name: list of length bsz}}``."""


class AbstractRewardManager(ABC):
    """Scores a batch.

    Args:
        tokenizer: tokenizer of the policy.
        num_examine: how many samples of each data source to log in every call.
        compute_score: the reward function, in one of the forms of
            :mod:`verl.workers.reward_manager.function`.
        reward_fn_key: column that says which scorer a sample belongs to.
        kwargs: further arguments of the manager or of the reward function.
    """

    @abstractmethod
    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | Result:
        """Scores of a batch.

        Args:
            data: prompts, responses, attention_mask, response_mask, and what the function reads.
            return_dict: also return what the reward function said beside the score.

        Returns:
            reward_tensor (bsz, response_length) float32, or with ``return_dict``
            ``{"reward_tensor": ..., "reward_extra_info": {name: list of length bsz}}``; the extra
            info always has ``score`` and ``reward_status`` (see :data:`verl.utils.killable_pool.STATUSES`).
        """

    def start(self, data: DataProto) -> Pending[torch.Tensor | Result]:
        """Begin to score a batch and return at once; ``result()`` waits for what ``__call__`` returns."""
        future: Future[Any] = ThreadPoolExecutor(1).submit(self, data, return_dict=True)
        return Pending([future], future.result)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score one sample without blocking the event loop.

        Returns:
            ``{"reward_score": float, "reward_extra_info": {name: value}}``.
        """
        result = await self.start(data).wait()
        tokens, extra = (result, {}) if isinstance(result, torch.Tensor) else result.values()
        return {
            "reward_score": float(tokens.sum()),
            "reward_extra_info": {name: values[0] for name, values in (extra or {}).items()},
        }

    def warm_up(self) -> None:  # noqa: B027 - a hook that may stay empty
        """Prepare for the first call while something else runs; does not wait."""

    def check_dataset(self, dataset: RLHFDataset) -> None:  # noqa: B027 - a hook that may stay empty
        """Look for what scoring will need in the data, before any model loads.

        Raises:
            DataError: a column is missing.
            UnknownDataSourceError: a row has a data source that nothing scores.
        """
