"""Keeping secrets out of whatever is shown, logged or written: configurations, trackers, errors.

A secret is found in three ways: by the name that it stands under (``api_key``, ``hf_token``, ``password``), by
how it looks (``Bearer ...``, the login of a URL, keys of well-known services), and by being the value of an
environment variable with such a name. What looks like any other text under a name like any other is not found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MASK = "***"
SHORTEST = 6
"""A shorter text is not looked for in other texts: it would be found by accident."""

# Names under which everything is a secret.
_ALWAYS = re.compile(
    r"(^|[_.-])("
    r"secrets?|password|passwd|passphrase|credentials?|cookies?"
    r"|(api|access|private|secret|auth|ssh)[_-]?keys?|apikeys?|(api|access|auth|bearer|refresh)[_-]?tokens?"
    r")([_.-]|$)",
    re.IGNORECASE,
)
# Names under which a text is a secret; a number is one of tokens, as in max_token.
_TEXT_ONLY = re.compile(r"(^|[_.-])(token|authorization)$", re.IGNORECASE)
# Names under which a text is a secret if it looks random: prompt_key is the name of a column.
_KEY = re.compile(r"(^|[_.-])key$", re.IGNORECASE)
# Names of settings that say where a secret is, such as api_key_env.
_TELLS_WHERE = re.compile(r"[_.-](env|var|path|file|name)$", re.IGNORECASE)
# Tokens of a tokenizer.
_VOCABULARY_NAME = re.compile(r"(^|[_.-])(pad|eos|bos|unk|sep|cls|mask|image|video|audio)_token$", re.IGNORECASE)
# Where a word begins in a name such as apiKey.
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_LOOKS_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])\S{16,}")
_REFERENCE = re.compile(r"\$\{(oc\.env:\w+|[\w.]+)\}")
"""References to the environment or to another key, which are filled in later and reveal nothing themselves."""

# Secrets by how they look: logins of URLs, HTTP's Authorization, secrets in queries, keys of OpenAI, Hugging Face,
# GitHub, GitLab and Slack, and of AWS.
_IN_TEXT: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=://)[^/@\s]+@"), f"{MASK}@"),
    (re.compile(r"\b(Bearer|Basic)(\s+)[\w.~+/=-]{6,}"), rf"\1\2{MASK}"),
    (re.compile(r"([?&][\w-]{0,40}(?:key|token|secret|password|signature)=)[^&\s#'\"]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"\b(?:sk|hf|gh[pousr]|github_pat|glpat|xox[abprs])[_-][A-Za-z0-9_-]{16,}"), MASK),
    (re.compile(r"\bAKIA[0-9A-Z]{16}\b"), MASK),
)


def without_secrets(settings: object) -> Any:
    """A copy of nested settings with ``***`` in place of secrets.

    Masked are: everything under a name like ``password``, ``secret`` or ``api_key``; texts under a
    name that ends in ``token``; long random texts under a name that ends in ``key``; wherever they stand,
    what :func:`redacted` masks. So ``ppo_max_token_len_per_gpu=16384``, ``prompt_key=prompt``,
    ``pad_token=<pad>`` and ``api_key_env=OPENAI_API_KEY`` stay, and ``hf_token`` and
    ``env_vars.WANDB_API_KEY`` do not.
    """
    secrets = [*_of_environment(), *secrets_in(settings)]
    return _masked(settings, secrets)


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """A text with ``***`` in place of what looks like a secret.

    That is the login of a URL and secrets in its query, what follows ``Bearer``, keys of well-known services, the
    values of environment variables with names like ``WANDB_API_KEY``, and ``secrets``.

    Args:
        text: to be shown.
        secrets: further texts to mask, as :func:`secrets_in` finds them.
    """
    return _text(text, [*_of_environment(), *secrets])


def redacted_texts(value: object, secrets: Iterable[str] = ()) -> Any:
    """Copy nested values, with :func:`redacted` applied to all texts under any name."""
    return _redacted(value, [*_of_environment(), *secrets])


def secrets_in(settings: object) -> list[str]:
    """The texts that :func:`without_secrets` masks by their names."""
    return list(dict.fromkeys(_values(settings)))


def is_secret(name: str, value: object) -> bool:
    """Return whether ``value`` is a secret, going by the name that it stands under."""
    name = _CAMEL.sub("_", name)
    if value is None or value == "" or isinstance(value, bool) or _TELLS_WHERE.search(name):
        return False
    if isinstance(value, str) and _REFERENCE.fullmatch(value):
        return False
    if _ALWAYS.search(name):
        return True
    if not isinstance(value, str) or _VOCABULARY_NAME.search(name):
        return False
    return bool(_TEXT_ONLY.search(name) or (_KEY.search(name) and _LOOKS_RANDOM.fullmatch(value)))


def _masked(settings: object, secrets: list[str]) -> object:
    if isinstance(settings, Mapping):
        return {key: MASK if is_secret(str(key), value) else _masked(value, secrets) for key, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [_masked(value, secrets) for value in settings]
    return _text(settings, secrets) if isinstance(settings, str) else settings


def _redacted(value: object, secrets: list[str]) -> object:
    if isinstance(value, Mapping):
        return {key: _redacted(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        # Token ids, of which there are many, are copied without a look at each.
        return list(value) if set(map(type, value)) <= {int, float} else [_redacted(item, secrets) for item in value]
    return _text(value, secrets) if isinstance(value, str) else value


def _text(text: str, secrets: list[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):  # one may be the beginning of another
        if len(secret) >= SHORTEST:
            text = text.replace(secret, MASK)
    for pattern, mask in _IN_TEXT:
        text = pattern.sub(mask, text)
    return text


def _values(settings: object) -> Iterator[str]:
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from _texts(value) if is_secret(str(key), value) else _values(value)
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _values(value)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def _of_environment() -> list[str]:
    return [value for name, value in os.environ.items() if is_secret(name, value)]
