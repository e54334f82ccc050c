"""Version of vLLM, from :mod:`verl.compat.toolkit.imports`."""

from verl.compat.import_hooks import old_names
from verl.compat.toolkit.imports import is_version_ge as is_version_ge

__getattr__ = old_names(__name__)
