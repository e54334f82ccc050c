"""Python code that comes with a model: it runs only if asked for, and then the run says so."""

from __future__ import annotations

import functools
import logging
import pickle
import sys
from pathlib import Path

from transformers import PretrainedConfig
from transformers.dynamic_module_utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from verl.errors import ConfigError

logger = logging.getLogger(__name__)

LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, pickle.UnpicklingError)
"""What Transformers raises where the files of a model cannot be used."""


def why_unreadable(error: Exception, path: str) -> str:
    """Why Transformers could not read the files at ``path``, in one sentence or two."""
    text = str(error).strip()
    if "trust_remote_code" in text:
        files = sorted(file.name for file in Path(path).glob("*.py")) if Path(path).is_dir() else []
        return (
            f"it needs Python code of its own ({', '.join(files) or 'from the hub'}), which is not run unless you ask "
            "for it. Read that code, and if you trust it, set trust_remote_code=true beside model.path "
            "(actor_rollout_ref.model, critic.model, reward_model.model, for supervised runs model; "
            "--trust-remote-code of verl.model_merger)."
        )
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in text or "Weights only" in text:
        return (
            "a weight file is a pickle with more in it than weights. Reading it could run code, so it is refused. "
            "Get the model as safetensors, or convert it where you trust it."
        )
    return text.splitlines()[0] if text else type(error).__name__


def tell_if_code_runs(loaded: object, path: str) -> None:
    """Warn, once per model and process, if the class of ``loaded`` is code that came with the model at ``path``."""
    name = type(loaded).__module__
    if name.split(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME:
        _tell(path, getattr(sys.modules.get(name), "__file__", None) or name)


@functools.cache
def _tell(path: str, file: str) -> None:
    logger.warning("trust_remote_code=true: Python code that came with the model '%s' runs here: %s", path, file)


def refuse_foreign_kernels(config: PretrainedConfig, path: str) -> None:
    """Refuse a model whose own config wants attention kernels from a hub: that is code, too.

    Raises:
        ConfigError: it names one, for the model or for a part of it.
    """
    for part in (config, *(value for value in vars(config).values() if isinstance(value, PretrainedConfig))):
        wanted = part._attn_implementation
        if isinstance(wanted, str) and "/" in wanted:
            raise ConfigError(
                f"the config.json of '{path}' asks for the attention kernel '{wanted}', which is code from a hub and "
                "is not run unless you ask for it. If you trust it, set override_config.attn_implementation "
                f"='{wanted}' beside model.path; else override it with sdpa or eager."
            )
