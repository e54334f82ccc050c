"""Speed flags of `override_transformer_config`: passed to megatron-core, or named in the log where they cannot be."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from verl.config import McoreEngineConfig
from verl.config.megatron_flags import IDLE, PASSED, PIPELINE_LAYOUT
from verl.config.pipeline_layout import layout_of_chunks
from verl.plugins.megatron.groups import Layout

logger = logging.getLogger(__name__)

_LAYOUT = "pipeline_model_parallel_layout"
_ON_GPUS = "it takes a GPU"
_EXTENSIONS: Mapping[str, tuple[str, str]] = {
    "gradient_accumulation_fusion": ("fused_weight_gradient_mlp_cuda", "Apex with its CUDA extensions"),
    "moe_permute_fusion": ("transformer_engine", "TransformerEngine"),
    **dict.fromkeys(("moe_enable_deepep", "moe_flex_dispatcher_backend", "flex"), ("deep_ep", "DeepEP")),
}
"""Flags that need an extension of CUDA: its module, and its name."""
_FLEX_FLAGS = ("moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms")


def transformer_fields(
    engine: McoreEngineConfig, layout: Layout, device: torch.device, has_experts: bool
) -> dict[str, object]:
    """Return the fields of ``TransformerConfig`` that divide the layers, and those of speed that this device has.

    What it lacks is logged by rank 0, in one line for each set of flags.
    """
    override = {name: value for name, value in engine.override_transformer_config.items() if value is not None}
    obstacles = dict(_obstacles(override, layout, device, has_experts))
    if obstacles and dist.get_rank() == 0:
        _warn("; ".join(f"{name} ({why})" for name, why in obstacles.items()))
    passed = [*PASSED, *(PIPELINE_LAYOUT if layout.pipeline > 1 else ())]
    if (chunks := layout_of_chunks(override.get(_LAYOUT))) is not None:
        # megatron-core takes no spaces, and the heads of multi-token prediction are built apart, on the last stage.
        override[_LAYOUT] = "|".join(chunks).replace("m", "")
    return {name: override[name] for name in passed if name in override and name not in obstacles}


@functools.cache  # actor, critic and reference of a process have the same flags
def _warn(flags: str) -> None:
    logger.warning("no effect: flags of megatron.override_transformer_config: %s", flags)


def _why_not_in_pipeline(name: str, layout: Layout) -> str | None:
    if name in PIPELINE_LAYOUT and layout.pipeline == 1:
        return "there is no pipeline"
    needs_interleaving = name in ("microbatch_group_size_per_vp_stage", "overlap_p2p_comm_warmup_flush")
    return "the pipeline is not interleaved" if needs_interleaving and layout.pieces == 1 else None


def _obstacles(
    override: Mapping[str, object], layout: Layout, device: torch.device, has_experts: bool
) -> Iterator[tuple[str, str]]:
    """Yield flags that are on, with what keeps them from having an effect."""
    has_flex = override.get("moe_token_dispatcher_type") == "flex"
    for name, value in override.items():
        why = IDLE.get(name) or _why_not_in_pipeline(name, layout)
        if why is None and name.startswith("moe_") and not has_experts:
            why = "the model has no experts"
        elif name in ("bias_activation_fusion", "bias_dropout_fusion") and device.type == "cpu":
            why = _ON_GPUS
        elif (extension := _EXTENSIONS.get("flex" if value == "flex" else name)) is not None:
            module, title = extension
            if device.type == "cpu":
                why = _ON_GPUS
            elif importlib.util.find_spec(module) is None:
                why = f"{title} is not installed"
            elif value == "flex" and layout.expert * layout.expert_tensor == 1:
                why = "one rank has all experts"
        if value == "flex":
            has_flex = why is None
        if why is not None and value is not False:
            yield name, f"{why}; alltoall is used" if value == "flex" and has_experts else why
    if not has_flex:  # what belongs to it is of no use either
        yield from (
            (name, "it belongs to moe_token_dispatcher_type=flex") for name in _FLEX_FLAGS if override.get(name)
        )
