"""Refuse Python code that comes with a model unless the user allows it, and warn when it runs."""

from __future__ import annotations

import functools
import logging
import pickle
import sys
from pathlib import Path

from safetensors import SafetensorError
from transformers import PretrainedConfig

from verl.errors import ConfigError
from verl.utils.model_facts.model_files import file_problem
from verl.utils.transformers_private import attention_of, is_from_model_folder

logger = logging.getLogger(__name__)

# Exceptions that Transformers raises if the files of a model cannot be used.
LOADING_ERRORS = (
    OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, pickle.UnpicklingError, SafetensorError,
)  # fmt: skip


def why_unreadable(error: Exception, path: str) -> str:
    """Explain in one or two sentences why Transformers could not read the files at ``path``."""
    if Path(path).is_dir() and (damage := file_problem(Path(path))):
        return f"{damage}."
    text = str(error).strip()
    if "trust_remote_code" in text:
        files = sorted(file.name for file in Path(path).glob("*.py")) if Path(path).is_dir() else []
        return (
            f"it needs Python code of its own ({', '.join(files) or 'from the hub'}), which is not run unless you ask "
            "for it. Read that code, and if you trust it, set trust_remote_code=true for this model "
            "(--trust-remote-code of verl merge)."
        )
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in text or "Weights only" in text:
        return (
            "a weight file is a pickle with more in it than weights. Reading it could run code, so it is refused. "
            "Get the model as safetensors, or convert it where you trust it."
        )
    return text.splitlines()[0] if text else type(error).__name__


def warn_if_code_runs(loaded: object, path: str) -> None:
    """Warn, once per model and process, if the class of ``loaded`` is code that came with the model at ``path``."""
    name = type(loaded).__module__
    if is_from_model_folder(name):
        _warn_once(path, getattr(sys.modules.get(name), "__file__", None) or name)


@functools.cache
def _warn_once(path: str, file: str) -> None:
    logger.warning("trust_remote_code=true: Python code that came with the model '%s' runs here: %s", path, file)


def refuse_foreign_kernels(config: PretrainedConfig, path: str) -> None:
    """Refuse a model whose config names attention kernels on a hub, because they are code."""
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))):
        kernel = attention_of(part)
        if isinstance(kernel, str) and "/" in kernel:
            raise ConfigError(
                f"the config.json of '{path}' asks for the attention kernel '{kernel}', which is code from a hub and "
                "is not run unless you ask for it. If you trust it, set override_config.attn_implementation "
                f"='{kernel}' for this model; else override it with sdpa or eager."
            )
