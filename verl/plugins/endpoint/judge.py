"""The judge of a run: an endpoint that reward functions ask, and engines that answer while rewards are computed.

::

    reward function ── HTTP ──► endpoint ── tokens ──► router ──► engine 0 … engine n
    (its own process)           (a thread of the driver)          the ranks of the reward model
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar, cast

from starlette.middleware.trustedhost import TrustedHostMiddleware

from verl.agents.chat_template import ChatTemplate
from verl.agents.policy import AsyncLLMServerManager, ContextFullError, SampleId, TokenOutput
from verl.base.types import JsonObject
from verl.config import ActorRolloutRefConfig, PPOConfig, RolloutConfig, local_copies
from verl.errors import ConfigError, DataError, EngineLostError, RolloutError, VerlError
from verl.plugins.endpoint.app import endpoint_app
from verl.plugins.endpoint.calls import (
    AnswerStream,
    CallRefusedError,
    ContextLengthError,
    ModelAnswer,
    ModelCall,
    refuse_unmet,
)
from verl.serving.connection import Connection
from verl.serving.local import LocalSession
from verl.serving.router import RolloutEndedError
from verl.serving.session import Session
from verl.tools.loopback import LoopbackServer
from verl.utils.deferred import Deferred
from verl.utils.metric import Metrics
from verl.utils.model import check_tokenizer_fits, hf_config_of
from verl.utils.tokenizer import hf_tokenizer
from verl.vision.messages import without_images
from verl.workers.rollout.request import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.single_controller.base.worker_group import WorkerGroup

T = TypeVar("T")


ASLEEP = (
    "the judge is asleep: it answers only while the rewards of a batch are computed; on ranks of its own "
    "(reward_model.enable_resource_pool=true) also while agent loops hold conversations."
)
JUDGE_PARAMETERS = frozenset({"seed", "chat_template_kwargs"})
"""Parameters of a call that a judge supports beyond those that every model supports."""
RESERVED = frozenset({"messages", "conversation", "tools", "tokenize", "add_generation_prompt"})
"""Names that are no variables of a chat template."""
COUNTED = ("calls", "failed_calls", "prompt_tokens", "tokens", "wake_s")
"""Counters: calls and those refused, tokens read and sampled, and seconds until the engines were awake."""
KEPT_TEMPLATES = 16
"""Largest number of cached chat templates, one for each set of variables that calls give."""


class JudgeService:
    """The generative reward model of a run, as reward functions and the trainer use it.

    It listens on loopback alone and asks for no key, as the reward functions of public scripts send none.

    Args:
        config: the whole configuration, with a judge.

    Raises:
        ConfigError: the tokenizer does not fit the model, or the lengths do not fit its context.
    """

    def __init__(self, config: PPOConfig) -> None:
        assert config.judge is not None, "this run has no judge"
        settings, model = config.judge, local_copies(config.judge).model
        _check_context(settings)
        self.tokenizer = hf_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        check_tokenizer_fits(self.tokenizer, hf_config_of(model))
        self._backend = JudgeBackend(settings, self.tokenizer)
        app = endpoint_app(lambda path, key: self._backend)
        # There is no key, so a page in a browser must not reach it under a host name that it controls.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
        self._server = LoopbackServer(app)
        self._session = _session(config.trainer.controller, settings.rollout, self._server.thread.loop)

    @property
    def reward_router_address(self) -> str:
        """``127.0.0.1:PORT``; calls go to ``http://{reward_router_address}/v1/chat/completions``."""
        return self._server.url.removeprefix("http://")

    @property
    def arguments(self) -> JsonObject:
        """Arguments for reward functions and reward managers whose signature names them."""
        return {"reward_router_address": self.reward_router_address, "reward_model_tokenizer": self.tokenizer}

    @property
    def model_name(self) -> str:
        """Name of the model at the endpoint, which answers to any."""
        return self._backend.models[0]

    def serve_while(self, group: WorkerGroup, step: int, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        """Let the judge answer while a batch is scored, or while conversations are held.

        Args:
            group: the worker group of the judge.
            step: index of the training step, which seeds the answers.
            start: starts the work; called once the engines are awake.

        Returns:
            the result of ``start``.

        Raises:
            ProcessLostError: a rank died or hangs.
            WorkerError: an engine failed.
        """
        began = time.monotonic()

        def awake() -> Future[T]:
            self._backend.wake(self._session, step, time.monotonic() - began)
            return _future_of(start())

        scoring = self._session.serve_while(group, awake)

        def result() -> T:
            try:
                return scoring.result()
            finally:
                self._backend.sleep()

        return Deferred(scoring.futures, result)

    def cancel(self) -> None:
        """Cancel scoring whose result is not needed, because the ranks have ended."""
        self._backend.sleep()
        self._session.close()

    def metrics(self) -> Metrics:
        """Counts of calls and tokens since the last call of this method."""
        return self._backend.take_metrics()

    def close(self) -> None:
        """End the endpoint."""
        self.cancel()
        self._server.close()


class JudgeBackend:
    """Answers calls of the endpoint by the judge's engines; its methods may be called from any thread.

    Args:
        settings: model and engine.
        tokenizer: the judge's.
    """

    def __init__(self, settings: ActorRolloutRefConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.models = [settings.model.path]
        self._settings = settings
        self._templates: dict[str, ChatTemplate] = {}
        self._engines: Connection | None = None
        self._engine: AsyncLLMServerManager | None = None
        self._counts = dict.fromkeys(COUNTED, 0.0)
        self._numbers = itertools.count()

    def wake(self, engines: Connection, step: int, seconds: float) -> None:
        """Answer calls from now on; waking the engines took so many seconds."""
        self._counts["wake_s"] += seconds
        self._engines = engines
        self._engine = self._model(f"step {step}")

    def _model(self, name: str) -> AsyncLLMServerManager:
        """Return a client of the engines whose random numbers are seeded by ``name``."""
        assert self._engines is not None
        rollout = self._settings.rollout
        default = SamplingParams(max_tokens=rollout.response_length, seed=0)
        return AsyncLLMServerManager(rollout, self._engines, SampleId(step=0, uid=name, sample_index=0), default)

    def sleep(self) -> None:
        """Refuse calls from now on."""
        self._engine = None

    def take_metrics(self) -> Metrics:
        """See :meth:`JudgeService.metrics`."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTED, 0.0)
        return {f"judge/{name}": count for name, count in counts.items()}

    @property
    def responses(self) -> None:
        """See :class:`verl.plugins.endpoint.calls.ModelBackend`: a judge answers for a whole run, and keeps none."""

    async def answer(self, call: ModelCall, stream: AnswerStream | None = None) -> list[ModelAnswer]:
        """See :class:`verl.plugins.endpoint.calls.ModelBackend`. A verdict is short, so it comes at once."""
        counts = self._counts
        counts["calls"] += 1
        try:
            answers = await self._answer(call)
        except VerlError:
            counts["failed_calls"] += 1
            raise
        counts["prompt_tokens"] += answers[0].prompt_tokens
        counts["tokens"] += sum(len(answer.token_ids) for answer in answers)
        return answers

    async def _answer(self, call: ModelCall) -> list[ModelAnswer]:
        if self._engine is None:
            raise CallRefusedError(ASLEEP, status=503)
        if call.must_call:
            message = "tool_choice: a judge calls no tools. Leave it out."
            raise CallRefusedError(message, param="tool_choice", code="unsupported_parameter")
        refuse_unmet(call, JUDGE_PARAMETERS, "Leave it out.")
        seed = call.extra.get("seed")
        engine = self._engine if seed is None else self._model(f"seed {seed}")
        ids = self._tokens(call)
        params = {**call.sampling, "stop": call.stop, "max_tokens": call.max_tokens}
        name = next(self._numbers)
        drawing = [
            asyncio.ensure_future(engine.generate(f"{name}/{each}", prompt_ids=ids, sampling_params=params))
            for each in range(call.n)
        ]
        try:
            outputs = await asyncio.gather(*drawing)
        except ContextFullError as error:
            raise ContextLengthError(len(ids), engine.max_model_len) from error
        except ConfigError as error:
            raise CallRefusedError(str(error)) from error
        except RolloutError as error:
            reason = getattr(error, "cause", error)  # Ray's error holds what was raised in the other process
            lost = isinstance(error, RolloutEndedError | EngineLostError)
            raise CallRefusedError(str(reason), status=503 if lost else 400) from error
        finally:
            for task in drawing:
                task.cancel()
        return [self._read(call, len(ids), output) for output in outputs]

    def _tokens(self, call: ModelCall) -> list[int]:
        """Tokenize a call; texts of messages never become control tokens."""
        if call.prompt is not None:
            return self.tokenizer(call.prompt)["input_ids"] if isinstance(call.prompt, str) else call.prompt
        variables = call.extra.get("chat_template_kwargs") or {}
        if not isinstance(variables, Mapping) or not RESERVED.isdisjoint(variables):
            message = f"chat_template_kwargs is {variables!r:.100}. Send an object without {', '.join(RESERVED)}."
            raise CallRefusedError(message, param="chat_template_kwargs")
        if without_images(call.messages)[1]:
            raise CallRefusedError("the messages have images, and the judge reads texts alone.", param=call.param)
        name = json.dumps(variables, sort_keys=True)
        try:
            if name not in self._templates:
                if len(self._templates) == KEPT_TEMPLATES:
                    self._templates.clear()
                self._templates[name] = ChatTemplate(self.tokenizer, template_kwargs=variables)
            return self._templates[name].prompt(call.messages, call.tools)
        except (ConfigError, DataError) as error:  # there is no template, or it does not take the messages
            raise CallRefusedError(str(error), param=call.param) from error

    def _read(self, call: ModelCall, prompt_tokens: int, output: TokenOutput) -> ModelAnswer:
        text = cast(str, self.tokenizer.decode(output.token_ids, skip_special_tokens=True))
        positions = {stop: text.find(stop) for stop in call.stop if stop in text}
        stop = min(positions, key=lambda each: positions[each], default=None)
        return ModelAnswer(
            content=text if stop is None else text[: positions[stop]],
            finish="length" if output.stop_reason == "length" else "stop",
            stop_text=stop,
            prompt_tokens=prompt_tokens,
            token_ids=output.token_ids,
            log_probs=output.log_probs or [],
        )


def _session(controller: str, rollout: RolloutConfig, loop: asyncio.AbstractEventLoop) -> Session:
    if controller == "local":
        return LocalSession(rollout.max_num_seqs, loop, ASLEEP)
    from verl.serving.ray import RaySession  # Ray need not be installed for the other

    return RaySession("the judge", rollout.max_num_seqs, rollout.agent.hang_timeout_s, ended=ASLEEP)


def _future_of(handle: Deferred[T]) -> Future[T]:
    """Wait for a handle in a thread that does not delay the end of the process."""
    outcome: Future[T] = Future()

    def wait() -> None:
        try:
            outcome.set_result(handle.result())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whoever waits for the outcome raises it
            outcome.set_exception(error)

    threading.Thread(target=wait, name="rewards", daemon=True).start()
    return outcome


def _check_context(settings: ActorRolloutRefConfig) -> None:
    """Check that request and answer fit into the model's context.

    Raises:
        ConfigError: they do not.
    """
    rollout, text = settings.rollout, hf_config_of(settings.model).get_text_config()
    needed = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None and needed > positions:
        raise ConfigError(
            f"reward_model.rollout: a request and its answer may take {needed} tokens (prompt_length + "
            f"response_length, or max_model_len), and the judge's context has max_position_embeddings={positions}. "
            "Lower them."
        )
