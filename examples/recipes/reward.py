"""The reward of the recipes' toy task."""

from __future__ import annotations


def compute_score(solution_str: str) -> float:
    """1 for a response with at least three vowels, else 0."""
    return float(sum(letter in "aeiou" for letter in solution_str) >= 3)
