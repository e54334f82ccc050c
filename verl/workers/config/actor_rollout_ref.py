"""Policy, rollout engine and reference: the roles that share a model."""

from __future__ import annotations

from verl.base_config import BaseConfig, section, setting, subsection
from verl.workers.config.actor import FSDPActorConfig, RefConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.config.rollout import RolloutConfig


@section
class ActorRolloutRefConfig(BaseConfig):
    """Policy, rollout engine and reference."""

    hybrid_engine: bool = setting(
        True, refuse="a rollout engine on ranks of its own is not in this version; set hybrid_engine=true"
    )
    """Sample and train on the same ranks."""
    nccl_timeout: int = setting(600, ge=1)
    """Seconds after which a collective that does not finish is an error."""
    model: HFModelConfig = subsection(HFModelConfig)
    """The model that all three share."""
    actor: FSDPActorConfig = subsection(FSDPActorConfig)
    """The policy that is trained."""
    rollout: RolloutConfig = subsection(RolloutConfig)
    """How responses are sampled."""
    ref: RefConfig = subsection(RefConfig)
    """The frozen reference."""
