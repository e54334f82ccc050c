"""Configuration of multi-token prediction: heads of a model that predict tokens after the next one."""

from __future__ import annotations

from typing import ClassVar

from verl.config.base import BaseConfig, section, setting


@section
class MtpConfig(BaseConfig):
    """Heads that predict tokens after the next one (arXiv:2412.19437, section 2.2), of models whose folder has them.

    Heads that are not trained are copied from the model's folder to every exported one.
    """

    hydra_target: ClassVar[str] = "verl.workers.config.MtpConfig"

    enable: bool = setting(False)
    """Read the settings of this section; false ignores the others."""
    enable_train: bool = setting(False)
    """Train the heads beside the model, by the cross entropy of the tokens of the loss; `strategy=megatron` only."""
    enable_rollout: bool = setting(False)
    """Let the rollout engine propose tokens by the heads (speculative decoding); `vllm` and `sglang` only.
    With `vllm` trained heads are updated with the model; else heads keep the weights of the model's folder."""
    detach_encoder: bool = setting(False)
    """Keep the gradients of this loss inside the heads: the model, its embedding and its output matrix get none."""
    mtp_loss_scaling_factor: float = setting(0.1, ge=0)
    """Weight of the loss, which is the mean over the heads of each head's mean over tokens."""
    speculative_algorithm: str = setting("EAGLE")
    """SGLang's name of the method."""
    speculative_num_steps: int = setting(2, ge=1)
    """Tokens that SGLang's heads propose one after another."""
    speculative_eagle_topk: int = setting(2, ge=1)
    """Branches of SGLang's proposals at each step."""
    speculative_num_draft_tokens: int = setting(4, ge=1)
    """Proposed tokens that SGLang checks at once."""
    method: str = setting("mtp")
    """vLLM's name of the method."""
    num_speculative_tokens: int = setting(1, ge=1)
    """Tokens that vLLM's heads propose at once."""

    @property
    def is_trained(self) -> bool:
        """True if heads are trained."""
        return self.enable and self.enable_train

    @property
    def is_in_rollout(self) -> bool:
        """True if the rollout engine uses the heads."""
        return self.enable and self.enable_rollout
