"""The only part of VeOmni that is used: the class of a model's backbone, bound to VeOmni's kernels."""

from __future__ import annotations

import copy
import dataclasses

import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel
from veomni.arguments.arguments_types import OpsImplementationConfig
from veomni.distributed.parallel_state import init_parallel_state, is_parallel_state_initialized
from veomni.models import build_foundation_model

from verl.errors import ConfigError

_LIGER_SETTINGS = ("rms_norm_implementation", "swiglu_mlp_implementation", "rotary_pos_emb_implementation")


def backbone_class(
    hf_config: PretrainedConfig, moe_implementation: str, uses_liger: bool = False
) -> type[PreTrainedModel]:
    """Return VeOmni's implementation of the backbone of ``hf_config``'s model.

    In the whole process, experts are computed by ``moe_implementation``, and norms, gates and rotations by Liger's
    kernels if ``uses_liger``; other layers are PyTorch's.

    Raises:
        ConfigError: VeOmni has no such model, or no such kernel on this device.
    """
    if not is_parallel_state_initialized():  # its models ask it who shares sequences: nobody does, for VeOmni
        ranks = dist.get_world_size()
        init_parallel_state(dp_size=ranks, dp_shard_size=ranks)
    kernels = {field.name: "eager" for field in dataclasses.fields(OpsImplementationConfig)}
    kernels |= {"moe_implementation": moe_implementation, "qat_implementation": "none"}
    if uses_liger:
        kernels |= dict.fromkeys(_LIGER_SETTINGS, "liger_kernel")
    try:
        model = build_foundation_model(
            copy.deepcopy(hf_config),
            attn_implementation="eager",
            init_device="meta",
            ops_implementation=OpsImplementationConfig(**kernels),
        )
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"strategy=veomni: VeOmni cannot build a {hf_config.model_type} with "
            f"moe_implementation={moe_implementation} here: {error} Use strategy=fsdp2."
        ) from error
    return type(model.base_model)
