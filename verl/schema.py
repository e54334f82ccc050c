"""Declaration of every batch column: name, dtype, dimensions, meaning, producer and consumers.

Padding: prompts are padded on the left, responses on the right, so that position ``prompt_length``
of a row is always its first response token. ``sequence_length`` is ``prompt_length +
response_length``; before generation, when there are only prompts, it is ``prompt_length``.

Per-token columns of a response are 0 where ``response_mask`` is 0, but for ``weight_versions`` and ``kept_ids``. Index
t refers to the prediction of ``responses[:, t]`` from everything before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from verl.base.registry import suggest
from verl.errors import SchemaError

if TYPE_CHECKING:
    from torch import Tensor

    from verl.protocol import DataProto


@dataclass(frozen=True)
class Column:
    """A batch column.

    Args:
        name: its key in ``batch`` or, with dtype ``object``, in ``non_tensor_batch``.
        dtype: torch's name of the dtype, or two with "or" between them; ``object`` for Python values.
        dims: a name for each dimension; equal names mean equal sizes; ``...`` is any number of further dimensions.
        producer: the stage that makes it.
        consumers: the stages that read it.
    """

    name: str
    dtype: str
    dims: tuple[str, ...]
    meaning: str
    producer: str
    consumers: tuple[str, ...] = ()

    @property
    def is_tensor(self) -> bool:
        """True if it is kept in ``batch``; else in ``non_tensor_batch``."""
        return self.dtype != "object"


ROW = ("bsz",)
PROMPT = ("bsz", "prompt_length")
RESPONSE = ("bsz", "response_length")
SEQUENCE = ("bsz", "sequence_length")

PREPARED = "algorithms.prepare_update, from the whole mini-batch before it is dealt to the ranks"
"""Producer of the columns that depend on other rows of the mini-batch."""

COUNTED = ("response_mask", "distillation_mask", "observation_weights", "trajectory_count")
"""Columns by which a row counts in a loss: 0 in a row that is computed only because ranks or passes must be equal."""

NOT_YET = "nothing in this version"
_TEACHERS = "teachers (distillation.enabled)"
AGENTS = ("agent loops",)

_SEQUENCES = (
    Column("prompts", "int64", PROMPT, "prompt tokens, padded on the left", "generate_sequences", ("reward",)),
    Column(
        "responses", "int64", RESPONSE, "sampled tokens, padded on the right", "generate_sequences", ("reward", "actor")
    ),
    Column(
        "response_mask",
        "int64",
        RESPONSE,
        "1 on tokens that the policy chose, its end-of-sequence token among them",
        "generate_sequences",
        ("advantages", "actor", "critic"),
    ),
    Column(
        "input_ids",
        "int64",
        SEQUENCE,
        "prompt and response, one after the other",
        "the data set (prompt alone), then generate_sequences",
        ("generate_sequences", "actor", "reference", "critic", "reward model"),
    ),
    Column(
        "attention_mask",
        "int64",
        SEQUENCE,
        "1 on tokens, 0 on padding",
        "the data set (prompt alone), then generate_sequences",
        ("generate_sequences", "actor", "reference", "critic", "reward model"),
    ),
    Column(
        "position_ids",
        "int64",
        ("bsz", "...", "sequence_length"),
        "0 on the first token, then 1, 2, ...; vision models have one row for each of several axes",
        "the data set (prompt alone), then generate_sequences",
        ("generate_sequences", "actor", "reference", "critic", "reward model"),
    ),
)

_LOG_PROBS = (
    Column(
        "rollout_log_probs",
        "float32",
        RESPONSE,
        "log-probabilities under the engine that sampled",
        "generate_sequences",
        ("metrics", "rollout correction"),
    ),
    Column(
        "weight_versions",
        "int32",
        RESPONSE,
        "version of the weights that drew the token, -1 where the policy drew none",
        "generate_sequences",
        ("metrics", "dumps"),
    ),
    Column(
        "updates_behind",
        "int32",
        RESPONSE,
        "updates of the policy between the weights that drew the token and this step; -1 where the policy drew none",
        "the source of experience, if it samples ahead of training or the correction reads it",
        ("actor", "metrics"),
    ),
    Column(
        "old_log_probs",
        "float32",
        RESPONSE,
        "log-probabilities under the policy at the start of the update",
        "actor.compute_log_prob",
        ("KL in the reward", "actor"),
    ),
    Column(
        "ref_log_prob",
        "float32",
        RESPONSE,
        "log-probabilities under the frozen reference policy",
        "ref.compute_ref_log_prob",
        ("KL in the reward", "actor"),
    ),
    Column(
        "entropys",
        "float32",
        RESPONSE,
        "entropy of the policy's next-token distribution, in nats",
        "actor.compute_log_prob",
        ("metrics", "the choice of tokens by entropy"),
    ),
    Column(
        "update_log_probs",
        "float32",
        RESPONSE,
        "log-probabilities that the policy loss was computed from, in the last pass over the token; NaN on tokens "
        "that are not trained on",
        "actor.update_actor, in steps of trainer.rollout_token_dump_freq",
        ("dumps",),
    ),
    Column(
        "update_clipped",
        "float32",
        RESPONSE,
        "1 where a bound of the policy loss held in that pass, else 0; NaN on tokens that are not trained on",
        "actor.update_actor, in steps of trainer.rollout_token_dump_freq",
        ("dumps",),
    ),
    Column(
        "sum_pi_squared",
        "float32",
        RESPONSE,
        "sum of the squared next-token probabilities",
        "actor.compute_log_prob, with actor.calculate_sum_pi_squared=true",
        ("advantages",),
    ),
    Column(
        "rollout_is_weights",
        "float32",
        RESPONSE,
        "importance weight of the policy over the rollout engine",
        "rollout correction (algorithm.rollout_correction)",
        ("actor",),
    ),
    Column(
        "accepted_mask",
        "int64",
        RESPONSE,
        "response_mask without what the rollout correction rejected",
        "rollout correction (algorithm.rollout_correction.rollout_rs)",
        ("the update",),
    ),
    Column(
        "teacher_logprobs",
        "float32",
        RESPONSE,
        "log-probabilities under the teacher; of spans of text, on the last token of each",
        _TEACHERS,
        ("actor", "metrics"),
    ),
    Column(
        "teacher_entropys",
        "float32",
        RESPONSE,
        "entropy of the teacher's next-token distribution, in nats",
        f"{_TEACHERS}, those that are a forward pass",
        ("metrics",),
    ),
    Column(
        "teacher_topk_ids",
        "int32",
        (*RESPONSE, "topk"),
        "the teacher's most likely tokens, by falling probability",
        f"{_TEACHERS}, for losses of the most likely tokens",
        ("actor",),
    ),
    Column(
        "teacher_topk_logprobs",
        "float32",
        (*RESPONSE, "topk"),
        "their log-probabilities under the teacher",
        f"{_TEACHERS}, for losses of the most likely tokens",
        ("actor",),
    ),
    Column(
        "teacher_index",
        "int64",
        ROW,
        "position of the row's teacher among several",
        _TEACHERS,
        ("actor",),
    ),
    Column(
        "span_ends",
        "int64",
        RESPONSE,
        "place of the last token of each token's span of text, -1 for tokens without a span",
        f"{_TEACHERS}, with distillation.alignment=text",
        ("actor", "metrics"),
    ),
)

_OWN_PROMPTS = "self-distillation; distillation.alignment=text"
_PRIVILEGED = (
    Column("teacher_prompts", "int64", ("bsz", "teacher_prompt_length"), "prompt under which the policy teaches "
           "itself, or in the tokens of another teacher, padded on the left", _OWN_PROMPTS, ("teacher",)),
    Column("teacher_prompts_mask", "int64", ("bsz", "teacher_prompt_length"), "1 on its tokens, 0 on padding",
           _OWN_PROMPTS, ("teacher",)),
    Column("distillation_mask", "int64", RESPONSE, "response_mask without rows that have no context to learn from and "
           "tokens without a span", _OWN_PROMPTS, ("actor",)),
)  # fmt: skip

_REWARDS = (
    Column(
        "rm_scores", "float32", RESPONSE, "score of the reward model, on the last token",
        "reward_model.compute_rm_score", ("reward",),
    ),
    Column(
        "token_level_scores", "float32", RESPONSE, "score of the reward function, on the last token", "reward",
        ("advantages", "metrics"),
    ),
    Column(
        "token_level_rewards", "float32", RESPONSE, "scores, minus KL to the reference if the reward has it",
        "advantages", ("advantages", "metrics"),
    ),
    Column(
        "reward_baselines", "float32", ROW, "score of the greedy response to the same prompt",
        "a greedy rollout (adv_estimator=remax)", ("advantages",),
    ),
    Column(
        "values", "float32", RESPONSE, "value of the state before the token", "critic.compute_values",
        ("advantages", "critic"),
    ),
    Column(
        "role_baselines", "float32", ROW, "mean reward of the agent in this kind of task before the step",
        "advantages (adv_estimator=rae)", ("advantages",),
    ),
    Column("advantages", "float32", RESPONSE, "how much better than expected the token was", "advantages", ("actor",)),
    Column("returns", "float32", RESPONSE, "targets of the critic's values", "advantages", ("critic", "metrics")),
)  # fmt: skip

_PREPARED = (
    Column("cov_selected", "int64", RESPONSE, "1 on tokens chosen for the covariance of log-prob and advantage "
           "(loss_mode=clip_cov, kl_cov)", PREPARED, ("actor",)),
    Column("m2_mask", "int64", RESPONSE, "1 on tokens that stay in the loss (loss_mode=m2po)", PREPARED, ("actor",)),
    Column("observation_weights", "float32", RESPONSE, "1 / their number in the mini-batch on tokens that the "
           "environment wrote, else 0 (actor.use_echo_loss=true)", PREPARED, ("actor",)),
    Column("top_entropy_mask", "int64", RESPONSE, "1 on tokens that keep their policy loss "
           "(policy_loss.top_entropy_quantile)", PREPARED, ("actor",)),
    Column("row_weights", "float32", ROW, "weight of each of the row's tokens (loss_agg_mode=prompt-mean, and "
           "seq-mean-token-mean if trajectories have several sequences)", PREPARED, ("actor", "critic")),
    Column("trajectory_count", "int64", ROW, "1 on the first sequence of each trajectory, 0 on its others, if "
           "trajectories have several; the sum is their number", PREPARED, ("actor", "critic")),
)  # fmt: skip

_OTHER_TENSORS = (
    Column(
        "routed_experts",
        "uint8 or int16",
        ("bsz", "sequence_length", "layers", "top_k"),
        "experts that each token went to, the largest number of the format where that is unknown",
        "actor.compute_log_prob with actor.router_replay.mode=R2, generate_sequences with R3",
        ("actor",),
    ),
    Column(
        "kept_ids",
        "int32",
        (*RESPONSE, "kept"),
        "ids of the tokens that truncated sampling kept, ascending, then -1; all -1 where the whole vocabulary counts",
        "generate_sequences with rollout.keep_sampling_mask=true",
        ("actor", "reference", "metrics"),
    ),
    Column(
        "dummy_tensor",
        "uint8",
        ("bsz", "..."),
        "nothing; gives rows to a batch of prompts that is not tokenized yet",
        "the data set",
    ),
)

_OBJECTS = (
    Column("uid", "object", ROW, "id of the group: responses with one uid are siblings of one prompt", "the trainer",
           ("generate_sequences", "advantages")),
    Column("sample_index", "object", ROW, "position among the siblings", "the trainer", ("generate_sequences",)),
    Column("raw_prompt", "object", ROW, "messages of the prompt: list of {role, content}", "the data set",
           ("generate_sequences", "reward")),
    Column("data_source", "object", ROW, "name of the data set; chooses the scorer", "the data set",
           ("reward", "validation")),
    Column("ability", "object", ROW, "kind of task, for the reader", "the data set"),
    Column("reward_model", "object", ROW, "{style: rule or model, ground_truth}", "the data set", ("reward",)),
    Column("extra_info", "object", ROW, "further information about the prompt", "the data set", ("reward",)),
    Column("index", "object", ROW, "number of the prompt in its data set", "the data set"),
    Column("row_index", "object", ROW, "position of the row in the training data", "the data set", ("curriculum",)),
    Column("baseline_status", "object", ROW, "reward_status of the greedy response to the same prompt",
           "a greedy rollout (adv_estimator=remax)", ("reward",)),
    Column("finish_reason", "object", ROW, "why generation ended: stop, length or abort", "generate_sequences",
           ("metrics",)),
    Column("weight_version", "object", ROW, "oldest version of the weights that sampled it", "generate_sequences",
           ("metrics",)),
    Column("agent_name", "object", ROW, "agent loop that answers the prompt", "the data set", AGENTS),
    Column("tools_kwargs", "object", ROW, "arguments for each tool", "the data set", AGENTS),
    Column("interaction_kwargs", "object", ROW, "arguments for the interaction", "the data set", AGENTS),
    Column("environment_kwargs", "object", ROW, "arguments for the environment", "the data set", AGENTS),
    Column("__num_turns__", "object", ROW, "messages in the conversation", "agent loops", ("reward", "metrics")),
    Column("trajectory_id", "object", ROW, "the trajectory that the sequence belongs to: uid/sample_index",
           "agent loops", ("reward", "advantages", "mini-batches", "metrics")),
    Column("agent", "object", ROW, "name of the agent whose sequence it is", "agent loops", ("advantages", "reward")),
    Column("earlier_turns", "object", ROW, "token ids of the agent's turns in earlier sequences of the trajectory",
           "the trainer, while it scores", ("reward", "reward model")),
    Column("trajectory_status", "object", ROW, "how the trajectory ended", "agent loops", ("reward", "metrics")),
    Column("trajectory_message", "object", ROW, "why the trajectory failed", "agent loops"),
    Column("trajectory_conversation", "object", ROW, "messages of the conversation with the seconds of each, or None",
           "agent loops", ("advantages", "dumps")),
    Column("agent_loop_metrics", "object", ROW, "seconds in the policy's turns, in tools and in scoring", "agent loops",
           ("metrics",)),
    Column("reward_score", "object", ROW, "score that the agent loop gave, or None", "agent loops", ("reward",)),
    Column("agent_answer", "object", ROW, "answer that an agent program gave, or None", "agent loops", ("reward",)),
    Column("turn_scores", "object", ROW, "score of each of the policy's turns, or None", "agent loops", ("reward",)),
    Column("turn_rewards", "object", ROW, "added to the score on each of the policy's turns, or None", "agent loops",
           ("reward",)),
    Column("tool_rewards", "object", ROW, "reward of each tool call", "agent loops", ("reward",)),
    Column("tool_call_counts", "object", ROW, "number of tool calls", "agent loops",
           ("reward", "metrics")),
    Column("tool_failures", "object", ROW, "number of tool calls that failed, by kind of failure", "agent loops",
           ("reward", "metrics")),
    Column("rendering_differences", "object", ROW, "where the chat template would have written other tokens, by kind",
           "agent loops", ("metrics",)),
    Column("multi_modal_inputs", "object", ROW, "pixel values and the like, as the processor made them", "the data set",
           ("actor", "reference", "critic")),
    Column("tool_extra_fields", "object", ROW, "what tools returned beside their text", "agent loops",
           ("reward",)),
    Column("ground_truth_answers", "object", ROW, "the true answers, beside decoded responses", "reward",
           ("batch reward functions",)),
)  # fmt: skip

COLUMNS: Mapping[str, Column] = {
    column.name: column
    for column in (*_SEQUENCES, *_LOG_PROBS, *_PRIVILEGED, *_REWARDS, *_PREPARED, *_OTHER_TENSORS, *_OBJECTS)
}
"""All known columns by name. Any other column is the user's own and is not checked."""


def require(batch: DataProto | Mapping[str, Tensor | np.ndarray], columns: Iterable[str], stage: str) -> None:
    """Check that ``batch`` has the columns that ``stage`` needs.

    ``stage`` is the subject of the error message: ``"advantage estimator 'gae'"``.

    Raises:
        SchemaError: one is missing; the message names it, the existing columns, and the stage that makes it.
    """
    present = _columns_of(batch)
    missing = [name for name in columns if name not in present]
    if not missing:
        return
    makers = " ".join(_producer_hint(name, present) for name in missing)
    raise SchemaError(
        f"{stage} needs column{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}, which the batch "
        f"lacks (has: {', '.join(sorted(present)) or 'nothing'}). {makers}"
    )


def _producer_hint(name: str, present: Mapping[str, object]) -> str:
    if name in COLUMNS:
        return f"'{name}' is made by {COLUMNS[name].producer}."
    return f"verl does not make '{name}': a data set or a stage of yours must.{suggest(name, list(present))}"


def check_columns(batch: DataProto | Mapping[str, Tensor | np.ndarray]) -> None:
    """Check the dtype and the dimensions of the known columns of ``batch``.

    Raises:
        SchemaError: a column differs from its declaration; the message gives both.
    """
    present = _columns_of(batch)
    sizes: dict[str, int] = {}
    where: dict[str, str] = {}
    for name, column in COLUMNS.items():
        if name not in present:
            continue
        _check_dtype(column, present[name])
        for dim, size in _sizes(column, tuple(present[name].shape)).items():
            if sizes.setdefault(dim, size) != size:
                raise SchemaError(
                    f"column '{name}' should be {_dims(column)}; it has {dim}={size}, but '{where[dim]}' has "
                    f"{dim}={sizes[dim]}."
                )
            where.setdefault(dim, name)
    _check_sequence_length(sizes, where)


def _check_dtype(column: Column, value: Tensor | np.ndarray) -> None:
    is_tensor = not isinstance(value, np.ndarray)
    if column.is_tensor != is_tensor:
        expected = "a tensor, in batch" if column.is_tensor else "an array, in non_tensor_batch"
        raise SchemaError(f"column '{column.name}' is a {type(value).__name__}; it should be {expected}.")
    dtype = str(value.dtype).removeprefix("torch.")
    if is_tensor and dtype not in column.dtype.split(" or "):
        raise SchemaError(
            f"column '{column.name}' has dtype {dtype}, it should be {column.dtype}; convert it where it is made "
            f"({column.producer})."
        )


def _sizes(column: Column, shape: tuple[int, ...]) -> dict[str, int]:
    """The size of each named dimension."""
    dims, sizes = column.dims, shape
    if "..." in dims:
        before = dims.index("...")
        after = len(dims) - before - 1
        dims = dims[:before] + dims[before + 1 :]
        sizes = shape[:before] + shape[max(before, len(shape) - after) :]
    # Objects may be kept with more dimensions, such as one text for each of two answers.
    if len(sizes) < len(dims) or (column.is_tensor and len(sizes) > len(dims)):
        raise SchemaError(f"column '{column.name}' should be {_dims(column)}, got shape {shape}.")
    return dict(zip(dims, sizes, strict=False))


def _dims(column: Column) -> str:
    return f"({', '.join(column.dims)})"


def _check_sequence_length(sizes: Mapping[str, int], where: Mapping[str, str]) -> None:
    if not {"prompt_length", "response_length", "sequence_length"} <= sizes.keys():
        return
    prompt, response, sequence = sizes["prompt_length"], sizes["response_length"], sizes["sequence_length"]
    if sequence != prompt + response:
        raise SchemaError(
            f"column '{where['sequence_length']}' has length {sequence}, but prompts and responses together have "
            f"{prompt} + {response}; it should hold both, one after the other."
        )


def _columns_of(batch: DataProto | Mapping[str, Tensor | np.ndarray]) -> dict[str, Tensor | np.ndarray]:
    if isinstance(batch, Mapping):
        return dict(batch)
    return {**batch.batch, **batch.non_tensor_batch}
