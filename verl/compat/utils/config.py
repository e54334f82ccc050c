"""Typed sections from composed configurations, from :mod:`verl.toolkit.config`."""

from verl.base.doors import absent_names
from verl.toolkit.config import omega_conf_to_dataclass as omega_conf_to_dataclass
from verl.toolkit.config import validate_config as validate_config

__getattr__ = absent_names(__name__)
