"""The rollout contract: prompts as token ids in; response token ids with their log-probs out.

An engine implements four methods (``generate``, ``load_weights``, ``sleep``, ``wake``). What the trainer
uses is built on them once, here: ``awake`` and ``generate_sequences``. Seeds, columns and checks are
therefore the same for every engine. An engine that decodes in steps of its own gets ``abort`` for two lines, see
``until_aborted``; one that hands its requests to a server overrides it.

    with rollout.awake(actor.get_per_tensor_param, version=actor.weight_version):
        columns = rollout.generate_sequences(prompts)
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor

from verl.errors import ConfigError, RolloutError
from verl.utils.model import check_tokenizer_fits, eos_token_ids, hf_config_of, unknown_ids
from verl.utils.registry import Registry

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from verl.protocol import DataProto
    from verl.workers.config import HFModelConfig, RolloutConfig

FinishReason = Literal["stop", "length", "abort"]
NO_WEIGHTS = -1
"""The weight version of an engine that holds no usable weights."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw one response.

    The next token is drawn from softmax(logits / temperature), cut first to the tokens that have at least the
    share ``min_p`` of the largest probability, then to the ``top_k`` most likely of them, then to the smallest set
    of those that holds the share ``top_p`` of their mass; among equally likely tokens the lower id comes first.
    Temperature 0 takes the most likely token (greedy).
    """

    max_tokens: int
    """Most tokens in the response."""
    seed: int
    """Seed of this response's own random numbers; see ``sample_seed``."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 or 0: all tokens."""
    min_p: float = 0.0
    """0: all tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end the response; the token that completes one is the last token kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response, kept as its last token, beside the end tokens of the model."""
    ignore_eos: bool = False
    """Go on after the model's end tokens; ``stop`` and ``stop_token_ids`` still end the response."""

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
        """The most likely token is taken; no random number decides."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Some tokens are never drawn, because of ``min_p``, ``top_k`` or ``top_p``."""
        return not self.is_greedy and (self.min_p > 0 or self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True)
class RolloutRequest:
    """One response to draw."""

    prompt_ids: list[int]
    """Tokens of the prompt, without padding; at least one."""
    sampling: SamplingParams


@dataclass(frozen=True)
class RolloutOutput:
    """One response."""

    token_ids: list[int]
    """What the policy chose, with the end token if it chose one."""
    log_probs: list[float]
    """log p of each token. With ``rollout.logprobs_mode=processed_logprobs`` under the distribution that it was
    drawn from: softmax(logits / temperature) over the tokens that min_p, top_k and top_p keep (without these, what
    the trainer computes); a greedy response has those of softmax(logits). With ``raw_logprobs`` under
    softmax(logits), whatever was sampled from."""
    finish_reason: FinishReason
    """``stop``: an end token or stop text; ``length``: ``max_tokens`` reached; ``abort``: cut short by
    :meth:`BaseRollout.abort`, with the tokens drawn until then, maybe none."""
    weight_version: int
    """Version of the weights that made it."""


class BaseRollout(ABC):
    """One engine on this rank.

    Args:
        config: ``actor_rollout_ref.rollout``.
        model_config: ``actor_rollout_ref.model``.
        tokenizer: of the model; it decodes for stop texts and names the pad token.
        device: where the engine computes.

    Raises:
        ConfigError: the tokenizer makes tokens that the model does not have, or the prompt and
            the response together are longer than the model or the engine can hold.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device | str,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.device = torch.device(device)
        self.hf_config = hf_config_of(model_config)
        check_tokenizer_fits(tokenizer, self.hf_config)
        self.eos_token_ids = eos_token_ids(model_config.path, tokenizer)
        self.unknown_ids = sorted(set(unknown_ids(tokenizer, self.hf_config)) - set(self.eos_token_ids))
        """Ids of the model that the tokenizer does not know: decoding would drop them. An engine does not draw them."""
        self.max_model_len = _max_model_len(config, self.hf_config)
        self.weight_version = NO_WEIGHTS
        self.ranks_per_engine = 1
        """Ranks that follow each other and share one engine: they get the same prompts."""
        self.leads = True
        """This rank generates; another of its engine only takes part in ``load_weights``."""
        self._abort_lock = threading.Lock()
        self._running: set[threading.Event] = set()
        self.set_up()

    def set_up(self) -> None:  # noqa: B027 - a hook that may stay empty
        """For engines: what the constructor does of their own; all attributes above are there."""

    @abstractmethod
    def generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        """One output per request, in the same order.

        A response depends on its own request and on the weights, never on the other requests. It has at least
        one token, unless :meth:`abort` was called.

        Raises:
            RolloutError: no weights are loaded, or a request cannot be served.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; the next ``generate`` uses them and nothing that was computed from older ones.

        The engine may keep the tensors that it is given instead of a copy, where they live on its device in its
        dtype. So they must not change while it generates, and whoever changes them afterwards gives them again
        under a new version; what a ``generate`` in between would see is not defined. Asleep without weights it
        keeps no tensor alive.

        Args:
            weights: parameter names of the Transformers model, and full tensors. Always iterated to the
                end (on several ranks that is a collective operation), also when some cannot be used.
            version: stamped on every response from now on.

        Raises:
            RolloutError: a name is unknown, missing, or has another shape; the message names them. The
                engine then holds no usable weights.
        """

    @abstractmethod
    def wake(self) -> None:
        """Take the memory that generation needs. Waking twice is the same as once."""

    @abstractmethod
    def sleep(self) -> None:
        """Give memory back to the trainer; sets ``weight_version`` to -1 if the weights go too. Idempotent."""

    def abort(self) -> None:
        """Make the running ``generate`` return soon; may be called from any thread.

        Responses that have not ended come back with ``finish_reason`` "abort" and the tokens and log-probs drawn
        so far, responses that have ended as they are. Without a running ``generate`` this does nothing: the
        next one is as ever.
        """
        with self._abort_lock:
            for running in self._running:
                running.set()

    @contextmanager
    def until_aborted(self) -> Iterator[threading.Event]:
        """For engines that decode in steps: around all work of one ``generate``; :meth:`abort` sets the event.

        ::

            with self.until_aborted() as aborted:
                while unfinished and not aborted.is_set():
                    ...
        """
        aborted = threading.Event()
        with self._abort_lock:
            self._running.add(aborted)
        try:
            yield aborted
        finally:
            with self._abort_lock:
                self._running.discard(aborted)

    @contextmanager
    def awake(self, weights: Callable[[], Iterable[tuple[str, Tensor]]], version: int) -> Iterator[Self]:
        """Awake, with the weights of ``version``, inside; asleep outside, also after an error.

        Args:
            weights: called for the tensors only if the engine does not hold ``version`` already.
            version: of the weights that ``weights()`` would yield.
        """
        try:
            self.wake()
            if self.weight_version != version:
                self.load_weights(weights(), version)
            yield self
        finally:
            self.sleep()

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One response to each row of ``prompts``; see ``verl.workers.rollout.batch`` for the columns.

        A rank that does not lead returns an empty batch, which nobody reads.
        """
        from verl.protocol import DataProto
        from verl.workers.rollout.batch import columns_from_outputs, requests_from_prompts

        if not self.leads:
            return DataProto()

        requests = requests_from_prompts(prompts, self.config)
        return columns_from_outputs(prompts, self.generate(requests), self.config.response_length, self._pad_token_id())

    def _pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        if not isinstance(pad, int):
            raise RolloutError("the tokenizer has no pad token; load it with verl.utils.hf_tokenizer.")
        return pad

    def check_requests(self, requests: list[RolloutRequest]) -> None:
        """For engines: refuse what cannot be served before any work is done.

        Raises:
            RolloutError: no weights, an empty prompt, a token outside of the vocabulary, or a prompt that leaves
                too little room for the response.
        """
        if self.weight_version == NO_WEIGHTS:
            raise RolloutError(
                f"{type(self).__name__} holds no weights. Generate inside `with rollout.awake(weights, version):`."
            )
        vocab_size = self.hf_config.get_text_config().vocab_size
        for i, request in enumerate(requests):
            ids, max_tokens = request.prompt_ids, request.sampling.max_tokens
            if not ids:
                raise RolloutError(f"request {i} has an empty prompt; a model needs at least one token to go on from.")
            if min(ids) < 0 or max(ids) >= vocab_size:
                raise RolloutError(
                    f"request {i} has a prompt token outside of the vocabulary of {vocab_size}. Tokenize with the "
                    "model's own tokenizer (model.tokenizer_path)."
                )
            if len(ids) + max_tokens > self.max_model_len:
                raise RolloutError(
                    f"request {i} has {len(ids)} prompt tokens and asks for {max_tokens} more, but there is room for "
                    f"{self.max_model_len} in all. Raise rollout.max_model_len, or ask for fewer."
                )


def _max_model_len(config: RolloutConfig, hf_config: PretrainedConfig) -> int:
    needed = config.prompt_length + config.response_length
    allowed = config.max_model_len or needed
    if needed > allowed:
        raise ConfigError(
            f"rollout.max_model_len={allowed} is less than rollout.prompt_length + rollout.response_length = "
            f"{config.prompt_length} + {config.response_length}. Raise it to {needed}, or leave it null."
        )
    positions = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and allowed > positions:
        raise ConfigError(
            f"prompt and response may take {allowed} tokens, but the model has max_position_embeddings={positions}. "
            "Lower data.max_prompt_length or data.max_response_length (or rollout.max_model_len); if the model can "
            "hold more, say so with model.override_config.max_position_embeddings."
        )
    return allowed


RolloutRegistry: Registry[type[BaseRollout]] = Registry("rollout engine")
"""Engines by their name in ``rollout.name``."""


def get_rollout_class(name: str) -> type[BaseRollout]:
    """The engine called ``name``: the class that ``verl.workers.rollout.<name>_rollout`` registers.

    An engine's libraries are imported only when it is chosen.

    Raises:
        ConfigError: there is no such engine.
    """
    if name not in RolloutRegistry and name in _engines_here():
        importlib.import_module(f"verl.workers.rollout.{name}_rollout")
    if name not in RolloutRegistry:
        known = sorted({*_engines_here(), *RolloutRegistry.names()})
        raise ConfigError(
            f"rollout.name={name}: there is no such rollout engine in this version. Use one of: {', '.join(known)}."
        )
    return RolloutRegistry.get(name)


def _engines_here() -> list[str]:
    package = importlib.import_module("verl.workers.rollout")
    return [m.name.removesuffix("_rollout") for m in pkgutil.iter_modules(package.__path__) if "_rollout" in m.name]
