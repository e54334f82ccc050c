"""Where scores come from: reward manager, scorers, a discriminative reward model."""

from __future__ import annotations

from typing import Any, Literal

from verl.base_config import BaseConfig, section, setting, subsection
from verl.utils.profiler.config import PART_OF_PROFILING, RewardProfilerConfig
from verl.workers.config.engine import NO_MEGATRON, NO_ULYSSES, FSDPEngineConfig, Strategy
from verl.workers.config.model import ALWAYS_FUSED, NO_SHM
from verl.workers.config.rollout import RewardRolloutConfig

FailurePolicy = Literal["mask", "drop_group", "stop"]
"""What becomes of samples that could not be scored."""

NO_REWARD_LOOP = "reward loops are not in this version; use reward_model.reward_manager"


def _forward_only() -> FSDPEngineConfig:
    return FSDPEngineConfig(forward_only=True)


@section
class SandboxFusionConfig(BaseConfig):
    """Where generated programs run: on a SandboxFusion service, or in the sandbox of this machine."""

    url: str | None = setting(None)
    """Address of a SandboxFusion service, such as `http://host:8080`; null runs programs on this machine, in the
    sandbox of bubblewrap."""
    max_concurrent: int = setting(64, ge=1)
    """Most requests to the service at once, over all processes that score."""
    memory_limit_mb: int = setting(1024, ge=64)
    """MiB for one run of a program, there or here."""


@section
class RewardModelModelConfig(BaseConfig):
    """The reward model's weights and tokenizer."""

    input_tokenizer: str | None = setting(None, interpolation="${actor_rollout_ref.model.path}", path=True)
    """Tokenizer of the policy, where the reward model reads other tokens; null if they share one."""
    path: str = setting("~/models/FsfairX-LLaMA3-RM-v0.1", path=True)
    """Folder of the reward model, or its name on the Hugging Face hub."""
    external_lib: str | None = setting(None, interpolation="${actor_rollout_ref.model.external_lib}")
    """Module that every worker imports before it loads the model."""
    trust_remote_code: bool = setting(False)
    """Run Python code that comes with the model."""
    override_config: dict[str, Any] = setting(factory=dict)
    """Values that replace entries of the model's config."""
    use_shm: bool = setting(False, refuse=NO_SHM)
    """Copy the model into shared memory before loading."""
    use_remove_padding: bool = setting(False)
    """Pack sequences one after the other, so that no time goes into padding."""
    use_fused_kernels: bool = setting(
        False, interpolation="${actor_rollout_ref.model.use_fused_kernels}", hint=ALWAYS_FUSED
    )
    """Use fused kernels."""
    fsdp_config: FSDPEngineConfig = subsection(_forward_only)
    """Sharding, precision, offload."""


@section
class RewardModelConfig(BaseConfig):
    """Scoring of responses by rules, by a function of yours, or by a model."""

    enable: bool = setting(False)
    """Score with a discriminative reward model."""
    enable_resource_pool: bool = setting(False)
    """Give the reward model ranks of its own instead of sharing those of the policy."""
    n_gpus_per_node: int = setting(8, ge=1)
    """Ranks per node of that pool."""
    nnodes: int = setting(0, ge=0)
    """Nodes of that pool."""
    strategy: Strategy = setting("fsdp", refuse_values=NO_MEGATRON)
    """Back end; `fsdp` and `fsdp2` are both served by FSDP2."""
    model: RewardModelModelConfig = subsection(RewardModelModelConfig)
    """The reward model's weights and tokenizer."""
    rollout: RewardRolloutConfig = subsection(
        RewardRolloutConfig, hint="part of serving a reward model, which is not in this version"
    )
    """The engine that serves a generative reward model."""
    micro_batch_size: int | None = setting(None, ge=1)
    """Older form of `micro_batch_size_per_gpu`: sequences per pass over all ranks together."""
    micro_batch_size_per_gpu: int | None = setting(None, ge=1)
    """Sequences per forward pass on one rank."""
    max_length: int | None = setting(None, ge=1)
    """Longest prompt and response together that the reward model reads; null is no limit."""
    use_dynamic_bsz: bool = setting(False, interpolation="${critic.use_dynamic_bsz}")
    """Fill passes by tokens instead of by sequences."""
    forward_max_token_len_per_gpu: int = setting(32768, ge=1, interpolation="${critic.forward_max_token_len_per_gpu}")
    """Tokens per pass on one rank, with `use_dynamic_bsz`."""
    ulysses_sequence_parallel_size: int = setting(1, ge=1, refuse=NO_ULYSSES)
    """Ranks that share one sequence."""
    reward_manager: str = setting("naive")
    """Registered reward manager: how responses become calls of a scorer."""
    reward_kwargs: dict[str, Any] = setting(factory=dict)
    """Further arguments of the reward manager."""
    reward_format: str | None = setting(None)
    """Registered scorer for all rows, whatever their data source; null goes by data source."""
    scorer_kwargs: dict[str, Any] = setting(factory=dict)
    """Further arguments of the scorer, such as `format_score` of countdown."""
    max_error_rate: float = setting(0.5, ge=0, le=1)
    """Fraction of a step's samples whose scorer may fail before the run stops."""
    on_failure: FailurePolicy = setting("mask")
    """What becomes of samples that could not be scored: `mask` leaves them out of training and of their group's
    baseline, `drop_group` leaves out all responses to the prompt, `stop` ends the run at the first one."""
    timeout_s: float = setting(30.0, gt=0)
    """Time for the score of one sample; what takes longer is killed and has the status `timeout`."""
    memory_limit_mb: int | None = setting(4096, ge=1)
    """Memory for the score of one sample, beyond what loading the scorer took; null is no limit."""
    launch_reward_fn_async: bool = setting(False)
    """Score while log-probs are computed."""
    num_workers: int = setting(1, ge=1)
    """Processes that score; more are started for a while when some are held up by a slow sample."""
    use_reward_loop: bool = setting(True, hint="reward managers are called by the driver in this version")
    """Score inside the rollout loop."""
    reward_loop_source: Literal["register", "importlib"] = setting("register", refuse=NO_REWARD_LOOP)
    """Where the reward loop comes from."""
    reward_loop_module_path: str | None = setting(None, refuse=NO_REWARD_LOOP)
    """File of a reward loop of your own."""
    reward_loop_class_name: str | None = setting(None, refuse=NO_REWARD_LOOP)
    """Its class."""
    sandbox_fusion: SandboxFusionConfig = subsection(SandboxFusionConfig)
    """Where generated programs run: on a SandboxFusion service, or in the sandbox of this machine."""
    profiler: RewardProfilerConfig = subsection(RewardProfilerConfig, hint=PART_OF_PROFILING)
    """Profiling of the reward model's workers."""
