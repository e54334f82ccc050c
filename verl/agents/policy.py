"""Generation for agent loops: ``await server_manager.generate(...)``, token ids in and out."""

from __future__ import annotations

import asyncio
import hashlib
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from verl.agents.images import VIDEOS_APART, as_inputs, text_places
from verl.agents.turns import DrawnTurn
from verl.base.types import JsonMapping, JsonObject
from verl.config import RolloutConfig
from verl.errors import ConfigError, RolloutError
from verl.protocol.shared import SharedTensors
from verl.serving.connection import Connection, GenerationCall
from verl.vision.prompts import ImagePrompts
from verl.workers.rollout.request import DrawnPart, RolloutRequest, SamplingParams, sample_seed

NO_EFFECT = ("logprobs",)
"""Sampling parameters of other engines that ask for what is always given."""
OTHER_NAMES = {"max_new_tokens": "max_tokens"}
"""Names that other libraries give a parameter; they are taken too."""
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1}
"""Parameters that engines of this version lack, and the value that changes nothing."""
KINDS = {"max_tokens": int, "top_k": int, "ignore_eos": bool, "stop": str, "stop_token_ids": int}
"""Types of sampling parameters, where not any number is allowed."""
KNOWN_PARAMETERS = SamplingParams.__dataclass_fields__.keys() - {"seed"}
"""Sampling parameters of a call. No seed: it follows from the sample, so that a resumed run draws the same tokens."""


class ContextFullError(RolloutError):
    """A conversation has used up the tokens that prompt and response may have together."""


class TokenOutput(BaseModel):
    """One response of the policy."""

    token_ids: list[int]
    """The drawn tokens, with the end token if one was drawn."""
    log_probs: list[float] | None = None
    """log p of each drawn token."""
    routed_experts: object = None
    """With ``rollout.enable_rollout_routing_replay`` a tensor (tokens of prompt and response, layers, experts per
    token); see :mod:`verl.workers.routers`."""
    stop_reason: str | None = None
    """``stop``: an end token or stop text; ``length``: as many tokens as asked for; ``abort``."""
    weight_version: int = -1
    """Version of the weights that the response was drawn with."""
    num_preempted: int | None = None
    """Preemptions by the engine for want of memory; None where the engine does not tell."""
    extra_fields: JsonObject = {}


@dataclass(frozen=True, kw_only=True)
class SampleId:
    """Identity of a trajectory within a run; its random numbers follow from this and from its own tokens."""

    step: int
    uid: str
    sample_index: int
    attempt: int = 0
    """0, or how often the trajectory was drawn before, with a failure at the end."""
    prompt_ids: tuple[int, ...] = ()
    """The prompt as the data set made it: a response to just this has the same seed as without an agent loop."""

    @property
    def name(self) -> str:
        """Step, prompt, sample and attempt, for logs and ids."""
        return f"{self.step}/{self.uid}/{self.sample_index}/{self.attempt}"


class AsyncLLMServerManager:
    """The policy, for one trajectory. ``generate`` may be called from several tasks at once.

    Args:
        config: ``actor_rollout_ref.rollout``.
        connection: the way to the engines.
        sample: which response of the run the trajectory is.
        default: sampling parameters where a call names none.
        images: reads images, by the policy's processor; None for a model for text.
        returns_routing: record the experts that each token went to.
        returns_kept_ids: record the tokens that truncated sampling kept; calls without ``top_k`` get the rollout's.
        asleep_s: returns for how many seconds engines have slept so far.
    """

    def __init__(
        self,
        config: RolloutConfig,
        connection: Connection,
        sample: SampleId,
        default: SamplingParams,
        images: ImagePrompts | None = None,
        returns_routing: bool = False,
        returns_kept_ids: bool = False,
        asleep_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._config = config
        self._returns_routing, self._returns_kept_ids = returns_routing, returns_kept_ids
        self._images = images
        self._connection = connection
        self._sample = sample
        self.sampling = default
        """Sampling parameters where a call names none."""
        self._num_requests: Counter[tuple[int, ...]] = Counter()
        self.turns: list[DrawnTurn] = []
        """All responses of the trajectory, in the order in which they arrived."""
        self.seconds = 0.0
        """Time spent in ``generate``, summed over calls, without that in which engines slept."""
        self.is_closed = False
        self._under_way: list[GenerationCall] = []
        self._asleep_s = asleep_s
        self._held_s = 0.0
        self._asked_after_s = 0.0
        """``asleep_s`` at the time of the first of the requests that are under way."""
        self._conversations: set[str] = set()

    @property
    def sample(self) -> SampleId:
        """Return the identity of the trajectory within the run."""
        return self._sample

    @property
    def is_asking(self) -> bool:
        """Return whether a request is under way."""
        return bool(self._under_way)

    @property
    def held_s(self) -> float:
        """Seconds in which a request of the trajectory waited for engines that slept."""
        return self._held_s + (self._asleep_s() - self._asked_after_s if self._under_way else 0.0)

    def close(self) -> None:
        """Withdraw what is under way and refuse further calls, also those of threads that were left behind."""
        self.is_closed = True
        for call in list(self._under_way):
            call.cancel()
        for conversation in list(self._conversations):
            self._connection.end(conversation)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and response together."""
        return self._config.max_model_len or self._config.prompt_length + self._config.response_length

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, object] | None = None,
        image_data: Sequence[object] | Mapping[str, object] | None = None,
        video_data: Sequence[object] | None = None,
        on_drawn: Callable[[list[int]], object] | None = None,
    ) -> TokenOutput:
        """Draw a response to ``prompt_ids``, all tokens of the conversation so far.

        Args:
            request_id: id of the conversation; the same for all its turns, so that they meet the same engine.
            prompt_ids: at least one token, with all tokens of the images.
            sampling_params: ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``max_tokens``, ``stop``,
                ``stop_token_ids``, ``ignore_eos``; by default those of the rollout (or of validation).
            image_data: all images whose tokens are in ``prompt_ids``, in their order: a list of images, each the bytes
                of a file, a path, a ``data:`` URL or a PIL image; or ``multi_modal_inputs`` of the row. What the policy
                itself drew stands for no image.
            video_data: refused: those of the row are in ``image_data``, its ``multi_modal_inputs``, and others in the
                ``image_data`` of a :class:`verl.agents.conversation.Conversation`.
            on_drawn: called now and then, in the event loop of the call, with all tokens drawn so far, by engines that
                tell them before the response has ended (``native``, ``vllm``).

        Raises:
            ContextFullError: there is no room for another token.
            ConfigError: a sampling parameter is unknown or out of range, or the images are not those of the tokens.
            DataError: an image cannot be read.
            RolloutError: the request cannot be served.
        """
        if video_data:
            raise ConfigError(VIDEOS_APART)
        if self.is_closed:
            raise RolloutError("this trajectory has ended, and the policy answers it no more.")
        ids = list(map(operator.index, prompt_ids))
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ContextFullError(
                f"the conversation has {len(ids)} tokens, and prompt and response may have {self.max_model_len} "
                "(data.max_prompt_length + data.max_response_length, or rollout.max_model_len)."
            )
        parameters = self._checked(sampling_params or {})
        most = min(parameters.pop("max_tokens", self.sampling.max_tokens), room)
        images, texts = await self._with_images(ids, image_data)
        params = replace(self.sampling, **parameters, max_tokens=most, seed=self._seed(tuple(ids)))
        returns_kept_ids = self._returns_kept_ids and params.truncates
        if returns_kept_ids and not 0 < params.top_k <= self._config.top_k:
            params = replace(params, top_k=self._config.top_k)
        on_part = None if on_drawn is None else _in_this_loop(on_drawn)
        request = RolloutRequest(
            ids,
            params,
            images,
            texts,
            self._returns_routing,
            streams=on_part is not None,
            returns_kept_ids=returns_kept_ids,
        )
        asked_at, began, slept_s = time.time(), time.monotonic(), self._asleep_s()
        conversation = f"{self._sample.name}/{request_id}"
        self._conversations.add(conversation)
        try:
            call = self._connection.send(conversation, request, on_part)
            if not self._under_way:
                self._asked_after_s = self._asleep_s()
            self._under_way.append(call)
            try:
                if self.is_closed:  # since the question above
                    raise asyncio.CancelledError
                output = await asyncio.wrap_future(call.future())
            except asyncio.CancelledError:
                call.cancel()
                raise
            finally:
                self._held_s = self.held_s if len(self._under_way) == 1 else self._held_s
                self._under_way.remove(call)
        finally:
            if self.is_closed:  # perhaps since before `send`
                self._connection.end(conversation)
            seconds = time.monotonic() - began - (self._asleep_s() - slept_s)
            self.seconds += seconds
        self.turns.append(
            DrawnTurn(
                ids,
                output.token_ids,
                output.log_probs,
                output.weight_version,
                seconds,
                asked_at,
                images,
                output.num_preempted,
                output.routed_experts,
                params,
                output.weight_versions,
                output.kept_ids,
            )
        )
        return TokenOutput(
            token_ids=output.token_ids,
            log_probs=output.log_probs,
            routed_experts=output.routed_experts,
            stop_reason=output.finish_reason,
            weight_version=output.weight_version,
            num_preempted=output.num_preempted,
        )

    async def _with_images(self, ids: list[int], images: object) -> tuple[SharedTensors | None, tuple[int, ...]]:
        """Return the inputs of images, None without any, and the places of image tokens that the policy drew."""
        if isinstance(images, Mapping) or not images:
            inputs = as_inputs(images, self._images, "image_data")
        else:  # decoding a picture would block all other conversations
            inputs = await asyncio.to_thread(as_inputs, images, self._images, "image_data")
        texts = () if self._images is None else text_places(ids, inputs, self.turns, self._images.config)
        return inputs if len(inputs) else None, texts

    def _checked(self, sampling_params: JsonMapping) -> JsonObject:
        """Return the sampling parameters that a call names, in the names and types of :class:`SamplingParams`."""
        parameters = {
            OTHER_NAMES.get(name, name): value for name, value in sampling_params.items() if name not in NO_EFFECT
        }
        for name, neutral in NEUTRAL.items():
            if parameters.pop(name, neutral) != neutral:
                raise ConfigError(
                    f"sampling parameter {name}={sampling_params[name]!r} is not in this version; leave it out."
                )
        if unknown := sorted(parameters.keys() - KNOWN_PARAMETERS):
            raise ConfigError(
                f"unknown sampling parameter {', '.join(unknown)}. Known: {', '.join(sorted(KNOWN_PARAMETERS))}."
            )
        for name in ("stop", "stop_token_ids"):
            if name in parameters:
                value = parameters[name] or ()
                parameters[name] = (value,) if isinstance(value, str) else tuple(value)
        for name, value in parameters.items():
            _check_type(name, value)
        return {name: value for name, value in parameters.items() if value is not None}

    def _seed(self, prompt: tuple[int, ...]) -> int:
        """Seed of a response: by the sample and the tokens before it, never by the order of calls."""
        earlier = self._num_requests[prompt]
        self._num_requests[prompt] += 1
        sample = self._sample
        seed = sample_seed(self._config.seed, sample.step, sample.uid, sample.sample_index)
        if prompt == sample.prompt_ids and earlier == 0 and sample.attempt == 0:
            return seed
        tokens = hashlib.blake2b(repr(prompt).encode(), digest_size=16).hexdigest()
        return sample_seed(seed, sample.attempt, tokens, earlier)


def _in_this_loop(on_drawn: Callable[[list[int]], object]) -> Callable[[DrawnPart], object]:
    """Return a callback for any thread that takes parts of a response and calls ``on_drawn`` in the running loop."""
    loop = asyncio.get_running_loop()
    token_ids: list[int] = []

    def take(part: DrawnPart) -> None:
        token_ids[part.start : part.start + len(part.token_ids)] = part.token_ids
        on_drawn(list(token_ids))

    return lambda part: loop.call_soon_threadsafe(take, part)


def _check_type(name: str, value: Any) -> None:
    """Check the type of a sampling parameter, for which an engine would end.

    Raises:
        ConfigError: it has another.
    """
    kind = KINDS.get(name, (int, float))
    values = value if name in ("stop", "stop_token_ids") else [value]
    if invalid := [each for each in values if each is not None and not isinstance(each, kind)]:
        expected = kind.__name__ if isinstance(kind, type) else "number"
        raise ConfigError(f"sampling parameter {name} has {invalid[0]!r}, which is no {expected}.")


LLMServerClient = AsyncLLMServerManager
