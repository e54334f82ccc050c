"""Training engines: one contract, and the back ends that register for it."""

from verl.workers.engine.base import BaseEngine, BatchTotals, EngineRegistry, LossFn, MicroBatchConfig, RankState, Share
from verl.workers.engine.fsdp import FSDPEngine

__all__ = [
    "BaseEngine",
    "BatchTotals",
    "EngineRegistry",
    "FSDPEngine",
    "LossFn",
    "MicroBatchConfig",
    "RankState",
    "Share",
]
