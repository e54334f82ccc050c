"""Heads of multi-token prediction in the files of a model: their names and their number.

Transformers drops these weights when it reads a model. DeepSeek-V3 and GLM-4.5 store head k as one more layer,
``model.layers.{layers + k}.``, with ``enorm``, ``hnorm``, ``eh_proj`` and ``shared_head`` beside the parts of a layer;
MiMo as ``model.mtp_layers.{k}.``; Qwen3-Next and Qwen3.5 as ``mtp.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MODULE = re.compile(r"(?:mtp|model\.mtp|model\.mtp_layers)\..+")
SHARED_WITH_HEADS = {
    "model.embed_tokens.weight": "embed_tokens.weight",
    "lm_head.weight": "shared_head.head.weight",
}
"""Weights of a model that heads use, and under which names DeepSeek's files have them for a head again."""
_AS_LAYER = re.compile(r"((?:.+\.)?layers\.\d+)\.eh_proj\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def head_weights(names: Iterable[str]) -> list[str]:
    """Return those of the ``names`` in a model's files that belong to heads."""
    names = list(names)
    layers = tuple(f"{match[1]}." for name in names if (match := _AS_LAYER.fullmatch(name)))
    return [name for name in names if _MODULE.fullmatch(name) or (layers and name.startswith(layers))]


def head_count(fields: Mapping[str, object]) -> int:
    """Return the number of heads that a config (entries of config.json) states; 0 if none."""
    text = fields.get("text_config")
    entries = {**fields, **(text if isinstance(text, Mapping) else {})}
    counts = (entries.get(name) for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    return next((count for count in counts if isinstance(count, int)), 0)


@dataclass(frozen=True)
class FurtherLayers:
    """Weights of heads that are stored as further layers of a model, without copies of the model's own."""

    layers: int
    """Layers of the model, without its heads."""
    shapes: Mapping[str, tuple[int, ...]]
    """By name."""

    @classmethod
    def from_last_layer(
        cls, layers: int, count: int, hidden: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> FurtherLayers:
        """Derive them from the last layer of a model.

        Args:
            layers: of the model without heads.
            count: number of heads.
            hidden: width of the model.
            shapes: of the weights of the model without heads, by name.
        """
        last = f"model.layers.{layers - 1}."
        head_shapes = {"enorm.weight": (hidden,), "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden)}
        head_shapes |= {"shared_head.norm.weight": (hidden,)}
        head_shapes |= {
            name.removeprefix(last): tuple(shape) for name, shape in shapes.items() if name.startswith(last)
        }
        prefixes = [f"model.layers.{layers + head}." for head in range(count)]
        return cls(layers, {f"{prefix}{name}": shape for prefix in prefixes for name, shape in head_shapes.items()})

    def in_last_layer(self, name: str) -> str:
        """Return the name that a weight of a head has in the model's last layer; others keep their name."""
        match = _LAYER.match(name)
        if match is None or int(match[1]) < self.layers:
            return name
        return f"model.layers.{self.layers - 1}.{name[match.end() :]}"
