"""The model's own Transformers code, around the trainer's tensors, reading and writing :class:`KeyValueMemory`.

Transformers calls attention through a registry of functions; ours, ``verl_native``, gets the pass that it belongs to as
an argument of the model's forward. A pass is one row of tokens: the prompts that are new, one after the other, or the
newest token of each running row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl.errors import RolloutError
from verl.utils.cpu_kernels import CPUKernels, cpu_kernels
from verl.utils.model import causal_lm_without_weights
from verl.workers.engine.fsdp.attention import Packing, packed_attention_forward
from verl.workers.rollout.native.memory import (
    AttentionRule,
    CopiedPromptMemory,
    KeyValueMemory,
    SharedPromptMemory,
    Shape,
)

NATIVE_ATTENTION = "verl_native"
OTHER_ENGINES = "vllm, sglang, hf"


class _Pass(Protocol):
    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor: ...


class _Prefill:
    """Whole prompts, packed; their keys and values are kept."""

    def __init__(self, memory: KeyValueMemory, packing: Packing) -> None:
        self._memory, self._packing = memory, packing

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        parts = (states[0].split(self._packing.lengths, dim=1) for states in (key, value))
        self._memory.store(_number(layer), list(zip(*parts, strict=True)))
        return packed_attention_forward(layer, query, key, value, packing=self._packing, **settings)[0]


class _Decode:
    """The newest token of each running row."""

    def __init__(self, memory: KeyValueMemory) -> None:
        self._memory = memory

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        scale = settings.get("scaling")
        rule = AttentionRule(
            query.shape[-1] ** -0.5 if scale is None else scale, settings.get("sliding_window"), settings.get("softcap")
        )
        rows = (states[0].transpose(0, 1) for states in (query, key, value))  # (rows, heads, head_dim)
        return self._memory.decode(_number(layer), *rows, rule).unsqueeze(0)


def _number(layer: nn.Module) -> int:
    number = layer.layer_idx
    assert isinstance(number, int)
    return number


def native_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    native_pass: _Pass | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, in the form that Transformers calls.

    Args:
        module: the attention layer.
        query: (1, heads, tokens, head_dim).
        key: (1, kv_heads, tokens, head_dim).
        value: as ``key``.
        attention_mask: None; who sees whom follows from the pass.
        native_pass: which tokens these are.
        settings: of the layer: scaling, sliding_window, softcap and what else Transformers says.

    Returns:
        (1, tokens, heads, head_dim), and no attention weights.

    Raises:
        ConfigError: the layer needs what packed sequences do not have (attention sinks, a bias by position).
        RolloutError: the model hides the pass from its layers.
    """
    if native_pass is None:
        raise RolloutError(f"{type(module).__name__} does not get the arguments that its model was called with")
    return native_pass.attend(module, query, key, value, attention_mask=attention_mask, **settings), None


ALL_ATTENTION_FUNCTIONS.register(NATIVE_ATTENTION, native_attention_forward)


class NativeModel:
    """A causal language model that holds no weights of its own where it can use those that it is given.

    Args:
        config: of the model.
        dtype: in which it computes.
        device: where.
        trust_remote_code: run the Python files of the model folder.

    Raises:
        RolloutError: this engine cannot serve the architecture; the message names those that may.
    """

    def __init__(
        self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
    ) -> None:
        self.module = causal_lm_without_weights(config, dtype, device, trust_remote_code)
        self.dtype, self.device = dtype, device
        _check_architecture(self.module)
        self.kernels = cpu_kernels() if device.type == "cpu" and dtype is torch.float32 else None
        self._standard_attention = self.module.config._attn_implementation
        self._places = _places_of_parameters(self.module)
        if device.type == "cpu":
            for layer in self.module.modules():
                _use_fast_forward(layer, self.kernels)
        self.use_native_attention()

    # ---- weights

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Take the tensors themselves where device and format fit, copies elsewhere; what was wrong with them."""
        problems, loaded = [], set()
        buffers = dict(self.module.named_buffers())
        for name, tensor in weights:
            target = self._places.get(name)
            current = buffers.get(name) if target is None else target.parameter
            if current is None:
                problems.append(f"{name} is unknown")
            elif current.shape != tensor.shape:
                problems.append(f"{name} has shape {list(tensor.shape)} where {list(current.shape)} is needed")
            elif target is None:
                current.copy_(tensor)
            else:
                target.put(tensor.detach().to(self.device, self.dtype))
                loaded.add(id(target))
        missing = {id(place): name for name, place in reversed(self._places.items()) if id(place) not in loaded}
        return problems + [f"{name} is missing" for name in reversed(missing.values())]

    def drop(self) -> None:
        """Keep no tensor alive."""
        for place in self._places.values():
            place.drop()

    @property
    def nbytes(self) -> int:
        """Memory of the weights, shared or not."""
        return sum(p.nbytes for p in self.module.parameters() if p.device.type != "meta")

    # ---- passes

    def memory(self, room: int, prompt_room: int, own_room: int) -> KeyValueMemory:
        """Room for keys and values; see :class:`KeyValueMemory`."""
        if self.kernels is not None and not self._caps_scores:
            return SharedPromptMemory(self.kernels, self.shape, room, prompt_room, own_room)
        return CopiedPromptMemory(self.shape, room, prompt_room, own_room)

    @property
    def shape(self) -> Shape:
        """What the size of keys and values follows from."""
        text = self.module.config.get_text_config()
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return Shape(text.num_hidden_layers, kv_heads, head_dim, self.dtype, self.device)

    @property
    def _caps_scores(self) -> bool:
        return bool(getattr(self.module.config.get_text_config(), "attn_logit_softcapping", None))

    def prefill(self, memory: KeyValueMemory, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Compute the prompts that ``memory`` let in last; (prompts, vocab) logits of the token after each."""
        lengths = [len(prompt) for prompt in prompts]
        packing = Packing.of(lengths, self.device)
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        last = packing.cu_seqlens[1:].long() - 1
        return self._logits(ids, positions, last, _Prefill(memory, packing))

    def decode(self, memory: KeyValueMemory, tokens: Tensor) -> Tensor:
        """Append a token to each running row; (rows, vocab) logits of the one after it."""
        everything = torch.arange(len(tokens), device=tokens.device)
        logits = self._logits(tokens, memory.positions, everything, _Decode(memory))
        memory.advance()
        return logits

    def _logits(self, ids: Tensor, positions: Tensor, wanted: Tensor, native_pass: _Pass) -> Tensor:
        output = self.module(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            native_pass=native_pass,
        )
        return output.logits[0]

    def standard_logits(self, ids: Tensor) -> Tensor:
        """(tokens, vocab) of one sequence, by the attention that Transformers would choose."""
        self.module.set_attn_implementation(self._standard_attention)
        try:
            return self.module(input_ids=ids[None], use_cache=False).logits[0]
        finally:
            self.use_native_attention()

    def use_native_attention(self) -> None:
        """Attend through :func:`native_attention_forward`."""
        self.module.set_attn_implementation(NATIVE_ATTENTION)


class _Place:
    """Where a parameter stands in the module: several places if it is tied."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str]] = []

    def add(self, module: nn.Module, name: str) -> None:
        self._places.append((module, name))

    @property
    def parameter(self) -> Tensor:
        module, name = self._places[0]
        return getattr(module, name)

    def put(self, tensor: Tensor) -> None:
        parameter = nn.Parameter(tensor, requires_grad=False)
        for module, name in self._places:
            module.register_parameter(name, parameter)

    def drop(self) -> None:
        self.put(self.parameter.to("meta"))


def _places_of_parameters(model: nn.Module) -> dict[str, _Place]:
    places: dict[int, _Place] = {}
    names = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            place = places.setdefault(id(parameter), _Place())
            place.add(module, name)
            names[f"{prefix}.{name}" if prefix else name] = place
    return names


def _check_architecture(module: PreTrainedModel) -> None:
    text = module.config.get_text_config()
    other = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    reasons = {
        f"has layers of type {', '.join(sorted(other))}": bool(other),
        "has no exchangeable attention": not getattr(module, "_supports_attention_backend", False),
        "reads the prompt with an encoder": bool(getattr(module.config, "is_encoder_decoder", False)),
    }
    for reason, holds in reasons.items():
        if holds:
            raise cannot_serve(module, reason)


def cannot_serve(module: nn.Module, reason: str) -> RolloutError:
    """The error for an architecture that this engine does not know."""
    return RolloutError(
        f"the native engine cannot serve {type(module).__name__}: it {reason}. Set rollout.name to an engine that may: "
        f"{OTHER_ENGINES}."
    )


# ---- faster ways to compute what a layer computes, without gradients


def _use_fast_forward(layer: nn.Module, kernels: CPUKernels | None) -> None:
    kind = type(layer).__name__
    if isinstance(layer, nn.Linear):
        layer.forward = functools.partial(_linear, layer)
    elif kernels is None:
        return
    elif kind.endswith("RMSNorm") and (found := _rms_norm_of(layer)) is not None:
        layer.forward = functools.partial(_rms_norm, layer, kernels, *found)
    elif kind.endswith("MLP") and type(getattr(layer, "act_fn", None)).__name__ in {"SiLU", "SiLUActivation"}:
        if all(hasattr(layer, name) for name in ("gate_proj", "up_proj", "down_proj")):
            layer.forward = functools.partial(_gated_mlp, layer, kernels)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """oneDNN's product: it beats the BLAS behind ``functional.linear`` on the few rows of a decoding step."""
    return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")


def _rms_norm_of(layer: nn.Module) -> tuple[float, float] | None:
    """Its epsilon, and 0 or 1 if the factor is the weight or one more than it; None if it is something else."""
    eps = getattr(layer, "variance_epsilon", getattr(layer, "eps", None))
    weight = getattr(layer, "weight", None)
    if not isinstance(eps, float) or weight is None or weight.dim() != 1 or len(list(layer.parameters())) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.rand(size, generator=generator) + 0.5 for size in ((3, len(weight)), (len(weight),)))
    found = torch.func.functional_call(layer, {"weight": w}, (x,))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for offset in (0.0, 1.0):
        if torch.allclose(found, (offset + w) * normed, rtol=1e-5, atol=1e-6):
            return eps, offset
    return None


def _rms_norm(layer: nn.Module, kernels: CPUKernels, eps: float, offset: float, x: Tensor) -> Tensor:
    return kernels.rms_norm(x, layer.weight, eps, offset)  # type: ignore[arg-type]


def _gated_mlp(layer: Any, kernels: CPUKernels, x: Tensor) -> Tensor:
    return layer.down_proj(kernels.silu_mul(layer.gate_proj(x), layer.up_proj(x)))
