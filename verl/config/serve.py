"""Root section of ``python -m verl.trainer.main_serve``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from verl.config.base import BaseConfig, section, setting, subsection
from verl.config.machine import DTYPE
from verl.config.megatron import ranks_per_copy
from verl.config.model import FP16, DType, FSDPEngineConfig, HFModelConfig
from verl.config.problems import Problem
from verl.config.rollout import RolloutConfig
from verl.config.trainer import PlacementConfig, RayConfig

OWN_MODEL = 1
"""Places for adapters on the ranks beside those of clients: one for saved weights whose prompts are scored."""


@section
class ServerConfig(BaseConfig):
    """The HTTP service: its address, its limits and its files."""

    port: int = setting(8000, ge=0, le=65535)
    """Port of the loopback address; 0 takes a free one."""
    model_name: str | None = setting(None)
    """Name of the model by which clients ask for it, besides its path; null is `model.path`."""
    state_dir: str = setting("serve_state", path=True)
    """Folder of the states and weights that clients save, which a later server finds again."""
    max_models: int = setting(4, ge=1)
    """Models that are in the memory of the ranks at once. Others wait on the disk until they are asked for."""
    max_lora_rank: int = setting(32, ge=1)
    """Largest rank of the LoRA adapters that a client may ask for; each place has memory for it."""
    max_length: int = setting(4096, ge=2)
    """Maximum length of a training sequence, or of a prompt and its response together, in tokens."""
    max_tokens_per_pass: int = setting(16384, ge=2)
    """Tokens that a rank computes in one pass, more than `server.max_length`; results do not depend on it."""
    seed: int = setting(1, ge=0)
    """Seed of the adapters of models and of the responses for which clients give no seed."""


@section
class SamplerEngineConfig(BaseConfig):
    """The engine that samples for clients; sampling settings come with their requests."""

    name: Literal["native", "hf"] = setting("native")
    """Rollout engine, which runs in the process of each rank beside the training engine."""
    dtype: DType = setting("bfloat16", interpolation=DTYPE)
    """Precision of the weights inside the engine; by default bfloat16 on GPUs and float32 on a CPU."""
    gpu_memory_utilization: float = setting(0.5, gt=0, le=1)
    """Fraction of the free memory that the engine may use for keys and values."""
    max_num_seqs: int = setting(256, ge=1)
    """Sequences that the engine runs at once."""
    enforce_eager: bool = setting(False)
    """Do not capture CUDA graphs."""


@section
class ServeConfig(BaseConfig):
    """A service that clients train with."""

    trainer: PlacementConfig = subsection(PlacementConfig)
    """Ranks and device."""
    server: ServerConfig = subsection(ServerConfig)
    """The HTTP service."""
    model: HFModelConfig = subsection(HFModelConfig)
    """The base model."""
    engine: FSDPEngineConfig = subsection(FSDPEngineConfig)
    """Training engine of the base model."""
    rollout: SamplerEngineConfig = subsection(SamplerEngineConfig)
    """Rollout engine."""
    ray_kwargs: RayConfig = subsection(RayConfig)
    """Settings with which Ray is started."""

    def problems(self, path: str) -> Iterator[Problem]:
        """Adapters of clients lie in the memory of the ranks, side by side."""
        model, engine, server = self.model, self.engine, self.server
        if model.lora_adapter_path is not None:
            cause = "each client has adapters of its own over the base model"
            yield Problem(
                "model.lora_adapter_path", model.lora_adapter_path, cause, "null", "merge them into the model"
            )
        if model.lora_rank:
            cause = "clients choose the rank of their adapters, up to server.max_lora_rank"
            yield Problem("model.lora_rank", model.lora_rank, cause, "0", "set server.max_lora_rank")
        if model.lora.use_dora or model.lora.target_parameters or model.lora.use_rslora:
            cause = "the adapters of several clients in one pass are plain LoRA of linear layers"
            yield Problem("model.lora", "a variant", cause, "the defaults of model.lora", "leave it out")
        if engine.strategy in ("megatron", "veomni") or ranks_per_copy(engine) > 1 or engine.fsdp_size != -1:
            cause = "adapters of several clients are computed by FSDP2 on ranks with whole sequences"
            remedy = "leave strategy, fsdp_size and the parallel sizes of engine at their defaults"
            yield Problem("engine", "another layout", cause, remedy=remedy)
        if engine.param_offload or engine.offload_policy or engine.forward_only:
            cause = "adapters stay on the device from one request to the next"
            yield Problem("engine.param_offload", True, cause, "false for it, offload_policy and forward_only")
        if engine.dtype in FP16:
            cause = "the gradients of clients are summed as they are, and small ones are 0 in fp16"
            yield Problem("engine.dtype", engine.dtype, cause, "bfloat16, float32")
        if server.max_tokens_per_pass <= server.max_length:
            cause = f"a pass has whole sequences, of up to server.max_length={server.max_length} tokens and a target"
            yield Problem("server.max_tokens_per_pass", server.max_tokens_per_pass, cause, f"> {server.max_length}")

    @property
    def name(self) -> str:
        """Name of the base model for clients."""
        return self.server.model_name or self.model.path

    @property
    def trained_model(self) -> HFModelConfig:
        """The model whose adapters are those of all clients side by side, as one adapter of a larger rank."""
        rank = self.server.max_lora_rank * (self.server.max_models + OWN_MODEL)
        return replace(self.model, lora_rank=rank, lora_alpha=rank)

    @property
    def sampled_model(self) -> HFModelConfig:
        """The model with the adapter of one client, as a rollout engine has it."""
        return replace(self.model, lora_rank=self.server.max_lora_rank)

    @property
    def full_rollout(self) -> RolloutConfig:
        """Settings of the rollout engine, for requests of any lengths that fit, with weights kept between them."""
        longest = self.server.max_length
        return RolloutConfig(
            **{name: self.rollout[name] for name in self.rollout},
            tensor_model_parallel_size=1,
            free_cache_engine=False,
            seed=self.server.seed,
            prompt_length=longest - 1,
            response_length=1,
            max_model_len=longest,
        )
