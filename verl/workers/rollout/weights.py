"""Weights on their way from the trainer to an engine that keeps a copy: which are expected, and in which files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from verl.errors import RolloutError
from verl.utils.model import empty_causal_lm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SHOWN_PROBLEMS = 8
_SPARE_BYTES = 2**20


class ExpectedWeights:
    """The weights of a model, by name and shape; known from its config alone.

    Args:
        hf_config: of the model.
        dtype: that the engine computes in; weights are converted to it.
        trust_remote_code: as for loading the model.
    """

    def __init__(self, hf_config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False) -> None:
        module = empty_causal_lm(hf_config, dtype, torch.device("meta"), trust_remote_code)
        names = {parameter: name for name, parameter in module.named_parameters()}
        self.model_name = type(module).__name__
        self._dtype = dtype
        self._buffers = {name for name, _ in module.named_buffers()}
        self._shapes = {name: parameter.shape for parameter, name in names.items()}
        # Tied weights have several names; they travel under the first.
        self._first_names = {name: names[p] for name, p in module.named_parameters(remove_duplicate=False)}

    def checked(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        """Each expected weight once, converted; iterates to the end, whatever is wrong, and then says what was.

        Raises:
            RolloutError: after the last weight, if some were unknown, missing or of another shape.
        """
        problems, seen = [], set()
        for given, tensor in weights:
            name = self._first_names.get(given)
            if name is None:
                if given not in self._buffers:
                    problems.append(f"{given} is unknown")
            elif tensor.shape != self._shapes[name]:
                problems.append(f"{given} has shape {list(tensor.shape)} where {list(self._shapes[name])} is needed")
                seen.add(name)
            elif name not in seen:
                seen.add(name)
                yield name, tensor.detach().to(self._dtype)
        problems += [f"{name} is missing" for name in self._shapes if name not in seen]
        if problems:
            shown = "; ".join(problems[:_SHOWN_PROBLEMS])
            more = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
            raise RolloutError(
                f"weights of version {version} do not fit {self.model_name}: {shown}{more}. Trainer and rollout must "
                "be built from the same model.path and override_config."
            )


def write_weight_files(
    weights: Iterable[tuple[str, Tensor]], folders: Iterable[Path], name: str, file_bytes: int
) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    """Safetensors files of about ``file_bytes`` each, and what is in them; the file is complete when it is yielded.

    Args:
        weights: held in memory until their file is written.
        folders: a file goes to the first that has room for it.
        name: of the files, without their number.
        file_bytes: size of a file; a larger tensor has a file of its own.

    Raises:
        RolloutError: none of the folders has room.
    """
    folders = list(folders)
    for number, part in enumerate(_parts(weights, file_bytes)):
        path = _with_room(folders, sum(tensor.nbytes for tensor in part.values())) / f"{name}-{number}.safetensors"
        save_file(part, path)
        yield path, part


def _parts(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    held = 0
    for name, tensor in weights:
        if part and held + tensor.nbytes > size:
            yield part
            part, held = {}, 0
        part[name] = tensor.cpu().contiguous()
        held += tensor.nbytes
    if part:
        yield part


def _with_room(folders: list[Path], size: int) -> Path:
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    for folder, room in free.items():
        if room > size + _SPARE_BYTES:
            return folder
    found = ", ".join(f"{folder} ({room / 2**20:.0f} MiB free)" for folder, room in free.items())
    raise RolloutError(
        f"{size / 2**20:.0f} MiB of new weights fit into none of {found}. Make room, or point TMPDIR at a folder that "
        "has it."
    )
