"""Merge the adapters of a checkpoint into the model that they were trained on.

A checkpoint of LoRA has the adapters alone in its shards, and in ``lora_adapter/adapter_config.json`` how they are
scaled and which model they belong to. Shards that verl 0.8 saved have that model too, under peft's names, and the scale
in ``lora_train_meta.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.base.fs import copy_to_local
from verl.config import HFModelConfig
from verl.errors import CheckpointError, ConfigError, DataError
from verl.model_merger.lazy_weights import LazyWeights
from verl.model_merger.probes import probes
from verl.utils.model import load_hf_config, torch_dtype
from verl.workers.engine.model.adapters import (
    ADAPTER_FOLDER,
    BASE,
    CONFIG_FILE,
    LORA_A,
    LORA_B,
    AdapterTarget,
    adapter_layers,
    is_adapter,
    merged,
    own_name,
    targets_of,
    with_adapters,
)
from verl.workers.engine.model.headed import (
    HeadedModel,
    ModelType,
    build_model,
    folder_weights,
    own_state,
    trained_parameters,
)
from verl.workers.forward_check import is_rounding, largest_difference

if TYPE_CHECKING:
    from verl.base.types import JsonObject

# Of verl 0.8: what stands before the names in its shards, and the file with the scale of the adapters.
PUBLIC_PREFIX, PUBLIC_SCALE = "base_model.model.", "lora_train_meta.json"
_TYPES: dict[str, ModelType] = {
    "ForTokenClassification": "value_model",
    "ForSequenceClassification": "reward_model",
}


def has_adapters(weights: Mapping[str, Tensor]) -> bool:
    """Return whether these weights of shards are adapters, or have some among them."""
    return any(".lora_A." in name for name in weights)


class Adapted:
    """The model of a checkpoint whose shards hold adapters, with the adapters applied.

    Args:
        weights: the trained weights in its shards.
        folder: the checkpoint's ``actor`` or ``critic``.
        architecture: of the model, as its config names it.
        base_model: folder, name or URL of the model that the adapters were trained on; None is the one in their config.
        trust_remote_code: run Python code that comes with that model.

    Raises:
        CheckpointError: the config or the model is missing, or the adapters do not fit it.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        folder: Path,
        architecture: str,
        base_model: str | None,
        trust_remote_code: bool,
    ) -> None:
        named = base_model or base_named_in(folder)
        kind: ModelType = "language_model"
        for ending, ending_type in _TYPES.items():
            kind = ending_type if architecture.endswith(ending) else kind
        try:
            path = copy_to_local(named)
            config = HFModelConfig(
                path=path,
                hf_config_path=str(folder / "huggingface") if kind == "language_model" else None,
                trust_remote_code=trust_remote_code,
                lora_adapter_path=str(folder / ADAPTER_FOLDER),
            )
            base = load_hf_config(path, trust_remote_code=trust_remote_code)
            self.dtype = torch_dtype(base.dtype or torch.float32)
            # Its base weights stay unset, so that they take no memory, until the logits need them.
            model = build_model(kind, config, self.dtype, with_weights=False, with_adapters=True)
            self._base = folder_weights(kind, config, model.hf.config)
        except (ConfigError, DataError) as error:
            raise CheckpointError(
                f"{folder} has adapters of the model {named}, which cannot be read: {error} If the model has moved, "
                "name its folder with --base_model."
            ) from error
        trained = trained_parameters(model)
        if missing := sorted(trained.keys() ^ weights.keys()):
            raise CheckpointError(f"{folder}: shards and {ADAPTER_FOLDER} are of different adapters: {missing[:3]}.")
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(weights[name].view(parameter.shape))  # of experts, Megatron has three dimensions
        self._model = model

    def merged_weights(self) -> LazyWeights:
        """Merge in fp32 and round to the model's own format, one layer at a time; tied weights come once.

        Buffers, such as biases of routers, stay in the format of the files.
        """
        state, targets = own_state(self._model), targets_of(adapter_layers(self._model))
        buffers = {own_name(name) for name, _ in self._model.named_buffers()}
        names = {own_name(name): tuple(tensor.shape) for name, tensor in state.items() if not is_adapter(name)}
        adapters = {name: tensor.detach() for name, tensor in state.items() if is_adapter(name)}

        def read(name: str) -> Tensor:
            if name.startswith("score."):  # it was saved with the adapters
                return state[name].detach().to(self.dtype)
            if name in buffers:
                return self._base.weight(name)
            weight = self._base.weight(name).to(self.dtype)
            (tensor,) = (weight for _, weight in merged(with_adapters([(name, weight)], adapters, targets), targets))
            return tensor.to(self.dtype)

        return LazyWeights(read, names)

    @torch.no_grad()
    def check_logits(self, model: PreTrainedModel, folder: Path) -> None:
        """Compare logits with those of the merged ``model``; both models are converted to fp32.

        Raises:
            CheckpointError: they differ by more than rounding of the weights explains.
        """
        state = own_state(self._model)
        names = {own_name(name): name for name in state if not is_adapter(name)}
        for name, tensor in self._base:
            if name in names and not name.startswith("score."):
                state[names[name]].copy_(tensor)
        both = self._model, HeadedModel(model, self._model.head_name)
        for probe in probes(model.config):
            expected, actual = (_outputs(part.float().eval(), probe) for part in both)
            if not is_rounding(actual, expected, self.dtype):
                raise CheckpointError(
                    f"{folder} gives logits that differ by {largest_difference(actual, expected):.3g} from those of "
                    "the model with its adapters."
                )


def _outputs(model: HeadedModel, probe: Mapping[str, Tensor]) -> Tensor:
    """Compute what the head gives at each token, (tokens, outputs)."""
    backbone = model.get_submodule(model.backbone_name)
    return model.head(backbone(**probe).last_hidden_state[0])


def base_named_in(folder: Path) -> str:
    """Return the path or name of the model that the adapters of a checkpoint's ``actor`` folder were trained on."""
    config = folder / ADAPTER_FOLDER / CONFIG_FILE
    try:
        path = json.loads(config.read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the shards hold LoRA adapters, and {config} does not say of which model ({error}). Name its folder with "
            "--base_model."
        ) from error
    return str(path)


class PublicAdapted:
    """The weights of shards that verl 0.8 saved, which hold the model and its adapters.

    Args:
        weights: by their names in the shards.
        folder: the checkpoint's ``actor`` or ``critic``.

    Raises:
        CheckpointError: the file with the scale is missing or damaged.
    """

    def __init__(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        path = folder / PUBLIC_SCALE
        try:
            about: JsonObject = json.loads(path.read_text())
            self._scale = float(about["lora_alpha"]) / int(about["r"])
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"{folder} holds a model with adapters, and {path.name}, which verl 0.8 writes with r and lora_alpha, "
                f"cannot be read: {error}."
            ) from error
        self._weights = {name.removeprefix(PUBLIC_PREFIX): tensor for name, tensor in weights.items()}
        self._layers = {name.rsplit(".lora_A.", 1)[0] for name in self._weights if ".lora_A." in name}

    def merged_weights(self) -> dict[str, Tensor]:
        """Merge in the wider of the formats of model and adapters and round to the model's own."""
        formats = {name.replace(".base_layer.", "."): tensor.dtype for name, tensor in self._weights.items()}
        targets = {name: AdapterTarget(f"{name}.weight", self._scale) for name in self._layers}
        stream = merged(sorted(self._weights.items()), targets)
        return {name: tensor.to(formats[name]) for name, tensor in stream}

    def take_apart(self, model: PreTrainedModel) -> None:
        """Give the layers of a model with merged weights their own weights back, and add the adapters to their results.

        Adapters of single experts stay merged, as a model of Transformers 5 holds the weights of all experts in one.
        """
        modules = dict(model.named_modules())
        for name in self._layers & modules.keys():
            base, down, up = (self._weights[f"{name}{part}"] for part in (BASE, LORA_A, LORA_B))
            _add_adapter(modules[name], base, down.float(), self._scale * up.float())


def _add_adapter(layer: nn.Module, base: Tensor, down: Tensor, up: Tensor) -> None:
    # A function of its own, because the hook of each layer needs its own matrices.
    layer.weight = nn.Parameter(base.float())
    layer.register_forward_hook(lambda _, inputs, output: output + inputs[0] @ down.T @ up.T)
