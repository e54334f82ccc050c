"""Shared parts of all tool parsers: the registry, the result, and reading JSON that a model wrote."""

from __future__ import annotations

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, cast

from pydantic import BaseModel

from verl.base.registry import Registry
from verl.base.types import JsonObject
from verl.utils.transformers_private import decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_MARKERS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end_of_text|>", "</s>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>", "<|user|>", "<|observation|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
"""Tokens that end a turn, of all known templates; they are no part of the message."""
MAX_MALFORMED = 8
"""Calls of one response that are reported; a model that repeats itself writes thousands, and each gets an answer."""
THINK, END_OF_THINK = "<think>", "</think>"

Properties = Mapping[str, Mapping[str, object]]
"""JSON schema of each parameter of a tool."""


class FunctionCall(BaseModel):
    """A tool call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class MalformedCall:
    """Text that was meant as a tool call and is none."""

    text: str
    reason: str


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the policy, read by a parser."""

    content: str
    """Text outside of calls and thinking, with calls that could not be read, without the tokens that end the turn."""
    calls: list[FunctionCall] = field(default_factory=list)
    malformed: list[MalformedCall] = field(default_factory=list)
    thinking: str = ""
    """Text of the thinking, in which no calls are looked for."""

    def message(self) -> JsonObject:
        """Return the turn as an OpenAI client would hold it."""
        calls = [{"type": "function", "function": call.model_dump()} for call in self.calls]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}


class NoCallError(ValueError):
    """A piece of text is not the call that it was taken for; the message says why."""


_parsers: Registry[type[ToolParser]] = Registry("tool parser")
P = TypeVar("P", bound="type[ToolParser]")


class ToolParser(ABC):
    """Reads the tool calls in the tokens of a response. One object serves all conversations of a process.

    A parser of your own extends this class, is registered by ``@ToolParser.register("name")``, and is chosen by
    ``rollout.multi_turn.format=name``.
    """

    _registry: ClassVar[dict[str, type[ToolParser]]] = _parsers.entries
    """The parsers by name, as public code reads and changes them."""
    call_end: ClassVar[str | None] = None
    """Text that ends every call. A turn can be stopped there, after its first call. None: calls have no such text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Sequence[object] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Return the text outside of calls, and the calls.

        Args:
            responses_ids: token ids of one response.
            tools: schemas of the tools; formats that do not mark types read the arguments by them.
        """

    async def parse(
        self, responses_ids: list[int], tools: Sequence[object] | None = None, is_thinking: bool = False
    ) -> ParsedTurn:
        """Read a response, its malformed calls and its thinking too.

        Args:
            responses_ids: token ids of one response.
            tools: as in :meth:`extract_tool_calls`.
            is_thinking: whether the prompt has opened the thinking block already.
        """
        extract = self.extract_tool_calls
        takes_tools = "tools" in inspect.signature(extract).parameters
        content, calls = await (extract(responses_ids, tools) if takes_tools else extract(responses_ids))
        return ParsedTurn(content, calls)

    def spoken(self, responses_ids: list[int], is_thinking: bool = False) -> str:
        """Return the text outside of calls and thinking of a response that goes on, as far as it stays as it is.

        A stream sends it before the response has ended; the rest follows at the end. By default there is none.

        Args:
            responses_ids: the first token ids of one response.
            is_thinking: as in :meth:`parse`.
        """
        return ""

    def opening(self, names: Sequence[str]) -> str | None:
        """Return the text with which a call of one of these tools begins, as far as it is the same for all of them.

        A call that a program forces begins with it, and the policy goes on. By default there is none (None), and
        programs cannot force calls. It ends where tokens end: ``"arguments":`` without the blank after it, which most
        tokenizers write with what follows.

        Args:
            names: of the tools, at least one.
        """
        return None

    def is_thinking_after(self, ids: Sequence[int]) -> bool:
        """Return whether a context ends with an opened thinking block, as the header of some templates does."""
        return decoded(self.tokenizer, list(ids[-8:])).rstrip().endswith(THINK)

    @classmethod
    def register(cls, name: str) -> Callable[[P], P]:
        """Register the decorated class under ``name``."""
        return _parsers.register(name)  # pyright: ignore[reportReturnType]

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: PreTrainedTokenizerBase) -> ToolParser:
        """Make the parser called ``name``; see :func:`get_tool_parser`."""
        return get_tool_parser(name, tokenizer)


def get_tool_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> ToolParser:
    """Make a parser.

    Raises:
        ConfigError: no parser has this name; the message lists them.
    """
    return _parsers.get(name)(tokenizer)


def is_built_in_parser(name: str) -> bool:
    """Return whether verl's own parser has this name."""
    return name in _parsers and _parsers.get(name).__module__.startswith(f"{__package__}.")


class TextToolParser(ToolParser):
    """Parser of a format that is read from the text of a response, with its special tokens."""

    starts: ClassVar[tuple[str, ...]] = ()
    """Texts that start a call; before the first of them, ``</think>`` ends the thinking."""

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Sequence[object] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """See :meth:`ToolParser.extract_tool_calls`."""
        turn = await self.parse(responses_ids, tools)
        return turn.content, turn.calls

    async def parse(
        self, responses_ids: list[int], tools: Sequence[object] | None = None, is_thinking: bool = False
    ) -> ParsedTurn:
        """See :meth:`ToolParser.parse`."""
        text = decoded(self.tokenizer, responses_ids)
        return self.parse_text(self._without_end(text), tools, is_thinking)

    def spoken(self, responses_ids: list[int], is_thinking: bool = False) -> str:
        """See :meth:`ToolParser.spoken`: what comes before the first call. Without :attr:`starts` there is none."""
        if not self.starts:
            return ""
        text = self._without_end(decoded(self.tokenizer, responses_ids))
        if is_thinking or text.lstrip().startswith(THINK):
            text = text.partition(END_OF_THINK)[2].lstrip()
        marks = (*self.starts, THINK, END_OF_THINK)
        first = min((position for mark in marks if (position := text.find(mark)) >= 0), default=len(text))
        return settled(text[:first], (*marks, *END_MARKERS))

    def parse_text(self, text: str, tools: Sequence[object] | None = None, is_thinking: bool = False) -> ParsedTurn:
        """Read the text of a response whose end markers are gone."""
        thinking, rest = self.split_thinking(text, is_thinking)
        content, calls, malformed = self.read(rest, properties_of(tools))
        return ParsedTurn(content.strip() if calls or malformed or thinking else content, calls, malformed, thinking)

    @abstractmethod
    def read(self, text: str, tools: Mapping[str, Properties]) -> Reading:
        """Return the text outside of calls, the calls, and what was no call."""

    def _without_end(self, text: str) -> str:
        special = cast(list[str | None], [self.tokenizer.eos_token, self.tokenizer.pad_token])
        ends = tuple({*END_MARKERS, *filter(None, special)})
        while (stripped := text.rstrip()).endswith(ends):
            text = stripped[: -len(next(end for end in ends if stripped.endswith(end)))]
        return text

    def split_thinking(self, text: str, is_thinking: bool) -> tuple[str, str]:
        """Return the thinking and the rest."""
        begins = text.lstrip().startswith(THINK)
        inner = text.lstrip().removeprefix(THINK) if begins else text
        end = inner.find(END_OF_THINK)
        if not (begins or is_thinking):
            first = min((position for start in self.starts if (position := inner.find(start)) >= 0), default=len(inner))
            if not 0 <= end < first:
                return "", text
        if end < 0:
            return inner, ""
        return inner[:end].strip(), inner[end + len(END_OF_THINK) :]


def settled(text: str, marks: Sequence[str]) -> str:
    """Return the beginning of a growing text to which it does not matter how the text goes on.

    Left out at the end: blanks, which may be stripped; a character whose bytes are not all there; and what may be the
    beginning of one of the ``marks``.
    """
    while True:
        stable = text.rstrip().rstrip("\ufffd")
        mark_length = max((n for mark in marks for n in range(1, len(mark)) if stable.endswith(mark[:n])), default=0)
        stable = stable[: len(stable) - mark_length]
        if stable == text:
            return text
        text = stable


Reading = tuple[str, list[FunctionCall], list[MalformedCall]]
"""The text outside of calls, the calls, and the texts that begin like a call and are none."""


def refusing(reason: str) -> Callable[[str, int], tuple[FunctionCall, int]]:
    """Return a ``read_one`` of :func:`read_calls` for markers after which no call can stand."""

    def read_one(text: str, start: int) -> tuple[FunctionCall, int]:
        raise NoCallError(reason)

    return read_one


def read_calls(text: str, start: str, end: str, read_one: Callable[[str, int], tuple[FunctionCall, int]]) -> Reading:
    """Read all calls that begin with ``start``.

    Args:
        text: what is read.
        start: text that begins a call.
        end: text that ends one; a call that cannot be read goes as far as this or the next ``start``.
        read_one: returns the call after a place of the text, and the place after its end; raises NoCallError.
    """
    pieces, calls, malformed, position = [], [], [], 0
    while len(malformed) < MAX_MALFORMED and (start_of_call := text.find(start, position)) >= 0:
        pieces.append(text[position:start_of_call])
        after = start_of_call + len(start)
        try:
            call, position = read_one(text, after)
            calls.append(call)
        except NoCallError as error:
            position = _end_of_broken(text, after, start, end)
            malformed.append(MalformedCall(text[start_of_call:position], str(error)))
            pieces.append(text[start_of_call:position])
    return "".join([*pieces, text[position:]]), calls, malformed


def _end_of_broken(text: str, position: int, start: str, end: str) -> int:
    next_start = text.find(start, position)
    limit = next_start if next_start >= 0 else len(text)
    next_end = text.find(end, position, limit)
    return next_end + len(end) if next_end >= 0 else limit


_BLANKS = re.compile(r"\s*")


def expect(text: str, position: int, expected: str) -> int:
    """Return the position after ``expected``, which may follow blanks.

    Raises:
        NoCallError: something else is there.
    """
    at = skip_blanks(text, position)
    if not text.startswith(expected, at):
        seen = f"found {text[at : at + 20]!r}" if text[at:] else "the response ends"
        raise NoCallError(f"expected {expected!r} at character {at}, but {seen}")
    return at + len(expected)


def read_value(text: str, position: int, end: str, followers: re.Pattern[str], what: str) -> tuple[str, int]:
    """Return the text up to ``end``, and the place after it; the model may have left ``end`` out.

    Args:
        text: what is read.
        position: where the value begins.
        end: text that ends it.
        followers: matches what can only follow the value. Before the next ``end``, it ends the value too, with the
            blanks in front of it.
        what: the value, for the message.

    Raises:
        NoCallError: neither of the two follows.
    """
    end_of_value, other = text.find(end, position), followers.search(text, position)
    if other and (end_of_value < 0 or other.start() < end_of_value):
        return text[position : other.start()].rstrip(), other.start()
    if end_of_value < 0:
        raise NoCallError(f"no {end!r} ends {what}")
    return text[position:end_of_value], end_of_value + len(end)


def require_first(key: str, arguments: Mapping[str, object]) -> None:
    """Check that a call has no other value for a parameter.

    Raises:
        NoCallError: it has.
    """
    if key in arguments:
        raise NoCallError(f"the parameter {key!r} is written twice")


def skip_blanks(text: str, position: int) -> int:
    """Return the first place that is no blank."""
    match = _BLANKS.match(text, position)
    return match.end() if match else position


def _refuse_constant(name: str) -> NoReturn:
    raise NoCallError(f"{name} is no JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def read_json(text: str, position: int = 0) -> tuple[Any, int]:
    """Read one JSON value that may follow blanks; return it with the place after it.

    Raises:
        NoCallError: there is none, or one that cannot be used (too deep, numbers of thousands of digits).
    """
    try:
        return _decoder.raw_decode(text, skip_blanks(text, position))
    except json.JSONDecodeError as error:
        raise NoCallError(f"invalid JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise NoCallError("invalid JSON: nested too deeply") from error
    except ValueError as error:
        raise NoCallError(f"invalid JSON: {error}") from error


def make_call(name: object, arguments: object) -> FunctionCall:
    """Make a call of values as they were read.

    Arguments may be the text of a JSON object, which models write too; an empty text is no arguments.

    Raises:
        NoCallError: the name is no text, or the arguments are no JSON object of texts that can be encoded.
    """
    if not isinstance(name, str) or not name.strip():
        raise NoCallError(f"the name of the function must be a text, not {name!r:.100}")
    if isinstance(arguments, str) and not arguments.strip():
        arguments = {}
    elif isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        value, end = read_json(arguments)
        if rest := arguments[end:].strip():
            raise NoCallError(f"{rest[:20]!r} follows the JSON object in the text of the arguments")
        arguments = value
    if not isinstance(arguments, dict):
        raise NoCallError(f"the arguments must be a JSON object, not {type(arguments).__name__} {arguments!r:.100}")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError) as error:  # 1e999 is infinite; "\ud800" is half of a character
        raise NoCallError(f"the arguments cannot be written as JSON: {error}") from error
    return FunctionCall(name=name.strip(), arguments=text)


def call_of_object(value: object, arguments_key: str) -> FunctionCall:
    """Make a call of an object ``{"name": ..., arguments_key: {...}}``.

    One that has a name alone is a call without arguments.

    Raises:
        NoCallError: it has another form.
    """
    if not isinstance(value, dict):
        raise NoCallError(f"a call is a JSON object, not {type(value).__name__}")
    has_arguments = arguments_key in value or not value.keys() <= {"name", "id", "type"}
    for key in ("name", arguments_key) if has_arguments else ("name",):
        if key not in value:
            raise NoCallError(f"the call has no {key!r}, only {', '.join(map(repr, value)) or 'nothing'}")
    arguments = value.get(arguments_key)
    return make_call(value["name"], {} if arguments is None else arguments)


def properties_of(tools: Sequence[Any] | None) -> dict[str, Properties]:
    """Return the parameters of each tool by name; tools are schemas of ``verl.tools.schemas`` or their dicts."""
    properties: dict[str, Properties] = {}
    for tool in tools or ():
        schema = tool if isinstance(tool, Mapping) else tool.model_dump(exclude_none=True)
        function = schema.get("function", schema)
        parameters = function.get("parameters") or {}
        properties[function["name"]] = parameters.get("properties") or {}
    return properties
