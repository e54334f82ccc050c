"""Configuration of the actor (the policy that is trained) and of the frozen reference policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from verl.config.base import BaseConfig, section, setting, subsection
from verl.config.megatron import DistributedModel, McoreEngineConfig
from verl.config.model import (
    NO_OTHER_BACK_END,
    CheckpointConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    Strategy,
)
from verl.config.problems import Problem, check_update
from verl.config.profiler import ModelProfilerConfig
from verl.config.rollout_correction import RolloutCorrectionConfig

KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]
LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"
]


@section
class PolicyLossConfig(BaseConfig):
    """The policy loss, and the settings of particular losses."""

    hydra_target: ClassVar[str] = "verl.workers.config.PolicyLossConfig"

    loss_mode: str = setting("vanilla")
    """Registered policy loss: vanilla (PPO's clip), gspo, luspo, geo_mean, sapo, cispo, gpg, clip_cov, kl_cov, dppo_tv,
    dppo_kl, dro, up, cfpo, vespo, topr, m2po, bypass_mode, or your own."""
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
    """`dro`: weight of its quadratic term, in advantage per nat; must be set for that loss."""
    vespo_k_pos: float = setting(2.0, ge=0)
    """`vespo`: power k of the ratio for advantages of at least 0."""
    vespo_lambda_pos: float = setting(3.0, ge=0)
    """`vespo`: rate λ at which large ratios lose weight, for advantages of at least 0."""
    vespo_k_neg: float = setting(3.0, ge=0)
    """`vespo`: power k for negative advantages."""
    vespo_lambda_neg: float = setting(2.0, ge=0)
    """`vespo`: rate λ for negative advantages."""
    m2_threshold: float = setting(0.04, gt=0)
    """`m2po`: largest mean of (log π/μ)² over the tokens of a mini-batch that stay in the loss."""
    off_policy_mask_threshold: float | None = setting(None, gt=0)
    """Take responses out of the policy loss whose advantage is negative and whose mean of log μ/π over their tokens is
    above this (DeepSeek-V3.2, arXiv:2512.02556); μ is the policy that drew them. null takes none out."""
    top_entropy_quantile: float = setting(1.0, gt=0, le=1)
    """Fraction of tokens, those of highest entropy, that keep their policy loss (arXiv:2506.01939); 1 keeps all."""
    rollout_correction: RolloutCorrectionConfig | None = setting(None, internal=True)
    """Copy of `algorithm.rollout_correction` where the policy loss may correct, filled in while the configuration is
    loaded: in bypass mode, with `prox_logp_method: loglinear`, and with weights that depend on one response each."""

    def problems(self, path: str) -> Iterator[Problem]:
        """`dro` has a weight, and the covariance bounds of `clip_cov` are in order."""
        if self.loss_mode == "dro" and self.dro_beta is None:
            cause = "policy_loss.loss_mode=dro is a policy gradient without any leash unless it has this weight"
            remedy = "0.1 lets the log-prob of a token with advantage 1 move by 10 nats, 10 by 0.1"
            yield Problem(f"{path}.dro_beta", None, cause, "> 0", remedy)
        if self.loss_mode == "clip_cov" and self.clip_cov_lb >= self.clip_cov_ub:
            cause = f"no covariance lies between it and policy_loss.clip_cov_ub={self.clip_cov_ub}"
            yield Problem(f"{path}.clip_cov_lb", self.clip_cov_lb, cause, f"< {self.clip_cov_ub}")


@section
class RouterReplayConfig(BaseConfig):
    """Replay of an earlier choice of experts, for mixtures of experts (docs/mixtures_of_experts.md)."""

    hydra_target: ClassVar[str] = "verl.workers.config.RouterReplayConfig"

    mode: Literal["disabled", "R2", "R3"] = setting("disabled")
    """`R2` repeats in the update the choice of the pass that computed `old_log_probs`; `R3` repeats the rollout's
    choice in that pass and in the update."""


def follows_clip_ratio(data: dict[str, Any]) -> float:
    """Return ``clip_ratio``, the default of both its sides."""
    return data["clip_ratio"]


@section
class UpdateConfig(BaseConfig):
    """One update of a model: batches, passes, optimizer. Actor and critic share this section."""

    strategy: Strategy = setting("fsdp", refuse_values=NO_OTHER_BACK_END)
    """Training back end; `fsdp` and `fsdp2` both use FSDP2, `veomni` FSDP2 with VeOmni's models, `megatron` uses
    megatron-core."""
    rollout_n: int = setting(1, ge=1, interpolation="${oc.select:actor_rollout_ref.rollout.n,1}")
    """Responses per prompt; follows `rollout.n`, which decides."""
    ppo_mini_batch_size: int = setting(256, ge=1)
    """Prompts per optimizer step over all ranks; each has `rollout.n` responses."""
    ppo_micro_batch_size_per_gpu: int | None = setting(None, ge=1)
    """Sequences per forward and backward pass on one rank."""
    use_dynamic_bsz: bool = setting(False)
    """Fill micro-batches by tokens instead of by sequences."""
    ppo_max_token_len_per_gpu: int = setting(16384, ge=1)
    """Tokens per pass on one rank, with `use_dynamic_bsz`."""
    ppo_epochs: int = setting(1, ge=1)
    """Passes over the batch of a step."""
    shuffle: bool = setting(False)
    """Use the mini-batches in random order; which samples are in each does not change."""
    data_loader_seed: int = setting(42, ge=0)
    """Seed of that order."""
    loss_agg_mode: LossAggMode = setting("token-mean")
    """Aggregation of per-token losses to a scalar; all denominators are global. `prompt-mean` weighs all prompts
    equally, and all tokens in the responses to one prompt."""
    checkpoint: CheckpointConfig = subsection(CheckpointConfig)
    """Contents of a checkpoint."""
    optim: FSDPOptimizerConfig = subsection(FSDPOptimizerConfig)
    """Optimizer and schedule."""
    use_prefix_grouper: bool = setting(False)
    """Compute a prompt once for all its responses in a pass, in updates and log-probs (docs/speed_and_memory.md)."""
    profiler: ModelProfilerConfig = subsection(ModelProfilerConfig)
    """Ranks whose processes are profiled."""


@section
class ActorConfig(UpdateConfig):
    """One update of the policy: batches, loss, optimizer."""

    clip_ratio: float = setting(0.2, ge=0)
    """Largest distance of the ratio of new to old probability from 1 before its gradient stops."""
    clip_ratio_low: float = setting(factory=follows_clip_ratio, ge=0)
    """Clip range for falling probabilities; by default `clip_ratio`."""
    clip_ratio_high: float = setting(factory=follows_clip_ratio, ge=0)
    """Clip range for rising probabilities; by default `clip_ratio`. More than `clip_ratio_low` is clip-higher
    (arXiv:2503.14476)."""
    tau_pos: float = setting(1.0, gt=0)
    """`sapo`: temperature for positive advantages."""
    tau_neg: float = setting(1.05, gt=0)
    """`sapo`: temperature for negative advantages."""
    policy_loss: PolicyLossConfig = subsection(PolicyLossConfig)
    """The policy loss."""
    clip_ratio_c: float = setting(3.0, gt=1)
    """Dual clip: upper bound of ratio·|A| if the advantage is negative (arXiv:1912.09729); `dppo_*`: upper bound of the
    ratio."""
    freeze_vision_tower: bool = setting(False)
    """Train only the language model of a vision-language model: its vision tower and projector do not change."""
    loss_scale_factor: float | None = setting(None, gt=0)
    """Divisor of `seq-mean-token-sum-norm`; null uses the response length."""
    entropy_coeff: float = setting(0)
    """Weight of the entropy bonus; with `entropy_target` its initial value."""
    entropy_target: float | None = setting(None, ge=0)
    """Target entropy per token, in nats: the weight rises while entropy is below, and is 0 above (arXiv:2505.22312)."""
    entropy_target_step: float = setting(0.005, gt=0)
    """Change of the weight per training step, with `entropy_target`."""
    entropy_coeff_min: float = setting(0.0, ge=0)
    """Smallest weight while the entropy is not above `entropy_target`."""
    entropy_coeff_max: float = setting(1.0, ge=0)
    """Largest weight, with `entropy_target`."""
    calculate_entropy: bool = setting(False)
    """Compute and log the entropy during the update even if the bonus has no weight."""
    recompute_old_log_probs: Literal["auto", "always"] = setting("auto")
    """True if a separate forward pass computes `old_log_probs`. `auto` skips it if the update's own pass gives the same
    result (one optimizer step per batch, and no earlier stage reads them); `always` never skips it."""
    use_kl_loss: bool = setting(False)
    """Add the divergence from the reference policy to the loss."""
    kl_loss_coef: float = setting(0.001, ge=0)
    """Weight of that divergence."""
    kl_loss_type: KLKind = setting("low_var_kl")
    """Estimator of that divergence: kl (k1), abs, mse (k2), low_var_kl (k3); with `+` the gradient is that of k2."""
    use_bias_correction_kl: bool = setting(False)
    """Weigh the divergence of each token by π/π_old, and by its importance weight if it has one, so that value and
    gradient are unbiased on samples of an older policy (DeepSeek-V3.2, arXiv:2512.02556)."""
    use_echo_loss: bool = setting(False)
    """Add the cross entropy of the tokens that tools, environments and users wrote in conversations (ECHO,
    arXiv:2605.24517), under the distribution that is sampled: use `rollout.temperature=1` for that of the model."""
    echo_loss_coef: float = setting(0.1, ge=0)
    """Weight of that cross entropy, a mean over such tokens."""
    router_replay: RouterReplayConfig = subsection(RouterReplayConfig)
    """Replay of an earlier choice of experts."""
    global_batch_info: dict[str, object] = setting(factory=dict, internal=True)
    """Global counts of the current mini-batch, for `agg_loss`; losses with the public signature receive a filled-in
    copy."""

    def problems(self, path: str) -> Iterator[Problem]:
        """Report divisors of 0, a divergence corrected twice, an entropy bonus that begins outside of its bounds."""
        if self.policy_loss.loss_mode == "cfpo":
            for key in ("clip_ratio_low", "clip_ratio_high"):
                if not self[key]:
                    cause = "policy_loss.loss_mode=cfpo divides by it"
                    yield Problem(f"{path}.{key}", self[key], cause, "> 0", "set clip_ratio, e.g. to 0.2")
        if self.use_bias_correction_kl and self.kl_loss_type.endswith("+"):
            cause = (
                "with use_bias_correction_kl the gradient is that of the divergence already, and + would add another"
            )
            remedy = "DeepSeek-V3.2 has k3"
            yield Problem(f"{path}.kl_loss_type", self.kl_loss_type, cause, self.kl_loss_type[:-1], remedy)
        if self.entropy_target is None:
            return
        low, high = self.entropy_coeff_min, self.entropy_coeff_max
        if low > high:
            yield Problem(f"{path}.entropy_coeff_min", low, f"it is above entropy_coeff_max={high}", f"<= {high}")
        elif not low <= self.entropy_coeff <= high:
            cause = f"with entropy_target it is kept between entropy_coeff_min={low} and entropy_coeff_max={high}"
            yield Problem(f"{path}.entropy_coeff", self.entropy_coeff, cause, f"{low} to {high}")

    def validate(self, n_gpus: int, train_batch_size: int, model_config: object = None) -> None:
        """Check this section by itself, as :func:`verl.utils.config.validate_config` does with the whole configuration.

        Args:
            n_gpus: number of ranks; what depends on it is checked with the whole configuration.
            train_batch_size: prompts of a training step.
            model_config: as ``n_gpus``.

        Raises:
            ConfigError: lists all problems.
        """
        del n_gpus, model_config
        check_update(self.problems("actor"), "actor", self.ppo_mini_batch_size, train_batch_size)


@section
class FSDPActorConfig(ActorConfig, DistributedModel):
    """An actor trained under FSDP."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPActorConfig"

    grad_clip: float = setting(1.0, gt=0)
    """Maximum gradient norm of one step."""
    fsdp_config: FSDPEngineConfig = subsection(FSDPEngineConfig)
    """Sharding, precision, offload."""
    use_remove_padding: bool = setting(
        True, interpolation="${oc.select:actor_rollout_ref.model.use_remove_padding,false}"
    )
    """Pack sequences; by default as in the model section."""
    calculate_sum_pi_squared: bool = setting(False)
    """Compute Σπ² of every token together with the old log-probs; set automatically for estimators that read it."""
    ulysses_sequence_parallel_size: int = setting(1, ge=1)
    """Ranks that share each sequence; the same setting as that of `fsdp_config`."""
    megatron: McoreEngineConfig = subsection(McoreEngineConfig)
    """With `strategy=megatron`: parallel sizes, precision, optimizer state."""

    @property
    def placement(self) -> FSDPEngineConfig | McoreEngineConfig:
        """The section of the training back end."""
        return self.megatron if self.strategy == "megatron" else self.fsdp_config


@section
class McoreActorConfig(FSDPActorConfig):
    """An actor trained by megatron-core: the same section with another default of ``strategy``."""

    strategy: Strategy = setting("megatron")
    """Training back end; `fsdp` and `fsdp2` both use FSDP2, `megatron` uses megatron-core."""


@section
class RefConfig(BaseConfig, DistributedModel):
    """The frozen reference policy; only its log-probs are computed."""

    hydra_target: ClassVar[str] = "verl.workers.config.FSDPActorConfig"

    strategy: Strategy = setting(
        "fsdp", interpolation="${actor_rollout_ref.actor.strategy}", refuse_values=NO_OTHER_BACK_END
    )
    """Back end; by default the actor's."""
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, ge=1)
    """Sequences per forward pass on one rank; null uses the setting of the rollout's log-probs."""
    log_prob_use_dynamic_bsz: bool = setting(
        False, interpolation="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}"
    )
    """Fill micro-batches by tokens instead of by sequences."""
    log_prob_max_token_len_per_gpu: int = setting(
        16384, ge=1, interpolation="${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,16384}"
    )
    """Tokens per pass on one rank, with `log_prob_use_dynamic_bsz`."""
    profiler: ModelProfilerConfig = subsection(ModelProfilerConfig)
    """Ranks whose processes are profiled."""
    fsdp_config: FSDPEngineConfig = subsection(FSDPEngineConfig, forward_only=True)
    """Sharding, precision, offload."""
    ulysses_sequence_parallel_size: int = setting(
        1, ge=1, interpolation="${oc.select:actor_rollout_ref.actor.ulysses_sequence_parallel_size,1}"
    )
    """Ranks that share each sequence, by default as for the actor; the same setting as that of `fsdp_config`."""
    megatron: McoreEngineConfig = subsection(McoreEngineConfig, forward_only=True)
    """With `strategy=megatron`; sizes that are not set are the actor's."""

    @property
    def placement(self) -> FSDPEngineConfig | McoreEngineConfig:
        """The section of the training back end."""
        return self.megatron if self.strategy == "megatron" else self.fsdp_config
