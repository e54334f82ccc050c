"""Public address of :mod:`verl.config.model` and :mod:`verl.config.megatron`."""

from verl.config.megatron import McoreEngineConfig as McoreEngineConfig
from verl.config.model import FSDPEngineConfig as FSDPEngineConfig
from verl.config.model import MixedPrecisionConfig as MixedPrecisionConfig
from verl.config.model import WrapPolicyConfig as WrapPolicyConfig
