"""Requests to a rollout engine, made of the prompts of a batch, and its responses; ``columns.py`` makes their columns.

Prompts (each row already repeated ``n`` times by the driver):
    input_ids, attention_mask    (bsz, prompt_length), padded on the left
    uid, sample_index            id of the prompt, and position of the response within its group
    multi_modal_inputs           of a model with images: those of each row (see verl.vision)
    position_ids                 of a model with images: (bsz, 4, prompt_length)
    meta_info                    global_steps; validate: sample with rollout.val_kwargs;
                                 do_sample: overrides the configured one (False: greedy)
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from verl.config import RolloutConfig
from verl.errors import ConfigError, RolloutError, SchemaError
from verl.protocol import DataProto
from verl.protocol.shared import SharedTensors
from verl.schema import require

FinishReason = Literal["stop", "length", "abort"]
NO_WEIGHTS = -1
"""Weight version of an engine without usable weights."""
NOT_KEPT = -1
"""Stands in ``kept_ids`` where there is no token."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one response.

    The next token is drawn from softmax(logits / temperature), restricted in this order to: tokens with at least
    ``min_p`` times the largest probability; of those the ``top_k`` most likely; of those the smallest set with at least
    ``top_p`` of their total mass. Among equally likely tokens the lower id ranks first. Temperature 0 takes the most
    likely token (greedy).
    """

    max_tokens: int
    """Most tokens in the response."""
    seed: int
    """Seed of this response's random numbers; see :func:`sample_seed`."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0 keeps all tokens."""
    min_p: float = 0.0
    """0 keeps all tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end the response; the token that completes one is kept as the last."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, in addition to the model's end tokens; kept as the last token."""
    ignore_eos: bool = False
    """Continue after the model's end tokens; ``stop`` and ``stop_token_ids`` still end the response."""

    def __post_init__(self) -> None:
        rules = [
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or larger"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("top_k", self.top_k >= -1, "-1 (all tokens) or a number of tokens"),
            ("stop", all(self.stop), "texts of at least one character"),
        ]
        for name, holds, allowed in rules:
            if not holds:
                raise ConfigError(f"sampling parameter {name}={getattr(self, name)!r} must be {allowed}.")

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0

    @property
    def distribution_params(self) -> dict[str, float]:
        """The parameters that decide how probable each token is; equal if the probabilities are."""
        if self.is_greedy:
            return {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
        top_k = self.top_k if self.top_k > 0 else -1
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": top_k, "min_p": self.min_p}

    @property
    def truncates(self) -> bool:
        """True if ``min_p``, ``top_k`` or ``top_p`` exclude some tokens from sampling."""
        return not self.is_greedy and (self.min_p > 0 or self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True)
class RolloutRequest:
    """A prompt and how to sample one response to it."""

    prompt_ids: list[int]
    """Tokens of the prompt, without padding; at least one."""
    sampling: SamplingParams
    images: SharedTensors | None = None
    """``pixel_values`` and ``image_grid_thw`` of the images whose tokens the prompt has; None if it has none."""
    text_places: tuple[int, ...] = ()
    """Places of prompt tokens that have the id of images and stand for none, because the policy drew them."""
    returns_routing: bool = False
    """Return the experts that each token went to."""
    streams: bool = False
    """Tell the tokens while the response is drawn (:class:`DrawnPart`), by engines that can."""
    drawn_count: int = 0
    """Number of tokens at the end of ``prompt_ids`` that are the beginning of the response, which was interrupted after
    them. Random numbers and stop texts continue from there; ``max_tokens`` and the answer cover only the tokens after
    ``prompt_ids``."""
    returns_kept_ids: bool = False
    """Return the tokens that truncated sampling kept for each drawn token."""

    @property
    def drawn_ids(self) -> list[int]:
        """The tokens of the response that were drawn before."""
        return self.prompt_ids[len(self.prompt_ids) - self.drawn_count :]

    @property
    def response_sampling(self) -> SamplingParams:
        """The sampling parameters of the whole response, with the tokens that were drawn before."""
        return replace(self.sampling, max_tokens=self.sampling.max_tokens + self.drawn_count)

    @property
    def places_of_text(self) -> list[int]:
        """Places of tokens that stand for no image: ``text_places``, and those of the response."""
        return [*self.text_places, *range(len(self.prompt_ids) - self.drawn_count, len(self.prompt_ids))]

    def after(self, token_ids: Sequence[int]) -> Self:
        """Return the request for the rest of the response, of which these tokens have been drawn."""
        left = replace(self.sampling, max_tokens=self.sampling.max_tokens - len(token_ids))
        drawn_count = self.drawn_count + len(token_ids)
        return replace(self, prompt_ids=[*self.prompt_ids, *token_ids], sampling=left, drawn_count=drawn_count)


@dataclass(frozen=True)
class DrawnPart:
    """Tokens of a response that goes on."""

    start: int
    """Index of the first of these tokens in the response; as an engine reports it, in the part that this engine draws.
    Tokens may come again: of a response that was interrupted, or is drawn again by another engine."""
    token_ids: list[int]


@dataclass(frozen=True)
class RolloutOutput:
    """A response and its log-probs."""

    token_ids: list[int]
    """The sampled tokens, including the end token if one was sampled."""
    log_probs: list[float]
    """log p of each token. With ``rollout.logprobs_mode=processed_logprobs`` under the distribution that it was drawn
    from: softmax(logits / temperature) over the tokens that min_p, top_k and top_p keep (if these keep all, the value
    that the trainer computes), and softmax(logits) for a greedy response. With ``raw_logprobs`` always under
    softmax(logits)."""
    finish_reason: FinishReason
    """``stop``: an end token or stop text; ``length``: ``max_tokens`` reached; ``abort``: ended by
    :meth:`~verl.workers.rollout.base.BaseRollout.abort`, with the tokens drawn until then, possibly none."""
    weight_version: int
    """Version of the weights that the response was drawn with; of several the oldest."""
    routed_experts: Tensor | None = None
    """(tokens of prompt and response, layers, experts per token), if the request asks for it; the last token, which
    has not gone into the model, has unknown ones. See :mod:`verl.workers.routers`."""
    num_preempted: int | None = None
    """Number of times that the engine preempted the response for lack of memory; None if it does not report it."""
    versions: tuple[tuple[int, int], ...] = ()
    """Versions of the weights, in order, and how many tokens were drawn with each; by default all with
    ``weight_version``."""
    kept_ids: Tensor | None = None
    """(drawn tokens, K) int32, if the request asks for it: the ids of the tokens that min_p, top_k and top_p kept for
    each drawn token, ascending, then -1; K is :attr:`~verl.config.RolloutConfig.kept_ids_width`. All -1 where they are
    not known, or more than K."""

    def __post_init__(self) -> None:
        if not self.versions and self.token_ids:
            object.__setattr__(self, "versions", ((self.weight_version, len(self.token_ids)),))

    @property
    def weight_versions(self) -> list[int]:
        """Version of the weights that drew each token."""
        return [version for version, count in self.versions for _ in range(count)]

    def kept_of_each(self, width: int) -> Tensor:
        """Return the ids that were kept for each token, (tokens, width) int32; -1 where they are not known."""
        if self.kept_ids is None:
            return torch.full((len(self.token_ids), width), NOT_KEPT, dtype=torch.int32)
        return widened(self.kept_ids, width)

    def followed_by(self, rest: RolloutOutput) -> RolloutOutput:
        """Return the whole response, of which this is the beginning.

        Experts are those with which each token's successor was drawn: of the tokens that are in both parts, those of
        this one, as far as it has them.
        """
        versions = [*self.versions, *rest.versions]
        if self.versions and rest.versions and self.versions[-1][0] == rest.versions[0][0]:
            joint = self.versions[-1][0], self.versions[-1][1] + rest.versions[0][1]
            versions = [*self.versions[:-1], joint, *rest.versions[1:]]
        routed = rest.routed_experts
        if routed is not None and self.routed_experts is not None:
            routed_tokens = len(self.routed_experts) - 1  # the last token had not gone into the model
            routed = torch.cat([self.routed_experts[:routed_tokens], routed[routed_tokens:]])
        widths = [part.kept_ids.shape[1] for part in (self, rest) if part.kept_ids is not None]
        counts = self.num_preempted, rest.num_preempted
        return RolloutOutput(
            [*self.token_ids, *rest.token_ids],
            [*self.log_probs, *rest.log_probs],
            rest.finish_reason,
            min((version for version, _ in versions), default=rest.weight_version),
            routed,
            None if None in counts else sum(filter(None, counts)),
            tuple(versions),
            torch.cat([part.kept_of_each(max(widths)) for part in (self, rest)]) if widths else None,
        )


def widened(kept_ids: Tensor, width: int) -> Tensor:
    """Return ids (..., K) with at least K columns: a run that goes on may store more of them than before."""
    return functional.pad(kept_ids, (0, width - kept_ids.shape[-1]), value=NOT_KEPT)


def kept_table(kept_ids: Sequence[array[int]], width: int) -> Tensor:
    """Make the table of :class:`RolloutOutput` from the ids that sampling kept for each token, ascending."""
    table = np.full((len(kept_ids), width), NOT_KEPT, dtype=np.int32)
    if fitting := [row for row, ids in enumerate(kept_ids) if 0 < len(ids) <= width]:
        counts = np.array([len(kept_ids[row]) for row in fitting])
        rows = np.full((len(fitting), width), NOT_KEPT, dtype=np.int32)
        rows[np.arange(width) < counts[:, None]] = np.concatenate([kept_ids[row] for row in fitting])
        table[fitting] = rows
    return torch.from_numpy(table)


def sample_seed(global_seed: int, step: int, uid: object, sample_index: int) -> int:
    """Seed of one response, in [0, 2^63); the same in every process and on every machine.

    Args:
        global_seed: seed of the run.
        step: training step, so that a repeated prompt gets different responses.
        uid: id of the prompt.
        sample_index: position of the response within its group.
    """
    # Not `hash`, which differs between processes.
    text = f"{global_seed}|{step}|{uid}|{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def continued_seed(seed: int, drawn_count: int) -> int:
    """Seed for the rest of a response in an engine whose random numbers cannot go on from a position.

    Args:
        seed: of the response.
        drawn_count: number of tokens that were drawn before; 0 gives ``seed`` itself.
    """
    return sample_seed(seed, 0, "rest", drawn_count) if drawn_count else seed


def requests_from_prompts(prompts: DataProto, config: RolloutConfig) -> list[RolloutRequest]:
    """Make one request per row, each with its own seed.

    Raises:
        SchemaError: a column is missing, or a prompt is not padded on the left only.
        RolloutError: a prompt is empty or longer than ``config.prompt_length``.
    """
    require(prompts, ("input_ids", "attention_mask", "uid", "sample_index"), "generate_sequences")
    step = int(prompts.meta_info.get("global_steps", 0))
    validates = bool(prompts.meta_info.get("validate", False))
    template = sampling_for(config, validates, prompts.meta_info.get("do_sample"))
    routing = config.enable_rollout_routing_replay and not validates
    returns_kept_ids = config.keep_sampling_mask and not validates and template.truncates
    uids, indices = prompts.non_tensor_batch["uid"], prompts.non_tensor_batch["sample_index"]
    rows = _unpadded(prompts.batch["input_ids"], prompts.batch["attention_mask"], uids, config.prompt_length)
    images = prompts.non_tensor_batch.get("multi_modal_inputs", [None] * len(rows))
    return [
        RolloutRequest(
            row,
            replace(template, seed=sample_seed(config.seed, step, uid, int(index))),
            _shared(inputs),
            returns_routing=routing,
            returns_kept_ids=returns_kept_ids,
        )
        for row, uid, index, inputs in zip(rows, uids, indices, images, strict=True)
    ]


def _shared(images: Mapping[str, Tensor] | None) -> SharedTensors | None:
    return images if isinstance(images, SharedTensors) and images else SharedTensors(images) if images else None


def sampling_for(config: RolloutConfig, validate: bool, do_sample: bool | None = None) -> SamplingParams:
    """Sampling parameters from ``rollout`` or, to validate, ``rollout.val_kwargs``, with seed 0 as a placeholder.

    ``do_sample`` overrides the configured one unless it is None; False gives temperature 0.
    """
    source = config.val_kwargs if validate else config
    samples = source.do_sample if do_sample is None else do_sample
    max_tokens = config.val_kwargs.max_tokens if validate else None
    return SamplingParams(
        max_tokens=max_tokens or config.response_length,
        seed=0,
        temperature=source.temperature if samples else 0.0,
        top_p=source.top_p,
        top_k=source.top_k,
        min_p=source.min_p,
        stop=config.stop if source.stop is None else source.stop,
        stop_token_ids=config.stop_token_ids if source.stop_token_ids is None else source.stop_token_ids,
        ignore_eos=config.ignore_eos,
    )


def _unpadded(input_ids: Tensor, attention_mask: Tensor, uids: np.ndarray, prompt_length: int) -> list[list[int]]:
    lengths = attention_mask.sum(-1).tolist()
    not_left_padded = (attention_mask[:, 1:] < attention_mask[:, :-1]).any(-1).tolist()
    rows = []
    for ids, length, broken, uid in zip(input_ids.tolist(), lengths, not_left_padded, uids, strict=True):
        if broken:
            raise SchemaError(
                f"prompt {uid!r}: attention_mask must be zeros, then ones; prompts are padded on the left."
            )
        if length == 0:
            raise RolloutError(f"prompt {uid!r} is empty; a model needs at least one token to go on from.")
        if length > prompt_length:
            raise RolloutError(
                f"prompt {uid!r} has {length} tokens, more than prompt_length={prompt_length}. Raise it "
                "(max_prompt_length of the data), or set filter_overlong_prompts=true or truncation=left."
            )
        rows.append(ids[-length:])
    return rows
