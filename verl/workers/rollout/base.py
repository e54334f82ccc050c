"""The interface of rollout engines: prompts as token ids in, response token ids with their log-probs out.

An engine implements ``generate``, ``load_weights``, ``sleep`` and ``wake``. ``awake`` and ``generate_sequences``, which
the trainer calls, are built on these, so seeds, columns and checks are the same for every engine.

    with rollout.awake(actor.get_per_tensor_param, version=actor.weight_version):
        columns = rollout.generate_sequences(prompts)
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from verl.base.registry import Registry
from verl.config import HFModelConfig, RolloutConfig
from verl.errors import ConfigError, RolloutError
from verl.protocol import DataProto
from verl.supervision.processes import show_life
from verl.utils.model import check_tokenizer_fits, eos_token_ids, hf_config_of, unknown_ids
from verl.vision.families import IMAGE_INPUTS, VisionConfig
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.rollout.columns import columns_from_outputs
from verl.workers.rollout.request import (
    NO_WEIGHTS,
    FinishReason,
    RolloutOutput,
    RolloutRequest,
    SamplingParams,
    requests_from_prompts,
)
from verl.workers.rollout.request_queue import RequestQueue
from verl.workers.rollout.scoring import ScoreRequest, TokenScores
from verl.workers.rollout.state import EngineState

_REPORT_EVERY_S = 0.5
"""Interval at which an engine at work tells its state."""

__all__ = [
    "NO_WEIGHTS",
    "BaseRollout",
    "FinishReason",
    "RequestQueue",
    "RolloutOutput",
    "RolloutRegistry",
    "RolloutRequest",
    "SamplingParams",
    "get_rollout_class",
]


Weights = Callable[[], Iterable[tuple[str, Tensor]]] | AdaptedWeights
"""Source of a model's weights: a function, or for a model with LoRA adapters its base and adapters separately."""


class BaseRollout(ABC):
    """The rollout engine of one rank.

    Args:
        config: ``actor_rollout_ref.rollout``.
        model_config: ``actor_rollout_ref.model``.
        tokenizer: the model's own; decodes responses to find stop texts, and gives the pad token.
        device: where the engine computes.

    Raises:
        ConfigError: the tokenizer has tokens that the model lacks, or the longest prompt and response together exceed
            the model's or the engine's context.
    """

    takes_images = False
    """True if requests may have images."""
    takes_divided = False
    """True if the weights passed to :meth:`awake` may be DTensors: it uses their parts, or gathers what it needs."""
    applies_adapters = False
    """True if :meth:`awake` takes LoRA adapters separately from the weights that they were added to."""
    shares_weights = False
    """True if it samples with the very tensors passed to :meth:`awake`, and not with copies of them."""
    scores_tokens = False
    """True if :meth:`score` can be called."""

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
        self._vision = VisionConfig.from_config(self.hf_config)
        check_tokenizer_fits(tokenizer, self.hf_config, warns=False)  # the driver has warned already
        self.eos_token_ids = eos_token_ids(model_config.path, tokenizer)
        # Ids of the model that the tokenizer lacks. Engines never draw them, because decoding would drop them.
        self.unknown_ids = sorted(set(unknown_ids(tokenizer, self.hf_config)) - set(self.eos_token_ids))
        self.max_model_len = _max_model_len(config, self.hf_config)
        self.weight_version = NO_WEIGHTS
        self.ranks_per_engine = 1
        """Number of consecutive ranks that share one engine; all of them must be given the same prompts."""
        self.leads = True
        """True if this rank's responses count; the other ranks of its engine only take part in ``load_weights``."""
        self.on_state: Callable[[EngineState], object] | None = None
        """Called with the state of the engine: after it woke and fell asleep, and now and then while it works. It must
        return at once."""
        self._state_reported_at = 0.0
        self._abort_lock = threading.Lock()
        self._running: set[threading.Event] = set()
        self.set_up()

    def set_up(self) -> None:  # noqa: B027  an engine may have nothing to do here
        """Finish the engine's construction; called at the end of ``__init__``."""

    @abstractmethod
    def generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        """Draw one response to each request, in the order of the requests.

        A response depends only on its request and the weights, never on the other requests. It has at least one token,
        unless :meth:`abort` was called.

        Raises:
            RolloutError: no weights are loaded, or a request cannot be served.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, and discard everything computed from the previous ones (such as cached keys and values).

        The engine may keep the given tensors instead of copies if they are on its device in its dtype. They must not
        change while it generates; after a change they must be loaded again under a new version, and the result of a
        ``generate`` before that is undefined. An engine that sleeps without weights holds no reference to any tensor.

        Args:
            weights: parameter names of the Transformers model, and full tensors. Always iterated to the end, also after
                an error, because on several ranks the iteration is collective.
            version: recorded in every response drawn with these weights.

        Raises:
            RolloutError: weights are unknown, missing or of another shape; the message names them. The engine then
                holds no usable weights.
        """

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenScores]:
        """Compute the log-probs of given tokens, in the order of the requests.

        Raises:
            RolloutError: this engine scores no tokens, it holds no weights, or a request cannot be served.
        """
        raise RolloutError(
            f"{type(self).__name__} computes no log-probs of given tokens. Use vllm or sglang, or a forward pass of "
            "the training engine."
        )

    def load_adapted(self, weights: AdaptedWeights, version: int) -> None:
        """Replace all weights as :meth:`load_weights` does, by base weights and adapters apart.

        Raises:
            RolloutError: this engine applies no adapters.
        """
        raise RolloutError(f"{type(self).__name__} applies no adapters. Give it merged weights.")

    @abstractmethod
    def wake(self) -> None:
        """Allocate the memory that generation needs. Idempotent."""

    @abstractmethod
    def sleep(self) -> None:
        """Release memory for the trainer; set ``weight_version`` to -1 if the weights are released too. Idempotent."""

    def abort(self) -> None:
        """Make the running ``generate`` return soon. Thread-safe.

        Unfinished responses are returned with ``finish_reason`` "abort" and the tokens and log-probs drawn so far;
        finished ones are unchanged. Without a running ``generate`` this has no effect, also not on the next one.
        """
        with self._abort_lock:
            for running in self._running:
                running.set()

    @contextmanager
    def until_aborted(self) -> Iterator[threading.Event]:
        """Yield an event that :meth:`abort` sets. Engines enter this once around each ``generate``.

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
    def awake(self, weights: Weights, version: int) -> Iterator[Self]:
        """Wake the engine with the weights of ``version``; put it to sleep on exit, also after an error.

        Args:
            weights: returns names and tensors; called only if the engine does not already hold ``version``.
            version: version of the weights that ``weights()`` returns.
        """
        try:
            self.wake()
            if self.weight_version != version:
                if isinstance(weights, AdaptedWeights):
                    self.load_adapted(weights, version)
                else:
                    self.load_weights(weights(), version)
            self.report_state()
            yield self
        finally:
            self.sleep()
            self.report_state()

    def state(self) -> EngineState:
        """Return what the engine does now; called by the thread that generates."""
        return EngineState(weight_version=self.weight_version)

    def report_state(self, if_due: bool = False) -> None:
        """Call :attr:`on_state`, if it is set, with the state; with ``if_due``, after a pass, twice a second."""
        if if_due:
            show_life()
        if self.on_state is None:
            return
        if if_due:
            now = time.monotonic()
            if now - self._state_reported_at < _REPORT_EVERY_S:
                return
            self._state_reported_at = now
        self.on_state(self.state())

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Draw one response to each row of ``prompts``.

        ``verl.workers.rollout.request`` lists the columns of prompts, ``verl.workers.rollout.columns`` those of the
        responses; ``finish_reason`` and ``weight_version`` are one per row.

        Returns an empty batch, to be ignored, on a rank that does not generate (``leads`` is false).
        """
        if not self.leads:
            return DataProto()

        pad = self.tokenizer.pad_token_id
        if not isinstance(pad, int):
            raise RolloutError("the tokenizer has no pad token; load it with verl.utils.hf_tokenizer.")
        outputs = self.generate(requests_from_prompts(prompts, self.config))
        return columns_from_outputs(prompts, outputs, self.config.response_length, pad, self._vision)

    def serve(self, queue: RequestQueue) -> None:
        """Answer the requests of ``queue`` as they come, until it is closed. Called inside :meth:`awake`.

        A response is the one that :meth:`generate` draws for the same request, whatever else is running and whenever it
        came. A request that cannot be served is answered with its error, and the others go on. This implementation
        answers what is waiting as one batch; engines that admit a request while others run replace it.

        Raises:
            RolloutError: the engine cannot go on.
        """
        while requests := queue.take(self.config.max_num_seqs, wait=True):
            queue.take_cancelled()  # a batch runs to its end; answers to cancelled requests are dropped
            servable = []
            for request_id, request in requests:
                try:
                    self.check_requests([request])
                    servable.append((request_id, request))
                except RolloutError as error:
                    queue.answer(request_id, error)
            outputs = self.generate([request for _, request in servable]) if servable else []
            for (request_id, _), output in zip(servable, outputs, strict=True):
                queue.answer(request_id, output)

    def check_requests(self, requests: list[RolloutRequest]) -> None:
        """Check that all requests can be served. Engines call this before any other work.

        Raises:
            RolloutError: no weights are loaded, a prompt is empty or has a token outside of the vocabulary, or prompt
                and response together exceed ``max_model_len``.
        """
        if any(request.images for request in requests):
            if self._vision is None:
                raise RolloutError(f"a prompt has images, and {type(self.hf_config).__name__} is of a model for text.")
            if not self.takes_images:
                raise RolloutError(
                    f"a prompt has images, which {type(self).__name__} does not take. Set "
                    "rollout.name=native, hf, vllm or sglang."
                )
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
                    "model's own tokenizer (tokenizer_path)."
                )
            self._check_images(i, request)
            if len(ids) + max_tokens > self.max_model_len:
                raise RolloutError(
                    f"request {i} has {len(ids)} prompt tokens and asks for {max_tokens} more, but there is room for "
                    f"{self.max_model_len} in all. Raise max_model_len, or ask for fewer."
                )

    def _check_images(self, request_index: int, request: RolloutRequest) -> None:
        """Check that the image tokens of a request are those of its images."""
        if self._vision is None:
            return
        expected = 0 if request.images is None else self._vision.tokens_of(request.images[IMAGE_INPUTS[1]])
        before = request.prompt_ids[: len(request.prompt_ids) - request.drawn_count]
        image_tokens = sum(map(before.count, self._vision.token_ids)) - len(request.text_places)
        if image_tokens != expected:
            raise RolloutError(
                f"request {request_index} has {image_tokens} image tokens, and its images make {expected}. Give the "
                "tokens that the processor makes of the text and the images, and all images of the conversation in "
                "their order."
            )

    def check_finite(self, outputs: Iterable[RolloutOutput]) -> None:
        """Raise RolloutError if a log-prob is nan or infinite."""
        if any(not math.isfinite(value) for output in outputs for value in output.log_probs):
            raise RolloutError(
                f"the model's logits are not finite with weights of version {self.weight_version}. The weights may "
                "have diverged (look at actor/grad_norm), or overflow in dtype="
                f"{self.config.dtype}; bfloat16 and float32 have a wider range than float16."
            )


def _max_model_len(config: RolloutConfig, hf_config: PretrainedConfig) -> int:
    needed = config.prompt_length + config.response_length
    allowed = config.max_model_len or needed
    if needed > allowed:
        raise ConfigError(
            f"max_model_len={allowed} is less than prompt_length + response_length = "
            f"{config.prompt_length} + {config.response_length}. Raise it to {needed}, or leave it null."
        )
    positions = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and allowed > positions:
        raise ConfigError(
            f"prompt and response may take {allowed} tokens, but the model has max_position_embeddings={positions}. "
            "Lower prompt_length or response_length (or max_model_len); if the model can hold more, say so with "
            "override_config.max_position_embeddings."
        )
    return allowed


RolloutRegistry: Registry[type[BaseRollout]] = Registry("rollout engine")
"""Engine classes by their name in ``rollout.name``."""

ROLLOUT_MODES = ("sync", "async")
"""Values of ``rollout.mode``."""


def get_rollout_class(rollout_name: str, mode: str = "async") -> type[BaseRollout]:
    """Return the engine class registered as ``rollout_name``.

    Its module ``verl.workers.rollout.<rollout_name>_rollout`` is imported only here, so that the libraries of the other
    engines need not be installed.

    Args:
        rollout_name: ``rollout.name``.
        mode: ``rollout.mode``. One class is returned for both.

    Raises:
        ConfigError: there is no such engine or mode.
    """
    if mode not in ROLLOUT_MODES:
        raise ConfigError(f"mode={mode}: there is no such mode. Use one of: {', '.join(ROLLOUT_MODES)}.")
    if rollout_name not in RolloutRegistry and rollout_name in _engines_here():
        importlib.import_module(f"verl.workers.rollout.{rollout_name}_rollout")
    if rollout_name not in RolloutRegistry:
        engines = sorted({*_engines_here(), *RolloutRegistry.names()})
        raise ConfigError(
            f"rollout_name={rollout_name}: there is no such rollout engine in this version. Use one of: "
            f"{', '.join(engines)}."
        )
    return RolloutRegistry.get(rollout_name)


def _engines_here() -> list[str]:
    package = importlib.import_module("verl.workers.rollout")
    return [m.name.removesuffix("_rollout") for m in pkgutil.iter_modules(package.__path__) if "_rollout" in m.name]
