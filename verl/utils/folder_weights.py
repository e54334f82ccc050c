"""The weights of a model folder under the names of its model, read one layer after the other.

Transformers builds a whole model of the files. What is in the files as the model has it stays mapped; what it converts
is a copy: another number format, or experts that the files have one by one. Here Transformers makes the same
conversions for one layer at a time, so that a process holds no more than that.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from verl.errors import ConfigError
from verl.utils.model import check_finite, check_loaded, load_pretrained, torch_dtype, weights_folder
from verl.utils.model_code import LOADING_ERRORS, warn_if_code_runs, why_unreadable
from verl.utils.model_facts.prediction_heads import head_weights
from verl.utils.transformers_private import (
    converted,
    joins_weights,
    no_init_weights,
    without_load_report,
    without_progress_bars,
)

_STORED = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Number formats by their name in safetensors; whole numbers are of buffers, such as masks."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def files_of_weights(folder: Path) -> dict[str, str]:
    """Return the safetensors file of each weight in a model folder, empty without such files.

    As in Transformers, an index beside ``model.safetensors`` is not read.

    Raises:
        ConfigError: a file cannot be read.
    """
    if (folder / SINGLE).is_file():
        with opened(folder / SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        file_of = json.loads(path.read_text())["weight_map"]
        if not all(isinstance(name, str) for name in file_of.values()):
            raise TypeError("not every weight has the name of a file")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path} does not say which file has which weight ({error}). Copy the model again."
        ) from error
    return file_of


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file, which is mapped into memory until the context and all of its tensors end.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Copy the model again.") from error


def stored_heads(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Iterate over heads of multi-token prediction in a folder's safetensors, by name and as they are stored.

    Raises:
        ConfigError: a file cannot be read.
    """
    file_of = files_of_weights(folder)
    by_file: dict[str, list[str]] = {}
    for name in head_weights(file_of):
        by_file.setdefault(file_of[name], []).append(name)
    for file_name, names in by_file.items():
        with opened(folder / file_name) as file:
            yield from ((name, file.get_tensor(name)) for name in names)


class FolderWeights:
    """Weights and persistent buffers of a model folder or hub name, in the shapes and under the names of the model.

    They are in the number format of the files, in the widest one where these have several, and mapped into memory
    where Transformers converts nothing. Tied weights come once, or as often as the files have them. Iterating reads
    every file once.

    Args:
        auto: the ``Auto...`` class of Transformers that makes the model.
        name_or_path: folder or hub name.
        hf_config: of the model.
        trust_remote_code: run Python code that comes with the model.
        new: names of weights that the files may lack; they are left out.

    Raises:
        ConfigError: the files cannot be read, or do not have the weights of the model.
    """

    def __init__(
        self,
        auto: Any,
        name_or_path: str,
        hf_config: PretrainedConfig,
        trust_remote_code: bool = False,
        new: Set[str] = frozenset(),
    ) -> None:
        self.folder = weights_folder(name_or_path)
        self._file_of = files_of_weights(self.folder)
        self._unit_of: dict[str, str] = {}
        self._listed: set[str] = set()
        """Units of which all names are in it."""
        self._last: tuple[str, Mapping[str, Tensor]] = ("", {})
        self.model: PreTrainedModel
        """The model, without its weights."""
        self.units: dict[str, list[str]] = {}
        """Names in the files by the layer that they belong to; what is outside of layers is a unit of its own."""
        if not self._file_of:  # a pickle, which PyTorch maps into memory
            stored = torch_dtype(hf_config.dtype or torch.float32)
            self.model = load_pretrained(auto, name_or_path, hf_config, stored, trust_remote_code, new)
            self._last = "", self.model.state_dict()
            self._unit_of = dict.fromkeys(self._last[1], "")
            return
        without_data = self._without_data()
        self.dtype = functools.reduce(torch.promote_types, {tensor.dtype for tensor in without_data.values()})
        try:
            with no_init_weights(), torch.device("meta"):
                empty: Any = auto.from_config(hf_config, dtype=self.dtype, trust_remote_code=trust_remote_code)
            with without_load_report(), without_progress_bars():
                self.model, info = type(empty).from_pretrained(
                    None,
                    config=hf_config,
                    state_dict=without_data,
                    device_map="meta",
                    dtype=self.dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, with their names
                )
        except LOADING_ERRORS as error:
            path = str(self.folder)
            raise ConfigError(f"model weights of '{path}' cannot be read: {why_unreadable(error, path)}") from error
        warn_if_code_runs(self.model, str(self.folder))
        check_loaded(self.model, info, str(self.folder), new)
        joins_outside = joins_weights(self.model)  # then weights outside of layers are one unit
        for name in self._file_of:
            layer = _layer_of(name)
            self.units.setdefault("" if joins_outside and layer == name else layer, []).append(name)

    def _without_data(self) -> dict[str, Tensor]:
        """Shapes and formats of all weights in the files, on the meta device."""
        tensors: dict[str, Tensor] = {}
        for name in sorted(set(self._file_of.values())):
            with opened(self.folder / name) as file:
                for key in file.keys():
                    part = file.get_slice(key)
                    if (dtype := _STORED.get(part.get_dtype())) is None:
                        raise ConfigError(
                            f"the weight {key} in '{self.folder}' is stored as {part.get_dtype()}, which is no format "
                            "to train or compute log-probs in. Convert the model to BF16, F16 or F32."
                        )
                    tensors[key] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
        self._file_of = {key: self._file_of[key] for key in tensors if key in self._file_of}
        return tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over names and tensors on the CPU.

        Raises:
            ConfigError: a file cannot be read, or a weight is not finite.
        """
        for part in self.parts():
            yield from part.items()

    def parts(self) -> Iterator[Mapping[str, Tensor]]:
        """Iterate likewise over whole units."""
        if not self._file_of:
            yield self.model.state_dict()
        yield from map(self.read, self.units)

    def weight(self, name: str) -> Tensor:
        """Return one weight by its name in the model; those of a layer that are asked for in turn are read once."""
        if name not in self._unit_of:  # which names a unit has shows when it is read; mostly the layer's are its own
            layer = _layer_of(name)
            for unit in sorted(self.units.keys() - self._listed, key=lambda unit: (unit != layer, unit)):
                self._last = unit, self.read(unit)
                self._listed.add(unit)
                self._unit_of |= dict.fromkeys(self._last[1], unit)
                if name in self._unit_of:
                    break
        if self._last[0] != self._unit_of[name]:
            self._last = self._unit_of[name], self.read(self._unit_of[name])
        return self._last[1][name]

    def read(self, unit: str) -> Mapping[str, Tensor]:
        """Read the weights of one of the :attr:`units`; those in the format of the files are mapped, not copied.

        Raises:
            ConfigError: a file cannot be read, or a weight is not finite.
        """
        with contextlib.ExitStack() as files:
            open_files = {name: files.enter_context(opened(self.folder / name)) for name in self._files_of(unit)}
            slices = {key: open_files[self._file_of[key]].get_slice(key) for key in self.units[unit]}
            weights = converted(self.model, slices, self.dtype)
        check_finite(weights.items(), str(self.folder))
        return weights

    def _files_of(self, unit: str) -> list[str]:
        return sorted({self._file_of[key] for key in self.units[unit]})


def _layer_of(name: str) -> str:
    """The layer of a weight, such as model.layers.3; outside of layers the weight itself."""
    layer = re.match(r"(.*?\.\d+)\.", name)
    return layer[1] if layer else name
