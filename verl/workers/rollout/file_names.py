"""Weights as they are in a model's files: engines go by the names there, and overlook or refuse others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Size, Tensor
from transformers import PreTrainedModel

from verl.utils.model import convert_weight_keys
from verl.utils.model_facts.prediction_heads import FurtherLayers
from verl.utils.sharded_tensor import DividedTensor

_PIECE_BYTES = 2**28
"""Experts are copied in pieces of about so many bytes when they are taken out of a joined weight."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class FileNames:
    """The names in files of a model's weights, of which Transformers renames some and joins others, such as experts.

    Weights come one by one, so one that Transformers makes of several in a way that cannot be undone for it alone
    keeps its name.

    Args:
        model: on any device, also ``meta``.
        heads: of multi-token prediction, whose weights are named as those of the model's last layer.
    """

    def __init__(self, model: PreTrainedModel, heads: FurtherLayers | None = None) -> None:
        self._model, self._heads = model, heads
        live = model.state_dict()
        in_files = convert_weight_keys(dict(live), model)
        unchanged = {id(tensor): name for name, tensor in in_files.items()}
        self._renamed = {name: unchanged[id(tensor)] for name, tensor in live.items() if id(tensor) in unchanged}
        joined = live.keys() - self._renamed.keys()
        file_tensors = {name: in_files[name] for name in in_files.keys() - self._renamed.values()}
        can_part = all(live[name].dim() for name in joined)
        self._joined: frozenset[str] = frozenset()
        # Files have experts apart, or (Qwen3-VL) joined in another way.
        for self._takes_pieces in (True, False) if can_part else ():
            separate: dict[str, Tensor] = {}
            for name in joined:
                separate |= dict(self._apart(name, live[name], len(live[name]) // 2 + 1))
            if _shapes(separate) == _shapes(file_tensors):
                self._joined = frozenset(joined)
                break
        self._stacked = frozenset(
            name for name in self._joined if not self._takes_pieces and self._keeps_rows(name, live[name])
        )
        """Joined weights of which files have all experts in one tensor too."""

    def convert(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a weight of the model as its files have it: one tensor, or several."""
        if self._is_joined(name):
            yield from self._apart(name, tensor, self._at_once(tensor))
        else:
            yield self._renamed.get(name, name), tensor

    def can_divide(self, name: str) -> bool:
        """Return whether :meth:`convert_divided` takes a weight; parts of joined convolutions, say, are not enough."""
        name = self._in_last_layer(name)
        return name not in self._joined or self._takes_pieces or name in self._stacked

    def convert_divided(self, name: str, tensor: DividedTensor) -> Iterator[tuple[str, DividedTensor]]:
        """Convert a weight that ranks divide, a joined one only by experts; see :meth:`convert`, :meth:`can_divide`."""
        if not self._is_joined(name):
            yield self._renamed.get(name, name), tensor
            return
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        start, held = tensor.start[0], len(tensor.box)
        count = self._at_once(full) if self._takes_pieces else len(full)
        first_of_box = 0 if self._takes_pieces else start  # a tensor for each expert, or one of all
        for first in range(0, len(full), count):
            low, high = (min(max(bound - start, 0), held) for bound in (first, first + count))
            own_parts = dict(self._piece(name, tensor.box[low:high], start + low)) if high > low else {}
            for in_file, part in self._piece(name, full[first : first + count], first):
                box = own_parts.get(in_file, tensor.box[:0])
                yield in_file, DividedTensor(part.shape, box, (first_of_box,) + (0,) * (part.dim() - 1))

    def _is_joined(self, name: str) -> bool:
        return self._in_last_layer(name) in self._joined

    def _in_last_layer(self, name: str) -> str:
        return name if self._heads is None else self._heads.in_last_layer(name)

    def _keeps_rows(self, name: str, tensor: Tensor) -> bool:
        """Return whether each row of a weight of the model is the row with the same index of a tensor in its files."""
        shapes, rows = _shapes(dict(self._piece(name, tensor, 0))), len(tensor) // 2 + 1
        if any(shape[:1] != (len(tensor),) for shape in shapes.values()):
            return False
        return _shapes(dict(self._piece(name, tensor[:rows], 0))) == {n: (rows, *s[1:]) for n, s in shapes.items()}

    def _apart(self, name: str, tensor: Tensor, experts: int) -> Iterator[tuple[str, Tensor]]:
        """Split a joined weight, ``experts`` experts at a time if the files have experts separately."""
        experts = experts if self._takes_pieces else len(tensor)
        for first in range(0, len(tensor), experts):
            yield from self._piece(name, tensor[first : first + experts], first)

    def _piece(self, name: str, experts: Tensor, first: int) -> Iterator[tuple[str, Tensor]]:
        """Split some experts of a joined weight; ``first`` is the index of their first one."""
        for piece_name, part in convert_weight_keys({name: experts}, self._model).items():
            yield _EXPERT.sub(lambda match: f".experts.{first + int(match[1])}.", piece_name), part

    @staticmethod
    def _at_once(tensor: Tensor) -> int:
        return max(1, _PIECE_BYTES * len(tensor) // tensor.nbytes)


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, Size]:
    return {name: tensor.shape for name, tensor in weights.items()}
