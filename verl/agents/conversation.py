r"""Tokens of a conversation, written once.

A conversation grows by two methods, and the tokens, their mask and their log-probs always together::

    conversation = Conversation(template, messages, tools)
    output = engine(conversation.ids)
    conversation.add_drawn(output.token_ids, output.log_probs, message)     # mask 1
    conversation.add_messages([{"role": "tool", "content": "4"}])           # mask 0

    <|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n                                        prompt_ids
    <tool_call>{"name": ...}</tool_call><|im_end|>                                                   mask 1
    \n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n      mask 0
    It is 4.<|im_end|>                                                                               mask 1

What the policy drew is never decoded and encoded again. Messages may have image and video parts: their tokens are
the processor's, with mask 0, and ``image_data`` has all images and videos for the engine.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from verl.agents.chat_template import ChatTemplate as ChatTemplate
from verl.agents.chat_template import Tools
from verl.agents.images import FOR_TEXT, apart, as_inputs, expanded, opened, together, token_counts
from verl.agents.rendering_check import KINDS, REFUSED, Difference, differences
from verl.base.types import JsonMapping
from verl.datasets.chat import Message, Truncation, common_prefix_length, truncate
from verl.errors import ConfigError, DataError
from verl.protocol.shared import SharedTensors
from verl.utils.control_tokens import Author, Side
from verl.vision.messages import is_image_part, texts_of, without_images
from verl.vision.prompts import ImagePrompts

PLACE = "the conversation"
OPENING = "opening"
"""Role of tokens that :meth:`Conversation.open_turn` wrote: the policy goes on with them, and did not draw them."""


@dataclass(frozen=True)
class Turn:
    """A part of the response: positions ``start`` to ``stop`` (exclusive), and whose it is.

    ``assistant`` is what the policy drew. Otherwise the role of the first message that was added; template text around
    it and the header of the next turn belong to it. ``history`` is what a template wrote anew, ``opening`` the
    beginning of a call that a program forced.
    """

    role: str
    start: int
    stop: int


@dataclass
class TokenSequence:
    """One sequence to train on: a prompt, and a response whose lists have equal length."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    """1 for tokens that the policy drew, 0 for all others."""
    response_logprobs: list[float] = field(default_factory=list)
    """The log-probs of drawn tokens, 0.0 for all others."""
    turns: list[Turn] = field(default_factory=list)
    """Cover the response without gaps."""

    @property
    def ids(self) -> list[int]:
        """The prompt and the response: what the engine gets next."""
        return self.prompt_ids + self.response_ids

    def add(self, role: str, ids: Sequence[int], mask: int, log_probs: Sequence[float]) -> None:
        """Append a turn."""
        start = len(self.response_ids)
        self.response_ids += ids
        self.response_mask += [mask] * len(ids)
        self.response_logprobs += log_probs
        self.turns.append(Turn(role, start, len(self.response_ids)))


class Conversation:
    """The messages and tokens of one trajectory.

    With ``use_inference_chat_template`` the template may rewrite history between turns, as it does when a server of the
    OpenAI protocol is sent all messages again: it leaves out thoughts of earlier turns, for example. The policy then
    sees other tokens than those written so far, so the sequence ends and another begins; ``sequences`` holds all of
    them, each with the context in which its last turns were drawn. Otherwise the drawn tokens stay, and there is one.

    Args:
        template: shared by all conversations of a process.
        messages: the prompt, as an OpenAI client would send it.
        tools: descriptions of the tools, as an OpenAI client would send them.
        assistant: who wrote the assistant's turns of the prompt; only those of the ``policy`` hold control tokens.
        images: reads images and videos, by the policy's processor; None for a model for text.
        of_row: ``multi_modal_inputs`` of the row, for image and video parts of the prompt that hold none of their own.

    Raises:
        DataError: the template refuses the messages, or an image or a video cannot be read.
        ConfigError: a message has an image or a video, and the policy is a model for text.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: list[Message],
        tools: Tools | None = None,
        assistant: Author = "policy",
        images: ImagePrompts | None = None,
        of_row: JsonMapping | None = None,
    ) -> None:
        self.template = template
        self._maker = images
        bare, sources = without_images(opened(messages, images, PLACE))
        self.messages = copied(bare)
        """As an OpenAI client would hold them; image and video parts without what they hold."""
        prompt_parts = self._images_of_prompt = self._prompt_images(sources, of_row)
        self._later_images: list[SharedTensors] = []
        self._image_data: SharedTensors | None = None
        self.tools = tools
        self.problems: Counter[str] = Counter()
        """Differences that :meth:`check` found, counted by kind."""
        self._guarded_tools = template.guarded(tools)
        takes = images is not None
        self._prepared = [template.prepare(message, "prompt", assistant, takes) for message in self.messages]
        self.prompt_length = len(self.messages)
        """Number of messages of the prompt."""
        self._drawn_last = False
        self._is_cut = False
        """Whether its tokens are others than the template writes: the prompt was cut, or a program wrote them."""
        self._ends: frozenset[int] = frozenset()
        self._numbers = itertools.count()
        rendered = template.encoded(self._prepared, self._guarded_tools, True)
        self.sequences = [TokenSequence(self._with_image_tokens(rendered, [prompt_parts]))]
        """The sequences to train on: one, unless the template rewrote history."""

    @property
    def sequence(self) -> TokenSequence:
        """The last sequence, to which turns are added."""
        return self.sequences[-1]

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the prompt."""
        return self.sequence.prompt_ids

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the prompt."""
        return self.sequence.response_ids

    @property
    def response_mask(self) -> list[int]:
        """1 for tokens that the policy drew, 0 for all others."""
        return self.sequence.response_mask

    @property
    def response_logprobs(self) -> list[float]:
        """The log-probs of drawn tokens, 0.0 for all others."""
        return self.sequence.response_logprobs

    @property
    def turns(self) -> list[Turn]:
        """The parts of the response, without gaps."""
        return self.sequence.turns

    @property
    def ids(self) -> list[int]:
        """The prompt and the response: what the engine gets next."""
        return self.sequence.ids

    @property
    def image_data(self) -> SharedTensors:
        """All images so far, in their order, for ``server_manager.generate``; empty without any."""
        if self._image_data is None:
            self._image_data = together([self._images_of_prompt, *self._later_images])
        return self._image_data

    def truncate_prompt(self, max_length: int, truncation: Truncation) -> None:
        """Cut the tokens of the prompt to ``max_length``, as the data set cuts those of prompts for single turns.

        Args:
            max_length: ``data.max_prompt_length``.
            truncation: ``data.truncation``. A prompt with images is never cut.

        Raises:
            DataError: they are more, and ``truncation`` is ``error`` or the prompt has images.
        """
        prompt_ids = self.prompt_ids
        what = "the prompt with the descriptions of the tools" if self.tools else "the prompt"
        if len(self._images_of_prompt):
            what, truncation = f"{what} and with its images", "error"
        self.sequence.prompt_ids = truncate(prompt_ids, max_length, truncation, what, "data.max_prompt_length")
        self._is_cut = len(prompt_ids) > max_length

    def tokens_left(self, response_length: int) -> int:
        """Return how many tokens may still be added before the response has ``response_length``."""
        return max(response_length - len(self.response_ids), 0)

    def add_drawn(self, token_ids: Sequence[int], log_probs: Sequence[float], message: Message) -> None:
        """Append a turn of the policy.

        Args:
            token_ids: what it drew, the end token included if it drew one.
            log_probs: one for each token.
            message: what a parser made of it: the content, and perhaps ``tool_calls``. Calls without an id get one.
        """
        if len(token_ids) != len(log_probs):
            raise DataError(f"a turn of {len(token_ids)} tokens came with {len(log_probs)} log-probs; each needs one.")
        if self._drawn_last:
            raise DataError("two turns of the policy follow each other; add the messages between them first.")
        message = copied(dict(message)) | {"role": "assistant"}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {"type": "function", **call, "id": call.get("id") or self._new_id()} for call in calls
            ]
        self._prepared.append(self.template.prepare(message, "policy"))
        self.messages.append(message)
        self.sequence.add("assistant", token_ids, 1, log_probs)
        self._drawn_last = True

    def open_turn(self, text: str) -> None:
        """Write the beginning of the policy's turn, which goes on with what it draws.

        Args:
            text: control tokens in it are tokens.
        """
        ids = self.template.control.encode(text, after_token=True)
        self.sequence.add(OPENING, ids, 0, [0.0] * len(ids))

    def add_messages(self, messages: list[Message], max_tokens: int | None = None, keep: Side = "middle") -> bool:
        """Append messages of others and the header of the next turn of the policy.

        Results of tools are matched to the calls of the last turn by their order where they have no ``tool_call_id``.

        Args:
            messages: results of tools, messages of the user.
            max_tokens: how many tokens there may be, header included. Texts of results of tools are shortened to that,
                the longest first; other texts, and images, are not.
            keep: the side of a shortened result that is kept; ``middle`` drops the middle.

        Returns:
            Whether they fit. If not, nothing was added.
        """
        if not self._drawn_last:
            raise DataError("messages are added after a turn of the policy; add its tokens first.")
        bare, sources = without_images(opened(messages, self._maker, PLACE))
        images = self._inputs(sources)
        fitting = self._fitting(self._named(copied(bare)), images, max_tokens, keep)
        if fitting is None:
            return False
        messages, prepared, ids = fitting
        if images:
            self._later_images, self._image_data = [*self._later_images, *images], None
        self.messages += messages
        self._prepared += prepared
        self._drawn_last = False
        # A prompt that was cut stays cut, and the template would write the whole one.
        if self.template.use_inference_chat_template and not self._is_cut and self._rewritten(ids):
            return True
        self.sequence.add(messages[0]["role"], ids, 0, [0.0] * len(ids))
        return True

    def rewrite(self, ids: list[int], mask: list[int]) -> None:
        """Replace the tokens of the last sequence with those that a program wrote in its own way.

        New tokens with mask 1 count as a turn of the policy, others as one of a tool. From then on the tokens are not
        compared with the template's, and history stays as it is written.

        Args:
            ids: prompt and response.
            mask: of the tokens of the response, the last ones.

        Raises:
            DataError: the mask is longer than the tokens.
        """
        start = len(ids) - len(mask)
        if start < 1:
            raise DataError(
                f"response_mask has {len(mask)} values, and prompt and response have {len(ids)} tokens. Extend "
                "prompt_ids and response_mask by the same tokens."
            )
        sequence, response = self.sequence, ids[start:]
        same = common_prefix_length(sequence.response_ids, response)
        turns = [turn for turn in sequence.turns if turn.stop <= same]
        end = turns[-1].stop if turns else 0
        log_probs = sequence.response_logprobs[:end] + [0.0] * (len(response) - end)
        self.sequences[-1] = TokenSequence(ids[:start], response, list(mask), log_probs, turns)
        self._is_cut = True
        for is_drawn, positions in itertools.groupby(range(end, len(response)), lambda index: bool(mask[index])):
            span = list(positions)
            role = "assistant" if is_drawn else "tool"
            turns.append(Turn(role, span[0], span[-1] + 1))
            text = self.template.tokenizer.decode(response[span[0] : span[-1] + 1], skip_special_tokens=True)
            self.messages.append({"role": role, "content": text})
            self._prepared.append(self.template.prepare(self.messages[-1], "policy" if is_drawn else "program"))
        self._drawn_last = bool(turns) and turns[-1].role == "assistant"

    def copy(self) -> Conversation:
        """Return a copy that grows by itself."""
        twin = copy.copy(self)
        twin.messages, twin._prepared = list(self.messages), list(self._prepared)
        twin.problems = Counter()
        twin.sequences = [
            TokenSequence(
                sequence.prompt_ids,
                list(sequence.response_ids),
                list(sequence.response_mask),
                list(sequence.response_logprobs),
                list(sequence.turns),
            )
            for sequence in self.sequences
        ]
        return twin

    def branch(self, drawn_turns: int) -> Conversation:
        """Return a copy that ends with the policy's turn of this number, counted from 1."""
        twin, sequence = self.copy(), self.sequence
        parts = [index for index, turn in enumerate(sequence.turns, 1) if turn.role == "assistant"]
        after_prompt = enumerate(self.messages[self.prompt_length :], self.prompt_length + 1)
        replies = [index for index, message in after_prompt if message["role"] == "assistant"]
        part, reply = parts[drawn_turns - 1], replies[drawn_turns - 1]
        stop = sequence.turns[part - 1].stop
        index = sum(_count_images(message) for message in twin.messages[self.prompt_length : reply])
        twin._later_images, twin._image_data = self._later_images[:index], None
        del twin.messages[reply:], twin._prepared[reply:], twin.sequence.turns[part:]
        del twin.response_ids[stop:], twin.response_mask[stop:], twin.response_logprobs[stop:]
        twin._drawn_last = True
        return twin

    def check(self) -> Counter[str]:
        """Compare the tokens with the template's rendering of all messages; count the differences by kind.

        To be called once, at the end. The kinds are in :data:`verl.agents.rendering_check.KINDS`; each is shown once in
        a process. A conversation whose prompt was cut is not compared. With ``sanity_check="ignore_strippable"``
        differences in whitespace do not count, with ``"disable"`` nothing is compared.
        """
        mode = self.template.sanity_check
        if mode == "disable" or self._is_cut:
            return self.problems
        for difference in self._differences():
            if mode == "strict" or difference.kind != "whitespace":
                self.problems[difference.kind] += 1
                self.template.warn_once(
                    difference.kind,
                    "a conversation's tokens are not those of the chat template for all its messages (%s): %s. "
                    "Written: %s. The template: %s. Set multi_turn.tokenization_sanity_check_mode to choose what is "
                    "compared.",
                    difference.kind,
                    KINDS[difference.kind],
                    _excerpt(difference.written),
                    _excerpt(difference.rendered),
                )
        return self.problems

    def _differences(self) -> Iterator[Difference]:
        template = self.template
        try:
            rendering = template.encoded(self._prepared, self._guarded_tools, not self._drawn_last)
        except DataError as error:
            yield Difference(REFUSED, " ".join(message["role"] for message in self.messages), str(error))
            return
        is_sampled = [turn.role in ("assistant", OPENING) for turn in self.turns for _ in range(turn.start, turn.stop)]
        ids, mask = self._without_repeats(self.ids, [0] * len(self.prompt_ids) + list(map(int, is_sampled)))
        yield from differences(
            ids,
            mask,
            rendering,
            special=frozenset(template.control.special.values()),
            ends=self._ends | template.end_token_ids,
            decode=template.tokenizer.decode,
        )

    def _new_id(self) -> str:
        """An id of nine letters and digits, as Mistral's templates demand."""
        return f"call{next(self._numbers):05d}"

    def _named(self, messages: list[Message]) -> list[Message]:
        """Give results of tools the ids and names of the calls that they answer, where they lack them."""
        if not messages:
            raise DataError("no messages to add; a list of at least one is expected.")
        calls = list(self.messages[-1].get("tool_calls") or [])
        names = {call["id"]: call["function"]["name"] for call in calls}
        results = [message for message in messages if message.get("role") == "tool"]
        for index, result in enumerate(results):
            if not result.get("tool_call_id"):  # what was no call is answered, too
                result["tool_call_id"] = calls[index]["id"] if index < len(calls) else self._new_id()
            result.setdefault("name", names.get(result["tool_call_id"], "unknown"))
        return messages

    def _prompt_images(self, sources: Sequence[object], row_inputs: Mapping[str, object] | None) -> SharedTensors:
        """The inputs of the prompt's images; parts that hold none stand for those of the row, in their order."""
        if None not in sources:
            return together(self._inputs(sources))
        row_images = as_inputs(row_inputs, self._maker, PLACE)
        if not any(sources):
            return row_images
        row, missing = apart(row_images), sources.count(None)
        if len(row) != missing:
            raise DataError(
                f"{PLACE}: {missing} image part(s) hold no image, and the row has {len(row)} image(s). Give others as "
                "{'type': 'image', 'image': ...}."
            )
        rest = iter(row)
        return together(self._inputs([{"image": next(rest)} if source is None else source for source in sources]))

    def _inputs(self, sources: Sequence[Any]) -> list[SharedTensors]:
        """The inputs of each image or video of opened parts."""
        if sources and self._maker is None:
            raise ConfigError(f"{PLACE}: a message has an image, and {FOR_TEXT}.")
        if None in sources:
            raise DataError(
                f"{PLACE}: an image part holds no image. Give it as {{'type': 'image', 'image': ...}}: bytes of a "
                "file, a path, a data: URL or a PIL image; a video as {'type': 'video', 'video': ...}."
            )
        return [inputs for source in sources for inputs in source.values()]

    def _with_image_tokens(self, ids: list[int], images: Sequence[SharedTensors]) -> list[int]:
        """Tokens of a rendered text, the image token of each image as often as the image has tokens."""
        if self._maker is None:
            return ids
        vision = self._maker.config
        return expanded(ids, [n for image in images for n in token_counts(image, vision)], self._maker, PLACE)

    def _without_repeats(self, ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
        """Tokens and their mask with one token for each image, as the template writes it."""
        if self._maker is None or not len(self.image_data):
            return ids, mask
        tokens, counts = self._maker.config.token_ids, iter(token_counts(self.image_data, self._maker.config))
        tokens_with_mask: list[tuple[int, int]] = []
        repeats = 0
        for token_id, is_sampled in zip(ids, mask, strict=True):
            if token_id in tokens and not is_sampled:
                if repeats:
                    repeats -= 1
                    continue
                repeats = next(counts) - 1
            tokens_with_mask.append((token_id, is_sampled))
        return [token_id for token_id, _ in tokens_with_mask], [is_sampled for _, is_sampled in tokens_with_mask]

    def _fitting(
        self, messages: list[Message], images: Sequence[SharedTensors], max_tokens: int | None, keep: Side
    ) -> tuple[list[Message], list[Message], list[int]] | None:
        """The messages, shortened to ``max_tokens``, their prepared form and their tokens; None if they cannot fit."""
        control = self.template.control
        prepared, ids = self._following(messages, images)
        if max_tokens is None or len(ids) <= max_tokens:
            return messages, prepared, ids
        results = [(n, message["content"]) for n, message in enumerate(prepared) if message["role"] == "tool"]
        texts = {(n, part): control.plain(text) for n, content in results for part, text in texts_of(content)}
        lengths = [control.count(text) for text in texts.values()]
        room = sum(lengths)
        while len(ids) > max_tokens:
            room -= len(ids) - max_tokens
            limit = _level(lengths, room)
            if limit < 1:
                return None
            shorter: dict[int, dict[int, str]] = {n: {} for n, _ in results}
            for (n, part), text in texts.items():
                shorter[n][part] = control.shorten(text, limit, keep)
            messages = [
                message | {"content": _with_texts(prepared[n]["content"], shorter[n])} if n in shorter else message
                for n, message in enumerate(messages)
            ]
            prepared, ids = self._following(messages, images)
        return messages, prepared, ids

    def _following(self, messages: list[Message], images: Sequence[SharedTensors]) -> tuple[list[Message], list[int]]:
        """The messages in prepared form, and the tokens that they add after the last turn of the policy."""
        takes = self._maker is not None
        prepared = [self.template.prepare(message, "program", with_images=takes) for message in messages]
        first_prompt = self._prepared[: self.prompt_length]
        continuation = self.template.after_turn(first_prompt, self._prepared[-1], prepared, self._guarded_tools)
        self._ends |= continuation.ends
        ids, turn = self._with_image_tokens(continuation.ids, images), self.turns[-1]
        if turn.start == turn.stop:
            return prepared, ids
        last = self.response_ids[-1]
        if last in continuation.ends:
            return prepared, ids[1:]
        if continuation.ends and last in self.template.end_token_ids:
            ids = ids[1:]
        if ids[:1] == [last]:
            ids = ids[1:]  # a template without ends of turns: the policy drew the token that opens what follows
        return prepared, ids

    def _rewritten(self, ids: list[int]) -> bool:
        """Begin another sequence if the template writes all messages otherwise than they are written so far."""
        all_images = [self._images_of_prompt, *self._later_images]
        rendering = self._with_image_tokens(
            self.template.encoded(self._prepared, self._guarded_tools, True), all_images
        )
        decode = self.template.tokenizer.decode
        if decode(rendering) == decode(self.ids + ids):
            return False
        same = common_prefix_length(self.prompt_ids, rendering)
        self.sequences.append(TokenSequence(rendering[:same]))
        self.sequence.add("history", rendering[same:], 0, [0.0] * (len(rendering) - same))
        return True


def copied(value: object) -> Any:
    """Copy dicts and lists of messages, and what is in them; faster than ``copy.deepcopy``, which also keeps cycles."""
    if type(value) in (str, int, float, bool, NoneType):
        return value
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    if type(value) is list:
        return [copied(item) for item in value]
    return copy.deepcopy(value)


def _count_images(message: Message) -> int:
    """Number of image and video parts of a message."""
    content = message.get("content")
    return sum(map(is_image_part, content)) if isinstance(content, list) else 0


def _with_texts(content: Any, texts: Mapping[int, str]) -> Any:
    """A content with other texts, by the number of the part."""
    if isinstance(content, str):
        return texts[0]
    return [
        part | {"text": texts[part_index]} if part_index in texts else part for part_index, part in enumerate(content)
    ]


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:100]} [...] {text[-100:]}")


def _level(lengths: list[int], room: int) -> int:
    """The largest limit under which lengths, each cut to it, add up to at most ``room``."""
    for index, length in enumerate(sorted(lengths)):
        share = room // (len(lengths) - index)
        if length > share:
            return share
        room -= length
    return max(lengths, default=0)
