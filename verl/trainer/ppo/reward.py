"""From the configuration to a reward manager, from a batch to its scores, and what becomes of failures."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.errors import ConfigError, RewardError
from verl.protocol import DataProto
from verl.schema import COLUMNS, require
from verl.trainer.config import PPOConfig
from verl.trainer.ppo.metrics import response_lengths
from verl.trainer.ppo.stages import metrics_by_source
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.import_utils import load_object
from verl.utils.killable_pool import STATUSES
from verl.utils.metric import distribution
from verl.utils.reward_score import check_settings, default_compute_score
from verl.utils.reward_score.one_source import scorer_for_all
from verl.utils.reward_score.prime_code import code_settings
from verl.workers.config.reward_model import FailurePolicy
from verl.workers.reward_manager import AbstractRewardManager, NaiveRewardManager, get_reward_manager_cls
from verl.workers.reward_manager.function import Pending, form_of, tensors_of

logger = logging.getLogger(__name__)

Metrics = dict[str, float]

FORMATS = {"math": "math_reward"}
"""Names of ``reward_model.reward_format`` that are not data sources."""


def get_custom_reward_fn(config: PPOConfig) -> Callable[..., Any] | None:
    """The function that ``custom_reward_function`` names, with its ``reward_kwargs`` bound; None if it names none.

    Raises:
        ConfigError: there is no such file or function, or it has neither form of
            :mod:`verl.workers.reward_manager.function`.
    """
    chosen = config.custom_reward_function
    if not chosen.path:
        return None
    function = load_object(chosen.path, chosen.name, "custom_reward_function")
    if not callable(function):
        raise ConfigError(f"custom_reward_function.name='{chosen.name}' is {type(function).__name__}, not a function.")
    form_of(function, chosen.reward_kwargs | config.reward_model.scorer_kwargs)
    return functools.partial(function, **chosen.reward_kwargs)


def load_reward_manager(
    config: PPOConfig, tokenizer: Any, num_examine: int, **reward_kwargs: Any
) -> AbstractRewardManager:
    """The reward manager of a configuration.

    Its function is the custom one, or the scorer of ``reward_model.reward_format`` for all rows, or
    goes by data source; ``reward_model.scorer_kwargs`` are bound to it. The manager is the
    registered one called ``reward_manager.name``, or, with ``reward_manager.source=importlib``, the
    class of that name in the file ``reward_manager.module.path``; it is given
    ``reward_model.reward_kwargs``, and of ``max_error_rate``, ``num_workers``, ``timeout_s``,
    ``memory_limit_mb`` and ``max_resp_len`` (``data.max_response_length``) those that it has as parameters.

    Args:
        config: the whole configuration.
        tokenizer: tokenizer of the policy.
        num_examine: how many samples of each data source to log in every call.
        reward_kwargs: further arguments of the manager; they win over the configuration's.

    Raises:
        ConfigError: a name is unknown, a file is missing, or a function has neither form.
        UnknownDataSourceError: ``reward_format`` is no scorer.
    """
    function = _reward_function(config)
    if config.reward_model.scorer_kwargs:
        function = functools.partial(function, **config.reward_model.scorer_kwargs)
    cls = _manager_class(config)
    model = config.reward_model
    offered = {
        "max_error_rate": model.max_error_rate,
        "num_workers": model.num_workers,
        "timeout_s": model.timeout_s,
        "memory_limit_mb": model.memory_limit_mb,
        "max_resp_len": config.data.max_response_length,
    }
    wanted = set(inspect.signature(cls).parameters)
    if NaiveRewardManager in getattr(cls, "__mro__", ()):  # further settings go on to it
        wanted |= set(inspect.signature(NaiveRewardManager).parameters)
    settings = {"reward_fn_key": config.data.reward_fn_key}
    settings |= {name: value for name, value in offered.items() if name in wanted}
    return cls(
        tokenizer=tokenizer,
        num_examine=num_examine,
        compute_score=function,
        **{**settings, **model.reward_kwargs, **reward_kwargs},
    )


def check_reward_data(config: PPOConfig, reward_fn: Any, dataset: Any) -> None:
    """Say what scoring will miss in the data before any model loads.

    A custom data set or manager answers for itself; where a reward model scores, the data needs nothing.

    Raises:
        DataError: a column is missing.
        UnknownDataSourceError: nothing scores a row's data source.
    """
    if config.reward_model.enable or not isinstance(dataset, RLHFDataset):
        return
    if isinstance(reward_fn, AbstractRewardManager):
        reward_fn.check_dataset(dataset)


def start_reward(data: DataProto, reward_fn: Any) -> Pending[tuple[torch.Tensor, dict[str, list[Any]]]]:
    """Begin to score a batch and return at once; ``result()`` waits for what :func:`compute_reward` returns."""
    if isinstance(reward_fn, AbstractRewardManager):
        return reward_fn.start(data).map(lambda result: _checked(result, data, reward_fn))
    return Pending([], lambda: _checked(reward_fn(data, return_dict=True), data, reward_fn))


def compute_reward(data: DataProto, reward_fn: Any) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """Scores of a batch, and what the reward function said beside them.

    Args:
        data: batch with responses.
        reward_fn: a reward manager.

    Returns:
        scores (bsz, response_length), and lists of length bsz by name: ``score``,
        ``reward_status`` (one of :data:`verl.utils.killable_pool.STATUSES`), and the function's own.

    Raises:
        RewardError: too many samples failed, or the manager returned something of another shape.
    """
    return start_reward(data, reward_fn).result()


def status_metrics(statuses: Sequence[str]) -> Metrics:
    """``reward/error_rate``, the share of samples that could not be scored, and ``reward/status/{status}`` of each way.

    >>> metrics = status_metrics(["ok", "timeout", "ok", "error"])
    >>> metrics["reward/error_rate"], metrics["reward/status/timeout"], metrics["reward/status/crashed"]
    (0.5, 0.25, 0.0)
    """
    counts, size = Counter(statuses), max(len(statuses), 1)
    failed = sum(count for status, count in counts.items() if status != "ok")
    rates = {f"reward/status/{status}": counts[status] / size for status in STATUSES if status != "ok"}
    return {"reward/error_rate": failed / size} | rates


def component_metrics(extra: Mapping[str, Sequence[Any]]) -> Metrics:
    """``reward/{name}/mean``, ``/max`` and ``/min`` of every number that the reward function returned.

    A sample that could not be scored, or has no such value, is no part of them. Names that hold a text
    or a list for any sample have no numbers.

    Args:
        extra: the second result of :func:`compute_reward`.
    """
    statuses = extra.get("reward_status")
    metrics: Metrics = {}
    for name, values in extra.items():
        scored = [v for row, v in enumerate(values) if v is not None and (statuses is None or statuses[row] == "ok")]
        if scored and all(isinstance(value, (bool, int, float)) for value in scored):
            metrics |= distribution([float(value) for value in scored], f"reward/{name}")
    return metrics


def leave_out_failed(
    batch: DataProto, statuses: Sequence[str], policy: FailurePolicy, needs_siblings: bool = False
) -> tuple[DataProto, Metrics]:
    """Take the samples that could not be scored out of training: a failure is not a score of zero.

    Their ``response_mask`` becomes zero, so no loss sees them, and they leave their group, so that
    their missing score is no part of any baseline. So do samples that have nothing left to be compared
    with: the greedy response to their prompt could not be scored, or none of their siblings.

    Args:
        batch: with response_mask and uid; ``baseline_status`` of greedy responses, if there are any.
        statuses: ``reward_status`` of each sample.
        policy: ``mask`` takes out the failed samples, ``drop_group`` all samples of a prompt of which one failed,
            ``stop`` allows no failure.
        needs_siblings: a sample without another one of its prompt has no baseline.

    Returns:
        the new ``response_mask`` and ``uid``; :func:`status_metrics`, ``reward/left_out_rate``, the share
        of samples that were taken out, and ``reward/baseline_error_rate``, that of greedy responses without score.

    Raises:
        RewardError: a sample failed, and the policy is ``stop``.
    """
    require(batch, ("response_mask", "uid"), "leaving out samples without score")
    assert batch.batch is not None
    metrics, uids = status_metrics(statuses), batch.non_tensor_batch["uid"].astype(str)
    reasons = np.array(statuses, dtype=object)
    if "baseline_status" in batch.non_tensor_batch:
        of_baseline = batch.non_tensor_batch["baseline_status"]
        metrics["reward/baseline_error_rate"] = float((of_baseline != "ok").mean())
        reasons = np.where(reasons == "ok", of_baseline, reasons)
    failed = reasons != "ok"
    if policy == "stop" and failed.any():
        row = int(failed.argmax())
        raise RewardError(
            f"{failed.sum()} of {len(failed)} samples could not be scored; the first is sample {uids[row]} "
            f"({reasons[row]}), and reward_model.on_failure=stop. The reason is logged above. Correct the reward "
            "function or the data, or set reward_model.on_failure=mask to go on without such samples."
        )
    out = np.isin(uids, uids[failed]) if policy == "drop_group" else failed
    if needs_siblings and out.any():
        remaining = Counter(uids[~out])
        out = out | np.array([remaining[uid] < 2 for uid in uids])
    new_uids = batch.non_tensor_batch["uid"].copy()
    new_uids[out] = [f"{uids[row]}-left-out-{row}" for row in np.flatnonzero(out)]
    mask = batch.batch["response_mask"]
    keep = torch.from_numpy(~out).to(mask).unsqueeze(-1)
    columns = DataProto.from_dict(tensors={"response_mask": mask * keep}, non_tensors={"uid": new_uids})
    return columns, metrics | {"reward/left_out_rate": float(out.mean())}


class RewardRecord:
    """What one step had scored: its batch or, with dynamic sampling, every batch that was drawn for it."""

    def __init__(self) -> None:
        self.batches: list[DataProto] = []
        self._names: dict[str, None] = {}
        self._rates: list[Metrics] = []

    def add(self, batch: DataProto, names: Sequence[str], rates: Metrics) -> None:
        """Take in a scored batch.

        Args:
            batch: with the columns of :func:`verl.trainer.ppo.stages.score_columns`.
            names: the columns that the reward function made.
            rates: the second result of :func:`leave_out_failed`.
        """
        self.batches.append(batch)
        self._names |= dict.fromkeys(names)
        self._rates.append(rates)

    def generated_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(int(response_lengths(batch).sum()) for batch in self.batches)

    def metrics(self) -> Metrics:
        """``reward/...`` and ``train-source/...`` over all that was scored."""
        sizes = [len(batch) for batch in self.batches]
        metrics = {
            name: float(np.average([rates[name] for rates in self._rates], weights=sizes)) for name in self._rates[0]
        }
        extra = {
            name: [value for batch in self.batches for value in batch.non_tensor_batch.get(name, [None] * len(batch))]
            for name in self._names
        }
        scored = DataProto.concat(
            [
                batch.select(
                    batch_keys=["responses", "attention_mask", "token_level_scores"],
                    non_tensor_batch_keys=[name for name in ("data_source",) if name in batch.non_tensor_batch],
                )
                for batch in self.batches
            ]
        )
        by_source = metrics_by_source(scored, scored.batch["token_level_scores"], extra["reward_status"])
        return metrics | component_metrics(extra) | by_source


def _checked(result: Any, data: DataProto, reward_fn: Any) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    scores, extra = (result, {}) if isinstance(result, torch.Tensor) else _unpacked(result)
    expected = tensors_of(data)["responses"].shape
    if scores.shape != expected:
        raise RewardError(
            f"{type(reward_fn).__name__} returned scores of shape {tuple(scores.shape)}; "
            f"expected that of the responses, {tuple(expected)}."
        )
    if wrong := [name for name, values in extra.items() if len(values) != len(data)]:
        raise RewardError(
            f"{type(reward_fn).__name__} returned reward_extra_info['{wrong[0]}'] with {len(extra[wrong[0]])} values "
            f"for {len(data)} samples."
        )
    if taken := sorted(COLUMNS.keys() & extra.keys()):
        raise RewardError(
            f"the reward function returned '{taken[0]}', the name of a column of verl: {COLUMNS[taken[0]].meaning} "
            f"(made by {COLUMNS[taken[0]].producer}). Give it another name."
        )
    extra.setdefault("reward_status", ["ok"] * len(data))
    scores, extra["reward_status"] = _without_non_finite(scores, extra["reward_status"], type(reward_fn).__name__)
    extra.setdefault("score", scores.sum(-1).tolist())
    return scores, extra


def _without_non_finite(scores: torch.Tensor, statuses: Sequence[str], manager: str) -> tuple[torch.Tensor, list[str]]:
    """A sample with a score that is NaN or infinite, of a manager that does not look, becomes a failed one."""
    bad = ~scores.isfinite().all(-1)
    if not bad.any():
        return scores, list(statuses)
    rows = bad.nonzero().flatten().tolist()
    first = scores[rows[0]]
    logger.error(
        "%s gave %d of %d samples a score that is not finite; the first is row %d, with %s. They count as failed "
        "(reward_status=error, reward_model.on_failure).",
        manager,
        len(rows),
        len(scores),
        rows[0],
        first[~first.isfinite()][0].item(),
    )
    statuses = ["error" if row in rows and status == "ok" else status for row, status in enumerate(statuses)]
    return torch.where(bad.unsqueeze(-1), 0.0, scores), statuses


def _unpacked(result: dict[str, Any]) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    extra = result.get("reward_extra_info") or {}
    return result["reward_tensor"], {name: list(values) for name, values in extra.items()}


def _reward_function(config: PPOConfig) -> Callable[..., Any]:
    custom, name = get_custom_reward_fn(config), config.reward_model.reward_format
    if custom is not None and name:
        raise ConfigError(
            f"both custom_reward_function.path and reward_model.reward_format='{name}' choose the reward. Set one."
        )
    if custom is not None:
        return custom
    code = _code_settings(config)
    check_settings(code | config.reward_model.scorer_kwargs)
    if not name:
        return functools.partial(default_compute_score, **code)
    source = FORMATS.get(name, name)
    check_settings(code | config.reward_model.scorer_kwargs, source)
    return functools.partial(scorer_for_all(source), **code)


def _code_settings(config: PPOConfig) -> dict[str, Any]:
    model, service = config.reward_model, config.reward_model.sandbox_fusion
    return code_settings(
        url=service.url,
        max_concurrent=service.max_concurrent,
        memory_limit_mb=service.memory_limit_mb,
        num_workers=model.num_workers,
        timeout_s=model.timeout_s,
    )


def _manager_class(config: PPOConfig) -> Any:
    chosen = config.reward_manager
    if chosen.source == "register":
        return get_reward_manager_cls(chosen.name)
    if not chosen.module.path:
        raise ConfigError("reward_manager.source=importlib needs reward_manager.module.path, the file of the class.")
    return load_object(chosen.module.path, chosen.name, "reward_manager.module")
