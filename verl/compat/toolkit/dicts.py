"""Small functions on dicts and on configurations."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from omegaconf import OmegaConf

from verl.protocol.columns import unite


def append_to_dict(data: dict[str, list[object]], new_data: Mapping[str, object], prefix: str = "") -> None:
    """Append each value of ``new_data`` to the list in ``data`` under ``prefix`` + its key, in place.

    >>> data = {"loss": [1]}; append_to_dict(data, {"loss": 2, "kl": 3}); data
    {'loss': [1, 2], 'kl': [3]}
    """
    for key, value in new_data.items():
        data.setdefault(f"{prefix}{key}", []).append(value)


def rename_dict(data: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return a copy whose keys begin with ``prefix``; keys that begin with it stay."""
    return {key if key.startswith(prefix) else f"{prefix}{key}": value for key, value in data.items()}


def union_two_dict(dict1: dict, dict2: Mapping) -> dict:
    """Add the entries of ``dict2`` to ``dict1`` in place and return it.

    Raises:
        SchemaError: a key is in both with different values; ``dict1`` is then unchanged.
    """
    dict1.update(unite(dict1, dict2, "entry"))
    return dict1


def convert_to_regular_types(obj: object) -> object:
    """Return a copy with OmegaConf's containers, at every level, as plain dicts and lists."""
    if OmegaConf.is_config(obj):
        return OmegaConf.to_container(obj, resolve=True)
    if isinstance(obj, Mapping):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return type(obj)(convert_to_regular_types(item) for item in obj)
    return obj


class NestedNamespace(SimpleNamespace):
    """A dict, at every level, with its keys as attributes."""

    def __init__(self, dictionary: Mapping[str, object], **kwargs: object) -> None:
        super().__init__(**kwargs)
        for key, value in dictionary.items():
            setattr(self, key, NestedNamespace(value) if isinstance(value, Mapping) else value)
