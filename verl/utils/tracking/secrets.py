"""Keeping secrets out of what trackers are told about a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_ALWAYS = re.compile(
    r"(^|[_.-])(secret|password|passwd|credentials?|(api|access|private|secret|auth|ssh)[_-]?key|apikey)([_.-]|$)",
    re.IGNORECASE,
)
_TEXT_ONLY = re.compile(r"(^|[_.-])(token|authorization)$", re.IGNORECASE)
_KEY = re.compile(r"(^|[_.-])key$", re.IGNORECASE)
_LOOKS_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{16,}")
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def without_secrets(settings: Any) -> Any:
    """A copy of nested settings with ``***`` in place of secrets.

    Masked are: everything under a name like ``password``, ``secret`` or ``api_key``; texts under a
    name that ends in ``token``; long random texts under a name that ends in ``key``; the login of
    a URL. So ``ppo_max_token_len_per_gpu=16384`` and ``prompt_key=prompt`` stay, and ``hf_token``
    and ``env_vars.WANDB_API_KEY`` do not.
    """
    if isinstance(settings, Mapping):
        return {key: MASK if _is_secret(str(key), value) else without_secrets(value) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [without_secrets(value) for value in settings]
    return _URL_LOGIN.sub(f"{MASK}@", settings) if isinstance(settings, str) else settings


def _is_secret(name: str, value: Any) -> bool:
    if value is None or value == "" or isinstance(value, bool):
        return False
    if _ALWAYS.search(name):
        return True
    return isinstance(value, str) and bool(
        _TEXT_ONLY.search(name) or (_KEY.search(name) and _LOOKS_RANDOM.fullmatch(value))
    )
