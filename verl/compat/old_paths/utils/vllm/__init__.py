"""Version of vLLM, from :mod:`verl.toolkit.imports`."""

from verl.base.doors import old_names
from verl.toolkit.imports import is_version_ge as is_version_ge

__getattr__ = old_names(__name__)
