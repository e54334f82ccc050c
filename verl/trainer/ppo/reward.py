"""Scoring in the training loop: build the reward manager, score batches, mask failed samples, compute metrics."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.base.doors import old_names
from verl.base.import_utils import load_object
from verl.config import FailurePolicy, PPOConfig
from verl.errors import ConfigError, RewardError
from verl.protocol import DataProto
from verl.schema import COLUMNS, require
from verl.supervision.killable_pool import STATUSES
from verl.trainer.config.load import load_config
from verl.trainer.ppo.dynamic_sampling import informative_rows
from verl.trainer.ppo.metric_utils import response_lengths
from verl.trainer.ppo.sequences import Trajectories, compared_groups, trajectory_scores
from verl.trainer.ppo.stages import metrics_by_source
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.deferred import Deferred
from verl.utils.metric import Metrics, distribution, number_or_nan
from verl.utils.reward_score import FORMATS, check_settings, default_compute_score, scorer_for_all
from verl.utils.reward_score.prime_code import code_settings
from verl.workers.reward_manager import AbstractRewardManager, NaiveRewardManager, get_reward_manager_cls
from verl.workers.reward_manager.abstract import call
from verl.workers.reward_manager.function import OF_JUDGE, form_of, tensors_of
from verl.workers.reward_manager.scores import on_drawn_tokens, token_scores
from verl.workers.reward_manager.texts import response_texts

logger = logging.getLogger(__name__)


Scored = tuple[torch.Tensor, dict[str, list[Any]]]
"""Scores (bsz, response_length), and further values of the reward function by name, one per sample."""
RewardHandle = Deferred[Scored]
"""Running scoring of a batch: ``result()`` waits, and returns or raises what :func:`compute_reward` does."""


def get_custom_reward_fn(config: PPOConfig | Mapping[str, Any]) -> Callable[..., Any] | None:
    """Load the function named by ``custom_reward_function``, with its ``reward_kwargs`` bound; None if unset.

    Args:
        config: the whole configuration, typed, or any part of it as :func:`load_reward_manager` takes it. Only the
            sections of rewards are checked.

    Raises:
        ConfigError: there is no such file or function, or it has none of the forms of
            :mod:`verl.workers.reward_manager.function`.
    """
    config = _typed(config, _OF_FUNCTION)
    chosen = config.custom_reward_function
    if not chosen.path:
        return None
    function = load_object(chosen.path, chosen.name, "custom_reward_function")
    if not callable(function):
        raise ConfigError(f"custom_reward_function.name='{chosen.name}' is {type(function).__name__}, not a function.")
    judge = dict.fromkeys(_named(function, OF_JUDGE)) if config.judge is not None else {}
    form_of(function, chosen.reward_kwargs | config.reward_model.scorer_kwargs | judge)
    return functools.partial(function, **chosen.reward_kwargs)


def load_reward_manager(
    config: PPOConfig | Mapping[str, Any], tokenizer: Any, num_examine: int = 0, **reward_kwargs: Any
) -> AbstractRewardManager:
    """Build the reward manager of a configuration.

    Its reward function is the custom function, else the scorer ``reward_model.reward_format`` for all rows, else the
    scorer of each row's data source; ``reward_model.scorer_kwargs`` are bound to it. Its class is the registered
    ``reward_manager.name`` or, with ``reward_manager.source=importlib``, the class of that name in the file
    ``reward_manager.module.path``. The class gets ``reward_model.reward_kwargs`` and those of ``max_error_rate``,
    ``num_workers``, ``timeout_s``, ``memory_limit_mb`` and ``max_resp_len`` (``data.max_response_length``) that its
    signature has.

    Args:
        config: the whole configuration, typed; or a ``DictConfig`` or dict with any part of it, of which the sections
            of rewards and data are checked.
        tokenizer: tokenizer of the policy.
        num_examine: how many samples of each data source to log in every call.
        reward_kwargs: further arguments of the manager; they override the configuration's. Those of :data:`OF_JUDGE`
            go to the function and to the manager, if these name them.

    Raises:
        ConfigError: a name is unknown, a file is missing, the function has none of the forms, or there is a judge that
            neither function nor manager asks.
        UnknownDataSourceError: no scorer is called ``reward_format``.
    """
    config = _typed(config, _OF_MANAGER)
    judge = {name: reward_kwargs.pop(name) for name in OF_JUDGE if name in reward_kwargs}
    scorer_kwargs = _judge_of_run(config, judge) | config.reward_model.scorer_kwargs
    function = _reward_function(config, scorer_kwargs)
    asked = {name: judge[name] for name in _named(function, judge) if config.custom_reward_function.path}
    if scorer_kwargs or asked:
        function = functools.partial(function, **scorer_kwargs, **asked)
    cls = resolve_reward_manager_cls(config)
    reward_kwargs |= {name: judge[name] for name in judge if name in inspect.signature(cls).parameters}
    if judge and not {*scorer_kwargs, *asked, *reward_kwargs} & {"reward_router_address", "base_url"}:
        raise ConfigError(
            f"reward_model.rollout.name={config.reward_model.rollout.name} serves a judge, but the reward function "
            "does not ask it: it has no parameter reward_router_address. Give it one, or leave reward_model.rollout "
            "out for a model that gives a score per response."
        )
    model = config.reward_model
    offered = {
        "max_error_rate": model.max_error_rate,
        "num_workers": model.num_workers,
        "timeout_s": model.timeout_s,
        "memory_limit_mb": model.memory_limit_mb,
        "max_resp_len": config.data.max_response_length,
    }
    wanted = set(inspect.signature(cls).parameters)
    if NaiveRewardManager in getattr(cls, "__mro__", ()):  # its subclasses pass **settings on to it
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
    """Check, before any model loads, that the data has the columns that scoring needs.

    Custom data sets, custom managers and runs with a reward model are not checked.

    Raises:
        DataError: a column is missing.
        UnknownDataSourceError: a row's data source has no scorer.
    """
    if config.reward_model.enable or not isinstance(dataset, RLHFDataset):
        return
    if isinstance(reward_fn, AbstractRewardManager):
        reward_fn.check_dataset(dataset)


def start_reward(data: DataProto, reward_fn: Any, max_error_rate: float = 0.5) -> RewardHandle:
    """Start to score a batch in the reward manager's processes and return at once.

    Args:
        data: batch with responses.
        reward_fn: a reward manager, or any callable that takes the batch, which is called only in ``result()``.
        max_error_rate: largest fraction of samples without a score, unless the manager has a limit of its own.
    """

    def checked(result: Any) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        return _checked(result, data, reward_fn, getattr(reward_fn, "max_error_rate", max_error_rate))

    if isinstance(reward_fn, AbstractRewardManager):
        return reward_fn.start(data).map(checked)
    return Deferred([], lambda: checked(call(reward_fn, data)))


def compute_reward(
    data: DataProto, reward_fn: Any, max_error_rate: float = 0.5
) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """Score a batch and wait.

    Args:
        data: batch with responses.
        reward_fn: a reward manager.
        max_error_rate: largest fraction of samples without a score, unless the manager has a limit of its own.

    Returns:
        scores (bsz, response_length), and lists of length bsz by name: ``score``, ``reward_status`` (one of
        :data:`verl.supervision.killable_pool.STATUSES`), and the further values of the reward function.

    Raises:
        RewardError: too many samples failed, or the manager returned something of another shape.
    """
    return start_reward(data, reward_fn, max_error_rate).result()


class RewardTask:
    """Scores a batch in a process of Ray: ``ray.get(compute_reward_async.remote(data, reward_fn=manager))``.

    Within one process, ``reward_fn.start(data)`` does it without Ray.
    """

    def __call__(
        self, data: DataProto, config: Any = None, tokenizer: Any = None, reward_fn: Any = None
    ) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        """Score a batch by ``reward_fn``, or by the manager of ``config``; see :func:`compute_reward`."""
        return compute_reward(data, reward_fn or load_reward_manager(config, tokenizer))

    def remote(self, data: DataProto, config: Any = None, tokenizer: Any = None, reward_fn: Any = None) -> Any:
        """Start scoring, and return the ``ObjectRef`` of the result.

        Raises:
            ConfigError: neither a manager nor the configuration and tokenizer to build one were given.
        """
        from verl.single_controller.ray import start_task

        if reward_fn is None and (config is None or tokenizer is None):
            raise ConfigError("compute_reward_async needs reward_fn, or config and tokenizer to build one.")
        return start_task(self, data, config, tokenizer, reward_fn)


compute_reward_async = RewardTask()


def extract_reward(batch: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the scores of a batch that was scored during the rollout.

    Returns:
        the column ``rm_scores`` (bsz, response_length), and the columns that ``meta_info["reward_extra_keys"]`` names.

    Raises:
        SchemaError: one of them is missing.
    """
    names = batch.meta_info.get("reward_extra_keys", [])
    require(batch, ("rm_scores", *names), "extract_reward")
    return batch.batch["rm_scores"], {name: batch.non_tensor_batch[name] for name in names}


OF_TRAJECTORY = "trajectory: "
"""What the ``reward_status`` of a sample begins with whose trajectory failed, so that there was nothing to score."""


def status_metrics(statuses: Sequence[str]) -> Metrics:
    """Fraction of samples that could not be scored: ``reward/error_rate``, and ``reward/status/{status}`` for each.

    Failed trajectories are not among them.

    >>> metrics = status_metrics(["ok", "timeout", "ok", "error"])
    >>> metrics["reward/error_rate"], metrics["reward/status/timeout"], metrics["reward/status/crashed"]
    (0.5, 0.25, 0.0)
    """
    counts, size = Counter(statuses), max(len(statuses), 1)
    failed = sum(count for status, count in counts.items() if status != "ok" and not status.startswith(OF_TRAJECTORY))
    rates = {f"reward/status/{status}": counts[status] / size for status in STATUSES if status != "ok"}
    return {"reward/error_rate": failed / size} | rates


def component_metrics(extra: Mapping[str, Sequence[Any]]) -> Metrics:
    """Compute ``reward/{name}/mean``, ``/max`` and ``/min`` of every numeric value of the reward function.

    Samples that were not scored, or whose value is missing or not finite, are left out. A name is skipped if any scored
    sample has a non-numeric value for it.

    Args:
        extra: the second result of :func:`compute_reward`.
    """
    statuses = extra.get("reward_status")
    metrics: Metrics = {}
    for name, values in extra.items():
        scored = [value for row, value in enumerate(values) if statuses is None or statuses[row] == "ok"]
        if all(isinstance(value, bool | int | float | None) for value in scored):
            present = [number for number in map(number_or_nan, scored) if not math.isnan(number)]
            metrics |= distribution(present, f"reward/{name}") if present else {}
    return metrics


def leave_out_failed(
    batch: DataProto, statuses: Sequence[str], policy: FailurePolicy, needs_siblings: bool = False
) -> tuple[DataProto, Metrics]:
    """Exclude samples that could not be scored from training, since a failure is not a score of zero.

    Their ``response_mask`` becomes zero, which removes them from the loss, and each gets a group (``uid``) of its
    own, which removes them from the baselines. The same happens to samples whose greedy response was not scored. All
    sequences of a trajectory are one sample.

    Args:
        batch: with ``response_mask``, ``uid`` and, if there are greedy responses, their ``baseline_status``.
        statuses: ``reward_status`` of each sample.
        policy: ``mask`` excludes the failed samples, ``drop_group`` their whole groups, ``stop`` raises. Failed
            trajectories, which ``rollout.agent.on_failure`` leaves out, are excluded alone with any of them.
        needs_siblings: also exclude what is then the only one of its group, and sequences of an agent that answered in
            one of the trajectories alone.

    Returns:
        the new ``response_mask`` and ``uid``; :func:`status_metrics` with ``reward/left_out_rate``, the fraction of
        excluded samples, and ``reward/baseline_error_rate``, that of greedy responses without a score.

    Raises:
        RewardError: a sample failed, and the policy is ``stop``.
    """
    require(batch, ("response_mask", "uid"), "leaving out samples without score")
    found, uids = Trajectories.of(batch), batch.non_tensor_batch["uid"].astype(str)
    scored = found.scored_rows
    metrics = status_metrics([statuses[row] for row in scored])
    reasons = np.array(statuses, dtype=object)
    if "baseline_status" in batch.non_tensor_batch:
        of_baseline = batch.non_tensor_batch["baseline_status"]
        metrics["reward/baseline_error_rate"] = float((of_baseline[scored] != "ok").mean())
        reasons = np.where(reasons == "ok", of_baseline, reasons)
    is_lost = np.array([str(reason).startswith(OF_TRAJECTORY) for reason in reasons], dtype=bool)
    failed = (reasons != "ok") & ~is_lost
    if policy == "stop" and failed.any():
        row = int(failed.argmax())
        raise RewardError(
            f"{failed[scored].sum()} of {len(scored)} samples could not be scored; the first is sample {uids[row]} "
            f"({reasons[row]}), and reward_model.on_failure=stop. The reason is logged above. Correct the reward "
            "function or the data, or set reward_model.on_failure=mask to go on without such samples."
        )
    out = is_lost | (np.isin(uids, uids[failed]) if policy == "drop_group" else failed)
    if needs_siblings and (out.any() or "agent" in batch.non_tensor_batch):
        groups = compared_groups(batch)
        kept = {unit: group for unit, group, is_out in zip(found.of_agents, groups, out, strict=True) if not is_out}
        remaining = Counter(kept.values())
        out = out | np.array([remaining[group] < 2 for group in groups])
    new_uids = batch.non_tensor_batch["uid"].copy()
    new_uids[out] = [f"{uids[row]}-left-out-{row}" for row in np.flatnonzero(out)]
    columns = batch.select(batch_keys=["response_mask"], non_tensor_batch_keys=[], meta_info_keys=[])
    if out.any():  # else the mask is the one that the ranks have made, and need not travel again
        mask = columns.batch["response_mask"]
        keep = torch.from_numpy(~out).to(mask).unsqueeze(-1)
        columns = DataProto.from_dict(tensors={"response_mask": mask * keep})
    columns = columns | DataProto.from_dict(non_tensors={"uid": new_uids})
    return columns, metrics | {"reward/left_out_rate": float(out[scored].mean())}


class RewardRecord:
    """All responses scored in one step, including those that dynamic sampling dropped."""

    def __init__(self) -> None:
        self.batches: list[DataProto] = []
        self._names: dict[str, None] = {}
        self._rates: list[Metrics] = []

    def add(self, batch: DataProto, names: Sequence[str], rates: Metrics) -> None:
        """Add a scored batch.

        Args:
            batch: with the columns of :func:`verl.trainer.ppo.stages.score_columns`.
            names: the columns made from the reward function's values.
            rates: the second result of :func:`leave_out_failed`.
        """
        self.batches.append(batch)
        self._names |= dict.fromkeys(names)
        self._rates.append(rates)

    def generated_tokens(self) -> int:
        """Number of tokens in all responses."""
        return sum(int(response_lengths(batch).sum()) for batch in self.batches)

    def metrics(self) -> Metrics:
        """Compute ``reward/...`` and ``train-source/...`` over all scored responses."""
        scored_rows = [Trajectories.of(batch).scored_rows for batch in self.batches]
        sizes = [len(rows) for rows in scored_rows]
        metrics = {
            name: float(np.average([rates[name] for rates in self._rates], weights=sizes)) for name in self._rates[0]
        }
        extra = {
            name: [
                value
                for batch, rows in zip(self.batches, scored_rows, strict=True)
                for value in batch.non_tensor_batch.get(name, np.full(len(batch), None))[rows]
            ]
            for name in self._names
        }
        scored = DataProto.concat(
            [
                batch.select(
                    batch_keys=["responses", "attention_mask"],
                    non_tensor_batch_keys=[name for name in ("data_source",) if name in batch.non_tensor_batch],
                ).select_idxs(rows)
                for batch, rows in zip(self.batches, scored_rows, strict=True)
            ]
        )
        scores = torch.cat([trajectory_scores(batch, batch.batch["token_level_scores"]) for batch in self.batches])
        by_source = metrics_by_source(scored, scores, extra["reward_status"])
        return metrics | component_metrics(extra) | by_source | self._equal_groups()

    def scored(self) -> Iterator[tuple[DataProto, int, float]]:
        """Yield batch, scored row and score of each trajectory that could be scored."""
        for batch in self.batches:
            scores = trajectory_scores(batch, batch.batch["token_level_scores"]).tolist()
            for row, score in zip(Trajectories.of(batch).scored_rows, scores, strict=True):
                if batch.non_tensor_batch["reward_status"][row] == "ok":
                    yield batch, row, score

    def _equal_groups(self) -> Metrics:
        """``reward/equal_group_rate``: fraction of prompts with several scored responses of one and the same score."""
        groups: dict[str, list[float]] = {}
        for batch, row, score in self.scored():
            groups.setdefault(str(batch.non_tensor_batch["uid"][row]), []).append(score)
        equal = [_are_equal(scores) for scores in groups.values() if len(scores) > 1]
        return {"reward/equal_group_rate": sum(equal) / len(equal)} if equal else {}


class EqualScores:
    """Warns once when all responses of several steps in a row have the same score, which teaches nothing."""

    def __init__(self, tokenizer: Any, steps: int = 3) -> None:
        self.tokenizer = tokenizer
        self.steps = steps
        self._row = 0
        self._is_told = False

    def look(self, record: RewardRecord) -> None:
        """Look at the scores of a step."""
        scored = list(record.scored())
        self._row = self._row + 1 if len(scored) > 1 and _are_equal([score for *_, score in scored]) else 0
        if self._row < self.steps or self._is_told:
            return
        self._is_told = True
        batch, row, score = scored[0]
        cut = [
            b.non_tensor_batch["finish_reason"][r] == "length"
            for b, r, _ in scored
            if "finish_reason" in b.non_tensor_batch
        ]
        response = response_texts(batch.select_idxs([row]), self.tokenizer)[0].solution_str
        truth = batch.non_tensor_batch.get("reward_model", [None] * len(batch))[row]
        logger.warning(
            "all responses of each of the last %d steps have the same score, %d with %g in this step: nothing tells a "
            "better one from a worse. Usual causes: the answer is not in the form that the scorer looks for, or was "
            "cut (%d of %d ended at data.max_response_length); the scorer or the ground truth is not that of the data; "
            "the prompts are far too hard or too easy. One response and what it was compared with:\n%.400s\n%.200s",
            self.steps, len(scored), score, sum(cut), len(scored), response, truth,
        )  # fmt: skip


_OF_FUNCTION = ("custom_reward_function", "reward_model", "reward")
_OF_MANAGER = (*_OF_FUNCTION, "reward_manager", "data")


def _are_equal(scores: Sequence[float]) -> bool:
    """Whether scores of whole responses differ at most by the rounding of float32."""
    return len(informative_rows(np.array(scores), np.zeros(len(scores)), np.ones(len(scores), dtype=bool))) == 0


def _typed(config: PPOConfig | Mapping[str, Any], sections: Sequence[str]) -> PPOConfig:
    if isinstance(config, PPOConfig):
        return config
    return load_config(config, with_rules=False, of_program=True, sections=sections)


def _checked(
    result: Any, data: DataProto, reward_fn: Any, max_error_rate: float
) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    manager = type(reward_fn).__name__
    scores, extra = result, {}
    if not isinstance(result, torch.Tensor):
        extra = {name: list(values) for name, values in (result.get("reward_extra_info") or {}).items()}
        scores = result["reward_tensor"]
    expected = tensors_of(data)["responses"].shape
    if scores.shape != expected:
        raise RewardError(
            f"{manager} returned scores of shape {tuple(scores.shape)}; "
            f"expected that of the responses, {tuple(expected)}."
        )
    if wrong := [name for name, values in extra.items() if len(values) != len(data)]:
        raise RewardError(
            f"{manager} returned reward_extra_info['{wrong[0]}'] with {len(extra[wrong[0]])} values "
            f"for {len(data)} samples."
        )
    if taken := sorted(COLUMNS.keys() & extra.keys()):
        raise RewardError(
            f"the reward function returned '{taken[0]}', the name of a column of verl: {COLUMNS[taken[0]].meaning} "
            f"(made by {COLUMNS[taken[0]].producer}). Give it another name."
        )
    placed = token_scores(on_drawn_tokens(scores, tensors_of(data)["response_mask"]), torch.ones_like(scores))
    assert placed.tokens is not None
    statuses = extra.get("reward_status", ["ok"] * len(data))
    unusable = [row for row, score in enumerate(placed.samples) if score.status != "ok" and statuses[row] == "ok"]
    extra["reward_status"] = ["error" if row in unusable else status for row, status in enumerate(statuses)]
    extra.setdefault("score", placed.tokens.sum(-1, dtype=torch.float64).tolist())
    failed = sum(status != "ok" for status in extra["reward_status"])
    what = f"{failed} of {len(data)} samples could not be scored ({failed / max(len(data), 1):.1%})."
    if unusable:
        first = unusable[0]
        what += f" The first whose score from {manager} cannot be used: row {first}:\n{placed.samples[first].error}"
    if failed > max_error_rate * len(data):
        raise RewardError(
            f"{what}\nThat is more than reward_model.max_error_rate={max_error_rate}. Correct the reward function or "
            "the data; a higher rate lets the run go on, with the failed samples left out of training."
        )
    if unusable:
        logger.error("%s\nThey count as failed (reward_status=error, reward_model.on_failure).", what)
    return placed.tokens, extra


def _named(function: Callable[..., Any], names: Iterable[str]) -> list[str]:
    """Return those of the names that a function takes as arguments."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in names if takes_any or name in parameters]


def _judge_of_run(config: PPOConfig, judge: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by which the scorer ``llm_judge`` asks the judge of the run; empty if there is none."""
    if not judge or config.reward_model.reward_format != "llm_judge":
        return {}
    return {"base_url": f"http://{judge['reward_router_address']}/v1", "model": config.reward_model.model.path}


def _reward_function(config: PPOConfig, scorer_kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    custom, name = get_custom_reward_fn(config), config.reward_model.reward_format
    if custom is not None and name:
        raise ConfigError(
            f"both custom_reward_function.path and reward_model.reward_format='{name}' choose the reward. Set one."
        )
    if custom is not None:
        return custom
    model, service = config.reward_model, config.reward_model.sandbox_fusion
    code = code_settings(
        url=service.url,
        max_concurrent=service.max_concurrent,
        memory_limit_mb=service.memory_limit_mb,
        num_workers=model.num_workers,
        timeout_s=model.timeout_s,
    )
    check_settings({**code, **scorer_kwargs})
    if not name:
        return functools.partial(default_compute_score, **code)
    source = FORMATS.get(name, name)
    check_settings({**code, **scorer_kwargs}, source)
    return functools.partial(scorer_for_all(source), **code)


def resolve_reward_manager_cls(config: PPOConfig | Mapping[str, Any]) -> Any:
    """Return the class of ``reward_manager``: the registered one of its name, or that of a file.

    Raises:
        ConfigError: no class has this name, or the file is missing.
    """
    chosen = _typed(config, ("reward_manager",)).reward_manager
    if chosen.source == "register":
        return get_reward_manager_cls(chosen.name)
    if not chosen.module.path:
        raise ConfigError("reward_manager.source=importlib needs reward_manager.module.path, the file of the class.")
    return load_object(chosen.module.path, chosen.name, "reward_manager.module")


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = old_names(__name__)
