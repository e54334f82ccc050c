"""The native engine's model, Transformers code over the trainer's tensors, and its attention functions."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from verl.backends.cpu.allocator import ReclaimableBuffers, keep_freed_memory
from verl.backends.cpu.decoder import ROTATIONS_OF_A_PASS, compiled_decoder
from verl.backends.cpu.kernels import cpu_kernels
from verl.backends.cpu.layers import use_fast_layers
from verl.backends.cuda.layers import use_fused_layers
from verl.config.rollout import GRAPH_SIZES
from verl.errors import RolloutError
from verl.utils.model import causal_lm_without_weights, rope_types
from verl.utils.model_facts.config_fields import layers_beyond_attention
from verl.utils.model_facts.experts import ExpertSizes
from verl.utils.transformers_private import (
    ALL_ATTENTION_FUNCTIONS,
    attention_of,
    keeps_state,
    takes_any_attention,
    use_attention,
)
from verl.vision.families import VisionConfig
from verl.vision.model import ImageInputs, hidden_states
from verl.vision.positions import AXES
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.packed_attention import AttentionRule, Packing, packed_attention_forward
from verl.workers.rollout.adapted_layers import AdaptedLayers
from verl.workers.rollout.native.graphs import DecodeGraphs
from verl.workers.rollout.native.memory import (
    CacheShape,
    CopiedPromptMemory,
    KeyValueMemory,
    SharedPromptMemory,
)
from verl.workers.rollout.placed_images import PlacedImages, images_of_pass
from verl.workers.rollout.quantized_layers import SCALE, QuantizedWeight, WeightFormat, quantize_layers
from verl.workers.routers import Routers

NATIVE_ATTENTION = "verl_native"
OTHER_ENGINES = "vllm, sglang, hf"


class NativeModel:
    """A causal language model that uses the tensors it is given as weights where it can, and copies elsewhere.

    Args:
        config: of the Transformers model.
        dtype: format of the weights.
        device: where it computes.
        trust_remote_code: see ``model.trust_remote_code``.
        graph_sizes: decode by :class:`DecodeGraphs` of these numbers of rows; None: of :data:`GRAPH_SIZES`, if decoding
            of this architecture is known to allow it.
        fuses_layers: compute norms, gates and rotations by Liger's kernels, on a GPU.
        quantization: keep the weights of linear layers in a format of 8 bits, see :mod:`quantized_layers`; None: in
            ``dtype``.

    Raises:
        RolloutError: the native engine does not support the architecture; the message names other engines.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        trust_remote_code: bool = False,
        graph_sizes: Sequence[int] | None = (),
        fuses_layers: bool = False,
        quantization: WeightFormat | None = None,
    ) -> None:
        config = copy.deepcopy(config)  # the attention implementation is set in it
        self.module = causal_lm_without_weights(config, dtype, device, trust_remote_code)
        self.dtype, self.device = dtype, device
        self.vision = VisionConfig.from_config(config)
        """Settings for passes with images; None for a model of text."""
        self.buffers = ReclaimableBuffers() if device.type == "cpu" else None
        """Memory of keys and values, reused from one rollout to the next."""
        _check_architecture(self.module)
        self.routers = Routers(self.module)
        self.kernels = cpu_kernels() if device.type == "cpu" and dtype is torch.float32 else None
        self._standard_attention = attention_of(self.module.config.get_text_config())
        self.adapters = AdaptedLayers(self.module, dtype, device)
        # The compiled step computes all layers in one call; quantized weights are made in full for one at a time.
        is_compiled = self.kernels is not None and quantization is None
        self._compiled = compiled_decoder(self.module) if is_compiled else None
        if device.type == "cpu":
            keep_freed_memory()
            if dtype is torch.float32:
                use_fast_layers(self.module, for_training=False)
        elif fuses_layers:
            use_fused_layers(self.module)
        quantized = {} if quantization is None else quantize_layers(self.module, quantization, dtype)
        if quantization is not None and not quantized:
            raise cannot_serve(self.module, "has no linear layers in the way of Transformers, whose weights it rounds")
        self._weights = _weights_by_name(self.module, quantized)
        self._count = len(set(self._weights.values()))
        if graph_sizes is None:
            graph_sizes = GRAPH_SIZES if self._can_be_recorded else ()
        self.graphs = DecodeGraphs(self._decode_logits, graph_sizes) if graph_sizes else None
        self.use_native_attention()

    @property
    def _can_be_recorded(self) -> bool:
        """True if a pass launches the same kernels for all tokens: dense models of text in code of Transformers.

        Experts are chosen on the device, and these rotations depend on the longest text.
        """
        config = self.module.config
        is_dense = not len(self.routers) and ExpertSizes.from_config(config.get_text_config()) is None
        is_known = type(self.module).__module__.startswith("transformers.models.") and self.vision is None
        return is_dense and is_known and not rope_types(config) & ROTATIONS_OF_A_PASS

    # ---- weights

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Load the tensors as weights: themselves where device and format fit, copies elsewhere.

        Tensors that it holds already are only recognised; changes in their values need no copy.

        Returns:
            problems found: weights that are unknown, missing or of another shape.
        """
        problems, loaded, changed = [], set(), False
        for name, tensor in weights:
            weight = self._weights.get(name)
            if weight is not None and weight.holds(tensor):
                loaded.add(weight)
                continue
            changed = True
            buffer = self._buffer(name) if weight is None else None
            shape = weight.shape if weight is not None else None if buffer is None else buffer.shape
            if shape is None:
                problems.append(f"{name} is unknown")
            elif shape != tensor.shape:
                problems.append(f"{name} has shape {list(tensor.shape)} where {list(shape)} is needed")
            elif buffer is not None:
                buffer.copy_(tensor)
            elif weight is not None:
                weight.put(tensor.detach(), self.device, self.dtype)
                loaded.add(weight)
        if changed:
            self.forget()
        if len(loaded) == self._count:
            return problems
        missing = {weight: name for name, weight in reversed(self._weights.items()) if weight not in loaded}
        return problems + [f"{name} is missing" for name in reversed(missing.values())]

    def _buffer(self, name: str) -> Tensor | None:
        return dict(self.module.named_buffers()).get(name)

    def load_adapters(self, weights: AdaptedWeights | None, version: int) -> None:
        """Load adapters, which are computed beside the weights, see :meth:`AdaptedLayers.load`; None removes them."""
        if self.adapters.drop() if weights is None else self.adapters.load(weights, version):
            self.forget()

    def drop(self) -> None:
        """Release all weights and adapters."""
        self.forget()
        self.adapters.drop()
        for weight in self._weights.values():
            weight.drop()

    def forget(self) -> None:
        """Discard what was derived from weights or attention windows; call it when they are replaced."""
        if self._compiled is not None:
            self._compiled.forget()
        if self.graphs is not None:
            self.graphs.forget()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's weights, whether the trainer's or copies, and of adapters."""
        return self.adapters.nbytes + sum(p.nbytes for p in self.module.parameters() if p.device.type != "meta")

    # ---- passes

    def memory(self, room: int, prompt_room: int, response_room: int, text_room: int | None = None) -> KeyValueMemory:
        """Allocate memory for keys and values; see :class:`KeyValueMemory`."""
        if self.kernels is not None and not self._caps_scores:
            return SharedPromptMemory(self.kernels, self.shape, room, prompt_room, response_room, text_room)
        return CopiedPromptMemory(self.shape, room, prompt_room, response_room, text_room)

    @property
    def shape(self) -> CacheShape:
        """Dimensions, format and place of keys and values."""
        text = self.module.config.get_text_config()
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        return CacheShape(text.num_hidden_layers, kv_heads, head_dim, self.dtype, self.device, self.buffers)

    @property
    def _caps_scores(self) -> bool:
        return bool(getattr(self.module.config.get_text_config(), "attn_logit_softcapping", None))

    def prefill(
        self,
        memory: KeyValueMemory,
        prompts: Sequence[Sequence[int]],
        cached: Sequence[int] | None = None,
        images: Sequence[PlacedImages | None] | None = None,
    ) -> Tensor:
        """Compute the prompts that ``memory`` admitted last; return (prompts, vocab) logits of the token after each.

        ``cached`` is the number of first tokens of each prompt that were admitted with their keys and values, and
        ``images`` are those of each prompt.
        """
        starts = cached or [0] * len(prompts)
        lengths = [len(prompt) for prompt in prompts]
        keys = Packing.from_lengths(lengths, self.device) if any(starts) else None
        packing = Packing.from_lengths([n - start for n, start in zip(lengths, starts, strict=True)], self.device, keys)
        new = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        ids = torch.tensor([token for tokens in new for token in tokens], device=self.device)
        images = images or [None] * len(prompts)
        positions = torch.cat(
            [self._positions(*bounds) for bounds in zip(starts, lengths, images, strict=True)], dim=-1
        ).to(self.device)
        last = packing.cu_seqlens[1:].long() - 1
        in_pass = images_of_pass(images, starts, lengths)
        return self._logits(ids, positions, last, PrefillPass(memory, packing), in_pass)

    def _positions(self, start: int, length: int, images: PlacedImages | None) -> Tensor:
        """Positions of the tokens of a prompt from ``start`` on, (tokens,), or (4, tokens) of a model with images."""
        if images is not None:
            return images.positions[:, start:]
        positions = torch.arange(start, length)
        return positions if self.vision is None else positions.expand(AXES, -1)

    def decode(self, memory: KeyValueMemory, tokens: Tensor) -> Tensor:
        """Append one token to each running row; return (rows, vocab) logits of the next."""
        if self._compiled is not None and isinstance(memory, SharedPromptMemory):
            logits = self._compiled(tokens, memory.responses, memory.shared, memory.places)
        elif self.graphs is not None and isinstance(memory, CopiedPromptMemory) and not self.routers.are_watched:
            logits = self.graphs(memory, tokens)
        else:
            logits = self._decode_logits(tokens, memory.offsets, memory.places, memory)
        memory.advance()
        return logits

    def _decode_logits(self, tokens: Tensor, offsets: Tensor, places: Any, memory: KeyValueMemory) -> Tensor:
        # Positions are (rows,), or (4, rows) of a model with images.
        positions = memory.positions if isinstance(memory, SharedPromptMemory) else places.positions
        if self.vision is not None:
            positions = torch.stack([positions, *[positions + offsets] * (AXES - 1)])
        return self._logits(tokens, positions, 0, DecodePass(memory, places))

    # ``indices`` selects tokens by index; 0 means all tokens, as ``logits_to_keep`` of Transformers.
    def _logits(
        self,
        ids: Tensor,
        positions: Tensor,
        indices: Tensor | int,
        native_pass: Pass,
        images: ImageInputs | None = None,
    ) -> Tensor:
        arguments: dict[str, object] = {
            "input_ids": ids[None],
            "position_ids": positions.unsqueeze(-2),  # (1, tokens), or (4, 1, tokens)
            "use_cache": False,
            "native_pass": native_pass,
        }
        if images is None:
            return self.module(**arguments, logits_to_keep=indices).logits[0]
        hidden = hidden_states(self.module.model, arguments, images.to(self.device))[0]
        head: Any = self.module.get_output_embeddings()
        return head(hidden[indices])

    def standard_logits(self, ids: Tensor, **images: Tensor) -> Tensor:
        """Compute (tokens, vocab) logits of one sequence by the model's own forward pass and attention.

        ``images`` are ``pixel_values`` and ``image_grid_thw``.
        """
        use_attention(self.module, self._standard_attention or "eager")
        inputs: dict[str, Tensor] = dict(images)
        if self.vision is not None:
            inputs["mm_token_type_ids"] = (ids == self.vision.image_token_id).int()[None]
        try:
            return self.module(input_ids=ids[None], use_cache=False, **inputs).logits[0]
        finally:
            self.use_native_attention()

    def use_native_attention(self) -> None:
        """Make the model's layers call :func:`native_attention_forward`."""
        use_attention(self.module, NATIVE_ATTENTION)


class _TiedWeight:
    """A parameter and the modules that hold it, several if it is tied.

    Args:
        without_memory: the initial parameter, on the meta device.
        quantized: how it is quantized; None if it is not.
    """

    __slots__ = ("_dtype", "_holders", "_pointer", "_quantized", "_without_memory", "shape")

    def __init__(self, without_memory: nn.Parameter, quantized: QuantizedWeight | None = None) -> None:
        self._holders: list[tuple[nn.Module, str]] = []
        self._without_memory, self._quantized = without_memory, quantized
        # `holds` runs for each weight at each update, with cold caches, so what it compares is kept here.
        self._pointer: int | None = None
        """Address of the parameter's memory if that belongs to a tensor passed to ``put``; None if it is a copy."""
        self._dtype: torch.dtype | None = None
        self.shape = without_memory.shape

    def add(self, module: nn.Module, name: str) -> None:
        self._holders.append((module, name))

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the parameter and ``tensor`` share memory, shape and format."""
        # The parameter keeps its memory alive, so another tensor cannot have the same address.
        return (
            tensor.data_ptr() == self._pointer
            and tensor.dtype is self._dtype
            and tensor.shape == self.shape
            and tensor.is_contiguous()
        )

    def put(self, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        if self._quantized is not None:
            self._put_quantized(self._quantized, tensor.to(device))
            return
        used = tensor.to(device, dtype)
        self._register(nn.Parameter(used, requires_grad=False))
        # A tensor that is not contiguous is copied again where it is used, so it cannot count as shared.
        self._pointer = used.data_ptr() if used.is_set_to(tensor) and used.is_contiguous() else None
        self._dtype = used.dtype

    def _put_quantized(self, quantized: QuantizedWeight, tensor: Tensor) -> None:
        values, scale = quantized.quantize(tensor)
        self._register(nn.Parameter(values, requires_grad=False))
        self._register(nn.Parameter(scale, requires_grad=False), SCALE)

    def drop(self) -> None:
        self._pointer = None
        self._register(self._without_memory)
        if self._quantized is not None:
            self._register(None, SCALE)

    def _register(self, parameter: nn.Parameter | None, ending: str = "") -> None:
        for module, name in self._holders:
            module.register_parameter(name + ending, parameter)


def _weights_by_name(model: nn.Module, quantized: Mapping[nn.Parameter, QuantizedWeight]) -> dict[str, _TiedWeight]:
    by_parameter: dict[int, _TiedWeight] = {}
    by_name = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = by_parameter.setdefault(id(parameter), _TiedWeight(parameter, quantized.get(parameter)))
            weight.add(module, name)
            by_name[f"{prefix}.{name}" if prefix else name] = weight
    return by_name


def _check_architecture(module: PreTrainedModel) -> None:
    text = module.config.get_text_config()
    other = layers_beyond_attention(getattr(text, "layer_types", None))
    reasons = {
        f"has layers of type {', '.join(other)}": bool(other),
        "has layers that carry a state from token to token": keeps_state(module),
        "has no exchangeable attention": not takes_any_attention(module),
        "reads the prompt with an encoder": bool(getattr(module.config, "is_encoder_decoder", False)),
        "has keys and values of other widths (latent attention)": bool(getattr(text, "kv_lora_rank", None)),
    }
    for reason, holds in reasons.items():
        if holds:
            raise cannot_serve(module, reason)


def cannot_serve(module: nn.Module, reason: str) -> RolloutError:
    """Make the error for a model that this engine does not support."""
    return RolloutError(
        f"the native engine cannot serve {type(module).__name__}: it {reason}. Set rollout.name to an engine that may: "
        f"{OTHER_ENGINES}."
    )


# ---- attention
#
# Transformers calls attention through a registry of functions. Ours, ``verl_native``, receives the current pass as a
# keyword argument of the model's forward. A pass is one row of tokens: new prompts, packed, or the newest token of each
# running row.


class Pass(Protocol):
    """One pass of the model, which computes the attention of its layers."""

    def attend(
        self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: object
    ) -> Tensor:
        """Map query, key and value, (1, heads, tokens, head_dim), to the output, (1, tokens, heads, head_dim)."""
        ...


class PrefillPass:
    """Pass over the new tokens of the prompts that ``memory`` admitted last, packed in one row.

    It stores their keys and values. ``packing.keys`` are the bounds of the whole prompts if some tokens are not new.
    """

    def __init__(self, memory: KeyValueMemory, packing: Packing) -> None:
        self.memory, self.packing = memory, packing

    def attend(
        self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any
    ) -> Tensor:
        """See :class:`Pass`."""
        parts = (states[0].split(self.packing.lengths, dim=1) for states in (key, value))
        self.memory.store(layer, list(zip(*parts, strict=True)))
        if self.packing.keys is not None:
            key, value = self.memory.prompts(layer)
        return packed_attention_forward(module, query, key, value, packing=self.packing, **settings)[0]


class DecodePass:
    """Pass over the newest token of each running row in ``memory``, at ``places`` there."""

    def __init__(self, memory: KeyValueMemory, places: object) -> None:
        self.memory, self.places = memory, places

    def attend(
        self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any
    ) -> Tensor:
        """See :class:`Pass`."""
        scale = settings.get("scaling")
        rule = AttentionRule(
            scale=query.shape[-1] ** -0.5 if scale is None else scale,
            window=settings.get("sliding_window"),
            softcap=settings.get("softcap"),
        )
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # (rows, heads, head_dim)
        return self.memory.decode(layer, query, key, value, rule, self.places).unsqueeze(0)


def native_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    native_pass: Pass | None = None,
    **settings: object,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer in the current pass, with the signature that Transformers expects.

    Shapes and settings are as for :func:`verl.workers.packed_attention.packed_attention_forward`.

    Raises:
        ConfigError: the layer needs something that packed attention lacks (attention sinks, a position bias).
        RolloutError: the layer has no number, or the model does not pass keyword arguments on to its layers.
    """
    layer = getattr(module, "layer_idx", None)
    if native_pass is None or not isinstance(layer, int):
        raise RolloutError(f"{type(module).__name__} does not know its number, or what its model was called with")
    return native_pass.attend(layer, module, query, key, value, attention_mask=attention_mask, **settings), None


ALL_ATTENTION_FUNCTIONS.register(NATIVE_ATTENTION, native_attention_forward)
