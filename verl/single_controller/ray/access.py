"""Who may talk to a Ray that is started here: who has the token. Ray's servers listen on all interfaces."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.utils.redact import is_secret

logger = logging.getLogger(__name__)

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def prepare_token() -> None:
    """Have a token for the Ray that is started next, which nobody else on the machine can read.

    A Ray of its own asks for one unless ``RAY_AUTH_MODE`` says otherwise (it reads that when it is imported). The
    token is the user's (``RAY_AUTH_TOKEN``, ``RAY_AUTH_TOKEN_PATH``) or that of ``~/.ray/auth_token``, where Ray's
    commands look for it; Ray would write that file for all to read.
    """
    if os.environ.get(MODE, "token") != "token" or os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH):
        return
    path = Path.home() / ".ray" / "auth_token"
    try:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "r+") as file:
            os.fchmod(descriptor, 0o600)
            if not file.read().strip():
                file.write(secrets.token_hex(32))
    except OSError as error:
        logger.warning("Ray's token cannot be kept in %s (%s): this run has one of its own.", path, error)
        os.environ[TOKEN] = secrets.token_hex(32)


def secrets_to_environment(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``ray.init`` without the secrets of ``runtime_env.env_vars``, which Ray would write into its logs.

    They go into this process's environment, which the processes of a Ray that is started here inherit.
    """
    runtime = arguments.get("runtime_env")
    if not isinstance(runtime, Mapping) or not isinstance(variables := runtime.get("env_vars"), Mapping):
        return dict(arguments)
    hidden = {name: str(value) for name, value in variables.items() if is_secret(name, value)}
    os.environ.update(hidden)
    shown = {name: value for name, value in variables.items() if name not in hidden}
    return {**arguments, "runtime_env": {**runtime, "env_vars": shown}}
