"""Training engines: the interface, and the back ends that implement it."""

from verl.workers.engine.base import BaseEngine, EngineRegistry, RankState
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.engine.loss import BatchTotals, FunctionLoss, LossFunction, LossMetrics, PartialSum
from verl.workers.engine.passes import MicroBatchConfig

__all__ = [
    "BaseEngine",
    "BatchTotals",
    "EngineRegistry",
    "FSDPEngine",
    "FunctionLoss",
    "LossFunction",
    "LossMetrics",
    "MicroBatchConfig",
    "PartialSum",
    "RankState",
]
