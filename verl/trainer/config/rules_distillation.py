"""Rules of distillation: which teachers, losses and layouts go together."""

from __future__ import annotations

from collections.abc import Iterator

from verl.config import PPOConfig, Problem

Problems = Iterator[Problem]


def distillation(config: PPOConfig) -> Problems:
    """Refuse distillation, which is under construction."""
    if config.distillation.enabled:
        yield Problem("distillation.enabled", True, "distillation is not in this version", remedy="leave it out")
