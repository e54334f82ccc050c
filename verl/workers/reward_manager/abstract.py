"""Interface of reward managers, and their registry."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from verl.base.registry import Registry
from verl.datasets.rl_dataset import RLHFDataset
from verl.protocol import DataProto
from verl.utils.deferred import Deferred

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RawRewardFn = Callable[..., object]
"""A reward function of a user, in one of the forms of :mod:`verl.workers.reward_manager.function`."""
Result = dict[str, Any]
"""``{"reward_tensor": ..., "reward_extra_info": {name: list of length bsz}}``."""


class RewardTensor(torch.Tensor):
    """Scores (bsz, response_length) that a manager's call returns, together with the further values.

    Both forms work::

        reward_tensor = manager(data)
        reward_tensor, reward_extra_info = manager(data)

    It iterates over these two, since a plain tensor of two rows would unpack to its rows in the second form. Every
    operation gives a plain tensor; ``reward_tensor.unbind()`` has the rows.
    """

    extra_info: Mapping[str, Sequence[object]]

    # That of Parameter returns plain tensors, so that results of operations are no RewardTensor.
    __torch_function__ = torch.nn.Parameter.__torch_function__  # type: ignore[assignment]

    @classmethod
    def from_result(cls, result: Result) -> RewardTensor:
        """Join the two parts of a result."""
        scores = result["reward_tensor"].as_subclass(cls)
        scores.extra_info = result["reward_extra_info"]
        return scores

    def __iter__(self) -> Iterator[object]:
        return iter((self.as_subclass(torch.Tensor), self.extra_info))


class AbstractRewardManager(ABC):
    """Computes the scores of a batch of responses.

    Args:
        tokenizer: tokenizer of the policy.
        num_examine: how many samples of each data source to log in every call.
        compute_score: the reward function, in one of the forms of
            :mod:`verl.workers.reward_manager.function`.
        reward_fn_key: column with the data source, by which a scorer is chosen.
        kwargs: further arguments of the manager or of the reward function.
    """

    @abstractmethod
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: Callable[..., object] | None = None,
        reward_fn_key: str = "data_source",
        **kwargs: object,
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | Result:
        """Score a batch and wait.

        Args:
            data: prompts, responses, attention_mask, response_mask, and the columns that the function reads.
            return_dict: also return the further values of the reward function.

        Returns:
            reward_tensor (bsz, response_length) float32, that of verl's managers a :class:`RewardTensor`; or with
            ``return_dict`` ``{"reward_tensor": ..., "reward_extra_info": {name: list of length bsz}}``; the extra
            info always has ``score`` and ``reward_status`` (see :data:`verl.supervision.killable_pool.STATUSES`).
        """

    def start(self, data: DataProto) -> Deferred[torch.Tensor | Result]:
        """Start to score a batch and return at once; ``result()`` waits and returns what ``__call__`` does."""
        future: Future[torch.Tensor | Result] = ThreadPoolExecutor(1).submit(call, self, data)
        return Deferred([future], future.result)

    async def run_single(self, data: DataProto) -> dict[str, object]:
        """Score one sample without blocking the event loop.

        Returns:
            ``{"reward_score": float, "reward_extra_info": {name: value}}``.
        """
        return single_score(await self.start(data).wait())

    def warm_up(self) -> None:  # noqa: B027 - a hook that may stay empty
        """Start preparing for the first call, without waiting."""

    def check_dataset(self, dataset: RLHFDataset) -> None:  # noqa: B027 - a hook that may stay empty
        """Check, before any model loads, that the data has what scoring needs.

        Raises:
            DataError: a column is missing.
            UnknownDataSourceError: a row's data source has no scorer.
        """


def call(manager: Callable[..., torch.Tensor | Result], data: DataProto) -> torch.Tensor | Result:
    """Call a manager or function with ``return_dict=True`` if it has such a parameter."""
    parameters = inspect.signature(manager).parameters
    takes = "return_dict" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return manager(data, return_dict=True) if takes else manager(data)


def single_score(result: torch.Tensor | Result) -> dict[str, object]:
    """Convert the scores of a batch of one sample to the result of :meth:`AbstractRewardManager.run_single`."""
    parts: Result = {"reward_tensor": result} if isinstance(result, torch.Tensor) else result
    extra = parts.get("reward_extra_info") or {}
    return {
        "reward_score": float(parts["reward_tensor"].sum(dtype=torch.float64)),
        "reward_extra_info": {name: values[0] for name, values in extra.items()},
    }


M = TypeVar("M", bound=type[AbstractRewardManager])

REWARD_MANAGERS: Registry[type[AbstractRewardManager]] = Registry("reward manager")
REWARD_MANAGER_REGISTRY = REWARD_MANAGERS.entries
"""Classes of the managers by name: the dict under the name by which public code reads and changes it."""


def register(name: str) -> Callable[[M], M]:
    """Return a class decorator that registers a reward manager under ``name``."""
    return cast(Any, REWARD_MANAGERS.register(name))


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """Return the reward manager registered under ``name``.

    Raises:
        ConfigError: the name is unknown; the message lists those that exist.
    """
    return REWARD_MANAGERS.get(name)
