"""Configuration of a model: its files, sharding, precision, optimizer and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

from verl.config.base import BaseConfig, OneOrMany, config_fields, section, setting, subsection
from verl.config.machine import DTYPE, STORED_DTYPE, stored_dtype
from verl.config.prediction import MtpConfig
from verl.config.problems import Problem

ModuleNames = str | tuple[str, ...]
"""A regular expression that matches full names, or a list of endings of names; see ``peft.LoraConfig``."""
ALL_LINEAR = "all-linear"


def pattern_problems(path: str, settings: Mapping[str, ModuleNames | None]) -> Iterator[Problem]:
    """Report settings that select layers and are no valid regular expression; ``path`` is the section's."""
    for name, value in settings.items():
        if not isinstance(value, str) or value == ALL_LINEAR:
            continue
        try:
            re.compile(value)
        except re.error as error:
            remedy = "write a regular expression that matches whole names, or a list of their endings"
            yield Problem(f"{path}.{name}".lstrip("."), value, f"no regular expression: {error}", remedy=remedy)


@section
class LoRAConfig(BaseConfig):
    """Variants of LoRA."""

    use_rslora: bool = setting(False)
    """Scale by `lora_alpha` / √`lora_rank` (arXiv:2312.03732) instead of `lora_alpha` / `lora_rank`."""
    use_dora: bool = setting(False)
    """Also train the norm of each row of a weight (DoRA, arXiv:2402.09353); slower."""
    target_parameters: tuple[str, ...] = setting(())
    """Weights of several experts that get an adapter for each expert, by endings: `[gate_up_proj,down_proj]`."""


@section
class PretrainedModelConfig(BaseConfig):
    """A Transformers model: its files, and how they are loaded. Policy, critic and reward models share this section."""

    path: str = setting("~/models/deepseek-llm-7b-chat", path=True, remote=True)
    """Folder of the model, a `.gguf` file, which is converted once, or the model's name on the Hugging Face hub."""
    use_shm: bool = setting(False)
    """Read the files of this section from copies in shared memory (/dev/shm), made once on each machine if they fit."""
    trust_remote_code: bool = setting(False)
    """Run Python code that comes with the model."""
    external_lib: str | None = setting(None)
    """Module that every worker imports before it loads the model (to register your own model)."""
    override_config: dict[str, object] = setting(factory=dict)
    """Values that replace entries of the model's config, such as `attn_implementation`. A rate of dropout is used in
    training only if it is named here. Updates then compute other log-probs than sampling and the reference: the first
    ratios of a policy are not 1, and `ppo_kl` is not 0 (0.8 with `attention_dropout: 0.3` in a small model)."""
    use_remove_padding: bool = setting(False)
    """Pack sequences one after another, so that padding is not computed."""
    use_liger: bool | None = setting(None)
    """True if norms, gates of MLPs and rotations on a GPU are Liger's kernels, under FSDP and in the engine `native`.
    null: where the package `liger-kernel` is installed. On CPUs and under Megatron it has no effect."""


@section
class TrainedModelConfig(PretrainedModelConfig):
    """A Transformers model that is trained, as a whole or by LoRA adapters. Policy and critic share this section."""

    tokenizer_path: str | None = setting(None, path=True, remote=True)
    """Folder of the tokenizer; null uses the model's folder."""
    enable_gradient_checkpointing: bool = setting(True)
    """Store only each layer's input and recompute the other activations in the backward pass."""
    enable_activation_offload: bool = setting(False)
    """Keep the activations for the backward pass in CPU memory; with `enable_gradient_checkpointing` these are each
    layer's input. Slower, with less memory on a GPU."""
    lora_rank: int = setting(0, ge=0)
    """Rank of the LoRA adapters that are trained instead of the model's weights; 0 trains the weights."""
    lora_alpha: float = setting(16, gt=0)
    """Adapters are scaled by `lora_alpha` / `lora_rank`."""
    target_modules: ModuleNames = setting(ALL_LINEAR)
    """Layers that get adapters: `all-linear` (all but the head), endings of names, or a regular expression."""
    exclude_modules: ModuleNames | None = setting(None)
    """Layers without adapters, as endings of names or a regular expression."""
    lora_adapter_path: str | None = setting(None, path=True, remote=True)
    """Folder of trained adapters, in peft's format, to continue from; rank and layers are read from its config."""
    lora: LoRAConfig = subsection(LoRAConfig)
    """Variants of LoRA."""

    @property
    def has_adapters(self) -> bool:
        """True if LoRA adapters (and a critic's head) are trained instead of all weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None

    def problems(self, path: str) -> Iterator[Problem]:
        """Layers are chosen by expressions that can be read."""
        patterns = {"target_modules": self.target_modules, "exclude_modules": self.exclude_modules}
        yield from pattern_problems(path, patterns)


@section
class HFModelConfig(TrainedModelConfig):
    """A Transformers model: its files, and how it is loaded and run."""

    hydra_target: ClassVar[str] = "verl.workers.config.HFModelConfig"

    hf_config_path: str | None = setting(None, path=True, remote=True)
    """Folder of the model's config; null uses the model's folder."""
    custom_chat_template: str | None = setting(None)
    """Chat template instead of the tokenizer's: Jinja text, or the path of a file with it."""
    use_remove_padding: bool = setting(True)
    mtp: MtpConfig = subsection(MtpConfig)
    """Multi-token prediction."""

    @classmethod
    def like(cls, model: PretrainedModelConfig) -> HFModelConfig:
        """Return the model of another section, such as the critic's, as the section that engines take."""
        return cls(**{name: model[name] for name in config_fields(cls).keys() & config_fields(type(model)).keys()})


Strategy = Literal["fsdp", "fsdp2", "veomni", "megatron"]
OTHER_ENGINES = ("torchtitan", "automodel", "mindspeed", "mlite", "fsdp_turbo")
"""Training back ends of verl's releases that are not in this version."""
_ANOTHER = "this training back end is not in this version; use fsdp2 or megatron"
_SHARDS = "it is not in this version; fsdp2 shards the same models, and tensor_parallel_size divides their matrices"
NO_OTHER_BACK_END = dict.fromkeys((*OTHER_ENGINES, "mindspeed_megatron"), _ANOTHER) | {
    "torchtitan": _SHARDS,
    "automodel": _SHARDS,
}
VEOMNI_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Models of VeOmni that give what Transformers' own give."""
DType = Literal["fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]
FP16 = ("fp16", "float16")
"""Names of one format."""


@section
class WrapPolicyConfig(BaseConfig):
    """Modules that are sharded as units."""

    min_num_params: int = setting(0, ge=0)
    """Shard every module with at least this many parameters; 0 shards by layer class."""
    transformer_layer_cls_to_wrap: Annotated[tuple[str, ...] | None, OneOrMany] = setting(None)
    """Class names of the layers that are sharded as units; null uses those that the model class declares."""


@section
class MixedPrecisionConfig(BaseConfig):
    """Precision inside a sharded forward and backward pass."""

    param_dtype: DType = setting("bf16")
    """Precision in which parameters are gathered and used."""
    reduce_dtype: DType = setting("fp32")
    """Precision in which gradients are summed over ranks."""
    buffer_dtype: DType = setting("fp32")
    """Precision of buffers."""


def _stored_dtype(data: dict[str, Any]) -> str:
    return stored_dtype(data["forward_only"], data["mixed_precision"], data["dtype"])


@section
class FSDPEngineConfig(BaseConfig):
    """One model under FSDP: sharding, precision, offload."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPEngineConfig"

    wrap_policy: WrapPolicyConfig = subsection(WrapPolicyConfig)
    """Modules that are sharded as units."""
    mixed_precision: MixedPrecisionConfig | None = setting(None)
    """Precision inside the passes; null computes in `dtype` and sums gradients in fp32."""
    param_offload: bool = setting(False)
    """Keep parameters in host memory while the model is idle."""
    optimizer_offload: bool = setting(False)
    """Keep the optimizer state in host memory while the model is idle."""
    offload_policy: bool = setting(False)
    """FSDP2 streams parameters from host memory during the passes."""
    reshard_after_forward: bool = setting(True)
    """Free gathered parameters after each layer's forward: less memory, one more gather."""
    fsdp_size: int = setting(-1, ge=-1)
    """Ranks over which FSDP divides each weight; a copy of the model is on so many times `tensor_parallel_size`. -1 is
    all ranks: one copy."""
    tensor_parallel_size: int = setting(1, ge=1)
    """Ranks that divide the matrices of each layer and compute the same rows (docs/speed_and_memory.md); it must divide
    the ranks, the model's attention and key/value heads and the size of its feed-forward layers."""
    forward_prefetch: bool = setting(False)
    """Gather the next layer while this one computes."""
    use_no_sync_for_gradient_accumulation: bool = setting(False)
    """Sum gradients over the ranks once per mini-batch, after its last micro-batch, instead of after each: less
    communication, but each rank holds whole gradients meanwhile."""
    seed: int = setting(42, ge=0)
    """Seed of this model's random numbers (dropout, new heads)."""
    full_determinism: bool = setting(False)
    """Allow only deterministic kernels: slower, bit-identical from run to run."""
    moe_implementation: str | None = setting(None)
    """With `strategy=veomni`: VeOmni's kernel for experts; null is `fused_triton` on GPUs and `eager` on a CPU."""
    forward_only: bool = setting(False)
    """The model is never trained: no optimizer, no gradients."""
    strategy: Strategy = setting("fsdp", refuse_values=NO_OTHER_BACK_END)
    """Sharding back end; `fsdp` and `fsdp2` both use FSDP2, `veomni` with VeOmni's models; `megatron` does not read
    this section."""
    dtype: DType = setting("bfloat16", interpolation=DTYPE)
    """Precision of the computation (parameters are cast to it inside the passes); by default bfloat16 on GPUs and
    float32 on a CPU. With `float16` the loss is scaled (docs/speed_and_memory.md)."""
    model_dtype: DType = setting(factory=_stored_dtype, interpolation=STORED_DTYPE)
    """Precision in which the parameters are stored; by default fp32 for a trained model, and for a frozen one
    (`forward_only`) the precision of the computation."""
    ulysses_sequence_parallel_size: int = setting(1, ge=1)
    """Ranks that split each sequence (docs/speed_and_memory.md); it must divide the ranks and the model's attention
    heads."""


@section
class OptimizerConfig(BaseConfig):
    """Settings of every optimizer: learning rate, weight decay, clipping and a schedule with warm-up."""

    lr: float = setting(1e-6, ge=0)
    """Peak learning rate."""
    lr_warmup_steps_ratio: float = setting(0.0, ge=0, le=1)
    """Warm-up as a fraction of all training steps; used when `lr_warmup_steps` is not positive."""
    total_training_steps: int = setting(-1, ge=-1)
    """Length of the schedule in training steps; -1 uses the length of the run. The learning rate is constant within a
    training step, even if that has several optimizer steps."""
    weight_decay: float = setting(0.01, ge=0)
    """Decoupled weight decay."""
    lr_warmup_steps: int = setting(-1, ge=-1)
    """Warm-up in training steps; 0 or -1 uses `lr_warmup_steps_ratio`."""
    betas: tuple[float, float] = setting((0.9, 0.999))
    """Decay rates of the running mean and of the running square of the gradient."""
    clip_grad: float = setting(1.0, gt=0)
    """Maximum gradient norm of one step; the same setting as `grad_clip` of the actor and the critic."""
    init_lr_ratio: float = setting(0.0, ge=0, le=1)
    """Learning rate at which the warm-up begins, as a fraction of `lr`."""

    def with_length(self, steps: int) -> Self:
        """Return the section with the length of its schedule, which is that of the run unless the section has one."""
        return self if self.total_training_steps > 0 else replace(self, total_training_steps=steps)

    def problems(self, path: str) -> Iterator[Problem]:
        """Running means forget, and a step does not overwrite the weights."""
        if not all(0 <= beta < 1 for beta in self.betas):
            cause = "a running mean keeps this fraction of its past at every step"
            yield Problem(f"{path}.betas", list(self.betas), cause, "two numbers >= 0 and < 1")
        if self.lr >= 1:
            cause = "one step of AdamW moves every weight by about this much, which no model survives"
            remedy = "usual are 1e-7 to 1e-4"
            yield Problem(f"{path}.lr", self.lr, cause, remedy=remedy, advice=True)


MomentDType = Literal["fp32", "bf16"]
_WITH_ADAMS_MOMENTS = ("AdamW", "Adam", "Muon")
_MUON_SETTINGS = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn", "adamw")
_ADAMW_SETTINGS = ("lr", "weight_decay", "eps")
_RATES_OF_MUON = ("match_rms_adamw", "original")


@section
class FSDPOptimizerConfig(OptimizerConfig):
    """Optimizer of a model that is trained under FSDP."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPOptimizerConfig"

    optimizer: str = setting("AdamW")
    """Class name of the optimizer inside `optimizer_impl`. `Muon` is for matrices of hidden layers, and AdamW for other
    weights (docs/speed_and_memory.md)."""
    optimizer_impl: str = setting("torch.optim")
    """Module with the optimizer class, as an import path."""
    min_lr_ratio: float = setting(0.0, ge=0, le=1)
    """Final learning rate of a decaying schedule, as a fraction of `lr`."""
    num_cycles: float = setting(0.5, gt=0)
    """Cosine periods over the run; 0.5 decreases once from the peak to the end."""
    lr_scheduler_type: Literal["constant", "cosine"] = setting("constant")
    """Shape of the schedule after the warm-up."""
    offload_fraction: float = setting(0.0, ge=0, le=1)
    """Part of the optimizer's state, with its fp32 weights, that stays in host memory during training too, under
    Megatron. It is copied to the device for its step, a part at a time; the numbers are the same."""
    exp_avg_dtype: MomentDType = setting("fp32")
    """Precision in which Adam's running mean of gradients is stored, under Megatron: `bf16` halves its memory. Steps
    are computed in fp32."""
    exp_avg_sq_dtype: MomentDType = setting("fp32")
    """The same of the running mean of their squares."""
    override_optimizer_config: dict[str, object] | None = setting(None)
    """Further keyword arguments of the optimizer class. With Muon, `adamw` may hold `lr`, `weight_decay` and `eps` of
    AdamW."""

    @property
    def is_muon(self) -> bool:
        """True if matrices of hidden layers are trained by PyTorch's Muon, and other weights by AdamW."""
        return (self.optimizer_impl, self.optimizer) == ("torch.optim", "Muon")

    def problems(self, path: str) -> Iterator[Problem]:
        """As of every optimizer, and Muon has its settings alone."""
        yield from super().problems(path)
        yield from self._moment_problems(path)
        if not self.is_muon:
            return
        settings = self.override_optimizer_config or {}
        adamw_settings = settings.get("adamw", {})
        sections: list[tuple[str, object, tuple[str, ...]]] = [
            (f"{path}.override_optimizer_config", settings, _MUON_SETTINGS),
            (f"{path}.override_optimizer_config.adamw", adamw_settings, _ADAMW_SETTINGS),
        ]
        for key, entries, allowed in sections:
            if not isinstance(entries, Mapping):
                yield Problem(key, entries, "it holds settings by name", f"a mapping of {', '.join(allowed)}")
                continue
            for name in entries.keys() - set(allowed):
                yield Problem(f"{key}.{name}", entries[name], "Muon has no such setting", ", ".join(allowed))
        if (rate := settings.get("adjust_lr_fn", "original")) not in _RATES_OF_MUON:
            key = f"{path}.override_optimizer_config.adjust_lr_fn"
            yield Problem(key, rate, "Muon has no such rule for its rate", ", ".join(_RATES_OF_MUON))

    def _moment_problems(self, path: str) -> Iterator[Problem]:
        """Formats of moments are those of Adam's, and a step changes a moment by more than its format's rounding."""
        has_moments = (self.optimizer_impl, self.optimizer) in [("torch.optim", name) for name in _WITH_ADAMS_MOMENTS]
        for name, beta in zip(("exp_avg_dtype", "exp_avg_sq_dtype"), self.betas, strict=True):
            if (value := self[name]) == "fp32":
                continue
            if not has_moments:
                cause = f"{self.optimizer_impl}.{self.optimizer} has no moments of Adam"
                remedy = f"or set {path}.optimizer to {', '.join(_WITH_ADAMS_MOMENTS)} of torch.optim"
                yield Problem(f"{path}.{name}", value, cause, "fp32", remedy)
            elif 1 - beta < 2**-8:  # numbers of 8 bits are rounded to the nearest
                cause = (
                    f"with {path}.betas={list(self.betas)} this mean falls by at most {1 - beta:.2g} of itself in a "
                    "step, which bf16 rounds to nothing: it stays near its largest value, and steps have the wrong size"
                )
                remedy = f"set {path}.{name}=fp32, or its number in betas to 0.99 or less"
                yield Problem(f"{path}.{name}", value, cause, remedy=remedy, advice=True)


CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]


def _same_as_saved(data: dict[str, Any]) -> tuple[str, ...]:
    return data["save_contents"]


@section
class CheckpointConfig(BaseConfig):
    """Contents of checkpoints, and the parts that are loaded on resume."""

    hydra_target: ClassVar[str] = "verl.trainer.config.CheckpointConfig"

    save_contents: Annotated[tuple[CheckpointPart, ...], OneOrMany] = setting(("model", "optimizer", "extra"))
    """Parts to save: `model` shards, `optimizer` state, `extra` (schedule, random states), `hf_model` (safetensors in
    the precision that the config of the model's folder names)."""
    load_contents: Annotated[tuple[CheckpointPart, ...], OneOrMany] = setting(
        factory=_same_as_saved, interpolation="${.save_contents}"
    )
    """Parts to load on resume; by default everything that was saved."""
    async_save: bool = setting(False)
    """Copy the state and write it while training continues, which needs memory for the copy; false makes the step wait.
    """
