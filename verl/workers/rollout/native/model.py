"""The model's own Transformers code, around the trainer's tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from verl.errors import RolloutError
from verl.utils.allocator import LentPages
from verl.utils.cpu_kernels import cpu_kernels
from verl.utils.model import causal_lm_without_weights
from verl.workers.packed_attention import Packing
from verl.workers.rollout.native.fast_layers import use_fast_forward
from verl.workers.rollout.native.memory import CopiedPromptMemory, KeyValueMemory, Shape, SharedPromptMemory
from verl.workers.rollout.native.passes import NATIVE_ATTENTION, DecodePass, Pass, PrefillPass
from verl.workers.rollout.native.step import compiled_step

OTHER_ENGINES = "vllm, sglang, hf"


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
        config = copy.deepcopy(config)  # which says what attention runs
        self.module = causal_lm_without_weights(config, dtype, device, trust_remote_code)
        self.dtype, self.device = dtype, device
        self.pages = LentPages() if device.type == "cpu" else None
        """Memory of keys and values between rollouts."""
        _check_architecture(self.module)
        self.kernels = cpu_kernels() if device.type == "cpu" and dtype is torch.float32 else None
        self._standard_attention = self.module.config._attn_implementation
        self._places = _places_of_parameters(self.module)
        self._count = len(set(self._places.values()))
        self._step = compiled_step(self.kernels, self.module)
        if device.type == "cpu":
            for layer in self.module.modules():
                use_fast_forward(layer, self.kernels)
        self.use_native_attention()

    # ---- weights

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Take the tensors themselves where device and format fit, copies elsewhere; what was wrong with them.

        Tensors that it holds already cost only the look that tells so: whatever has changed in them is seen.
        """
        problems, loaded, changed = [], set(), False
        for name, tensor in weights:
            place = self._places.get(name)
            if place is not None and place.holds(tensor):
                loaded.add(place)
                continue
            changed = True
            current = self._buffer(name) if place is None else place.parameter
            if current is None:
                problems.append(f"{name} is unknown")
            elif current.shape != tensor.shape:
                problems.append(f"{name} has shape {list(tensor.shape)} where {list(current.shape)} is needed")
            elif place is None:
                current.copy_(tensor)
            else:
                place.put(tensor.detach(), self.device, self.dtype)
                loaded.add(place)
        if changed:
            self.forget()
        if len(loaded) == self._count:
            return problems
        missing = {place: name for name, place in reversed(self._places.items()) if place not in loaded}
        return problems + [f"{name} is missing" for name in reversed(missing.values())]

    def _buffer(self, name: str) -> Tensor | None:
        return dict(self.module.named_buffers()).get(name)

    def drop(self) -> None:
        """Keep no tensor alive."""
        self.forget()
        for place in self._places.values():
            place.drop()

    def forget(self) -> None:
        """Weights or windows are others now: nothing that was made of them is used again."""
        if self._step is not None:
            self._step.forget()

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
        return Shape(text.num_hidden_layers, kv_heads, head_dim, self.dtype, self.device, self.pages)

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
        return self._logits(ids, positions, last, PrefillPass(memory, packing))

    def decode(self, memory: KeyValueMemory, tokens: Tensor) -> Tensor:
        """Append a token to each running row; (rows, vocab) logits of the one after it."""
        if self._step is not None and isinstance(memory, SharedPromptMemory):
            logits = self._step(memory, tokens)
        else:
            logits = self._logits(tokens, memory.positions, 0, DecodePass(memory))
        memory.advance()
        return logits

    # 0 of ``wanted`` stands for all tokens, as Transformers has it.
    def _logits(self, ids: Tensor, positions: Tensor, wanted: Tensor | int, native_pass: Pass) -> Tensor:
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
        self.module.set_attn_implementation(self._standard_attention or "eager")
        try:
            return self.module(input_ids=ids[None], use_cache=False).logits[0]
        finally:
            self.use_native_attention()

    def use_native_attention(self) -> None:
        """Attend through :func:`verl.workers.rollout.native.passes.native_attention_forward`."""
        self.module.set_attn_implementation(NATIVE_ATTENTION)


class _Place:
    """Where a parameter stands in the module: several places if it is tied.

    Args:
        without_memory: the parameter as the module begins, on the meta device.
    """

    __slots__ = ("_dtype", "_places", "_pointer", "_shape", "_without_memory")

    def __init__(self, without_memory: nn.Parameter) -> None:
        self._places: list[tuple[nn.Module, str]] = []
        self._without_memory = without_memory
        # An update is a look at each weight when none is in a cache: so what a look needs is kept beside the parameter.
        self._pointer: int | None = None
        """Where the parameter begins, if it is the memory of a tensor that was given, and of no copy."""
        self._dtype: torch.dtype | None = None
        self._shape = without_memory.shape

    def add(self, module: nn.Module, name: str) -> None:
        self._places.append((module, name))

    @property
    def parameter(self) -> Tensor:
        module, name = self._places[0]
        return getattr(module, name)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the parameter is this tensor: the same memory, shape and format, whatever its numbers are now."""
        # The parameter keeps its memory alive: nothing else can begin where it does.
        return (
            tensor.data_ptr() == self._pointer
            and tensor.dtype is self._dtype
            and tensor.shape == self._shape
            and tensor.is_contiguous()
        )

    def put(self, tensor: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        used = tensor.to(device, dtype)
        self._register(nn.Parameter(used, requires_grad=False))
        # What is not contiguous is copied once more by whoever computes with it.
        self._pointer = used.data_ptr() if used.is_set_to(tensor) and used.is_contiguous() else None
        self._dtype = used.dtype

    def drop(self) -> None:
        self._pointer = None
        self._register(self._without_memory)

    def _register(self, parameter: nn.Parameter) -> None:
        for module, name in self._places:
            module.register_parameter(name, parameter)


def _places_of_parameters(model: nn.Module) -> dict[str, _Place]:
    places: dict[int, _Place] = {}
    names = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            place = places.setdefault(id(parameter), _Place(parameter))
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
        "has keys and values of other widths (latent attention)": bool(getattr(text, "kv_lora_rank", None)),
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
