"""Tensor parallelism beside FSDP2: the matrices of each layer are divided over ranks that compute the same rows.

Which matrices, and how, is the plan of the Transformers model (``base_model_tp_plan`` of its config); the layers are
divided by ``torch.distributed.tensor.parallel``. The embedding and the output projection of a language model are
divided over the vocabulary, and of the experts of a mixture each rank has some, whole. A vision tower stays whole.
Weights are DTensors on the mesh of the tensor-parallel ranks, which :func:`fully_shard` divides further. Activations
between layers are whole on every rank.

LoRA adds ``(x Aᵀ) Bᵀ`` to ``x Wᵀ`` with A (r, in) and B (out, r). Where the rows of W are divided, so are those of B,
and A is whole on every rank; where the columns of W are divided, so are those of A, and B is whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from verl.errors import ConfigError
from verl.utils.transformers_private import use_some_experts
from verl.vision.families import TOWER
from verl.workers.engine.model.adapters import LORA_A, LORA_B, is_adapter, is_of_experts, magnitudes_of, own_name
from verl.workers.engine.model.headed import HeadedModel
from verl.workers.engine.model.vocab_parallel import with_summed_gradient

_KEY = "fsdp_config.tensor_parallel_size"
_EXPERTS = "moe_tp_experts"  # how a plan names a module of experts
_EXPERT_WORDS = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}  # its matrices; here experts stay whole


def check_division(config: PretrainedConfig, ranks: int) -> None:
    """Check, from its config alone, that the matrices of a model can be divided over ``ranks`` ranks.

    Raises:
        ConfigError: Transformers has no plan for it or one with styles unknown here, or ``ranks`` does not divide its
            heads, its experts or the size of its feed-forward layers.
    """
    text = config.get_text_config()
    name = f"{_KEY}={ranks}: a {config.model_type}"
    remedy = f"Set {_KEY}=1, or use strategy=megatron."
    plan = _plan(text)
    if not plan:
        raise ConfigError(f"{name} has no plan in Transformers (base_model_tp_plan). {remedy}")
    words = {path: word for path, word in plan.items() if _EXPERT_WORDS.get(path.rpartition(".experts.")[2]) != word}
    if unknown := sorted(set(words.values()) - _styles().keys()):
        raise ConfigError(f"{name} has a plan with {', '.join(unknown)}, which this engine does not know. {remedy}")
    sizes = divided_sizes(plan, lambda entry: getattr(text, entry, None))
    for entry, size in sizes.items():
        if size % ranks:
            allowed = ", ".join(str(n) for n in range(1, ranks + 1) if all(s % n == 0 for s in sizes.values()))
            raise ConfigError(
                f"{name} with {entry}={size} cannot be divided over {ranks} ranks: each has equally many. Use one of "
                f"{allowed}."
            )


def divide_layers(model: HeadedModel, mesh: DeviceMesh, adapters: Mapping[str, Any]) -> None:
    """Divide the weights of ``model`` over ``mesh``, in place; weights may be on the meta device.

    Args:
        model: to be divided.
        mesh: of the tensor-parallel ranks.
        adapters: the layers with adapters by name; see :func:`~verl.workers.engine.model.adapters.adapter_layers`.

    Raises:
        ConfigError: the plan leaves out a weight between two that it divides, or adapters are of a kind that is not
            divided.
    """
    _check_adapters(adapters)
    ties = _ties(model)
    prefix = f"{model.backbone_name}." if model.vision is None else f"{model.backbone_name}.language_model."
    plan = {prefix + path: word for path, word in _without_experts(_plan(model.hf.config.get_text_config())).items()}
    styles, vocab_size = _styles(), model.hf.config.get_text_config().vocab_size
    layer_styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        word = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", own_name(name)))
        if word is not None and name in adapters:
            layer_styles |= _adapter_styles(name, word)
        elif word is not None:
            layer_styles[name] = styles[word]
        elif isinstance(module, nn.Embedding) and module.num_embeddings == vocab_size and TOWER not in name.split("."):
            layer_styles[name] = _OverVocabulary()
    if model.head.out_features > 1:
        # Passes compute the head by its weight; its own forward serves checks of the model.
        layer_styles[model.head_name] = ColwiseParallel(output_layouts=Replicate())
    columns = Counter(own_name(name).rpartition(".")[0] for name, s in layer_styles.items() if s is styles["colwise"])
    for parent in columns:
        _check_plan_complete(model, parent, layer_styles)
    parallelize_module(model, mesh, layer_styles)
    for parent, count in columns.items():
        if count > 1:
            # One sum of gradients over the ranks in place of one for each matrix.
            _share_input(model.get_submodule(parent), mesh)
    for first, *tied_names in ties:
        weight = model.get_parameter(first)
        for name in tied_names:
            module, _, entry = name.rpartition(".")
            model.get_submodule(module).register_parameter(entry, weight)  # type: ignore[arg-type]


def divided_sizes(plan: Mapping[str, str], entry: Callable[[str], object]) -> dict[str, int]:
    """Return what each rank has equally many of, by its name in a model's config.

    Args:
        plan: of Transformers.
        entry: the value of an entry of the config; None if it has none.
    """
    names: list[str] = []
    if any("self_attn" in path for path in plan):
        names += ["num_attention_heads", "num_key_value_heads"]
    if any("self_attn" not in path and "expert" not in path for path in plan):
        names.append("intermediate_size")
    if any("shared_expert" in path for path in plan):  # theirs is this or a multiple
        names += ["moe_intermediate_size", "shared_expert_intermediate_size"]
    if _EXPERTS in plan.values():
        names += ["num_experts", "num_local_experts", "n_routed_experts"]
    return {name: size for name in names if isinstance(size := entry(name), int)}


def _plan(config: PretrainedConfig) -> Mapping[str, str]:
    # The language models of Qwen3-VL have the layers of Qwen3, and Transformers' plans lack them, or norms of heads.
    text_configs = {"qwen3_vl_text": Qwen3Config, "qwen3_vl_moe_text": Qwen3MoeConfig}
    source = text_configs.get(config.model_type, config)
    return getattr(source, "base_model_tp_plan", None) or {}


def _without_experts(plan: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of a plan without those of single matrices of experts."""
    return {path: word for path, word in plan.items() if ".experts." not in path}


def _check_adapters(adapters: Mapping[str, object]) -> None:
    remedy = f"Set {_KEY}=1, or use plain LoRA of linear layers."
    if magnitudes_of(adapters):
        raise ConfigError(
            f"{_KEY}: the adapters are of DoRA (model.lora.use_dora), which needs the norms of rows of whole matrices. "
            f"{remedy}"
        )
    if expert_layers := [name for name, layer in adapters.items() if is_of_experts(layer)]:
        raise ConfigError(
            f"{_KEY}: {own_name(expert_layers[0])} has adapters of experts (model.lora.target_parameters), which are "
            f"not divided. {remedy}"
        )


def _adapter_styles(layer: str, word: str) -> dict[str, ParallelStyle]:
    """Return the styles of A and B beside a matrix with the style ``word``; a B that stays whole has none."""
    down, up = (f"{layer}{ending}".removesuffix(".weight") for ending in (LORA_A, LORA_B))
    if word.startswith("colwise"):
        return {down: _Replicated(sums_input=True), up: _AdapterRows(gathers=word != "colwise")}
    return {down: _styles()[word]}


def _styles() -> dict[str, ParallelStyle]:
    """Return what the words of a plan mean."""
    return {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
        "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
        "replicated_with_grad_allreduce": _Replicated(),
        _EXPERTS: _Experts(),
    }


class _Replicated(ParallelStyle):
    """A module whose whole weights each rank applies for its own heads: their gradients are sums over the ranks.

    Args:
        sums_input: whether the input is the same on all ranks, so that its gradient is a sum as well.
    """

    def __init__(self, sums_input: bool = False) -> None:
        super().__init__()
        self._sums_input = sums_input

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        forward = module.forward

        def with_local_weights(input: Tensor) -> object:
            if self._sums_input:
                input = with_summed_gradient(input, device_mesh)
            with _local_weights(module, Partial()):
                return forward(input)

        module.forward = with_local_weights
        return module


class _AdapterRows(ParallelStyle):
    """B of an adapter of which each rank has the rows of its part of W.

    Its input is that of :class:`_Replicated`, which adds up the gradients.

    Args:
        gathers: whether the output is whole on each rank.
    """

    def __init__(self, gathers: bool) -> None:
        super().__init__()
        self._gathers = gathers

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        forward = module.forward

        def forward_rows(input: Tensor) -> Tensor:
            with _local_weights(module, Shard(0)):
                output = forward(input)
            if not self._gathers:
                return output
            part = DTensor.from_local(output, device_mesh, [Shard(output.dim() - 1)], run_check=False)
            return part.redistribute(placements=[Replicate()]).to_local()

        module.forward = forward_rows
        return module


class _Experts(ParallelStyle):
    """The experts of a layer, of which each rank has equally many, whole: it computes the tokens that go to them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        count = int(module.num_experts) // device_mesh.size()  # type: ignore[arg-type]
        first = device_mesh.get_local_rank() * count
        use_some_experts(module, count)
        forward = module.forward

        def forward_local(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            is_here = (top_k_index >= first) & (top_k_index < first + count)
            local_ids = torch.where(is_here, top_k_index - first, count)
            hidden, weights = (with_summed_gradient(x, device_mesh) for x in (hidden_states, top_k_weights))
            with _local_weights(module, Shard(0)):
                term = forward(hidden, local_ids, torch.where(is_here, weights, 0.0))
                # All ranks have a gradient of their experts, also where no token goes to them.
                term = term + sum(weight.flatten()[:0].sum() for weight in module.parameters(recurse=False))
            total = DTensor.from_local(term, device_mesh, [Partial()], run_check=False)
            return total.redistribute(placements=[Replicate()]).to_local()

        module.forward = forward_local
        return module


class _OverVocabulary(ParallelStyle):
    """An embedding of which each rank has the rows of its part of the vocabulary."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        _distribute(module, device_mesh, Shard(0))
        rank_rows = -(-module.num_embeddings // device_mesh.size())
        first = device_mesh.get_local_rank() * rank_rows
        count = max(min(rank_rows, module.num_embeddings - first), 0)
        # The row without gradients, among those of this rank.
        padding = module.padding_idx
        is_here = padding is not None and first <= padding < first + count
        module.padding_idx = padding - first if padding is not None and is_here else None
        forward = module.forward

        def looked_up(input: Tensor) -> Tensor:
            is_here = (input >= first) & (input < first + count)
            with _local_weights(module, Shard(0)):
                if count:
                    term = forward(torch.where(is_here, input - first, 0)) * is_here.unsqueeze(-1)
                else:  # this rank has no row, and a gradient of none
                    term = module.weight.new_zeros(*input.shape, module.embedding_dim) + module.weight.sum()
            total = DTensor.from_local(term, device_mesh, [Partial()], run_check=False)
            return total.redistribute(placements=[Replicate()]).to_local()

        module.forward = looked_up
        return module


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Replicate | Shard) -> None:
    for name, weight in list(module.named_parameters(recurse=False)):
        divided = distribute_tensor(weight, mesh, [placement])
        module.register_parameter(name, nn.Parameter(divided, requires_grad=weight.requires_grad))


@contextmanager
def _local_weights(module: nn.Module, gradient: Partial | Shard) -> Iterator[None]:
    """Let a module compute with this rank's part of its weights; their gradients have the placement ``gradient``."""
    weights = dict(module.named_parameters(recurse=False))
    for name, weight in weights.items():
        assert isinstance(weight, DTensor)
        module._parameters[name] = weight.to_local(grad_placements=[gradient])  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters.update(weights)


def _ties(model: nn.Module) -> list[list[str]]:
    """Return the names of weights that several modules share."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def _share_input(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the hidden states that a module gets one DTensor, to which all of its matrices add their gradients."""

    def whole(value: object) -> object:
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)

    def share(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "hidden_states" in kwargs:
            return args, kwargs | {"hidden_states": whole(kwargs["hidden_states"])}
        return (*map(whole, args[:1]), *args[1:]), kwargs

    module.register_forward_pre_hook(share, with_kwargs=True)


def _check_plan_complete(model: HeadedModel, parent: str, planned: Collection[str]) -> None:
    """Check that the plan names each weight beside matrices whose columns are divided: it sees a part of their output.

    Args:
        model: of which ``parent`` is a module, an attention or a feed-forward layer.
        parent: its name.
        planned: names of modules in the plan.
    """
    for name, _ in model.get_submodule(parent).named_parameters():
        module = f"{parent}.{name}".rpartition(".")[0]
        if module not in planned and not is_adapter(name):
            raise ConfigError(
                f"{_KEY}: Transformers' plan for {type(model.hf).__name__} divides matrices of {parent} and says "
                f"nothing of {parent}.{name}, which would get a wrong gradient. Set {_KEY}=1, or use "
                "strategy=megatron."
            )
