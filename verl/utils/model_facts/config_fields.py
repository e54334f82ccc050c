"""What the entries of a model's config say of it: those of config.json, or of Transformers' ``config.to_dict()``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.base.types import JsonMapping

_RANDOM = ("drop", "jitter", "noise")


def random_fields(fields: Mapping[str, object]) -> dict[str, float]:
    """Return the entries that make the forward pass random in training: dropout, jitter or noise above 0."""
    return {
        name: float(value)
        for name, value in fields.items()
        if any(word in name for word in _RANDOM) and isinstance(value, (int, float)) and value > 0
    }


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
