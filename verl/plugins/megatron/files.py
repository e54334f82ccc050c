"""Boxes of weights from the safetensors files of a model folder, without reading the rest of a weight."""

from __future__ import annotations

import re
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl.errors import ConfigError
from verl.plugins.megatron.weights import Box
from verl.utils.folder_weights import SINGLE, files_of_weights
from verl.utils.model import weights_folder
from verl.utils.torch_functional import all_finite

# Transformers' names of the joined weights of a layer's experts, which files may have separately for each expert.
_EXPERTS = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")
_OLDER = {"model.language_model.": "model.", "model.visual.": "visual."}
"""Beginnings of names in models with images, and what the files of Qwen2-VL and Qwen2.5-VL have in their place."""
_IN_FILES = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
"""Names of each matrix of an expert in the files of Qwen3-MoE and of Mixtral."""


class ModelFiles:
    """The weights of a model folder, or of a model on the Hugging Face hub.

    Raises:
        ConfigError: the folder has no safetensors.
    """

    def __init__(self, path: str) -> None:
        self.folder = weights_folder(path)
        self._file_of = files_of_weights(self.folder)
        self._open: dict[str, object] = {}
        if not self._file_of:
            raise ConfigError(
                f"'{path}' has no {SINGLE}, which strategy=megatron reads. Save the model with safetensors "
                "(save_pretrained of Transformers does so)."
            )

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{self.folder / name} cannot be read: {error}. Copy the model again.") from error
        return self._open[name]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """Read one box of the weight ``name``, which must have ``shape``.

        Raises:
            ConfigError: the weight is missing, has another shape, or is not finite.
        """
        if name not in self._file_of:
            return self._read_under_other_name(name, shape, box)
        try:
            weight = self._file(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise ConfigError(f"{self.folder / self._file_of[name]} lacks the weight {name}: {error}.") from error
        stored = tuple(weight.get_shape())
        if stored != shape and _EXPERTS.fullmatch(name) and stored == (shape[0], *shape[:0:-1]):
            # Qwen3-VL's files have the matrices of all experts transposed.
            (expert, *start), (count, *size) = box
            transposed = (expert, *start[::-1]), (count, *size[::-1])
            return self.read(name, stored, transposed).transpose(1, 2)
        if stored != shape:
            raise ConfigError(
                f"the weight {name} in '{self.folder}' has the shape {weight.get_shape()}, and {list(shape)} is "
                "needed. Take config.json and weights of the same model."
            )
        start, size = box
        tensors: Tensor = weight[tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))]
        if not all_finite(tensors):
            raise ConfigError(
                f"the weight {name} in '{self.folder}' is not finite (nan or infinite): the training that wrote it "
                "diverged, or a conversion overflowed. Take an earlier checkpoint, or copy the model again."
            )
        return tensors

    def _read_under_other_name(self, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        """Read a box of a weight that the files have under another name, or apart for each expert."""
        start, size = box
        if match := _EXPERTS.fullmatch(name):
            stem, kind = match.groups()
            half, (expert, *first) = 0, start  # the box belongs to one expert
            rows, columns = shape[1:]
            if kind == "gate_up_proj":
                rows //= 2
                half, first[0] = divmod(first[0], rows)
            qwen, mixtral = _IN_FILES[("gate", "up")[half] if kind == "gate_up_proj" else "down"]
            names = (
                f"{stem}mlp.experts.{expert}.{qwen}.weight",
                f"{stem}block_sparse_moe.experts.{expert}.{mixtral}.weight",
            )
            shape, box = (rows, columns), (tuple(first), size[1:])
        else:
            older = (old + name.removeprefix(new) for new, old in _OLDER.items() if name.startswith(new))
            names = (name.replace(".mlp.gate.", ".block_sparse_moe.gate."), *older)
        other_name = next((other for other in names if other in self._file_of), None)
        if other_name is None:
            raise ConfigError(
                f"the files of '{self.folder}' do not contain the weight {name}. Name the folder of a complete model."
            )
        return self.read(other_name, shape, box).reshape(size)
