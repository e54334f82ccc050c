"""Public address of :mod:`verl.config.model` and :mod:`verl.config.megatron`."""

from verl.compat.import_hooks import old_names
from verl.config.megatron import McoreEngineConfig as McoreEngineConfig
from verl.config.model import FSDPEngineConfig as FSDPEngineConfig
from verl.config.model import MixedPrecisionConfig as MixedPrecisionConfig
from verl.config.model import WrapPolicyConfig as WrapPolicyConfig

__getattr__ = old_names(__name__)
