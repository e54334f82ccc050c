"""Which arguments SGLang has: asked of the interpreter that will run it, before any model loads."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping

from verl.errors import ConfigError
from verl.utils.registry import suggest
from verl.workers.rollout.sglang.settings import ENGINE_SIDE

_SCRIPT = "verl_sglang_arguments.py"
_ATTEMPTS = 3


def check_names(names: Iterable[str], python: str, environment: Mapping[str, str], timeout_s: float) -> None:
    """Check names of ``engine_kwargs.sglang``; without any, nothing is asked, because importing SGLang takes seconds.

    Args:
        names: to be fields of SGLang's ``ServerArgs``.
        python: interpreter of the environment with SGLang.
        environment: variables that it needs beside those of this process.
        timeout_s: longest wait for the answer.

    Raises:
        ConfigError: there is no such field, or SGLang cannot be imported there.
    """
    names = list(names)
    if not names:
        return
    known = _known_names(python, environment, timeout_s)
    unknown = [name for name in names if name not in known]
    if unknown:
        hints = "".join(suggest(name, known) for name in unknown)
        raise ConfigError(
            f"rollout.engine_kwargs.sglang: this SGLang has no argument {', '.join(unknown)}.{hints} `{python} -m "
            "sglang.launch_server --help` lists what it has, with dashes in place of underscores."
        )


def _known_names(python: str, environment: Mapping[str, str], timeout_s: float) -> list[str]:
    command = [python, str(ENGINE_SIDE / _SCRIPT)]
    try:
        for _ in range(_ATTEMPTS):
            asked = subprocess.run(
                command, env=os.environ | environment, capture_output=True, text=True, timeout=timeout_s, check=False
            )
            if asked.returncode >= 0:  # else somebody killed it
                break
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"rollout.name=sglang: {python} did not import SGLang within {timeout_s:g} s. If its disk is only slow, "
            "raise rollout.engine_kwargs.sglang.start_timeout_s."
        ) from None
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
        raise ConfigError(
            f"rollout.name=sglang: {python} cannot import SGLang: {last}. Install it there (requirements/sglang.txt), "
            "or name the interpreter of another environment in rollout.engine_kwargs.sglang.python."
        )
    return json.loads(asked.stdout.splitlines()[-1])
