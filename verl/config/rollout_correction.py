"""Configuration of rollout correction, and common settings as presets."""

from __future__ import annotations

from typing import Annotated, Literal

from verl.config.base import BaseConfig, section, setting


@section
class RolloutCorrectionConfig(BaseConfig):
    """Correction for the gap between the rollout's and the trainer's probabilities.

    The class methods are presets. *Decoupled*: the trainer computes its own old log-probs, and importance weights or
    rejection correct for the gap between them and the rollout's. *A-3PO*: the same, but the old log-probs are
    interpolated in the policy loss. *Bypass*: the rollout's log-probs are the old ones, and the policy loss does the
    correction.
    """

    rollout_is: Literal["token", "sequence"] | None = setting(None)
    """Importance weights π/μ of the trainer's policy over the rollout's, per token or per response; null for none."""
    rollout_is_threshold: Annotated[float | str, "threshold"] = setting(2.0)
    """Upper bound of a weight, at least 1; or a band `lo_hi` (0.5_5.0) outside of which a weight is 0 (IcePop); 0.0_3.0
    has no lower bound (with `rollout_is: sequence` the `sequence_mask` of TRL)."""
    rollout_rs: str | None = setting(None)
    """Criteria of rejection, comma-separated: token_k1..k3, seq_sum_k1..k3, seq_mean_k1..k3, seq_max_k2..k3."""
    rollout_rs_threshold: Annotated[str | float | None, "threshold"] = setting(None)
    """One threshold for each criterion, or one for all: k1 a band of ratios `lo_hi`, k2 and k3 an upper bound."""
    bypass_mode: bool = setting(False)
    """Use the rollout's log-probs as the old ones: no pass for old log-probs; the policy loss corrects the difference.
    """
    loss_type: Literal["ppo_clip", "reinforce"] = setting("ppo_clip")
    """Policy loss of bypass mode: clip the ratio to the rollout, or weighted policy gradient without a clip."""
    rollout_is_batch_normalize: bool = setting(False)
    """Divide the weights by their mean over the batch of a step."""
    prox_logp_method: Literal["recompute", "loglinear"] = setting("recompute")
    """Old log-probs by a forward pass, or interpolated between the rollout's and the current policy's by the age of
    each token, without a pass (A-3PO, arXiv:2512.06547)."""

    @property
    def is_decoupled(self) -> bool:
        """True if the driver computes weights or rejection, from the trainer's own old log-probs."""
        recomputes = not self.bypass_mode and not self.interpolates
        return recomputes and (self.rollout_is is not None or self.rollout_rs is not None)

    @property
    def weighs_by_response(self) -> bool:
        """True if the driver's correction is weights that depend on one response each, so that a loss can make them."""
        return self.is_decoupled and self.rollout_rs is None and not self.rollout_is_batch_normalize

    @property
    def interpolates(self) -> bool:
        """True if the policy loss interpolates the old log-probs (A-3PO)."""
        return self.prox_logp_method == "loglinear"

    @classmethod
    def _weighted(
        cls,
        rollout_is: Literal["token", "sequence"],
        is_threshold: float,
        rollout_rs: str,
        rs_threshold: str | float,
        loss_type: Literal["ppo_clip", "reinforce"] | None = None,
    ) -> RolloutCorrectionConfig:
        """Make a preset of weights and rejection, in bypass mode if a loss is given."""
        return cls(
            rollout_is=rollout_is,
            rollout_is_threshold=is_threshold,
            rollout_rs=rollout_rs,
            rollout_rs_threshold=rs_threshold,
            bypass_mode=loss_type is not None,
            loss_type=loss_type or "ppo_clip",
        )

    # ---- presets, decoupled -------------------------------------------------------------------

    @classmethod
    def disabled(cls) -> RolloutCorrectionConfig:
        """No correction; the gap is only measured."""
        return cls()

    @classmethod
    def decoupled_token_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Truncated importance weights per token."""
        return cls(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Truncated importance weights per response."""
        return cls(rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_token_icepop(cls, threshold: str = "0.5_5.0") -> RolloutCorrectionConfig:
        """Importance weights per token, 0 outside of a band."""
        return cls(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_mask(cls, threshold: float = 3.0) -> RolloutCorrectionConfig:
        """Importance weights per response, 0 above a bound: the default of TRL."""
        return cls(rollout_is="sequence", rollout_is_threshold=f"0.0_{threshold}")

    @classmethod
    def decoupled_seq_is_rs(
        cls, is_threshold: float = 2.0, rs_threshold: str | float = "0.5_2.0"
    ) -> RolloutCorrectionConfig:
        """Truncated weights per response; responses rejected by their ratio."""
        return cls._weighted("sequence", is_threshold, "seq_sum_k1", rs_threshold)

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: str | float = "0.999_1.001") -> RolloutCorrectionConfig:
        """Responses rejected by the geometric mean of their token ratios."""
        return cls(rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: str | float = "0.999_1.001"
    ) -> RolloutCorrectionConfig:
        """Truncated weights per response; responses rejected by the geometric mean of their token ratios."""
        return cls._weighted("sequence", is_threshold, "seq_mean_k1", rs_threshold)

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: str | float = "0.999_1.001"
    ) -> RolloutCorrectionConfig:
        """Truncated weights per token; responses rejected by the geometric mean of their token ratios."""
        return cls._weighted("token", is_threshold, "seq_mean_k1", rs_threshold)

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float = 0.01) -> RolloutCorrectionConfig:
        """Responses rejected by their mean k3 divergence."""
        return cls(rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, is_threshold: float = 2.0, rs_threshold: float = 0.01) -> RolloutCorrectionConfig:
        """Truncated weights per response; responses rejected by their mean k3 divergence."""
        return cls._weighted("sequence", is_threshold, "seq_mean_k3", rs_threshold)

    @classmethod
    def decoupled_k3_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: float = 0.01
    ) -> RolloutCorrectionConfig:
        """Truncated weights per token; responses rejected by their mean k3 divergence."""
        return cls._weighted("token", is_threshold, "seq_mean_k3", rs_threshold)

    # ---- presets, A-3PO -----------------------------------------------------------------------

    @classmethod
    def a3po(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Old log-probs interpolated by the age of each token; truncated importance weights per token."""
        return cls(prox_logp_method="loglinear", rollout_is="token", rollout_is_threshold=threshold)

    # ---- presets, bypass ----------------------------------------------------------------------

    @classmethod
    def bypass_ppo_clip(cls) -> RolloutCorrectionConfig:
        """PPO's clip on the ratio of the policy to the rollout."""
        return cls(bypass_mode=True, loss_type="ppo_clip")

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: str | float = "0.999_1.001") -> RolloutCorrectionConfig:
        """PPO's clip on the ratio to the rollout; responses rejected by the geometric mean of their token ratios."""
        return cls(bypass_mode=True, loss_type="ppo_clip", rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: float = 0.01) -> RolloutCorrectionConfig:
        """PPO's clip on the ratio to the rollout; responses rejected by their mean k3 divergence."""
        return cls(bypass_mode=True, loss_type="ppo_clip", rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_is(cls, threshold: float = 2.0) -> RolloutCorrectionConfig:
        """Policy gradient with truncated weights per response."""
        return cls(bypass_mode=True, loss_type="reinforce", rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def bypass_pg_token_icepop(cls, threshold: str = "0.5_5.0") -> RolloutCorrectionConfig:
        """Policy gradient with weights per token, 0 outside of a band."""
        return cls(bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: str | float = "0.999_1.001") -> RolloutCorrectionConfig:
        """Policy gradient without weights; responses rejected by the geometric mean of their token ratios."""
        return cls(bypass_mode=True, loss_type="reinforce", rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: str | float = "0.999_1.001"
    ) -> RolloutCorrectionConfig:
        """Policy gradient, truncated weights per response; responses rejected by the geometric mean of token ratios."""
        return cls._weighted("sequence", is_threshold, "seq_mean_k1", rs_threshold, "reinforce")

    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: str | float = "0.999_1.001"
    ) -> RolloutCorrectionConfig:
        """Policy gradient, truncated weights per token; responses rejected by the geometric mean of token ratios."""
        return cls._weighted("token", is_threshold, "seq_mean_k1", rs_threshold, "reinforce")
