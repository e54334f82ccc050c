"""Weights as they are in a model's files: engines go by the names there, and overlook or refuse others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Size, Tensor
from transformers import PreTrainedModel

from verl.utils.model import convert_weight_keys


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
        apart: dict[str, Tensor] = {}
        for name in joined:
            apart |= convert_weight_keys({name: live[name]}, model)
        made = {name: tensor for name, tensor in in_files.items() if name not in self._renamed.values()}
        self._joined = frozenset(joined if _shapes(apart) == _shapes(made) else ())

    def of(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a weight of the model as its files have it: one tensor, or several."""
        if name in self._joined:
            yield from convert_weight_keys({name: tensor}, self._model).items()
        else:
            yield self._renamed.get(name, name), tensor


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, Size]:
    return {name: tensor.shape for name, tensor in weights.items()}
