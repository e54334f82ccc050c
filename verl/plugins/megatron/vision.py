"""Images under megatron-core: Transformers' vision tower in front of the decoder, whole on every tensor-parallel rank.

The tower is on the first pipeline stage. Its ranks compute the same features of all images of a pass, of which each
takes those of its own tokens, where they share the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verl.plugins.megatron.library import TransformerLayer, parallel_state, tensor_parallel
from verl.utils.transformers_private import checkpoint_layers, no_init_weights
from verl.vision.families import TOWER
from verl.vision.model import ImageInputs, image_features

Places = tuple[Tensor, Tensor]
"""Index along the length and index of the row, (image tokens,) each."""


def build_tower(skeleton: nn.Module, dtype: torch.dtype, is_checkpointed: bool) -> nn.Module:
    """Build the vision tower of a Transformers backbone on the CPU, with uninitialised weights.

    Args:
        skeleton: the backbone, on any device.
        dtype: of the weights.
        is_checkpointed: keep the input of each block alone for the backward pass.
    """
    source: Any = skeleton.get_submodule(TOWER)
    with no_init_weights(), torch.device("cpu"):
        tower = type(source)(source.config).to(dtype)
    if is_checkpointed:
        checkpoint_layers(tower)
    for parameter in tower.parameters():
        # Ranks whose kernels add up in another order each time keep equal weights.
        parameter.average_gradients_across_tp_domain = True
    return tower


def placed_features(tower: nn.Module, images: ImageInputs, is_divided: bool) -> tuple[Places, list[Tensor]]:
    """Compute the features of this rank's image tokens, (image tokens, hidden) each, and where these are.

    Args:
        tower: the vision tower.
        images: of the pass.
        is_divided: the tensor-parallel ranks have a part of the length each.
    """
    features = image_features(tower, images)
    rows, steps = images.places.nonzero(as_tuple=True)
    if is_divided:
        # Adds up the gradients of all ranks' tokens, so that the towers stay equal.
        features = [tensor_parallel.copy_to_tensor_model_parallel_region(part) for part in features]
        part = images.places.shape[1] // parallel_state.get_tensor_model_parallel_world_size()
        first = part * parallel_state.get_tensor_model_parallel_rank()
        mine = ((steps >= first) & (steps < first + part)).nonzero().flatten()
        rows, steps = rows[mine], steps[mine] - first
        features = [part.index_select(0, mine) for part in features]
    return (steps, rows), features


class DeepstackLayer(TransformerLayer):
    """A layer after which features of images are added to the hidden states (DeepStack, arXiv:2406.04334).

    They come in the arguments for cross-attention, which no model here has: of all arguments of a layer, recomputation
    keeps those, with their gradients.
    """

    def forward(
        self,
        hidden_states: Tensor,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **settings: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer.

        Args:
            hidden_states: (length, bsz, hidden), this rank's part of the length.
            context: (layers with features, image tokens, hidden); None without images.
            context_mask: (2, image tokens), their :data:`Places`.
            settings: of any layer.
        """
        hidden, _ = super().forward(hidden_states=hidden_states, **settings)
        if context is not None and context_mask is not None and self.layer_number <= len(context):
            hidden = hidden.index_put(tuple(context_mask), context[self.layer_number - 1], accumulate=True)
        return hidden, context
