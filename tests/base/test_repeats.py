"""A traceback that comes at every step is shown once."""

from __future__ import annotations

from verl.base.repeats import without_repeated_traceback

TEXT = """{count} of 16 samples could not be scored. The first:
Traceback (most recent call last):
  File "reward.py", line {line}, in compute_score
    return truths[solution_str]
KeyError: {key}"""


def test_the_same_error_at_the_same_line_has_its_traceback_once() -> None:
    first = TEXT.format(count=4, line=7, key="'a'")
    assert without_repeated_traceback(first) == first
    again = without_repeated_traceback(TEXT.format(count=8, line=7, key="'b'"))
    assert again == "8 of 16 samples could not be scored. The first: KeyError: 'b' (its traceback is above)"
    elsewhere = TEXT.format(count=4, line=9, key="'a'")
    assert without_repeated_traceback(elsewhere) == elsewhere


def test_a_text_without_a_traceback_stays() -> None:
    text = "2 of 4 samples could not be scored: 2 timeout."
    assert [without_repeated_traceback(text) for _ in range(2)] == [text, text]


def test_chained_errors_are_told_by_the_last() -> None:
    cause = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nOSError: no file\n\nThe above ...\n\n'
    text = TEXT.format(count=1, line=3, key="'c'").replace("Traceback", f"{cause}Traceback")
    assert without_repeated_traceback(text) == text
    expected = "1 of 16 samples could not be scored. The first: KeyError: 'c' (its traceback is above)"
    assert without_repeated_traceback(text) == expected
