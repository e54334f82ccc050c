"""How a training engine places a model on its ranks."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from verl.base_config import BaseConfig, OneOrMany, section, setting, subsection
from verl.workers.config.model import ALWAYS_FUSED

Strategy = Literal["fsdp", "fsdp2", "megatron"]
DType = Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]

NO_MEGATRON = {"megatron": "Megatron is not in this version; use fsdp2"}
NO_ULYSSES = "sequence parallelism is not in this version; set it to 1 and use dynamic batches for long sequences"


@section
class WrapPolicyConfig(BaseConfig):
    """Which modules are sharded as units."""

    min_num_params: int = setting(0, ge=0)
    """Shard every module with at least this many parameters; 0 shards by layer class."""
    transformer_layer_cls_to_wrap: Annotated[tuple[str, ...] | None, OneOrMany] = setting(None)
    """Class names of the layers that are sharded as units; null takes those that the model itself names."""


@section
class MixedPrecisionConfig(BaseConfig):
    """Number formats inside a sharded forward and backward pass."""

    param_dtype: DType = setting("bf16")
    """Format in which parameters are gathered and used."""
    reduce_dtype: DType = setting("fp32")
    """Format in which gradients are summed over ranks."""
    buffer_dtype: DType = setting("fp32")
    """Format of buffers."""


@section
class FSDPEngineConfig(BaseConfig):
    """One model under FSDP: sharding, precision, offload."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPEngineConfig"

    wrap_policy: WrapPolicyConfig = subsection(WrapPolicyConfig)
    """Which modules are sharded as units."""
    mixed_precision: MixedPrecisionConfig | None = setting(None)
    """Number formats inside the passes; null computes in `dtype` and sums gradients in fp32."""
    param_offload: bool = setting(False)
    """Keep parameters in host memory while the model is idle."""
    optimizer_offload: bool = setting(False)
    """Keep the optimizer state in host memory while the model is idle."""
    offload_policy: bool = setting(False)
    """Let FSDP2 itself stream parameters from host memory during the passes."""
    reshard_after_forward: bool = setting(True)
    """Give gathered parameters back after each layer's forward: less memory, one more gather."""
    fsdp_size: int = setting(-1, ge=-1)
    """Ranks that share one copy of the model; -1 means all of them."""
    forward_prefetch: bool = setting(False)
    """Gather the next layer while this one computes."""
    model_dtype: DType = setting("fp32")
    """Format in which the trained parameters are stored."""
    use_orig_params: bool = setting(False, hint="FSDP1 only; FSDP2 always keeps the original parameters")
    """Keep the original parameter objects (FSDP1)."""
    seed: int = setting(42, ge=0)
    """Seed of this model's random numbers (dropout, new heads)."""
    full_determinism: bool = setting(False)
    """Allow only deterministic kernels: slower, bit-equal from run to run."""
    ulysses_sequence_parallel_size: Annotated[int, "ranks"] = setting(1, ge=1, refuse=NO_ULYSSES)
    """Ranks that share one sequence."""
    entropy_from_logits_with_chunking: bool = setting(False, hint=ALWAYS_FUSED)
    """Compute the entropy in slices: less memory, a little slower."""
    use_torch_compile: bool = setting(True, hint="this version runs its small kernels uncompiled; results are the same")
    """Compile the log-prob and entropy kernels."""
    entropy_checkpointing: bool = setting(False, hint=ALWAYS_FUSED)
    """Compute the entropy again in the backward pass instead of keeping its inputs."""
    forward_only: bool = setting(False)
    """The model is never trained: no optimizer, no gradients."""
    strategy: Strategy = setting("fsdp", refuse_values=NO_MEGATRON)
    """Sharding back end; `fsdp` and `fsdp2` are both served by FSDP2."""
    dtype: DType = setting("bfloat16")
    """Format of the computation (parameters are cast to it inside the passes)."""
