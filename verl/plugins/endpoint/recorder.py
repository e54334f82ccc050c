r"""The policy of one trajectory as an endpoint's backend: it draws the answers and keeps their tokens.

A call whose messages begin with those of an earlier call and its answer continues that sequence, with the drawn tokens
as they were drawn. Any other begins a sequence: another system prompt, a rewritten history, other tools, a sub-agent::

    call 1   system, user                            ──► answer a      sequence 1: prompt │ a
    call 2   system, user, a, result                 ──► answer b      sequence 1: prompt │ a, result, b
    call 3   system, user, a, another result         ──► answer c      sequence 2: prompt │ a (mask 0), result, c
    call 4   another system prompt, …                ──► answer d      sequence 3: prompt │ d

Each drawn token has mask 1 in one sequence.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from verl.agents.chat_template import ChatTemplate
from verl.agents.conversation import Conversation
from verl.agents.loop import AgentLoopMetrics, AgentLoopOutput
from verl.agents.parsers import FunctionCall, ToolParser
from verl.agents.parsers.base import END_OF_THINK
from verl.agents.policy import AsyncLLMServerManager, ContextFullError, TokenOutput
from verl.base.import_utils import user_code
from verl.config.agent import TrajectoryStatus
from verl.datasets.chat import Message
from verl.errors import ConfigError, DataError, RolloutError
from verl.plugins.endpoint.calls import (
    AnswerStream,
    CallRefusedError,
    ContextLengthError,
    ModelAnswer,
    ModelCall,
    ModelToolCall,
    refuse_unmet,
)
from verl.plugins.endpoint.raw_text import RawText
from verl.plugins.endpoint.streamed_text import StreamedText, cut
from verl.utils.transformers_private import decoded
from verl.vision.messages import has_image_parts
from verl.vision.prompts import ImagePrompts

SHORT_CALL = 20_000
"""Characters of the messages of a call without images that is rendered in the event loop of all calls."""
MODEL = "policy"
"""Name of the policy among the models."""
MAIN = "main"
"""Name of the agent that asks for the model ``policy``."""


@dataclass(frozen=True, kw_only=True)
class RecorderSettings:
    """Settings that all recorders of an agent loop share."""

    template: ChatTemplate
    parser: ToolParser
    prompt_length: int
    """Most tokens of a prompt; further ones of a long context are the beginning of the response, with mask 0."""
    response_length: int
    max_turns: int | None = None
    """Most answers of a trajectory."""
    ignored: Collection[str] = ()
    """Parameters of calls that are disregarded where they cannot be kept."""
    remedy: str = ""
    """Advice in errors about a parameter that cannot be honoured."""


@dataclass
class _Sequence:
    """A conversation that grows, and its turns."""

    agent: str
    conversation_id: int
    """Id of the conversation for the engines: branches of it meet the engine that has cached their beginning."""
    conversation: Conversation | RawText
    turn_indices: list[int] = field(default_factory=list)
    """Number of each drawn turn in the trajectory; branches share some."""


@dataclass(frozen=True)
class _AnswerPlace:
    """Place of the next answer: a copy of a sequence with the messages of the call."""

    sequence: _Sequence
    origin: _Sequence | None
    """The sequence that it continues."""
    digest: bytes
    """Digest of the agent, the tools and the messages."""
    context: list[int]
    most: int
    """Tokens that the sequence may have."""
    is_thinking: bool = False
    """True if the answer begins in a thinking block."""
    opening: list[int] = field(default_factory=list)
    """The beginning of a forced call, at the end of the context."""


class TrajectoryRecorder:
    """The backend of one trajectory. Its calls run in one event loop.

    Args:
        policy: draws the answers, with the sampling parameters of the rollout.
        settings: shared with other trajectories.
        images: reads images, by the policy's processor; None for a model for text.
    """

    def __init__(
        self, policy: AsyncLLMServerManager, settings: RecorderSettings, images: ImagePrompts | None = None
    ) -> None:
        self._images = images
        self.models = (MODEL,)
        self.tokenizer = settings.template.tokenizer
        self.status: TrajectoryStatus = "done"
        """``context_full`` or ``turns_used_up`` if the last call met this limit."""
        self.responses: dict[str, list[Message]] = {}
        """See :class:`verl.plugins.endpoint.calls.ModelBackend`."""
        self.answers = 0
        """Number of answers so far."""
        self.ignored: Counter[str] = Counter()
        """Number of calls in which a parameter was disregarded, by its name."""
        self._policy, self._settings = policy, settings
        self._sequences: list[_Sequence] = []
        self._positions: dict[bytes, tuple[_Sequence, int]] = {}
        """For each conversation that ends with a drawn turn, its sequence and the number of its turns until there."""
        self._conversations = itertools.count()

    async def answer(self, call: ModelCall, stream: AnswerStream | None = None) -> list[ModelAnswer]:
        """See :class:`verl.plugins.endpoint.calls.ModelBackend`."""
        self._check(call)
        is_short = len(call.prompt or "") + sum(len(str(message)) for message in call.messages) <= SHORT_CALL
        is_short &= not any(has_image_parts(message.get("content")) for message in call.messages)
        # Rendering a long context, or decoding images, which may have many pixels in a few bytes, would hold up the
        # other calls; a change of threads takes longer than a short one.
        position = self._find_place(call) if is_short else await asyncio.to_thread(self._find_place, call)
        room = position.most - len(position.context)
        if room < 1:
            self.status = "context_full"
            raise ContextLengthError(len(position.context), position.most)
        max_tokens = min(room, call.max_tokens or room)
        ends = (self._settings.parser.call_end,) if call.one_call and call.calls_tools and call.tools else ()
        params = {"max_tokens": max_tokens, "stop": (*self._policy.sampling.stop, *call.stop, *filter(None, ends))}
        if stream is not None:
            stream.begin(len(position.context))
        texts = [self._text(call, position, stream, index) for index in range(call.n)]
        drawing = [asyncio.ensure_future(self._drawn(position, params, text)) for text in texts]
        try:
            outputs = await asyncio.gather(*drawing)
        finally:
            for task in drawing:
                task.cancel()  # does nothing unless another one raised
        is_full = max_tokens == room and any(output.stop_reason == "length" for output in outputs)
        self.status = "context_full" if is_full else "done"
        return [await self._recorded(call, position, *pair) for pair in zip(outputs, texts, strict=True)]

    def outputs(self) -> list[AgentLoopOutput]:
        """Return the training sequences, that with the newest answer last."""
        ordered = sorted(self._sequences, key=lambda sequence: sequence.turn_indices[-1])
        written = [(sequence, *self._split(sequence.conversation)) for sequence in ordered]
        seen: set[int] = set()
        outputs = []
        for sequence, prompt, rest in written:
            conversation = sequence.conversation
            mask = list(rest.mask)
            drawn_turns = [turn for turn in conversation.turns if turn.role == "assistant"]
            for turn_index, turn in zip(sequence.turn_indices, drawn_turns, strict=True):
                if turn_index in seen:
                    first = turn.start + len(mask) - len(conversation.response_mask)
                    mask[first : first + turn.stop - turn.start] = [0] * (turn.stop - turn.start)
            seen.update(sequence.turn_indices)
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=prompt,
                    response_ids=rest.ids,
                    response_mask=mask,
                    agent=sequence.agent,
                    num_turns=len(conversation.messages),
                    conversation=conversation.messages,
                    metrics=AgentLoopMetrics(),
                    extra_fields={"rendering_differences": dict(conversation.check())},
                )
            )
        return outputs

    # ---- one call

    def _check(self, call: ModelCall) -> None:
        """Refuse what cannot be kept."""
        settings = self._settings
        if settings.max_turns is not None and self.answers + call.n > settings.max_turns:
            self.status = "turns_used_up"
            raise CallRefusedError(
                f"the trajectory has had its answers (rollout.multi_turn.max_assistant_turns={settings.max_turns}).",
                status=403,
                code="turns_used_up",
            )
        configured = self._policy.sampling
        deviating = {
            name: f"{value} is not the rollout's {getattr(configured, name)}, which the policy is trained with."
            for name, value in call.sampling.items()
            if value != getattr(configured, name)
        }
        call = replace(call, unmet={**call.unmet, **deviating, **_unmet_calls(call, settings.parser)})
        refuse_unmet(call, settings.ignored, settings.remedy)
        self.ignored.update(call.unmet.keys())

    def _find_place(self, call: ModelCall) -> _AnswerPlace:
        """Find the sequence that a call continues, or begin one, and write the call's messages."""
        agent = agent_of(call.model)
        replies = [index for index, message in enumerate(call.messages, 1) if message["role"] == "assistant"]
        num_known = replies[-1] if replies else 0
        begin = _digest_of([agent, call.tools])
        before = _digest(begin, call.messages[:num_known])
        origin, turns = self._positions.get(before, (None, 0))
        try:
            if call.prompt is not None:
                return self._continued(call.prompt, agent)
            if origin is None:
                conversation = Conversation(
                    self._settings.template, call.messages, call.tools, "prompt", images=self._images
                )
                sequence = _Sequence(agent, next(self._conversations), conversation)
            else:
                conversation = origin.conversation.branch(turns)
                assert isinstance(conversation, Conversation)  # digests of raw prompts are of other texts
                conversation.add_messages(call.messages[num_known:])
                sequence = _Sequence(agent, origin.conversation_id, conversation, origin.turn_indices[:turns])
        except (DataError, ConfigError) as error:
            raise CallRefusedError(str(error), param=call.param, code="invalid_value") from error
        is_thinking = self._settings.parser.is_thinking_after(conversation.ids)
        opening = self._open_call(conversation, call, is_thinking)
        position = self._place_in(sequence, origin, _digest(before, call.messages[num_known:]))
        return replace(position, is_thinking=is_thinking, opening=opening)

    def _open_call(self, conversation: Conversation, call: ModelCall, is_thinking: bool) -> list[int]:
        """Begin the turn with a call if the program forces one; return the tokens of that."""
        control = self._settings.template.control
        names = [control.guard(name, "prompt") for name in call.must_call]
        opening = self._settings.parser.opening(names) if names else None
        if opening is None:
            return []
        before = len(conversation.response_ids)
        conversation.open_turn(f"\n{END_OF_THINK}\n\n{opening}" if is_thinking else opening)
        return conversation.response_ids[before:]

    def _continued(self, prompt: str | list[int], agent: str) -> _AnswerPlace:
        """Find the sequence that a raw prompt continues, or begin one."""
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)
        best = None
        for sequence in self._sequences:
            if sequence.agent == agent and isinstance(sequence.conversation, RawText):
                for turns, beginning in enumerate(sequence.conversation.beginnings(prompt), 1):
                    if beginning and (best is None or beginning > best[2]):
                        best = sequence, turns, beginning
        if best is None:
            raw = RawText(self.tokenizer, prompt)
            if not raw.prompt_ids:
                raise CallRefusedError("prompt: it is empty.", param="prompt", code="invalid_value")
            self._refuse_image_tokens(raw.prompt_ids)
            return self._place_in(_Sequence(agent, next(self._conversations), raw), None, _digest_of([agent, text]))
        origin, turns, beginning = best
        raw = origin.conversation.branch(turns)
        assert isinstance(raw, RawText)
        written = len(raw.ids)
        raw.add_text(prompt[beginning:])
        self._refuse_image_tokens(raw.ids[written:])
        sequence = _Sequence(agent, origin.conversation_id, raw, origin.turn_indices[:turns])
        return self._place_in(sequence, origin, _digest_of([agent, text]))

    def _refuse_image_tokens(self, ids: Collection[int]) -> None:
        """Refuse tokens of images in a raw prompt, which brings no images."""
        if self._images is not None and any(token in ids for token in self._images.config.token_ids):
            raise CallRefusedError(
                "prompt: it has the token of an image, and /v1/completions takes no images. Send them in messages of "
                "/v1/chat/completions.",
                param="prompt",
                code="invalid_value",
            )

    def _place_in(self, sequence: _Sequence, origin: _Sequence | None, digest: bytes) -> _AnswerPlace:
        conversation, settings = sequence.conversation, self._settings
        prompt = min(len(conversation.prompt_ids), settings.prompt_length)
        most = min(prompt + settings.response_length, self._policy.max_model_len)
        return _AnswerPlace(sequence, origin, digest, conversation.ids, most)

    def _text(
        self, call: ModelCall, position: _AnswerPlace, stream: AnswerStream | None, index: int
    ) -> StreamedText | None:
        """Return what sends the text of an answer while it is drawn, if the call streams."""
        if stream is None:
            return None
        if call.prompt is None:
            read = partial(self._spoken, position)
        else:
            read = partial(self.tokenizer.decode, skip_special_tokens=True)
        return StreamedText(read, call.stop, partial(stream.text, index))

    def _spoken(self, position: _AnswerPlace, token_ids: list[int]) -> str:
        return self._settings.parser.spoken(position.opening + token_ids, position.is_thinking)

    async def _drawn(
        self, position: _AnswerPlace, params: Mapping[str, object], text: StreamedText | None
    ) -> TokenOutput:
        conversation = position.sequence.conversation
        try:
            return await self._policy.generate(
                str(position.sequence.conversation_id),
                prompt_ids=position.context,
                sampling_params=params,
                image_data=conversation.image_data if isinstance(conversation, Conversation) else None,
                on_drawn=None if text is None else text.take,
            )
        except ContextFullError as error:
            self.status = "context_full"
            raise ContextLengthError(len(position.context), position.most) from error
        except RolloutError as error:
            if self._policy.is_closed:
                raise CallRefusedError(ENDED, status=410) from error
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._policy.is_closed and task is not None and not task.cancelling():
                raise CallRefusedError(ENDED, status=410) from None
            raise

    async def _recorded(
        self, call: ModelCall, position: _AnswerPlace, output: TokenOutput, text: StreamedText | None
    ) -> ModelAnswer:
        """Write an answer to its sequence."""
        parser, tokens = self._settings.parser, output.token_ids
        content, calls = decoded(self.tokenizer, tokens, skip_special_tokens=True), []
        if call.prompt is None:
            with user_code("the tool parser"):
                turn = await parser.parse(position.opening + tokens, call.tools, position.is_thinking)
            if not turn.calls or (call.calls_tools and call.tools is not None):
                content, calls = turn.content, _with_ids(turn.calls, position.context, tokens)
        shown, stop_text = cut(content, call.stop)
        sent_content = shown if text is None else text.completed(shown)
        variants = {shown, shown + (stop_text or ""), sent_content}
        self._write(position, output, {"role": "assistant", "content": content}, calls, variants)
        return ModelAnswer(
            content=sent_content,
            streamed="" if text is None else text.sent,
            calls=tuple(calls),
            finish="length" if output.stop_reason == "length" else "stop",
            stop_text=stop_text,
            prompt_tokens=len(position.context),
            token_ids=tokens,
            log_probs=output.log_probs or [],
        )

    def _write(
        self,
        position: _AnswerPlace,
        output: TokenOutput,
        message: Message,
        calls: Sequence[ModelToolCall],
        shown: Collection[str],
    ) -> None:
        if calls:
            tool_calls = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
            message = message | {"tool_calls": tool_calls}
        origin, turns = position.origin, len(position.sequence.turn_indices)
        conversation = position.sequence.conversation.copy()
        conversation.add_drawn(output.token_ids, output.log_probs or [], message)
        if origin is not None and len(origin.turn_indices) == turns:
            sequence = origin
            sequence.conversation = conversation
        else:
            sequence = replace(
                position.sequence, conversation=conversation, turn_indices=list(position.sequence.turn_indices)
            )
            self._sequences.append(sequence)
        sequence.turn_indices.append(self.answers)
        self.answers += 1
        for content in shown:
            digest = _digest(position.digest, [message | {"content": content}])
            self._positions[digest] = sequence, turns + 1

    def _split(self, conversation: Conversation | RawText) -> tuple[list[int], _ResponsePart]:
        """The prompt and the response; what a prompt may not hold is the beginning of the response."""
        prompt, longest = conversation.prompt_ids, self._settings.prompt_length
        rest = prompt[longest:]
        return prompt[:longest], _ResponsePart(
            rest + conversation.response_ids, [0] * len(rest) + conversation.response_mask
        )


@dataclass(frozen=True)
class _ResponsePart:
    ids: list[int]
    mask: list[int]


ENDED = "this trajectory has ended, and its calls are answered no more."


def agent_of(model: str) -> str:
    """Return the name of the agent that asks for a model: of ``policy/critic`` it is ``critic``, of ``policy`` main."""
    if model == MODEL:
        return MAIN
    return model.removeprefix(f"{MODEL}/") or MAIN


def _unmet_calls(call: ModelCall, parser: ToolParser) -> dict[str, str]:
    """Return the entries of ``unmet`` for demands on tool calls that a parser cannot fulfil."""
    format_, unmet = type(parser).__name__, {}
    if call.must_call and parser.opening(call.must_call) is None:
        unmet["tool_choice"] = f"a call cannot be forced, as the parser {format_} does not know how one begins."
    if call.one_call and call.tools and parser.call_end is None:
        unmet["parallel_tool_calls"] = (
            f"the turn cannot end after its first call, as the parser {format_} knows no text that ends each call."
        )
    return unmet


def _with_ids(calls: Sequence[FunctionCall], context: list[int], token_ids: list[int]) -> list[ModelToolCall]:
    """Give calls ids of nine letters and digits, as Mistral's templates demand; the same for the same tokens."""
    if not calls:
        return []
    common_digest = hashlib.blake2b(repr((context, token_ids)).encode())
    ids = []
    for index in range(len(calls)):
        digest = common_digest.copy()
        digest.update(str(index).encode())
        ids.append(base64.b32encode(digest.digest()).decode()[:9].lower())
    return [ModelToolCall(id, call.name, call.arguments) for id, call in zip(ids, calls, strict=True)]


def _digest(before: bytes, messages: Sequence[Message]) -> bytes:
    """Digest of a conversation: that of its beginning, and of further messages."""
    for message in messages:
        before = _digest_of([before.hex(), *_compared(message)])
    return before


def _digest_of(value: object) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


def _compared(message: Message) -> list[object]:
    """Return the parts of a message by which it is recognised.

    Clients trim what the model said, and write its arguments as JSON of their own.
    """
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return [message["role"], content, message.get("tool_call_id")]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return ["assistant", content.strip(), [[call["name"], _value(call["arguments"])] for call in calls]]


def _value(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
