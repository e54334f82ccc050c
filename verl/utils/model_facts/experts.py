"""Sizes of the experts of a model, from its config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """The mixtures of experts of a model, whose feed-forward parts are gated ones."""

    count: int
    """Experts of a layer among which its router chooses."""
    per_token: int
    """Experts that a token goes to."""
    width: int
    """Inner width of an expert."""
    shared_width: int
    """Inner width of what every token of such a layer passes beside its experts; 0 without."""
    sparse: tuple[bool, ...]
    """True for each layer that has experts."""

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        return tuple(layer for layer, has_experts in enumerate(self.sparse) if has_experts)

    @classmethod
    def from_config(cls, text: object) -> ExpertSizes | None:
        """Read them; None if no layer has experts.

        Args:
            text: Transformers' config of a language model, or the entries of its config.json as attributes.
        """

        def number(name: str) -> int:
            return getattr(text, name, None) or 0

        count = number("num_experts") or number("num_local_experts") or number("n_routed_experts")
        dense, first = set(getattr(text, "mlp_only_layers", None) or ()), number("first_k_dense_replace")
        step = number("decoder_sparse_step") or 1
        layers = range(number("num_hidden_layers"))
        sparse = tuple(layer >= first and layer not in dense and (layer + 1) % step == 0 for layer in layers)
        if not count or not any(sparse):
            return None
        width = number("moe_intermediate_size") or number("intermediate_size")
        shared = number("shared_expert_intermediate_size") or number("n_shared_experts") * width
        return cls(
            count=count, per_token=number("num_experts_per_tok"), width=width, shared_width=shared, sparse=sparse
        )
