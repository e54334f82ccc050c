"""Configuration of a model under Megatron: parallel sizes, precision, optimizer state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from verl.config.base import BaseConfig, section, setting
from verl.config.machine import DTYPE
from verl.config.megatron_flags import RECOMPUTE, flag_problems
from verl.config.model import FP16, DType, FSDPEngineConfig, Strategy
from verl.config.pipeline_layout import chunks_per_stage, layout_problems
from verl.config.problems import Problem

GROUPED = ("deepseek_v3", "glm4_moe")
"""``model_type`` of the models that choose groups of experts first."""

HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""``model_type`` of the models with gated delta nets among their layers."""

MIXTURES = ("mixtral", "qwen3_moe", "qwen3_vl_moe", "qwen3_next", "qwen3_5_moe_text", *GROUPED)
"""``model_type`` of the models with experts among them."""

MEGATRON_FAMILIES = tuple(
    dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", *MIXTURES, *HYBRIDS))
)
"""``model_type`` of the models that ``strategy=megatron`` builds."""

INDEX = ".metadata"
"""File with the index of a ``torch_dist`` checkpoint, which megatron-core writes."""

SHARING = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Keys of the numbers of ranks whose product shares one copy of a model."""

SIZES = (
    *SHARING,
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Keys of a layout; one process has one of each."""

CHECKPOINT = ("use_dist_checkpointing", "dist_checkpointing_path", "dist_checkpointing_prefix")
"""Keys of the checkpoint that the first weights are read from."""

PARTS_OF_LAYERS = ("core_attn", "mlp", "moe")
"""Parts of a layer that `recompute_granularity=selective` computes again (`recompute_modules`); megatron-core has more,
which need TransformerEngine."""

FIXED = {
    "override_ddp_config": ({}, "gradients are summed in fp32, and divided by use_distributed_optimizer alone"),
    "override_mcore_model_config": (
        {},
        "the model is built as its Hugging Face config says; see model.override_config",
    ),
}
"""Keys that keep their defaults, and why."""


@section
class McoreEngineConfig(BaseConfig):
    """One model under Megatron: parallel sizes, precision, optimizer state."""

    hydra_target: ClassVar[str] = "verl.workers.config.McoreEngineConfig"

    tensor_model_parallel_size: int = setting(1, ge=1)
    """Ranks that split each weight matrix; it must divide the model's attention heads, key heads and feed-forward
    width."""
    pipeline_model_parallel_size: int = setting(1, ge=1)
    """Ranks that split the layers; each has a range of consecutive layers."""
    sequence_parallel: bool = setting(True)
    """Between attention and feed-forward, split the tokens over the tensor-parallel ranks too: less memory."""
    use_distributed_optimizer: bool = setting(True)
    """Split the optimizer state over the data-parallel ranks."""
    virtual_pipeline_model_parallel_size: int | None = setting(None, ge=1)
    """Model chunks on each pipeline rank, each of consecutive layers (an interleaved pipeline): ranks wait less and
    send more. This size times `pipeline_model_parallel_size` must divide the layers; null is one chunk."""
    context_parallel_size: int = setting(1, ge=1)
    """Ranks that split each sequence; times `tensor_model_parallel_size` it must divide the attention heads."""
    expert_model_parallel_size: int = setting(1, ge=1)
    """Ranks that split the experts of each layer, out of those that hold copies of the other layers; it must divide the
    number of experts."""
    expert_tensor_parallel_size: int | None = setting(None, ge=1)
    """Ranks that split each expert's matrices; null is `tensor_model_parallel_size`."""
    param_offload: bool = setting(False)
    """Keep parameters in host memory while the model is idle."""
    grad_offload: bool = setting(False)
    """Keep the gradients of an unfinished update in host memory while the model is idle. Gradients of a finished update
    are always freed."""
    optimizer_offload: bool = setting(False)
    """Keep the optimizer state and its fp32 weights in host memory while the model is idle."""
    use_dist_checkpointing: bool = setting(False)
    """Read the first weights from a `torch_dist` checkpoint of megatron-core in `dist_checkpointing_path`; from
    `model.path` come config and tokenizer."""
    dist_checkpointing_path: str | None = setting(None, path=True)
    """Folder of that checkpoint, which has the file `.metadata`. No effect without `use_dist_checkpointing`."""
    dist_checkpointing_prefix: str = setting("")
    """Prefix of the names in it, such as `model.`."""
    override_ddp_config: dict[str, object] = setting(factory=dict)
    """Values for megatron-core's data-parallel config; must stay empty: use `use_distributed_optimizer`."""
    override_transformer_config: dict[str, object] = setting(factory=dict)
    """Values for megatron-core's model config: recomputation (`recompute_granularity` ..., in place of
    `enable_gradient_checkpointing`), layers of each pipeline stage (`num_layers_in_first_pipeline_stage`,
    `pipeline_model_parallel_layout` ...), and speed (`bias_activation_fusion`, `moe_token_dispatcher_type` ...)."""
    override_mcore_model_config: dict[str, object] = setting(factory=dict)
    """Values for the model; must stay empty: use its Hugging Face config and `model.override_config`."""
    use_mbridge: bool = setting(True)
    """Read and write Hugging Face folders; always on, so this key has no effect."""
    vanilla_mbridge: bool = setting(True)
    """Bridge that reads the weights; this key has no effect."""
    seed: int = setting(42, ge=0)
    """Seed of this model's random numbers."""
    forward_only: bool = setting(False)
    """The model is never trained: no optimizer, no gradients."""
    strategy: Strategy = setting("megatron")
    """Always `megatron`."""
    dtype: DType = setting("bfloat16", interpolation=DTYPE)
    """Precision of weights and computation; the optimizer keeps a copy of bfloat16 weights in fp32. By default bfloat16
    on GPUs and float32 on a CPU."""

    @property
    def model_chunks(self) -> int:
        """Model chunks on each pipeline stage."""
        stages, virtual = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        return chunks_per_stage(self.override_transformer_config, stages, virtual)

    def problems(self, path: str) -> Iterator[Problem]:
        """Keys that are fixed, and formats that cannot be trained."""
        for name, (default, why) in FIXED.items():
            if (value := getattr(self, name)) != default:
                yield Problem(f"{path}.{name}", value, why, f"{default!r}")
        yield from flag_problems(self.override_transformer_config, f"{path}.override_transformer_config")
        yield from self._recomputation(f"{path}.override_transformer_config")
        if self.use_dist_checkpointing and self.dist_checkpointing_path is None:
            why = "use_dist_checkpointing reads the weights from it"
            yield Problem(f"{path}.dist_checkpointing_path", None, why, "the folder of a checkpoint of megatron-core")
        if self.dtype in FP16:
            yield Problem(f"{path}.dtype", self.dtype, "its gradients underflow", "bfloat16 or float32")

    def pipeline_problems(self, path: str) -> Iterator[Problem]:
        """Pieces without a pipeline. Asked of models that Megatron holds, as other sections have the actor's sizes."""
        stages, virtual = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        override = f"{path}.override_transformer_config"
        yield from layout_problems(self.override_transformer_config, stages, virtual, override)
        if (virtual or 1) > 1 and stages == 1:
            yield Problem(
                f"{path}.virtual_pipeline_model_parallel_size",
                virtual,
                "there is no pipeline to interleave with pipeline_model_parallel_size=1",
                "null, or a pipeline_model_parallel_size above 1",
            )

    def _recomputation(self, path: str) -> Iterator[Problem]:
        """Values of :data:`RECOMPUTE` that megatron-core takes together."""
        override = self.override_transformer_config
        granularity, method, layers, modules = (override.get(key) for key in RECOMPUTE)
        if granularity not in (None, "full", "selective"):
            yield Problem(f"{path}.recompute_granularity", granularity, "there is no such way", "full, selective, null")
            return
        if granularity == "full":
            if method not in ("uniform", "block"):
                cause = "recompute_granularity=full says which layers"
                yield Problem(f"{path}.recompute_method", method, cause, "uniform, block")
            if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
                cause = "recompute_granularity=full says how many layers are recomputed together (uniform), or in all"
                yield Problem(f"{path}.recompute_num_layers", layers, cause, "a whole number from 1")
        idle, why = {
            None: (RECOMPUTE[1:], "recompute_granularity, which says whether layers or parts are recomputed, is null"),
            "full": (RECOMPUTE[3:], "recompute_granularity=full recomputes whole layers"),
            "selective": (RECOMPUTE[1:3], "recompute_granularity=selective recomputes parts of every layer"),
        }[granularity]
        # Published configurations state that no layer is recomputed, and beside it which parts would be.
        states_none = granularity is None and RECOMPUTE[0] in override
        for key in () if states_none else idle:
            if (value := override.get(key)) is not None:
                remedy = "" if granularity else "or set recompute_granularity to full or selective"
                yield Problem(f"{path}.{key}", value, why, "null", remedy)
        if granularity == "selective" and modules is not None:
            allowed = f"some of {', '.join(PARTS_OF_LAYERS)}"
            if not isinstance(modules, (list, tuple)):
                yield Problem(f"{path}.recompute_modules", modules, "it is a list", allowed)
            elif unknown := [str(part) for part in modules if part not in PARTS_OF_LAYERS]:
                cause = f"layers without TransformerEngine have no {', '.join(unknown)} to recompute"
                yield Problem(f"{path}.recompute_modules", modules, cause, allowed)


def with_own_files(placement: FSDPEngineConfig | McoreEngineConfig) -> FSDPEngineConfig | McoreEngineConfig:
    """Return the placement of a further model, such as a teacher, whose weights are those in its own ``path``."""
    if isinstance(placement, McoreEngineConfig):
        return replace(placement, use_dist_checkpointing=False)
    return placement


def ranks_per_copy(placement: FSDPEngineConfig | McoreEngineConfig) -> int:
    """Return the number of ranks that compute the same rows."""
    if isinstance(placement, McoreEngineConfig):
        ranks_per_layer = placement.tensor_model_parallel_size * placement.context_parallel_size
        return ranks_per_layer * placement.pipeline_model_parallel_size
    return placement.ulysses_sequence_parallel_size * placement.tensor_parallel_size


class DistributedModel(ABC):
    """Base of sections whose model is distributed over ranks by FSDP or Megatron."""

    @property
    @abstractmethod
    def placement(self) -> FSDPEngineConfig | McoreEngineConfig:
        """The section of the training back end."""

    @property
    def shared_by(self) -> int:
        """Number of ranks that compute the same rows."""
        return ranks_per_copy(self.placement)
