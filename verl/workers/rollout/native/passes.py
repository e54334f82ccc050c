"""A pass of tokens through the model, as its attention layers see it.

Transformers calls attention through a registry of functions; ours, ``verl_native``, gets the pass that it belongs to
as an argument of the model's forward. A pass is one row of tokens: prompts that are new, one after the other, or the
newest token of each running row.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verl.errors import RolloutError
from verl.workers.packed_attention import Packing, packed_attention_forward
from verl.workers.rollout.native.memory import AttentionRule, KeyValueMemory

NATIVE_ATTENTION = "verl_native"


class Pass(Protocol):
    """What an attention layer asks of the pass."""

    def attend(
        self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any
    ) -> Tensor:
        """(1, tokens, heads, head_dim) from (1, heads, tokens, head_dim)."""
        ...


class PrefillPass:
    """Whole prompts, packed; their keys and values are kept.

    Args:
        memory: which has let the prompts in.
        packing: of the prompts.
    """

    def __init__(self, memory: KeyValueMemory, packing: Packing) -> None:
        self.memory, self.packing = memory, packing

    def attend(
        self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any
    ) -> Tensor:
        """See :class:`Pass`."""
        parts = (states[0].split(self.packing.lengths, dim=1) for states in (key, value))
        self.memory.store(layer, list(zip(*parts, strict=True)))
        return packed_attention_forward(module, query, key, value, packing=self.packing, **settings)[0]


class DecodePass:
    """The newest token of each running row.

    Args:
        memory: of the rows.
    """

    def __init__(self, memory: KeyValueMemory) -> None:
        self.memory = memory

    def attend(
        self, layer: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **settings: Any
    ) -> Tensor:
        """See :class:`Pass`."""
        scale = settings.get("scaling")
        rule = AttentionRule(
            query.shape[-1] ** -0.5 if scale is None else scale, settings.get("sliding_window"), settings.get("softcap")
        )
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # (rows, heads, head_dim)
        return self.memory.decode(layer, query, key, value, rule).unsqueeze(0)


def native_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    native_pass: Pass | None = None,
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
    layer = getattr(module, "layer_idx", None)
    if native_pass is None or not isinstance(layer, int):
        raise RolloutError(f"{type(module).__name__} does not know its number, or what its model was called with")
    return native_pass.attend(layer, module, query, key, value, attention_mask=attention_mask, **settings), None


ALL_ATTENTION_FUNCTIONS.register(NATIVE_ATTENTION, native_attention_forward)
