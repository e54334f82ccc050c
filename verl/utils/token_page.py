"""Tokens as HTML, coloured by one of their numbers: what a file of tokens holds, for pages, reports and trackers."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from verl.base.streams import printable
from verl.vision.families import IMAGE_TOKEN
from verl.vision.texts import image_word, runs

if TYPE_CHECKING:
    from verl.base.types import JsonMapping

MAX_TOKENS = 40_000
"""Tokens of a response that a page is sent."""
MAX_CHARACTERS = 20_000  # of one value; what is longer is cut
UNLIKELY = 0.1
"""Probability below which a token is marked where there are no colours."""
LISTED = 10
"""Unlikely tokens of a sequence that are listed there."""

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy of a page that runs nothing and loads nothing."""
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; border-radius: 8px; padding: .7rem; }
pre { margin: .3rem 0; unicode-bidi: isolate; }
.tokens span { border-radius: 3px; } .other { text-decoration: underline dotted; opacity: .7; }
"""


def described(row: JsonMapping, texts: Mapping[str, str]) -> dict[str, object]:
    """Describe a sequence by the row of a file of tokens and the texts of its metadata.

    Returns:
        ``prompt``, ``response`` and, of a policy that teaches itself, ``teacher_prompt`` as lists of {id, text};
        ``mask``, ``numbers`` by column, ``weight_version``; and ``images``, first and last place of each image in the
        response and the word that stands for it.
    """
    count = min(len(row["response_ids"]), MAX_TOKENS)
    lists = {name: values for name, values in row.items() if isinstance(values, list)}
    id_columns = ("prompt_ids", "teacher_prompt_ids", "response_ids", "response_mask", "span_ends")
    numbers = {name: _finite(values[:count]) for name, values in lists.items() if name not in id_columns}
    if {"old_log_probs", "rollout_log_probs"} <= lists.keys():
        pairs = zip(lists["old_log_probs"][:count], lists["rollout_log_probs"][:count], strict=True)
        numbers["log_prob_gap"] = [old - rollout for old, rollout in pairs]
    if {"old_log_probs", "teacher_logprobs"} <= lists.keys():
        pairs = zip(lists["old_log_probs"][:count], lists["teacher_logprobs"][:count], strict=True)
        gaps = [old - teacher for old, teacher in pairs]
        numbers["teacher_gap"] = _of_spans(gaps, lists["span_ends"][:count]) if "span_ends" in lists else gaps
    # Of the update, and so only on tokens that it trained on: elsewhere they are NaN in the file.
    if {"old_log_probs", "update_log_probs"} <= lists.keys():
        pairs = zip(lists["old_log_probs"][:count], lists["update_log_probs"][:count], strict=True)
        numbers["ratio"] = _finite([_exp(new - old) for old, new in pairs])
    response = _tokens(row["response_ids"][:count], texts)
    mask = row["response_mask"][:count]
    is_image_token = [
        token["text"] == IMAGE_TOKEN and not is_policy for token, is_policy in zip(response, mask, strict=True)
    ]
    teacher_ids = lists.get("teacher_prompt_ids")
    return {
        "prompt": _tokens(row["prompt_ids"][-MAX_TOKENS:], texts),
        **({} if teacher_ids is None else {"teacher_prompt": _tokens(teacher_ids[-MAX_TOKENS:], texts)}),
        "response": response,
        "mask": mask,
        "images": [
            (start, end - 1, image_word(end - start)) for is_image, start, end in runs(is_image_token) if is_image
        ],
        "numbers": numbers,
        "weight_version": row.get("weight_version"),
        "left_out": len(row["response_ids"]) - count,
    }


def _of_spans(values: list[float], ends: list[float]) -> list[float | None]:
    """Return the sum over each token's span of text, whose last token is at ``ends``; None without a whole span."""
    sums: dict[float, float] = {}
    for value, end in zip(values, ends, strict=True):
        sums[end] = sums.get(end, 0.0) + value
    return [sums[end] if 0 <= end < len(ends) else None for end in ends]


def token_spans(sequence: JsonMapping, most: int = MAX_TOKENS) -> tuple[str, str]:
    """Return the response of a described sequence as HTML, and the name of the numbers that colour its tokens.

    These are its advantages, else its log-probs under the rollout engine; without either the name is ``mask``.
    """
    name = next((column for column in ("advantages", "rollout_log_probs") if column in sequence["numbers"]), "")
    values = sequence["numbers"][name] if name else [None] * len(sequence["response"])
    colours = heat([value if is_policy else None for value, is_policy in zip(values, sequence["mask"], strict=True)])
    spans = [
        f'<span style="background:{colours[index]}"{"" if sequence["mask"][index] else " class=other"} '
        f'title="{name} {values[index]}">{escaped(text)}</span>'
        for index, text in _words(sequence, most)
    ]
    rest = len(values) - most
    return "".join(spans) + (f" … and {rest} more tokens" if rest > 0 else ""), name or "mask"


@dataclass(frozen=True)
class TokenPage:
    """Described sequences, with the first ``most`` tokens of each, as a tracker shows them."""

    title: str
    sequences: Sequence[Mapping[str, object]]
    most: int

    @cached_property
    def html(self) -> str:
        """An HTML page that needs nothing else: tokens coloured by one of their numbers."""
        parts = [f"<h1>{escaped(self.title)}</h1>"]
        for sequence in self.sequences:
            spans, name = token_spans(sequence, self.most)
            parts.append(f"<pre>{_prompt(sequence)}</pre><p>Tokens by {name}</p><pre class=tokens>{spans}</pre>")
        return whole_page(self.title, STYLE, "".join(parts))

    @cached_property
    def markdown(self) -> str:
        """Markdown, which has no colours: tokens that were unlikely when they were drawn are bold, and listed."""
        parts = [
            f"## {escaped(self.title)}",
            f"Bold: tokens of a probability below {UNLIKELY:g} in the rollout. Italics: not the policy's.",
        ]
        for sequence in self.sequences:
            marked, unlikely = marked_tokens(sequence, self.most)
            parts += [f"<pre>{_prompt(sequence)}</pre>", f"<pre>{marked}</pre>"]
            rows = [f"| {index} | <code>{text}</code> | {value:.2f} |" for value, index, text in unlikely]
            parts += ["\n".join(["| token | text | log-prob |", "|---|---|---|", *rows])] if rows else []
        return "\n\n".join(parts)


def marked_tokens(sequence: JsonMapping, most: int) -> tuple[str, list[tuple[float, int, str]]]:
    """Return the response of a described sequence with bold and italics, and its least likely tokens.

    Returns:
        HTML of ``<strong>`` and ``<em>`` alone; and log-prob, place from 1 and text of at most :data:`LISTED` tokens.
    """
    log_probs = sequence["numbers"].get("rollout_log_probs") or [None] * len(sequence["response"])
    parts: list[str] = []
    unlikely: list[tuple[float, int, str]] = []
    for index, word in _words(sequence, most):
        text, value = escaped(word), log_probs[index]
        if not sequence["mask"][index]:
            parts.append(f"<em>{text}</em>")
        elif value is None or value >= math.log(UNLIKELY):
            parts.append(text)
        else:
            parts.append(f"<strong>{text}</strong>")
            unlikely.append((value, index + 1, text.replace("|", "&#124;").replace("\n", "\\n")))
    return "".join(parts), sorted(unlikely)[:LISTED]


def _words(sequence: JsonMapping, most: int) -> list[tuple[int, str]]:
    """Return place and text of the first tokens of a response; an image is one word, at its first token."""
    words = {start: word for start, _, word in sequence["images"]}
    within = {index for start, end, _ in sequence["images"] for index in range(start + 1, end + 1)}
    texts = enumerate(token["text"] for token in sequence["response"][:most])
    return [(index, words.get(index, text)) for index, text in texts if index not in within]


def _prompt(sequence: JsonMapping) -> str:
    prompts = [sequence["prompt"], *([sequence["teacher_prompt"]] if "teacher_prompt" in sequence else [])]
    texts = ("".join(token["text"] for token in prompt) for prompt in prompts)
    return escaped("\n\nPrompt as the teacher: ".join(texts))


PAGE_BEGINS = (
    f'<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
)
"""First bytes of every page."""


def whole_page(title: str, style: str, body: str) -> str:
    """Return an HTML document that runs no script and loads nothing."""
    return (
        f"{PAGE_BEGINS}"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{style}</style>{body}</html>\n"
    )


def heat(values: Sequence[float | None]) -> list[str]:
    """Return a colour for each number: orange below 0, blue above, stronger the further from it."""
    magnitudes = [abs(value) for value in values if value is not None]
    most = max(magnitudes, default=0.0) or 1.0

    def colour(value: float | None) -> str:
        if value is None:
            return "transparent"
        return f"rgb({'230 110 20' if value < 0 else '30 120 220'} / {0.6 * min(1.0, abs(value) / most):.2f})"

    return [colour(value) for value in values]


def escaped(value: object) -> str:
    """Escape a text for HTML; characters that cannot be seen, or turn the direction of text, become their codes."""
    return html.escape(printable(str(value)[:MAX_CHARACTERS]))


def _tokens(ids: Sequence[int], texts: Mapping[str, str]) -> list[dict[str, object]]:
    return [{"id": token_id, "text": texts.get(str(token_id), f"<{token_id}>")} for token_id in ids]


def _exp(log_ratio: float) -> float:
    return math.exp(log_ratio) if log_ratio < 700 else math.inf  # above it a float overflows


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if value == value and abs(value) != float("inf") else None for value in values]
