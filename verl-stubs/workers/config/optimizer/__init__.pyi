from verl.config.model import FSDPOptimizerConfig as FSDPOptimizerConfig
from verl.config.model import OptimizerConfig as OptimizerConfig
from verl.workers.engine.fsdp.optimizer import build_optimizer as build_optimizer
