"""Public address of :mod:`verl.config.critic`."""

from verl.config.critic import CriticConfig as CriticConfig
from verl.config.critic import FSDPCriticConfig as FSDPCriticConfig
from verl.config.critic import FSDPCriticModelCfg as FSDPCriticModelCfg
