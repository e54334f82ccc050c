"""Interpret entries of a model's config: of config.json, or of Transformers' ``config.to_dict()``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from verl.base.types import JsonMapping

_DROPOUT = "drop"
_RANDOM = (_DROPOUT, "jitter", "noise")


def random_fields(fields: Mapping[str, object]) -> dict[str, float]:
    """Return the entries that make the forward pass random in training: dropout, jitter or noise above 0."""
    return {
        name: float(cast(float, value))
        for name, value in fields.items()
        if any(word in name for word in _RANDOM) and type(value) in (int, float) and cast(float, value) > 0
    }


def dropout_rates(fields: Mapping[str, object]) -> dict[str, float]:
    """Return the rates of dropout above 0, those of nested configs by dotted names."""
    rates = {name: rate for name, rate in random_fields(fields).items() if _DROPOUT in name}
    for name, part in fields.items():
        if name.endswith("_config") and isinstance(part, Mapping):
            rates |= {f"{name}.{inner}": rate for inner, rate in dropout_rates(part).items()}
    return rates


def with_dropout(fields: Mapping[str, object], rates: Mapping[str, float]) -> dict[str, object]:
    """Return a config's entries with ``rates`` of dropout, which have dotted names in nested configs."""
    changed = dict(fields)
    for path, rate in rates.items():
        name, _, inner = path.partition(".")
        changed[name] = with_dropout(cast("Mapping[str, object]", changed[name]), {inner: rate}) if inner else rate
    return changed


def rope_rules(fields: JsonMapping) -> list[JsonMapping]:
    """Return the rules of the rotary embeddings, of all layers or of each type of layer; older files name them else."""
    rules = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return [rules, *(rule for rule in rules.values() if isinstance(rule, Mapping))]


def rope_type(rule: JsonMapping) -> str | None:
    """Return the type of a rotary embedding, such as ``default`` or ``yarn``."""
    return rule.get("rope_type", rule.get("type"))


def layers_beyond_attention(layer_types: Iterable[str] | None) -> list[str]:
    """Return the kinds of layers, sorted, other than full attention and attention in a sliding window.

    Recurrent layers and convolutions carry a state from token to token, and sparse attention chooses among the blocks
    of a row: for them a row is one sequence, whatever a mask or positions say.

    Args:
        layer_types: the entry of a config, one kind for each layer; None: all layers are full attention.
    """
    return sorted(set(layer_types or ()) - {"full_attention", "sliding_attention"})
