"""Version of vLLM, from :mod:`verl.toolkit.imports`."""

from verl.base.doors import absent_names
from verl.toolkit.imports import is_version_ge as is_version_ge

__getattr__ = absent_names(__name__)
