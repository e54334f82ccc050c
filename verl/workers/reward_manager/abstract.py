"""What every reward manager is: a batch of responses in, scores out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset


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
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Scores of a batch.

        Args:
            data: prompts, responses, attention_mask, response_mask, and what the function reads.
            return_dict: also return what the reward function said beside the score.

        Returns:
            reward_tensor (bsz, response_length) float32, or with ``return_dict``
            ``{"reward_tensor": ..., "reward_extra_info": {name: list of length bsz}}``; the extra
            info always has ``score`` and ``reward_status`` (``ok`` or ``error``).
        """

    def check_dataset(self, dataset: RLHFDataset) -> None:  # noqa: B027 - a hook that may stay empty
        """Look for what scoring will need in the data, before any model loads.

        Raises:
            DataError: a column is missing.
            UnknownDataSourceError: a row has a data source that nothing scores.
        """
