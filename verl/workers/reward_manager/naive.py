"""The plain reward manager: decode each response, call the reward function, put the score on the last token."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl.errors import ConfigError, RewardError
from verl.protocol import DataProto
from verl.schema import require
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.killable_pool import Budget, RateLimit, unwrapped
from verl.utils.reward_score import check_settings, default_compute_score
from verl.workers.reward_manager.abstract import AbstractRewardManager, Result
from verl.workers.reward_manager.function import (
    Form,
    Pending,
    RewardFunction,
    Sample,
    Score,
    Scores,
    on_turns,
    tensors_of,
    token_scores,
)
from verl.workers.reward_manager.registry import register

logger = logging.getLogger(__name__)


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Scores every response by itself.

    The reward function runs in processes of its own, each call under a budget of time and memory
    (:class:`~verl.utils.killable_pool.KillablePool`). A sample that cannot be scored stops nothing in
    silence: it gets score 0 and a ``reward_status`` other than ``ok``, and the first reason is logged
    with the counts. Above ``max_error_rate`` the run stops with it.

    ``rm_scores`` of a reward model, where the batch has them, are the score unless a rule was
    chosen in so many words (a custom function, or ``reward_model.reward_format``); such a rule finds
    the model's score as ``extra_info["rm_score"]``.

    Args:
        tokenizer: tokenizer of the policy.
        num_examine: how many samples of each data source to log in every call.
        compute_score: a function of one of the forms (see :mod:`verl.workers.reward_manager.function`);
            None goes by data source: :func:`verl.utils.reward_score.default_compute_score`.
        reward_fn_key: column that says which scorer a sample belongs to.
        max_error_rate: largest share of a batch that may fail.
        max_concurrent: calls of an async function at once.
        num_workers: processes that score.
        timeout_s: time for the score of one sample.
        memory_limit_mb: memory for the score of one sample, beyond what loading the function took; None
            is no limit.
        batch_timeout_s: time for a call that scores a whole batch; None is ten times ``timeout_s``.
        kill_retries: how often a sample is scored again whose process was killed from outside; its status then is
            ``killed``. What the sample itself does, or takes too much of, is not tried again.
        scorer_kwargs: further arguments of the reward function.

    Raises:
        ConfigError: the function has none of the forms.
    """

    forms: tuple[Form, ...] = ("sample", "texts", "batch")
    """Forms of reward function that the manager takes."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: Callable[..., Any] | None = None,
        reward_fn_key: str = "data_source",
        max_error_rate: float = 0.5,
        max_concurrent: int = 64,
        num_workers: int = 1,
        timeout_s: float = 30.0,
        memory_limit_mb: int | None = 4096,
        batch_timeout_s: float | None = None,
        kill_retries: int = Budget.kill_retries,
        **scorer_kwargs: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.reward_fn_key = reward_fn_key
        self.max_error_rate = max_error_rate
        function = compute_score or default_compute_score
        self.settings = {**getattr(function, "keywords", {}), **scorer_kwargs}
        self.has_rule = unwrapped(function) is not default_compute_score
        self.function = RewardFunction(
            function,
            scorer_kwargs,
            max_concurrent=max_concurrent,
            num_workers=num_workers,
            budget=Budget(timeout_s, memory_limit_mb, kill_retries=kill_retries),
            batch_timeout_s=batch_timeout_s,
            limits=self.limits(),
        )
        if self.function.form not in self.forms:
            raise ConfigError(
                f"{type(self).__name__} takes reward functions of the form {' or '.join(self.forms)}, and this one has "
                f"the form '{self.function.form}' (see verl.workers.reward_manager.function). "
                "Set reward_model.reward_manager=naive, which takes all forms."
            )

    def limits(self) -> Sequence[RateLimit]:
        """Rates that all calls of the function together keep."""
        return ()

    def tokens(self, samples: Sequence[Sample]) -> Sequence[float] | None:
        """What each call takes from a limit of tokens."""
        return None

    def check_dataset(self, dataset: RLHFDataset) -> None:
        """See :meth:`AbstractRewardManager.check_dataset`; a rule of one's own may need nothing."""
        if self.has_rule:
            return
        dataset.require_columns(
            {
                self.reward_fn_key: "data.reward_fn_key",
                "reward_model": "scorers compare with its ground_truth",
            }
        )
        for source in dict.fromkeys(map(str, dataset.source_column(self.reward_fn_key))):
            check_settings(self.settings, source)

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | Result:
        """Scores of a batch; see :meth:`AbstractRewardManager.__call__`.

        Raises:
            RewardError: more than ``max_error_rate`` of the samples failed.
            SchemaError: the batch lacks a column.
        """
        result = self.start(data).result()
        return result if return_dict else result["reward_tensor"]

    def start(self, data: DataProto) -> Pending[Result]:
        """Begin to score a batch and return at once; ``result()`` waits, and raises as :meth:`__call__` does."""
        samples = self.samples(data)

        def checked(scores: Scores) -> Result:
            self._report_errors(samples, scores.samples)
            self._log_examples(data, samples, scores.samples)
            return self._result(scores)

        return self._scores(data, samples).map(checked)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score one sample without blocking the event loop; a failure is its ``reward_status``, and no error.

        Returns:
            ``{"reward_score": float, "reward_extra_info": {name: value}}``.
        """
        result = self._result(await self._scores(data, self.samples(data)).wait())
        extra = {name: values[0] for name, values in result["reward_extra_info"].items()}
        return {"reward_score": float(result["reward_tensor"][0].sum()), "reward_extra_info": extra}

    def warm_up(self) -> None:
        """Start the processes that score; does not wait for them."""
        self.function.warm_up()

    def shaped(self, data: DataProto, scores: Scores) -> Scores:
        """The scores as they count in training; a hook for what is added to those of the function."""
        return scores

    def _scores(self, data: DataProto, samples: Sequence[Sample]) -> Pending[Scores]:
        """Scores of the samples, and where they lie in the responses."""
        tensors = tensors_of(data)
        if not self.has_rule and "rm_scores" in tensors.keys():
            model = token_scores(tensors["rm_scores"], tensors["response_mask"])
            return Pending([], lambda: self.shaped(data, model))
        if not self.has_rule:
            require(data, ("reward_model",), "scoring by data source")
        if self.function.form == "sample":
            scored = self.function.submit_samples(samples, self.tokens(samples)).map(Scores)
        else:
            scored = self.function.submit_batch(data, samples)
        return scored.map(lambda scores: self.shaped(data, placed(scores, tensors["response_mask"])))

    def _result(self, scores: Scores) -> Result:
        return {"reward_tensor": scores.tokens, "reward_extra_info": extra_info(scores.samples)}

    def samples(self, data: DataProto) -> list[Sample]:
        """Each row of the batch as a reward function sees it."""
        columns = data.non_tensor_batch
        rows = range(len(data))
        texts = decode_responses(data, self.tokenizer)
        sources = columns.get(self.reward_fn_key, ["unknown"] * len(data))
        uids = columns.get("uid", [f"row {row}" for row in rows])
        truths = [_ground_truth(value) for value in columns.get("reward_model", [None] * len(data))]
        extras = self._extra_infos(data)
        return [Sample(str(sources[i]), texts[i], truths[i], extras[i], str(uids[i])) for i in rows]

    def _extra_infos(self, data: DataProto) -> list[dict[str, Any]]:
        columns, tensors = data.non_tensor_batch, tensors_of(data)
        extras = [dict(info or {}) for info in columns.get("extra_info", [None] * len(data))]
        beside: dict[str, Sequence[Any]] = {}
        if "__num_turns__" in columns:
            beside["num_turns"] = columns["__num_turns__"].tolist()
        if "raw_prompt" in columns:
            beside["raw_prompt"] = columns["raw_prompt"].tolist()
        if "reward_scores" in columns:
            beside["rollout_reward_scores"] = columns["reward_scores"].tolist()
        if "rm_scores" in tensors.keys():
            beside["rm_score"] = tensors["rm_scores"].sum(-1).tolist()
        for name, values in beside.items():
            for info, value in zip(extras, values, strict=True):
                info[name] = value
        return extras

    def _report_errors(self, samples: Sequence[Sample], scores: Sequence[Score]) -> None:
        failed = [(sample, score) for sample, score in zip(samples, scores, strict=True) if score.status != "ok"]
        if not failed:
            return
        counts = Counter(score.status for _, score in failed)
        (sample, score), rate = failed[0], len(failed) / len(samples)
        what = (
            f"{len(failed)} of {len(samples)} samples could not be scored ({rate:.1%}): "
            f"{', '.join(f'{count} {status}' for status, count in sorted(counts.items()))}. "
            f"The first: sample {sample.uid}, data source '{sample.data_source}', {score.status}:\n{score.error}"
        )
        if rate > self.max_error_rate:
            raise RewardError(
                f"{what}\nThat is more than reward_model.max_error_rate={self.max_error_rate}. Correct the reward "
                "function or the data; a higher rate lets the run go on, with the failed samples left out of training."
            )
        logger.warning("%s\nFailed samples score 0 and are left out of training.", what)

    def _log_examples(self, data: DataProto, samples: Sequence[Sample], scores: Sequence[Score]) -> None:
        shown: Counter[str] = Counter()
        for row, (sample, score) in enumerate(zip(samples, scores, strict=True)):
            if shown[sample.data_source] >= self.num_examine:
                continue
            shown[sample.data_source] += 1
            prompt = self.tokenizer.decode(tensors_of(data)["prompts"][row], skip_special_tokens=True)
            logger.info(
                "[%s]\n[prompt] %s\n[response] %s\n[ground_truth] %s\n[score] %s",
                sample.data_source,
                prompt,
                sample.solution_str,
                sample.ground_truth,
                score.value if score.status == "ok" else score.status,
            )


def decode_responses(data: DataProto, tokenizer: Any) -> list[str]:
    """The text of each response without padding and special tokens."""
    tensors = tensors_of(data)
    responses = tensors["responses"]
    valid = tensors["attention_mask"][:, -responses.size(1) :].bool()
    ids = [row[keep].tolist() for row, keep in zip(responses, valid, strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def on_last_token(response_mask: torch.Tensor, scores: Sequence[float]) -> torch.Tensor:
    """Scores on the last token that the policy chose; an empty response has no token to carry its score.

    Args:
        response_mask: (bsz, response_length) 1 on tokens that the policy chose.
        scores: one per sample.

    Returns:
        (bsz, response_length) float32.

    >>> on_last_token(torch.tensor([[1, 1, 0], [0, 0, 0]]), [0.5, 1.0])
    tensor([[0.0000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    places = torch.arange(1, response_mask.size(1) + 1)
    last = (response_mask.cpu().bool() * places).amax(-1, keepdim=True)  # (bsz, 1), counted from 1; 0 for none
    return (places == last) * torch.tensor(scores, dtype=torch.float32).unsqueeze(-1)


def placed(scores: Scores, response_mask: torch.Tensor) -> Scores:
    """Scores with their place in the responses.

    A score sits on the last token of the policy; ``turn_scores`` on the last token of each of its turns,
    which are the runs of ones in ``response_mask``. Another number of scores than turns is an error of the sample.
    """
    if scores.tokens is not None:
        return scores
    mask = response_mask.cpu().bool()
    samples = list(scores.samples)
    tokens = on_last_token(mask, [score.value for score in samples])
    ends = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    for row, score in enumerate(samples):
        if score.turn_scores is None:
            continue
        samples[row] = on_turns(score, int(ends[row].sum()))
        tokens[row] = 0.0
        if samples[row].status == "ok":
            tokens[row, ends[row]] = torch.tensor(score.turn_scores, dtype=torch.float32)
    return Scores(samples, tokens)


def extra_info(scores: Sequence[Score]) -> dict[str, list[Any]]:
    """What the reward function said, as one list per name; None where a sample has no such value."""
    names = dict.fromkeys(name for score in scores for name in score.extra)
    columns: dict[str, list[Any]] = {name: [score.extra.get(name) for score in scores] for name in names}
    columns["score"] = [score.value for score in scores]
    columns["reward_status"] = [score.status for score in scores]
    return columns


def _ground_truth(reward_model: Any) -> Any:
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
