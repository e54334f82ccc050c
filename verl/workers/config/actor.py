"""The policy that is trained, and the frozen reference beside it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from verl.base_config import BaseConfig, section, setting, subsection
from verl.utils.profiler.config import PART_OF_PROFILING, ProfilerConfig
from verl.workers.config.checkpoint import CheckpointConfig
from verl.workers.config.engine import NO_MEGATRON, NO_ULYSSES, FSDPEngineConfig, Strategy
from verl.workers.config.model import ALWAYS_FUSED
from verl.workers.config.optimizer import FSDPOptimizerConfig
from verl.workers.config.rollout_correction import RolloutCorrectionConfig

KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]
LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
]

NO_ROUTER_REPLAY = "router replay is not in this version; leave it disabled"
NEVER_KEPT = "Σπ² is computed in slices and without a gradient, so that there is nothing to keep or to compute again"


@section
class PolicyLossConfig(BaseConfig):
    """Which policy loss, and the settings of those that have their own."""

    hydra_target: ClassVar[str] = "verl.workers.config.PolicyLossConfig"

    loss_mode: str = setting("vanilla")
    """Registered policy loss: vanilla (PPO's clip), gspo, luspo, geo_mean, sapo, cispo, gpg, clip_cov, kl_cov, dppo_tv,
    dppo_kl, dro, bypass_mode, or your own."""
    clip_cov_ratio: float = setting(0.0002, ge=0, le=1)
    """`clip_cov`: fraction of tokens whose gradient is dropped."""
    clip_cov_lb: float = setting(1.0)
    """`clip_cov`: covariance above which a token may be dropped."""
    clip_cov_ub: float = setting(5.0)
    """`clip_cov`: covariance below which a token may be dropped."""
    kl_cov_ratio: float = setting(0.0002, ge=0, le=1)
    """`kl_cov`: fraction of tokens that get a KL penalty."""
    ppo_kl_coef: float = setting(0.1, ge=0)
    """`kl_cov`: weight of that penalty."""
    dro_beta: float | None = setting(None, gt=0)
    """`dro`: weight of its quadratic term, in advantage per nat; that loss cannot do without."""
    top_entropy_quantile: float = setting(1.0, gt=0, le=1)
    """Fraction of tokens, those of highest entropy, that keep their policy loss (arXiv:2506.01939); 1 keeps all."""
    rollout_correction: RolloutCorrectionConfig | None = setting(None, internal=True)
    """`bypass_mode`: `algorithm.rollout_correction`, which loading hands over to the loss."""


@section
class RouterReplayConfig(BaseConfig):
    """Replaying the expert choices of rollout in training."""

    hydra_target: ClassVar[str] = "verl.workers.config.RouterReplayConfig"

    mode: Literal["disabled", "R2", "R3"] = setting("disabled", refuse=NO_ROUTER_REPLAY)
    """Which expert choices are replayed."""
    record_file: str | None = setting(None, refuse=NO_ROUTER_REPLAY)
    """File to record choices into."""
    replay_file: str | None = setting(None, refuse=NO_ROUTER_REPLAY)
    """File to replay choices from."""


def _follows_clip_ratio(data: dict[str, Any]) -> float:
    return data["clip_ratio"]


@section
class ActorConfig(BaseConfig):
    """One update of the policy: batches, loss, optimizer."""

    strategy: Strategy = setting("fsdp", refuse_values=NO_MEGATRON)
    """Training back end; `fsdp` and `fsdp2` are both served by FSDP2."""
    ppo_mini_batch_size: int = setting(256, ge=1)
    """Prompts per optimizer step over all ranks; each brings its `rollout.n` responses."""
    ppo_micro_batch_size: int | None = setting(None, ge=1)
    """Older form of `ppo_micro_batch_size_per_gpu`: sequences per pass over all ranks together."""
    ppo_micro_batch_size_per_gpu: int | None = setting(None, ge=1)
    """Sequences per forward and backward pass on one rank."""
    use_dynamic_bsz: bool = setting(False)
    """Fill passes by tokens instead of by sequences."""
    ppo_max_token_len_per_gpu: int = setting(16384, ge=1)
    """Tokens per pass on one rank, with `use_dynamic_bsz`."""
    clip_ratio: float = setting(0.2, ge=0)
    """How far the ratio of new to old probability may move before its gradient stops."""
    clip_ratio_low: float = setting(factory=_follows_clip_ratio, ge=0)
    """The same, downwards; left alone it follows `clip_ratio`."""
    clip_ratio_high: float = setting(factory=_follows_clip_ratio, ge=0)
    """The same, upwards; above `clip_ratio_low` it is clip-higher (arXiv:2503.14476)."""
    tau_pos: float = setting(1.0, gt=0)
    """`sapo`: temperature for positive advantages."""
    tau_neg: float = setting(1.05, gt=0)
    """`sapo`: temperature for negative advantages."""
    freeze_vision_tower: bool = setting(
        False, refuse="vision models are not in this version; set freeze_vision_tower=false"
    )
    """Do not train the vision encoder."""
    policy_loss: PolicyLossConfig = subsection(PolicyLossConfig)
    """Which policy loss."""
    clip_ratio_c: float = setting(3.0, gt=1)
    """Dual clip: cap on ratio·|A| where the advantage is negative (arXiv:1912.09729); `dppo_*`: cap on the ratio."""
    loss_agg_mode: LossAggMode = setting("token-mean")
    """How per-token losses become one number; all denominators are global. In `prompt-mean` every prompt weighs the
    same, and in its group of responses every token."""
    loss_scale_factor: float | None = setting(None, gt=0)
    """Divisor of `seq-mean-token-sum-norm`; null takes the response length."""
    entropy_coeff: float = setting(0)
    """Weight of the entropy bonus; with `entropy_target` the one to start from."""
    entropy_target: float | None = setting(None, ge=0)
    """Entropy per token, in nats, that the bonus holds: its weight rises below and is 0 above (arXiv:2505.22312)."""
    entropy_target_step: float = setting(0.005, gt=0)
    """Change of the weight per training step, with `entropy_target`."""
    entropy_coeff_min: float = setting(0.0, ge=0)
    """The weight never falls below, with `entropy_target`."""
    entropy_coeff_max: float = setting(1.0, ge=0)
    """The weight never rises above, with `entropy_target`."""
    calculate_entropy: bool = setting(False)
    """Compute and log the entropy during the update also where the bonus has no weight."""
    recompute_old_log_probs: Literal["auto", "always"] = setting("auto")
    """Whether `old_log_probs` get a forward pass of their own. `auto` leaves it out where the update's own pass gives
    the same: one optimizer step per batch, and nothing that reads them before; `always` never does."""
    use_kl_loss: bool = setting(False)
    """Add the divergence from the reference policy to the loss."""
    use_prefix_grouper: bool = setting(
        False, refuse="sharing the prompt among siblings in training is not in this version; set it false"
    )
    """Compute the prompt that siblings share only once."""
    use_torch_compile: bool = setting(True, hint="this version runs its small kernels uncompiled; results are the same")
    """Compile the log-prob and entropy kernels."""
    kl_loss_coef: float = setting(0.001, ge=0)
    """Weight of that divergence."""
    kl_loss_type: KLKind = setting("low_var_kl")
    """Its estimator: kl (k1), abs, mse (k2), low_var_kl (k3); with `+` the gradient is that of k2."""
    ppo_epochs: int = setting(1, ge=1)
    """Passes over the batch of a step."""
    shuffle: bool = setting(False)
    """Shuffle the batch before it is cut into mini-batches."""
    data_loader_seed: int = setting(42, ge=0)
    """Seed of that shuffle."""
    checkpoint: CheckpointConfig = subsection(CheckpointConfig)
    """What a checkpoint holds."""
    optim: FSDPOptimizerConfig = subsection(FSDPOptimizerConfig)
    """Optimizer and schedule."""
    use_fused_kernels: bool = setting(
        False, interpolation="${oc.select:actor_rollout_ref.model.use_fused_kernels,false}", hint=ALWAYS_FUSED
    )
    """Compute log-probs and entropy straight from the last hidden state."""
    profiler: ProfilerConfig = subsection(ProfilerConfig, hint=PART_OF_PROFILING)
    """Profiling of the actor's workers."""
    router_replay: RouterReplayConfig = subsection(RouterReplayConfig)
    """Replaying the expert choices of rollout."""
    rollout_n: int = setting(1, ge=1, interpolation="${oc.select:actor_rollout_ref.rollout.n,1}")
    """Responses per prompt, as in `rollout.n`."""
    global_batch_info: dict[str, Any] = setting(factory=dict, internal=True)
    """Global counts of the mini-batch at hand, for `agg_loss`; the engine hands the loss a copy with them filled in."""


@section
class FSDPActorConfig(ActorConfig):
    """An actor trained under FSDP."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPActorConfig"

    grad_clip: float = setting(1.0, gt=0)
    """Largest norm of the gradient of one step."""
    ulysses_sequence_parallel_size: int = setting(1, ge=1, refuse=NO_ULYSSES)
    """Ranks that share one sequence."""
    entropy_from_logits_with_chunking: bool = setting(False, hint=ALWAYS_FUSED)
    """Compute the entropy in slices: less memory, a little slower."""
    entropy_checkpointing: bool = setting(False, hint=ALWAYS_FUSED)
    """Compute the entropy again in the backward pass instead of keeping its inputs."""
    fsdp_config: FSDPEngineConfig = subsection(FSDPEngineConfig)
    """Sharding, precision, offload."""
    use_remove_padding: bool = setting(
        True, interpolation="${oc.select:actor_rollout_ref.model.use_remove_padding,false}"
    )
    """Pack sequences, by default as the model section says."""
    calculate_sum_pi_squared: bool = setting(False)
    """Compute Σπ² of every token beside the old log-probs; estimators that read it turn it on themselves."""
    sum_pi_squared_checkpointing: bool = setting(False, hint=NEVER_KEPT)
    """Compute it again in the backward pass instead of keeping its inputs."""


def _forward_only() -> FSDPEngineConfig:
    return FSDPEngineConfig(forward_only=True)


@section
class RefConfig(BaseConfig):
    """The frozen reference policy; only its log-probs are computed."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPActorConfig"

    strategy: Strategy = setting("fsdp", interpolation="${actor_rollout_ref.actor.strategy}", refuse_values=NO_MEGATRON)
    """Back end, as the actor's."""
    rollout_n: int = setting(1, ge=1, interpolation="${oc.select:actor_rollout_ref.rollout.n,1}")
    """Responses per prompt, as in `rollout.n`."""
    use_torch_compile: bool = setting(
        True,
        interpolation="${oc.select:actor_rollout_ref.actor.use_torch_compile,true}",
        hint="this version runs its small kernels uncompiled; results are the same",
    )
    """Compile the log-prob kernels."""
    log_prob_micro_batch_size: int | None = setting(None, ge=1)
    """Older form of `log_prob_micro_batch_size_per_gpu`: sequences per pass over all ranks together."""
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, ge=1)
    """Sequences per forward pass on one rank."""
    log_prob_use_dynamic_bsz: bool = setting(
        False, interpolation="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}"
    )
    """Fill passes by tokens instead of by sequences."""
    log_prob_max_token_len_per_gpu: int = setting(
        16384, ge=1, interpolation="${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,16384}"
    )
    """Tokens per pass on one rank, with `log_prob_use_dynamic_bsz`."""
    profiler: ProfilerConfig = subsection(ProfilerConfig, hint=PART_OF_PROFILING)
    """Profiling of the reference's workers."""
    router_replay: RouterReplayConfig = subsection(RouterReplayConfig)
    """Replaying the expert choices of rollout."""
    fsdp_config: FSDPEngineConfig = subsection(_forward_only)
    """Sharding, precision, offload."""
    ulysses_sequence_parallel_size: int = setting(
        1,
        ge=1,
        interpolation="${oc.select:actor_rollout_ref.actor.ulysses_sequence_parallel_size,1}",
        refuse=NO_ULYSSES,
    )
    """Ranks that share one sequence."""
    entropy_from_logits_with_chunking: bool = setting(False, hint=ALWAYS_FUSED)
    """Compute the entropy in slices."""
    entropy_checkpointing: bool = setting(False, hint=ALWAYS_FUSED)
    """Compute the entropy again in the backward pass."""
