"""Tokens of a sequence as HTML, with their numbers and colours."""

from __future__ import annotations

import re

from verl.utils.token_page import TokenPage, described, heat, token_spans

ROW = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4, 9, 9, 5],
    "response_mask": [1, 1, 0, 0, 1],
    "rollout_log_probs": [-0.5, -1.0, 0.0, 0.0, -4.0],
    "old_log_probs": [-0.25, -1.0, 0.0, 0.0, -2.0],
    "weight_version": 7,
}
TEXTS = {"1": "What", "2": " is <it>?", "3": "It", "4": " is", "9": "<|image_pad|>", "5": "\u202e&"}


def spans(page: str) -> list[tuple[str, str, str]]:
    found = re.findall(r'<span style="background:([^"]*)"( class=other)? title="([^"]*)">([^<]*)</span>', page)
    return [(colour + other, title, text) for colour, other, title, text in found]


def test_the_gap_of_log_probs_and_images_are_described():
    found = described(ROW | {"teacher_logprobs": [-0.5, -0.5, 0.0, 0.0, -2.0]}, TEXTS)
    assert found["numbers"]["log_prob_gap"] == [0.25, 0.0, 0.0, 0.0, 2.0]  # before the update less rollout
    assert found["numbers"]["teacher_gap"] == [0.25, -0.5, 0.0, 0.0, 0.0]
    by_text = described(
        ROW | {"teacher_logprobs": [0.0, -1.0, 0.0, 0.0, -2.0], "span_ends": [1.0, 1.0, -1.0, -1.0, 5.0]}, TEXTS
    )
    # Of the spans: -0.25 - 1 + 1; the last one goes on where the page ends.
    assert by_text["numbers"]["teacher_gap"] == [-0.25, -0.25, None, None, None]
    assert "span_ends" not in by_text["numbers"]
    assert found["images"] == [(2, 3, "<image: 2 tokens>")]
    assert [token["text"] for token in found["prompt"]] == ["What", " is <it>?"]
    assert (found["weight_version"], found["left_out"]) == (7, 0)


def test_tokens_are_coloured_by_log_prob_and_an_image_is_one_word():
    page, name = token_spans(described(ROW, TEXTS))
    assert name == "rollout_log_probs"
    # The largest is 4: 0.6 · 0.5 / 4 = 0.075 (a float below it, so 0.07), 0.6 · 1 / 4 = 0.15, and 0.6 for itself.
    assert spans(page) == [
        ("rgb(230 110 20 / 0.07)", "rollout_log_probs -0.5", "It"),
        ("rgb(230 110 20 / 0.15)", "rollout_log_probs -1.0", " is"),
        ("transparent class=other", "rollout_log_probs 0.0", "&lt;image: 2 tokens&gt;"),
        ("rgb(230 110 20 / 0.60)", "rollout_log_probs -4.0", "[U+202E]&amp;"),
    ]


def test_advantages_come_first_and_their_sign_is_the_colour():
    row = ROW | {"advantages": [0.5, -1.0, 0.0, 0.0, float("nan")]}
    page, name = token_spans(described(row, TEXTS), most=2)
    assert name == "advantages"
    assert [colour for colour, _, _ in spans(page)] == ["rgb(30 120 220 / 0.30)", "rgb(230 110 20 / 0.60)"]
    assert page.endswith(" … and 3 more tokens")
    assert heat([None, 0.0]) == ["transparent", "rgb(30 120 220 / 0.00)"]


def test_a_page_runs_nothing_and_loads_nothing():
    page = TokenPage("Step <1>", [described(ROW, TEXTS)] * 2, most=2_000).html
    assert page.count("<p>Tokens by rollout_log_probs</p>") == 2
    assert "<title>Step &lt;1&gt;</title>" in page
    assert "What is &lt;it&gt;?" in page
    assert """content="default-src 'none'; style-src 'unsafe-inline'\"""" in page
    assert not re.search(r"<script|<img|<link|src=|https?://|@import|url\(", page)


def test_markdown_marks_unlikely_tokens_and_lists_them():
    row = ROW | {"response_ids": [3, 4, 9, 9, 6, 5], "response_mask": [1, 1, 0, 0, 1, 1]}
    row |= {"rollout_log_probs": [-2.5, -2.3, -9.0, -9.0, -2.31, -4.0], "old_log_probs": [0.0] * 6}
    page = TokenPage("Step <1>", [described(row, TEXTS | {"6": "a|b\n"})], most=2_000).markdown
    # log 0.1 = -2.303; the image is a tool's.
    heading, meaning, prompt, response, listed = page.split("\n\n")
    assert heading == "## Step &lt;1&gt;"
    assert meaning.startswith("Bold: tokens of a probability below 0.1 in the rollout.")
    assert prompt == "<pre>What is &lt;it&gt;?</pre>"
    assert response == (
        "<pre><strong>It</strong> is<em>&lt;image: 2 tokens&gt;</em>"
        "<strong>a|b\n</strong><strong>[U+202E]&amp;</strong></pre>"
    )
    assert listed.splitlines()[2:] == [
        "| 6 | <code>[U+202E]&amp;</code> | -4.00 |",
        "| 1 | <code>It</code> | -2.50 |",
        "| 5 | <code>a&#124;b\\n</code> | -2.31 |",
    ]
    assert TokenPage("", [described(ROW | {"rollout_log_probs": [0.0] * 5}, TEXTS)], 2_000).markdown.count("\n\n") == 3
