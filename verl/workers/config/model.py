"""The policy's model and tokenizer."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from verl.base_config import BaseConfig, OneOrMany, section, setting, subsection

NO_LORA = "LoRA is not in this version; leave it at its default and train all parameters"
ALWAYS_FUSED = "log-probs and entropy always come from hidden states in slices, never from all logits at once"
PART_OF_MTP = "part of multi-token prediction, which is not in this version"
PART_OF_LORA = "part of LoRA, which is not in this version"
NO_OFFLOAD = "activation offload is not in this version; use enable_gradient_checkpointing=true"
NO_SHM = "copying models or data into shared memory is not in this version; set use_shm=false"
NO_TILED_MLP = "the tiled MLP is not in this version; use gradient checkpointing and smaller token budgets"


@section
class FusedKernelConfig(BaseConfig):
    """Choice of the fused log-prob kernel."""

    impl_backend: str = setting("torch", hint=ALWAYS_FUSED)
    """Implementation of the fused kernels."""


@section
class TiledMlpConfig(BaseConfig):
    """Feed-forward layers computed in slices of the sequence."""

    enabled: bool = setting(False, refuse=NO_TILED_MLP)
    """Compute feed-forward layers in slices."""
    num_shards: int = setting(4, ge=1)
    """Number of slices."""


@section
class MtpConfig(BaseConfig):
    """Multi-token prediction heads."""

    hydra_target: ClassVar[str] = "verl.workers.config.MtpConfig"

    enable: bool = setting(False, refuse="multi-token prediction is not in this version; set mtp.enable=false")
    """Use the model's multi-token prediction heads."""
    enable_train: bool = setting(False)
    """Train the heads."""
    enable_rollout: bool = setting(False)
    """Draft with the heads during rollout."""
    detach_encoder: bool = setting(False)
    """Stop the heads' gradient before the trunk."""
    mtp_loss_scaling_factor: float = setting(0.1, ge=0)
    """Weight of the heads' loss."""
    speculative_algorithm: str = setting("EAGLE")
    """Drafting algorithm of the rollout engine."""
    speculative_num_steps: int = setting(2, ge=1)
    """Drafting steps."""
    speculative_eagle_topk: int = setting(2, ge=1)
    """Candidates per drafting step."""
    speculative_num_draft_tokens: int = setting(4, ge=1)
    """Tokens per draft."""
    method: str = setting("mtp")
    """Name under which the rollout engine knows the heads."""
    num_speculative_tokens: int = setting(1, ge=1)
    """Tokens that the heads predict ahead."""


@section
class HFModelConfig(BaseConfig):
    """A Transformers model: where it lies and how it is loaded and run."""

    hydra_target: ClassVar[str] = "verl.workers.config.HFModelConfig"

    path: str = setting("~/models/deepseek-llm-7b-chat", path=True)
    """Folder of the model, or its name on the Hugging Face hub."""
    hf_config_path: str | None = setting(None, path=True)
    """Folder of the model's config, where it is not the model's own."""
    tokenizer_path: str | None = setting(None, path=True)
    """Folder of the tokenizer, where it is not the model's own."""
    use_shm: bool = setting(False, refuse=NO_SHM)
    """Copy the model into shared memory before loading."""
    trust_remote_code: bool = setting(False)
    """Run Python code that comes with the model."""
    custom_chat_template: str | None = setting(None)
    """Jinja chat template in place of the tokenizer's own."""
    external_lib: str | None = setting(None)
    """Module that every worker imports before it loads the model (to register your own model)."""
    override_config: dict[str, Any] = setting(factory=dict)
    """Values that replace entries of the model's config, such as `attn_implementation`."""
    enable_gradient_checkpointing: bool = setting(True)
    """Keep only each layer's input and compute the rest again in the backward pass."""
    enable_activation_offload: bool = setting(False, refuse=NO_OFFLOAD)
    """Move the kept activations to host memory."""
    use_remove_padding: bool = setting(True)
    """Pack sequences one after the other, so that no time goes into padding."""
    lora_rank: int = setting(0, ge=0, refuse=NO_LORA)
    """Rank of the LoRA adapter; 0 trains all parameters."""
    lora_alpha: int = setting(16, ge=1, hint=PART_OF_LORA)
    """Scale of the LoRA adapter."""
    target_modules: Annotated[tuple[str, ...] | str, "module names"] = setting("all-linear", hint=PART_OF_LORA)
    """Layers that get an adapter."""
    exclude_modules: Annotated[tuple[str, ...] | None, OneOrMany] = setting(None, hint=PART_OF_LORA)
    """Layers that get none."""
    lora_adapter_path: str | None = setting(None, refuse=NO_LORA)
    """Adapter to go on training."""
    use_liger: bool = setting(False, refuse="Liger kernels are not in this version; set use_liger=false")
    """Patch the model with Liger kernels."""
    use_fused_kernels: bool = setting(False, hint=ALWAYS_FUSED)
    """Compute log-probs and entropy straight from the last hidden state."""
    fused_kernel_options: FusedKernelConfig = subsection(FusedKernelConfig)
    """Choice of the fused log-prob kernel."""
    tiled_mlp: TiledMlpConfig = subsection(TiledMlpConfig, hint="part of the tiled MLP, which is not in this version")
    """Feed-forward layers in slices."""
    mtp: MtpConfig = subsection(MtpConfig, hint=PART_OF_MTP)
    """Multi-token prediction heads."""
