"""Adapters of clients as files, in the format of peft, with the optimizer's state beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from verl.base.types import JsonMapping, JsonObject
from verl.checkpoint.files import NewFolder, sync_tree
from verl.errors import CheckpointError
from verl.workers.engine.model.adapters import WEIGHTS_FILE, peft

ALPHA = 32
"""Adapters are scaled by this over their rank."""
SPEC_FILE, OPTIMIZER_FILE, GRADIENTS_FILE = "verl_adapter.json", "optimizer.safetensors", "gradients.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")
_PREFIX = "base_model.model."  # before each name in a file of peft


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Specification of a client's adapter."""

    base_model: str
    rank: int
    seed: int
    train_attn: bool = True
    """True if layers of attention have adapters that are trained."""
    train_mlp: bool = True
    """True if all other layers below the head have adapters that are trained."""

    @property
    def scale(self) -> float:
        """The scale s of ``x Wᵀ + s (x Aᵀ) Bᵀ``."""
        return ALPHA / self.rank

    def trains(self, layer: str) -> bool:
        """Return whether the layer of this name is trained."""
        return self.train_attn if "attn" in layer or "attention" in layer else self.train_mlp


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter in memory, by ``LAYER.lora_A.weight`` and ``LAYER.lora_B.weight``."""

    spec: AdapterSpec
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]] | None = None
    """``exp_avg`` and ``exp_avg_sq`` of each weight; None without an optimizer."""
    steps: int = 0
    """Optimizer steps made."""
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    """Gradients since the last step; empty in what clients save."""


def write_adapter(adapter: StoredAdapter, folder: Path, notes: JsonMapping) -> None:
    """Write an adapter durably, with notes about it: the folder appears complete or not at all, in place of another."""
    new = NewFolder(folder)
    part = new.begin()
    endings = sorted({name.rpartition(".lora_")[0].rsplit(".", 1)[-1] for name in adapter.weights})
    config = peft().LoraConfig(
        r=adapter.spec.rank,
        lora_alpha=ALPHA,
        target_modules=endings,
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=adapter.spec.base_model,
    )
    config.save_pretrained(str(part))
    tensors = {f"{_PREFIX}{name}": tensor.contiguous() for name, tensor in adapter.weights.items()}
    save_file(tensors, part / WEIGHTS_FILE, metadata={"format": "pt"})
    described = {"spec": asdict(adapter.spec), "steps": adapter.steps, "notes": notes}
    if adapter.moments is not None:
        flat = {f"{name}.{m}": of[m].contiguous() for name, of in adapter.moments.items() for m in MOMENTS}
        save_file(flat, part / OPTIMIZER_FILE, metadata={"format": "pt"})
    if adapter.gradients:
        save_file(dict(adapter.gradients), part / GRADIENTS_FILE, metadata={"format": "pt"})
    (part / SPEC_FILE).write_text(json.dumps(described, indent=2) + "\n")
    sync_tree(part)
    new.commit()


def read_spec(folder: Path) -> tuple[AdapterSpec, JsonObject]:
    """Read what the adapter in a folder is, and the notes about it.

    Raises:
        CheckpointError: there is none, or the file is damaged.
    """
    spec, _, notes = _read(folder)
    return spec, notes


def read_adapter(folder: Path, with_optimizer: bool = False) -> StoredAdapter:
    """Read an adapter that :func:`write_adapter` wrote.

    Raises:
        CheckpointError: there is none, a file is damaged, or it has no state of an optimizer.
    """
    spec, steps, _ = _read(folder)
    if with_optimizer and not (folder / OPTIMIZER_FILE).exists():
        raise CheckpointError(
            f"{folder} has weights without a state of the optimizer. Load the weights alone, or a state that "
            "save_state wrote."
        )
    try:
        saved = load_file(folder / WEIGHTS_FILE)
        flat = load_file(folder / OPTIMIZER_FILE) if with_optimizer else {}
        gradients = load_file(folder / GRADIENTS_FILE) if (folder / GRADIENTS_FILE).exists() else {}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"the adapter in {folder} cannot be read: {error}.") from error
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in saved.items()}
    if not with_optimizer:
        return StoredAdapter(spec, weights)
    moments = {name: {m: flat[f"{name}.{m}"] for m in MOMENTS} for name in weights}
    return StoredAdapter(spec, weights, moments, steps, gradients)


def _read(folder: Path) -> tuple[AdapterSpec, int, JsonObject]:
    try:
        described = json.loads((folder / SPEC_FILE).read_text())
        return AdapterSpec(**described["spec"]), int(described["steps"]), dict(described["notes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"there is no adapter in {folder} that can be read: {error}.") from error


def new_weights(shapes: Mapping[str, torch.Size], spec: AdapterSpec) -> dict[str, Tensor]:
    """Draw the weights of a new adapter: A uniform in ±1/√in as a linear layer's, B 0, so that it changes nothing.

    Args:
        shapes: of the whole matrices: A (r, in), B (out, r).
        spec: its seed decides the numbers, whatever slot or number of ranks the adapter gets.
    """
    generator = torch.Generator().manual_seed(spec.seed)
    weights = {}
    for name in sorted(shapes):
        shape = shapes[name]
        weights[name] = torch.zeros(shape)
        if ".lora_A." in name:
            weights[name].uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
    return weights
