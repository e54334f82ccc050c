from verl.compat.toolkit.imports import is_version_ge as is_version_ge
