"""Weights as they are in a model's files: engines go by the names there, and overlook or refuse others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Size, Tensor
from transformers import PreTrainedModel

from verl.utils.model import convert_weight_keys

_PIECE_BYTES = 2**28
"""Experts are copied in pieces of about so many bytes when they are taken out of a joined weight."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class FileNames:
    """The names in files of a model's weights, of which Transformers renames some and joins others, such as experts.

    Weights come one by one, so one that Transformers makes of several in a way that cannot be undone for it alone
    keeps its name.

    Args:
        model: on any device, also ``meta``.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        live = model.state_dict()
        in_files = convert_weight_keys(dict(live), model)
        unchanged = {id(tensor): name for name, tensor in in_files.items()}
        self._renamed = {name: unchanged[id(tensor)] for name, tensor in live.items() if id(tensor) in unchanged}
        joined = live.keys() - self._renamed.keys()
        made = {name: in_files[name] for name in in_files.keys() - self._renamed.values()}
        can_part = all(live[name].dim() for name in joined)
        self._joined: frozenset[str] = frozenset()
        # Files have experts apart, or (Qwen3-VL) joined in another way.
        for self._takes_pieces in (True, False) if can_part else ():
            apart: dict[str, Tensor] = {}
            for name in joined:
                apart |= dict(self._apart(name, live[name], len(live[name]) // 2 + 1))
            if _shapes(apart) == _shapes(made):
                self._joined = frozenset(joined)
                break

    def of(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a weight of the model as its files have it: one tensor, or several."""
        if name in self._joined:
            yield from self._apart(name, tensor, max(1, _PIECE_BYTES * len(tensor) // tensor.nbytes))
        else:
            yield self._renamed.get(name, name), tensor

    def _apart(self, name: str, tensor: Tensor, experts: int) -> Iterator[tuple[str, Tensor]]:
        """Take a joined weight apart, so many experts at a time if there are some apart."""
        experts = experts if self._takes_pieces else len(tensor)
        for first in range(0, len(tensor), experts):
            piece = convert_weight_keys({name: tensor[first : first + experts]}, self._model)
            for of_piece, part in piece.items():
                yield _EXPERT.sub(lambda found, first=first: f".experts.{first + int(found[1])}.", of_piece), part


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, Size]:
    return {name: tensor.shape for name, tensor in weights.items()}
