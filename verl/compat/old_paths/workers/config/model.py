"""Public address of :mod:`verl.config.model`."""

from verl.config.model import HFModelConfig as HFModelConfig
