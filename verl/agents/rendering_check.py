"""Differences between the tokens of a conversation and the rendering of all its messages at once."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from verl.datasets.chat import common_prefix_length

REFUSED = "refused"
KINDS: Mapping[str, str] = MappingProxyType(
    {
        REFUSED: "the template refuses all messages together, though it took them turn by turn",
        "history": "the template writes the policy's turn otherwise, for example without its thoughts; what was drawn "
        "stays, and the policy saw it in its later turns",
        "context": "the template writes texts around the policy's turns otherwise once all messages are known",
        "turn_end": "the template ends the policy's turn with another token than the policy",
        "whitespace": "the texts differ in spaces and newlines only",
        "tokens": "the texts are equal; the policy drew other tokens than the tokenizer makes of them",
    }
)
"""Kinds of differences, and what each means."""


@dataclass(frozen=True)
class Difference:
    """A place at which the written text and the template's rendering part."""

    kind: str
    written: str
    rendered: str


def differences(
    written: Sequence[int],
    mask: Sequence[int],
    rendering: Sequence[int],
    *,
    special: frozenset[int],
    ends: frozenset[int],
    decode: Callable[[Sequence[int]], str],
) -> Iterator[Difference]:
    """Compare two token sequences part by part; a part begins at each special token.

    Where the policy drew the last turn, its end is not compared: what is written there comes too late to be seen.

    Args:
        written: tokens of a conversation.
        mask: 1 where the policy drew them.
        rendering: tokens of all its messages, rendered at once.
        special: tokens that begin a part. So the work does not grow with the square of the length.
        ends: tokens that may end a turn.
        decode: gives the text of tokens.
    """
    if mask and mask[-1]:
        rest = [token for token in rendering[len(written) :] if token not in ends]
        if list(rendering[: len(written)]) == list(written) and not decode(rest).strip():
            return
        written, rendering = _without_end(written, ends, decode), _without_end(rendering, ends, decode)
    if list(written) == list(rendering):
        return
    written_parts, rendered_parts = _parts(written, special), _parts(rendering, special)
    numbers: dict[tuple[int, ...], int] = {}  # equal parts have one number, so that long parts are hashed once
    sequences = [
        [numbers.setdefault(part, len(numbers)) for _, part in parts] for parts in (written_parts, rendered_parts)
    ]
    matcher = difflib.SequenceMatcher(None, *sequences, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            continue
        pairs = [(a + n, a + n + 1, c + n, c + n + 1) for n in range(b - a)] if b - a == d - c else [(a, b, c, d)]
        for first, last, other_first, other_last in pairs:
            our_tokens = [token for _, part in written_parts[first:last] for token in part]
            other = [token for _, part in rendered_parts[other_first:other_last] for token in part]
            if our_tokens != other:
                start = written_parts[first][0] if first < len(written_parts) else len(written)
                yield _difference(our_tokens, mask[start : start + len(our_tokens)], other, ends, decode)


def _difference(
    our_tokens: list[int],
    mask: Sequence[int],
    other: list[int],
    ends: frozenset[int],
    decode: Callable[[Sequence[int]], str],
) -> Difference:
    """Name the difference of two parts."""
    text, rendered = decode(our_tokens), decode(other)
    if text == rendered:
        kind = "tokens"
    elif "".join(text.split()) == "".join(rendered.split()):
        kind = "whitespace"
    else:
        begin = common_prefix_length(our_tokens, other)
        end = common_prefix_length(our_tokens[begin:][::-1], other[begin:][::-1])
        stop = len(our_tokens) - end
        if ends.issuperset(our_tokens[begin:stop]) and ends.issuperset(other[begin : len(other) - end]):
            kind = "turn_end"
        elif any(mask[begin:stop] if begin < stop else mask[max(begin - 1, 0) : stop + 1]):
            kind = "history"
        else:
            kind = "context"
    return Difference(kind, text, rendered)


def _without_end(ids: Sequence[int], ends: frozenset[int], decode: Callable[[Sequence[int]], str]) -> Sequence[int]:
    """Tokens before the end of their last turn, which spaces and other ends may follow."""
    stop = len(ids)
    while stop and (ids[stop - 1] in ends or not decode(ids[stop - 1 : stop]).strip()):
        stop -= 1
    return ids[: next((n for n in range(stop, len(ids)) if ids[n] in ends), len(ids))]


def _parts(ids: Sequence[int], special: frozenset[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Positions and tokens of the parts that begin at special tokens."""
    starts = [n for n, token in enumerate(ids) if n == 0 or token in special]
    return [(start, tuple(ids[start:stop])) for start, stop in itertools.pairwise([*starts, len(ids)])]
