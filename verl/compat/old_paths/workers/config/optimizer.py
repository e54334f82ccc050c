"""Public address of :mod:`verl.config.model` and :mod:`verl.workers.engine.optimizer`."""

from verl.config.model import FSDPOptimizerConfig as FSDPOptimizerConfig
from verl.config.model import OptimizerConfig as OptimizerConfig
from verl.workers.engine.optimizer import build_optimizer as build_optimizer
