"""Weights that are read when they are used, so that a merge holds one after the other and never the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor


class LazyWeights(Mapping[str, Tensor]):
    """Tensors by name, each read again whenever it is looked up.

    Args:
        read: returns the tensor of a name.
        shapes: of all tensors, by name.
    """

    def __init__(self, read: Callable[[str], Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._read, self.shapes = read, dict(shapes)

    @classmethod
    def from_tensors(cls, weights: Mapping[str, Tensor]) -> LazyWeights:
        """Make it of tensors that are in memory."""
        return cls(weights.__getitem__, {name: tuple(tensor.shape) for name, tensor in weights.items()})

    def without(self, names: Collection[str]) -> LazyWeights:
        """Return the other weights."""
        return LazyWeights(self._read, {name: shape for name, shape in self.shapes.items() if name not in names})

    def converted(self, convert: Callable[[str, Tensor], Tensor]) -> LazyWeights:
        """Return the weights as ``convert`` makes them of a name and a weight."""
        return LazyWeights(lambda name: convert(name, self._read(name)), self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
