"""Public address of :mod:`verl.config.algorithm`."""

from verl.config import AlgoConfig as AlgoConfig
from verl.config import FilterGroupsConfig as FilterGroupsConfig
from verl.config import KLControlConfig as KLControlConfig
from verl.config import PFPPOConfig as PFPPOConfig
from verl.config import RolloutCorrectionConfig as RolloutCorrectionConfig
