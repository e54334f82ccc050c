"""LoRA adapters (arXiv:2106.09685) by ``peft``: add them to a model, merge them into its weights, switch them off.

A layer with weight W (out, in) computes ``x Wᵀ + s (x Aᵀ) Bᵀ`` with trained A (r, in) and B (out, r) and the scale
s = α / r. ``peft`` names the parts of layer ``q`` ``q.base_layer.weight``, ``q.lora_A.default.weight`` and
``q.lora_B.default.weight``; merged weights have the model's own names again.

A weight of several experts, (experts, out, in), has for each of them an A and a B of rank r. All of them are in two
matrices: A (experts · r, in), one expert after the other, and B (out, r · experts), the first columns of all experts,
then the second ones, and so on. ``peft`` wraps the module of the experts once for each of its weights, as in
``experts.base_layer.base_layer.down_proj``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.base.fs import source_of
from verl.config import HFModelConfig
from verl.config.model import ALL_LINEAR
from verl.errors import CheckpointError, ConfigError
from verl.vision.families import TOWER

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

logger = logging.getLogger(__name__)

ADAPTER_FOLDER = "lora_adapter"
"""Folder of a checkpoint with the adapters as files of peft."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # as peft names them

_ADAPTER = "default"  # peft's name of a model's only adapter
_PREFIX = "base_model.model."  # before each name in a file of peft
BASE, LORA_A, LORA_B = ".base_layer.weight", f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"
"""Endings of the names of a layer's weight, and of its adapter's two."""
_MAGNITUDE = f".lora_magnitude_vector.{_ADAPTER}.weight"  # m of DoRA (arXiv:2402.09353), one number for each row of W
_TASKS = {"lm_head": "CAUSAL_LM", "score": "TOKEN_CLS"}  # head: peft's name of the task
_HEADS_OF_PEFT = {"classifier", "score"}  # heads that peft saves with a classifier, whether it has both or one
# In a model that stores its experts joined, peft takes any layer with one of these names for an expert.
_EXPERT_LAYERS = ("gate", "gate_proj", "up_proj", "down_proj")
# What another adapter may have and merging or FSDP2 would get wrong: setting of its config -> the value allowed.
_PLAIN = {
    "bias": "none",
    "fan_in_fan_out": False,
    "layer_replication": None,
    "lora_bias": False,
    "megatron_config": None,
    "modules_to_save": None,
    "trainable_token_indices": None,
}


def peft() -> Any:
    """Import the library ``peft``, which takes a second.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import peft as library
    except ImportError as error:
        raise ConfigError(
            f"LoRA (model.lora_rank, model.lora_adapter_path) needs the package peft ({error}): pip install peft."
        ) from error
    return library


# ---- add ------------------------------------------------------------------------------------------


def add_adapters(hf: PreTrainedModel, head_name: str, config: HFModelConfig, with_weights: bool, seed: int = 0) -> None:
    """Add adapters to layers of ``hf`` in place; only they and a head for scalars remain trainable.

    New adapters change nothing until their first update, as B is 0. They are stored in fp32 if the model has less.

    Args:
        hf: the model, on the CPU.
        head_name: its output layer, which gets no adapter.
        config: rank, layers and variant, or the folder of trained adapters.
        with_weights: read the weights of trained adapters, or draw those of new ones; otherwise they are filled from
            another rank.
        seed: of the random numbers.

    Raises:
        ConfigError: an adapter would be bound to no layer, or to one that is not linear; the message lists the layers.
    """
    lora = _config_in(config) if config.lora_adapter_path else _new_config(config)
    lora.task_type = _TASKS[head_name]
    linear = _linear_layers(hf, head_name)
    if lora.target_modules == ALL_LINEAR:
        lora.target_modules = _endings(linear)
    _restrict_to_language_model(hf, lora, linear)
    try:
        peft().inject_adapter_in_model(lora, hf)
    except ValueError as error:
        raise ConfigError(f"{_settings(config)}: {error} {_known_layers(linear)}") from error
    _check_bound(hf, lora, head_name, linear, config)
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(".lora_" in name or (head_name != "lm_head" and name.startswith(f"{head_name}.")))
        if parameter.requires_grad and parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()  # it stays the parameter that peft's layer has
    _log_trained(hf)
    if not with_weights:
        return
    if config.lora_adapter_path:
        _load(hf, Path(config.lora_adapter_path))
        return
    for name, parameter in hf.named_parameters():
        if name.endswith(LORA_A):
            parameter.data.copy_(first_factor(name, tuple(parameter.shape), seed))


def first_factor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw A (r, in) of a new adapter as peft does, uniformly between ±1 / √in (Kaiming's for ``nn.Linear``).

    It depends on its name in a model of peft, its shape and the seed alone, so it is the same under every back end, in
    every layout and beside any other adapters.
    """
    digest = hashlib.sha256(f"{seed} {name} {'x'.join(map(str, shape))}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)


def _new_config(config: HFModelConfig) -> LoraConfig:
    def names(setting: str | tuple[str, ...] | None) -> str | list[str] | None:
        return list(setting) if isinstance(setting, tuple) else setting

    return peft().LoraConfig(
        r=config.lora_rank,
        lora_alpha=int(config.lora_alpha) if float(config.lora_alpha).is_integer() else config.lora_alpha,
        target_modules=names(config.target_modules),
        target_parameters=names(config.lora.target_parameters) or None,
        exclude_modules=names(config.exclude_modules),
        use_rslora=config.lora.use_rslora,
        use_dora=config.lora.use_dora,
        base_model_name_or_path=source_of(config.path),
    )


def _config_in(config: HFModelConfig) -> LoraConfig:
    """Read the config of trained adapters, without dropout."""
    folder = Path(config.lora_adapter_path or "")
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(
            f"model.lora_adapter_path={folder} is not a folder of adapters: {CONFIG_FILE} or {WEIGHTS_FILE} is "
            "missing. Name the folder that peft's save_pretrained wrote, or lora_adapter of a checkpoint."
        )
    try:
        peft_config = peft().PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE} cannot be read: {error}.") from error
    if not isinstance(peft_config, peft().LoraConfig):
        kind = str(peft_config.peft_type).removeprefix("PeftType.")
        raise ConfigError(f"{folder} holds adapters of kind {kind}; only LORA is supported.")
    for name, allowed in _PLAIN.items():
        value = getattr(peft_config, name, allowed)
        if allowed is None and not value:
            continue  # peft writes an empty list for a mixture of experts
        if name == "modules_to_save" and "score" in value and set(value) <= _HEADS_OF_PEFT:
            continue
        if value != allowed:
            raise ConfigError(
                f"the adapters in {folder} have {name}={value!r:.80}; only {allowed!r} is supported. Merge them into "
                "the model (merge_and_unload of peft), and start from that."
            )
    if config.lora_rank not in (0, peft_config.r):
        raise ConfigError(
            f"model.lora_rank={config.lora_rank}, but the adapters in {folder} have rank {peft_config.r}. Leave it at "
            f"0, or set {peft_config.r}."
        )
    if peft_config.lora_dropout:
        logger.warning(
            "lora_dropout=%s of %s is not used: log-probs must not be random", peft_config.lora_dropout, folder
        )
    peft_config.lora_dropout, peft_config.inference_mode, peft_config.modules_to_save = 0.0, False, None
    peft_config.base_model_name_or_path = source_of(config.path)
    return peft_config


def _linear_layers(hf: PreTrainedModel, head_name: str) -> list[str]:
    """Return the linear layers that may have adapters: below the head, outside of a vision tower and of experts."""
    linear = [name for name, module in hf.named_modules() if isinstance(module, nn.Linear) and name != head_name]
    linear = [name for name in linear if not _in_tower(name)]
    return [name for name in linear if name.rsplit(".", 1)[-1] not in _EXPERT_LAYERS] if _joined_experts(hf) else linear


def _joined_experts(hf: nn.Module) -> list[str]:
    """Return the names of weights that hold several experts, (experts, out, in), as the model without adapters has."""
    return [own_name(name) for name, weight in hf.named_parameters() if ".experts." in name and weight.dim() == 3]


def is_of_experts(layer: object) -> bool:
    """Return whether one of the :func:`adapter_layers` adapts a module's parameter instead of a linear layer."""
    return isinstance(layer, peft().tuners.lora.ParamWrapper)


def own_name(name: str) -> str:
    """Return the name that a weight of a model with adapters has in the model without."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _in_tower(name: str) -> bool:
    return TOWER in name.split(".")


def _restrict_to_language_model(hf: PreTrainedModel, lora: LoraConfig, linear: Sequence[str]) -> None:
    """Replace endings of names by whole names, as layers of a vision tower may have the same endings."""
    if not isinstance(lora.target_modules, (set, list)) or not any(_in_tower(name) for name, _ in hf.named_modules()):
        return
    endings = set(lora.target_modules)
    names = [n for n in linear if any(n == e or n.endswith(f".{e}") for e in endings)]
    lora.target_modules = names or sorted(endings)


def _endings(names: Sequence[str]) -> list[str]:
    """Last parts of names; the whole name where that is a number."""
    lasts = {name: name.rsplit(".", 1)[-1] for name in names}
    return sorted({name if last.isdigit() else last for name, last in lasts.items()})


def _settings(config: HFModelConfig) -> str:
    if config.lora_adapter_path:
        return f"model.lora_adapter_path={config.lora_adapter_path}"
    settings = {"target_modules": config.target_modules, "exclude_modules": config.exclude_modules}
    settings["lora.target_parameters"] = config.lora.target_parameters
    return ", ".join(f"model.{name}={value}" for name, value in settings.items() if value)


def _known_layers(linear: Sequence[str]) -> str:
    """Name the layers that may have adapters, for an error."""
    example = f" (such as {linear[0]})" if linear else ""
    return (
        f"The model's linear layers are {', '.join(_endings(linear))}{example}. Use {ALL_LINEAR}, a list of these "
        "endings, or a regular expression that matches whole names."
    )


def _check_bound(
    hf: PreTrainedModel, lora: LoraConfig, head_name: str, linear: Sequence[str], config: HFModelConfig
) -> None:
    bound = adapter_layers(hf)
    if tower := [name for name in bound if _in_tower(name)]:
        raise ConfigError(
            f"{_settings(config)} gives adapters to {tower[0]}, a layer of the vision tower; adapters are for the "
            f"language model alone. {_known_layers(linear)}"
        )
    _check_experts(hf, lora, bound, config)
    adapted = {name: layer for name, layer in bound.items() if not is_of_experts(layer)}
    other = [
        name for name, layer in adapted.items() if name == head_name or not isinstance(layer.base_layer, nn.Linear)
    ]
    if other:
        raise ConfigError(
            f"{_settings(config)} gives adapters to {', '.join(other[:3])}, which is no linear layer below the head. "
            f"{_known_layers(linear)}"
        )
    endings = lora.target_modules if isinstance(lora.target_modules, (set, list)) else ()
    layer_names = {*bound, *(linear if lora.exclude_modules else ())}  # all layers of an ending may be excluded
    unbound = sorted(w for w in endings if not any(name == w or name.endswith(f".{w}") for name in layer_names))
    if unbound or not bound:
        named = f" has no layer for {', '.join(unbound)}" if unbound else " binds adapters to no layer"
        raise ConfigError(f"{_settings(config)}: {type(hf).__name__}{named}. {_known_layers(linear)}")


def _check_experts(hf: PreTrainedModel, lora: LoraConfig, bound: Mapping[str, Any], config: HFModelConfig) -> None:
    """Refuse adapters of parameters other than weights (experts, out, in), and endings that name none."""
    joined = _joined_experts(hf)
    endings_of_joined = sorted({name.rsplit(".", 1)[-1] for name in joined})
    choices = f"Its weights of several experts are {', '.join(endings_of_joined) or 'none'}."
    expert_weights = [(_target(name, layer).weight, layer) for name, layer in bound.items() if is_of_experts(layer)]
    for weight, layer in expert_weights:
        if weight not in joined or getattr(layer.get_base_layer(), "is_transposed", False):
            raise ConfigError(
                f"{_settings(config)} gives adapters to {weight} of {type(hf).__name__}, which is no weight "
                f"(experts, out, in). {choices}"
            )
    endings = sorted(lora.target_parameters or ())
    if absent := [
        ending for ending in endings if not any(f".{weight}".endswith(f".{ending}") for weight, _ in expert_weights)
    ]:
        raise ConfigError(f"{_settings(config)}: {type(hf).__name__} has no {', '.join(absent)}. {choices}")


def _log_trained(hf: PreTrainedModel) -> None:
    """Log how much is trained, and which weights of several experts are not."""
    trained = sum(p.numel() for p in hf.parameters() if p.requires_grad)
    layers = adapter_layers(hf)
    total = sum(p.numel() for p in hf.parameters())
    logger.info("LoRA: %d layers have adapters; %d of %d parameters are trained", len(layers), trained, total)
    if experts := _joined_experts(hf):
        linear = [f"{name}.weight" for name, module in hf.named_modules() if isinstance(module, nn.Linear)]
        dense = [own_name(name) for name in linear if name.split(".")[-2] in _EXPERT_LAYERS]
        adapted = {target.weight for target in targets_of(layers).values()}
        if rest := [name for name in (*experts, *dense) if name not in adapted]:
            logger.warning(
                "experts that lora.target_parameters does not name, shared ones and the dense layers of such a model "
                "have no adapters and stay as they are: %s ...",
                rest[0],
            )


def _load(hf: PreTrainedModel, folder: Path) -> None:
    """Fill the adapters of ``hf`` from the files of ``folder``; both must have the same ones."""
    trained = {name: p for name, p in hf.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, values in saved_adapters(folder, trained).items():
            trained[name].copy_(values)


def saved_adapters(folder: Path, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read trained adapters from the files of peft, by the names of a model with adapters.

    Args:
        folder: with the files.
        trained: the parameters that are to be filled; of a head for scalars the files may have none.

    Raises:
        ConfigError: the files cannot be read, or are of other adapters.
    """
    try:
        saved = load_file(folder / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{folder / WEIGHTS_FILE} cannot be read: {error}.") from error
    names = {name_in_file(name): name for name in trained}
    # Adapters of a language model have no head.
    heads = {in_file for in_file, name in names.items() if not is_adapter(name)}
    missing, unknown = sorted(names.keys() - saved.keys() - heads), sorted(saved.keys() - names.keys())
    misshapen = sorted(name for name in names.keys() & saved.keys() if saved[name].shape != trained[names[name]].shape)
    reasons = {"they lack {}": missing, "the model has no {}": unknown}
    problems = [words.format(", ".join(names_of[:3])) for words, names_of in reasons.items() if names_of]
    problems += [f"{n} has shape {[*saved[n].shape]} for {[*trained[names[n]].shape]} here" for n in misshapen[:1]]
    if problems:
        raise ConfigError(
            f"the adapters in {folder} are of another model: {'; '.join(problems)}. Name the model that they were "
            "trained on in model.path."
        )
    return {names[name]: values for name, values in saved.items()}


# ---- use ------------------------------------------------------------------------------------------


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers with adapters (``peft.tuners.lora.LoraLayer``) by name."""
    layer_class = peft().tuners.lora.LoraLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, layer_class)}


def is_adapter(name: str) -> bool:
    """Return whether a weight of a model with adapters belongs to an adapter."""
    return ".lora_" in name


def require_linear(layers: Mapping[str, object]) -> None:
    """Raise ConfigError if adapters are on experts, which engines that apply adapters by themselves do not know."""
    if expert_layers := [name for name, layer in layers.items() if is_of_experts(layer)]:
        raise ConfigError(
            f"rollout.merge_adapters=false: {expert_layers[0]} has adapters of experts, and the rollout engine applies "
            "those of linear layers alone. Set merge_adapters=true."
        )


@contextmanager
def without_adapters(layers: Iterable[LoraLayer]) -> Iterator[None]:
    """Compute with the base weights of the layers inside the context."""
    # peft's enable_adapters(False) does this and also clears requires_grad, which FSDP2 reads when it gathers weights.
    layers = list(layers)
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@dataclass(frozen=True)
class AdapterTarget:
    """A weight with an adapter."""

    weight: str
    """Name of the weight in the model without adapters."""
    scale: float
    """The scale s."""


def _target(name: str, layer: Any) -> AdapterTarget:
    """Return the weight and the scale of one of the :func:`adapter_layers`."""
    parameter = layer.parameter_name if is_of_experts(layer) else "weight"
    return AdapterTarget(own_name(f"{name}.{parameter}"), float(layer.scaling[_ADAPTER]))


def targets_of(layers: Mapping[str, object]) -> dict[str, AdapterTarget]:
    """Return the weight and the scale of each of the :func:`adapter_layers`."""
    return {name: _target(name, layer) for name, layer in layers.items()}


def magnitudes_of(layers: Mapping[str, object]) -> dict[str, str]:
    """Return the names of the magnitudes of DoRA among :func:`adapter_layers`, by the name of the weight."""
    dora = {name: layer for name, layer in layers.items() if getattr(layer, "use_dora", {}).get(_ADAPTER)}
    return {_target(name, layer).weight: f"{name}{_MAGNITUDE}" for name, layer in dora.items()}


def with_adapters(
    weights: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], targets: Mapping[str, AdapterTarget]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight of a model, and after it what belongs to its adapter, as :func:`merged` takes them.

    Args:
        weights: by the names of the model without adapters.
        adapters: by the names of the model with adapters.
        targets: what each layer with an adapter adapts, by its name.
    """
    parts_of: dict[str, list[str]] = {}
    for name in adapters:
        layer = name[: name.index(".lora_")]
        parts_of.setdefault(targets[layer].weight, []).append(name)
    for name, tensor in weights:
        yield name, tensor
        yield from ((part, adapters[part]) for part in parts_of.get(name, ()))


@torch.no_grad()
def merged(weights: Iterable[tuple[str, Tensor]], targets: Mapping[str, AdapterTarget]) -> Iterator[tuple[str, Tensor]]:
    """Merge adapters into the weights: W + s B A, with DoRA m (W + s B A) / |W + s B A| by rows.

    Args:
        weights: weights by the names of a model with adapters. All of a module come before those of the next, its base
            first.
        targets: what each layer with an adapter adapts, by its name.

    Yields:
        weights by the names of the model without adapters. Merged ones are new tensors in the wider of the formats
        of base and adapter.
    """
    scales = {target.weight: target.scale for target in targets.values()}
    module, adapters = "", dict[str, dict[str, Tensor]]()  # the current module, and the parts of its adapted weights
    for name, tensor in weights:
        model_name = own_name(name)
        if adapters and not model_name.startswith(f"{module}."):
            yield from ((weight, _merge(parts, scales[weight])) for weight, parts in adapters.items())
            adapters = {}
        part = next((ending for ending in (LORA_A, LORA_B, _MAGNITUDE) if name.endswith(ending)), "")
        if part:
            adapters[targets[name.removesuffix(part)].weight][part] = tensor
        elif model_name in scales:
            module, adapters = model_name.rpartition(".")[0], adapters | {model_name: {BASE: tensor}}
        else:
            yield model_name, tensor
    yield from ((weight, _merge(parts, scales[weight])) for weight, parts in adapters.items())


def _merge(parts: Mapping[str, Tensor], scale: float) -> Tensor:
    base, down, up = (parts[name] for name in (BASE, LORA_A, LORA_B))
    dtype = torch.promote_types(base.dtype, down.dtype)
    base, down, up = (tensor.to(dtype) for tensor in (base, down, up))
    if base.dim() == 3:
        down = down.view(len(base), -1, down.shape[1])  # (experts, r, in)
        up = up.view(len(up), -1, len(base)).permute(2, 0, 1)  # (experts, out, r)
        return torch.baddbmm(base, up, down, alpha=scale)
    weight = torch.addmm(base, up, down, alpha=scale)
    if (magnitude := parts.get(_MAGNITUDE)) is None:
        return weight
    return weight * (magnitude.to(dtype) / weight.norm(dim=1)).unsqueeze(1)


def base_of(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the base weights of a model with adapters, by the names of the model without adapters."""
    for name, tensor in weights:
        if not is_adapter(name):
            yield own_name(name), tensor


def linear_adapters(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield A and B of each layer as :class:`~verl.workers.adapted_weights.AdaptedWeights` has them.

    Args:
        weights: those of a model with adapters of linear layers, or its adapters alone.
    """
    for name, tensor in weights:
        if name.endswith((LORA_A, LORA_B)):
            yield name.removesuffix(f".{_ADAPTER}.weight") + ".weight", tensor.detach()


# ---- files ----------------------------------------------------------------------------------------


def name_in_file(name: str) -> str:
    """Return the name that peft's files have for a parameter of a model with adapters."""
    return _PREFIX + name.replace(f".{_ADAPTER}.weight", "" if _MAGNITUDE in name else ".weight")


def check_same_scale(hf: PreTrainedModel, folder: Path) -> None:
    """Check that this run scales a checkpoint's adapters as they were trained; without their config, check nothing.

    Raises:
        CheckpointError: ``lora_alpha`` or the variant of LoRA has changed; the message names the setting.
    """
    try:
        saved = json.loads((folder / CONFIG_FILE).read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG_FILE} cannot be read: {error}.") from error
    config: LoraConfig = hf.peft_config[_ADAPTER]  # type: ignore[index]
    for name in ("lora_alpha", "use_rslora", "use_dora"):
        now = getattr(config, name)
        if saved.get(name, now) != now:
            raise CheckpointError(
                f"the adapters in {folder} were trained with {name}={saved[name]}, and this run has {name}={now}, with "
                "which they are another policy. Set it as it was, or start from them with model.lora_adapter_path."
            )


def write_adapters(hf: PreTrainedModel, head_name: str, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write trained parameters as ``peft.PeftModel.from_pretrained`` and ``lora_adapter_path`` read them."""
    folder.mkdir(parents=True, exist_ok=True)
    config: LoraConfig = copy.deepcopy(hf.peft_config[_ADAPTER])  # type: ignore[index]
    config.inference_mode = True
    config.modules_to_save = None if head_name == "lm_head" else [head_name]
    config.save_pretrained(str(folder))
    tensors = {name_in_file(name): tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
