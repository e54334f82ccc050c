"""Responses in the tokens of a teacher with another tokenizer, and the spans of text that both tokenizations share.

::

    policy     The | answer | is | 12 | <eos>
    teacher    Th | e | an | swer is | 12 | <end>
    spans      The | answer is | 12 | the end

A span ends where a token of both ends, and is as short as that allows. Its log-prob is the sum of those of its tokens,
so that the sum over the spans of a response is the log-prob of the whole response under either model.

The teacher reads the text of the response, without special tokens; the token with which the policy ends a response is
the one with which the teacher's chat template ends a turn. Tokens without a counterpart belong to no span:

- special tokens inside a response, and a span that one interrupts;
- bytes that are no character, and a span that has some;
- what comes after the first character that the teacher's tokenizer changes or drops, unless it composes characters
  (Unicode's NFC) that each are in one token of the policy.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import cast

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verl.config import DistillationConfig, HFModelConfig
from verl.datasets.chat import common_prefix_length, encode, render, require_chat_template
from verl.errors import ConfigError, DataError
from verl.protocol import DataProto
from verl.schema import require
from verl.utils.model import compute_position_id_with_mask, eos_token_ids
from verl.utils.tokenizer import tokenizer_of
from verl.utils.torch_functional import pad_2d_list_to_length
from verl.workers.teacher.tokenizers import tokenizers_by_text

NO_SPAN = -1
_BROKEN = "\ufffd"
_PROBE = "verl_probe"


@dataclass(frozen=True)
class AlignedResponse:
    """One response in the tokens of both models."""

    teacher_ids: list[int]
    policy_spans: list[int]
    """Number of each policy token's span, from 0 on, or ``NO_SPAN``."""
    teacher_spans: list[int]
    """Number of each teacher token's span."""


@dataclass(frozen=True)
class AlignedRows:
    """Rows in the tokens of the teacher, and where their spans end in the rows of the policy."""

    rows: DataProto
    """Rows that the teacher reads."""
    span_ends: Tensor
    """(bsz, response_length) int64: place of the last token of each policy token's span, or ``NO_SPAN``."""
    places: Tensor
    """(bsz, response_length of the teacher) int64: the same place, of each teacher token's span."""

    def columns(self, teacher: DataProto) -> DataProto:
        """Convert the teacher's columns to the tokens of the policy.

        Args:
            teacher: ``teacher_logprobs`` and perhaps ``teacher_entropys`` of the teacher's tokens.

        Returns:
            ``teacher_logprobs``, the log-prob of each span on its last token, 0 elsewhere; ``teacher_entropys``, on
            each token the mean over the teacher's tokens of its span; ``span_ends``; and ``distillation_mask``, 1 on
            tokens with a span. All are (bsz, response_length).
        """
        is_aligned, ends = self.places >= 0, self.places.clamp_min(0)

        def sums(values: Tensor) -> Tensor:
            zeros = values.new_zeros(self.span_ends.shape)
            return zeros.scatter_add(1, ends, values.masked_fill(~is_aligned, 0))

        in_span, end_indices = self.span_ends >= 0, self.span_ends.clamp_min(0)
        tensors = {
            "teacher_logprobs": sums(teacher.batch["teacher_logprobs"]),
            "span_ends": self.span_ends,
            "distillation_mask": in_span.long(),
        }
        if "teacher_entropys" in teacher.batch.keys():
            entropys = teacher.batch["teacher_entropys"]
            means = sums(entropys) / sums(torch.ones_like(entropys)).clamp_min(1)
            tensors["teacher_entropys"] = means.gather(1, end_indices).masked_fill(~in_span, 0)
        return DataProto.from_dict(tensors=tensors)


class TextAlignment:
    """Finds the spans of text that the policy's tokens share with those of one teacher.

    Args:
        policy: the policy's tokenizer.
        teacher: the teacher's tokenizer.
        end_ids: tokens with which the policy ends a response.
        setting: names the teacher in messages.

    Raises:
        ConfigError: a tokenizer is not one of the ``tokenizers`` library, or the teacher's has no chat template or no
            token that ends a turn.
    """

    def __init__(
        self,
        policy: PreTrainedTokenizerBase,
        teacher: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        setting: str = "the teacher",
    ) -> None:
        self._policy, self.teacher = _fast(policy, "the policy"), _fast(teacher, setting)
        self._special = special_ids(policy) | {*end_ids}
        self._end_ids = frozenset(end_ids)
        self._teacher_end = end_of_turn(teacher, setting)

    @classmethod
    def for_teachers(cls, distillation: DistillationConfig, student: HFModelConfig) -> Mapping[str, TextAlignment]:
        """Make the alignments of all teachers with another tokenizer than the policy's, by name."""
        teachers = tokenizers_by_text(distillation, student)
        if not teachers:
            return {}
        policy = tokenizer_of(student)
        ends = eos_token_ids(student.path, policy)
        return {
            name: cls(policy, teacher, ends, f"distillation.teacher_models.{name}")
            for name, teacher in teachers.items()
        }

    def response(self, ids: Sequence[int]) -> AlignedResponse:
        """Align one response of the policy."""
        has_end = bool(ids) and ids[-1] in self._end_ids
        policy_texts = texts_of_tokens(ids[:-1] if has_end else ids, self._policy, self._special)
        text = "".join(piece for piece in policy_texts if piece)
        # What the policy wrote is text, also where it has the name of one of the teacher's special tokens.
        teacher_ids = list(self.teacher(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        teacher_texts = texts_of_tokens(teacher_ids, self.teacher, ())
        composed = [piece and unicodedata.normalize("NFC", piece) for piece in policy_texts]
        if "".join(filter(None, composed)) == "".join(filter(None, teacher_texts)):
            policy_texts = composed  # Qwen's tokenizers write U+2126, the ohm sign, as U+03A9
        spans, teacher_spans = shared_spans(policy_texts, teacher_texts)
        if has_end:
            last = max(spans, default=NO_SPAN) + 1
            teacher_ids.append(self._teacher_end)
            spans.append(last)
            teacher_spans.append(last)
        return AlignedResponse(teacher_ids, spans, teacher_spans)

    def rows(self, batch: DataProto) -> AlignedRows:
        """Make the teacher's rows of a batch of single turns.

        Args:
            batch: with ``teacher_prompts`` in the teacher's tokens.

        Raises:
            DataError: a response has tokens that the policy did not choose, which are in its own chat template.
        """
        needed = ("teacher_prompts", "teacher_prompts_mask", "responses", "response_mask", "attention_mask")
        require(batch, needed, "a teacher with another tokenizer")
        columns = batch.batch
        is_trained, width = columns["response_mask"].bool().cpu(), columns["responses"].shape[1]
        present = columns["attention_mask"][:, -width:].bool().cpu()
        mixed = (is_trained.any(-1) & (is_trained != present).any(-1)).nonzero().flatten().tolist()
        if mixed:
            raise DataError(
                f"distillation.alignment=text: in row {mixed[0]} the policy did not choose every token of the "
                "response: some are results of tools, or turns of a user. They are in the policy's chat template, "
                "which the teacher does not read. Take a teacher with the policy's tokenizer, or leave such rows out."
            )
        aligned = [
            self.response(ids[keep].tolist()) for ids, keep in zip(columns["responses"].cpu(), is_trained, strict=True)
        ]
        span_ends = torch.full(is_trained.shape, NO_SPAN)
        places = torch.full((len(batch), max([1, *(len(response.teacher_ids) for response in aligned)])), NO_SPAN)
        for row, response in enumerate(aligned):
            policy_places = is_trained[row].nonzero().flatten()
            last = {span: int(position) for position, span in zip(policy_places, response.policy_spans, strict=True)}
            last[NO_SPAN] = NO_SPAN
            span_ends[row, policy_places] = torch.tensor(
                [last[span] for span in response.policy_spans], dtype=torch.long
            )
            places[row, : len(response.teacher_spans)] = torch.tensor([last[span] for span in response.teacher_spans])
        pad = cast(int, self.teacher.pad_token_id or 0)
        responses = pad_2d_list_to_length([response.teacher_ids for response in aligned], pad, places.shape[1])
        counts = torch.tensor([len(response.teacher_ids) for response in aligned])
        mask = (torch.arange(places.shape[1]) < counts[:, None]).long()
        prompts, prompts_mask = columns["teacher_prompts"], columns["teacher_prompts_mask"]
        attention_mask = torch.cat([prompts_mask, mask], dim=1)
        rows = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": compute_position_id_with_mask(attention_mask),
            "response_mask": mask,
        }
        return AlignedRows(DataProto.from_dict(tensors=rows), span_ends, places)


def spans_of_tokens(response_mask: Tensor) -> DataProto:
    """Return ``span_ends`` and ``distillation_mask`` of a teacher with the policy's tokens: a span is one token."""
    places = torch.arange(response_mask.shape[1], device=response_mask.device).expand_as(response_mask)
    tensors = {
        "span_ends": places.masked_fill(~response_mask.bool(), NO_SPAN),
        "distillation_mask": response_mask.long(),
    }
    return DataProto.from_dict(tensors=tensors)


def shared_spans(policy: Sequence[str | None], teacher: Sequence[str | None]) -> tuple[list[int], list[int]]:
    """Return the number of the span of each token of both, from 0 on, or ``NO_SPAN``.

    Args:
        policy: texts of tokens as :func:`texts_of_tokens` returns them.
        teacher: those of the teacher's tokens.
    """
    sides = policy, teacher
    text, other = ("".join(piece or "" for piece in pieces) for pieces in sides)
    ends = [list(accumulate(len(piece or "") for piece in pieces)) for pieces in sides]
    policy_ends, teacher_ends = (
        {end for end, piece in zip(ends_of_side, pieces, strict=True) if piece}
        for ends_of_side, pieces in zip(ends, sides, strict=True)
    )
    same = common_prefix_length(text, other)
    bounds = sorted(end for end in policy_ends & teacher_ends if end <= same)
    dropped = {len(bounds)}  # what follows the last common end
    dropped |= {n for n, (start, end) in enumerate(pairwise([0, *bounds])) if _BROKEN in text[start:end]}
    numbers: list[list[int]] = []
    for ends_of_side, pieces in zip(ends, sides, strict=True):
        spans, before, is_interrupted = list[int](), NO_SPAN, False
        for end, piece in zip(ends_of_side, pieces, strict=True):
            if piece is None:
                spans.append(NO_SPAN)
                is_interrupted = True
                continue
            # A token that completes no character belongs to the span of the next character.
            spans.append(bisect_left(bounds, end) if piece else bisect_right(bounds, end))
            if is_interrupted and spans[-1] == before:
                dropped.add(before)
            before, is_interrupted = spans[-1], False
        numbers.append(spans)
    first, second = ([NO_SPAN if span in dropped else span for span in spans] for spans in numbers)
    return first, second


def texts_of_tokens(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerFast, special: Sequence[int] | frozenset[int]
) -> list[str | None]:
    """Return the text that each token adds to that of the tokens before it; joined they are the text of all.

    It is empty for a token that completes no character, whose bytes are in the text of a later one; and None for the
    ids in ``special``, which add nothing.
    """
    stream, core = DecodeStream(skip_special_tokens=False), tokenizer.backend_tokenizer
    return [None if token_id in special else stream.step(core, token_id) or "" for token_id in ids]


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that stand for no text."""
    return frozenset(n for n, token in tokenizer.added_tokens_decoder.items() if token.special)


def end_of_turn(tokenizer: PreTrainedTokenizerBase, setting: str) -> int:
    """Return the token with which the chat template ends a turn of the assistant; else the tokenizer's end token.

    Raises:
        ConfigError: there is no chat template, or no such token.
    """
    require_chat_template(tokenizer)
    turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _PROBE}]
    rendered = render(turns, tokenizer, setting)
    special = special_ids(tokenizer)
    after = encode(rendered[rendered.rindex(_PROBE) + len(_PROBE) :], tokenizer)
    text_end = cast("int | None", tokenizer.eos_token_id)
    end = next((token_id for token_id in after if token_id in special), text_end)
    if end is None:
        raise ConfigError(
            f"{setting}: its chat template ends no turn with a special token and its tokenizer has no end token, so "
            "what ends the policy's responses has no counterpart. Set eos_token in its tokenizer_config.json."
        )
    return end


def _fast(tokenizer: PreTrainedTokenizerBase, whose: str) -> PreTrainedTokenizerFast:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"distillation.alignment=text: the tokenizer of {whose} ({type(tokenizer).__name__}) is not one of the "
            "'tokenizers' library (it has no tokenizer.json), which alone says where the text of a token ends. Take a "
            "model that ships tokenizer.json."
        )
    return tokenizer
