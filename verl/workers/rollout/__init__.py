"""Rollout engines, which draw responses to prompts; the interface is :mod:`verl.workers.rollout.base`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.base.lazy import on_first_use

__all__ = ["BaseRollout", "get_rollout_class"]

if TYPE_CHECKING:
    from verl.workers.rollout.base import BaseRollout, get_rollout_class

# Processes of engines import light modules of this package.
__getattr__ = on_first_use(
    __name__, {"BaseRollout": "verl.workers.rollout.base", "get_rollout_class": "verl.workers.rollout.base"}
)
