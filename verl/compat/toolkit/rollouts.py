"""Responses from files in the place of new ones, for trainers that users write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig

from verl.config import PPOConfig
from verl.experience.stored_rollouts import StoredRollouts
from verl.protocol import DataProto
from verl.trainer.config.load import load_config


class RolloutSkip:
    """Let an object that generates responses take them from ``rollout.skip_dump_dir`` where they are there.

    :class:`verl.trainer.ppo.ray_trainer.RayPPOTrainer` does this by itself; a loop of one's own that calls
    ``generate_sequences`` calls :meth:`wrap_generate_sequences` once before. Batches need the column ``uid``.

    Args:
        config: the whole configuration; ``actor_rollout_ref.rollout.skip_rollout`` turns it on.
        rollout_wg: an object with ``generate_sequences(batch)``.

    Raises:
        ConfigError: the configuration is wrong.
    """

    def __init__(self, config: PPOConfig | DictConfig | Mapping[str, object], rollout_wg: Any) -> None:
        self.config = (
            config if isinstance(config, PPOConfig) else load_config(config, with_rules=False, for_program=True)
        )
        self._rollout_wg = rollout_wg

    @property
    def is_active(self) -> bool:
        """True if responses are stored and read."""
        return self.config.actor_rollout_ref.rollout.skip_rollout

    def wrap_generate_sequences(self) -> None:
        """Replace ``generate_sequences`` of the object; nothing changes unless this is active."""
        if self.is_active:
            self._rollout_wg.generate_sequences = wrap_generate_sequences(self, self._rollout_wg)


def wrap_generate_sequences(rolloutskip: RolloutSkip, rollout_wg: Any) -> Callable[[DataProto], DataProto]:
    """Return a function that answers a batch from files, and where there is none by ``rollout_wg``, and keeps it."""
    return StoredRollouts(rolloutskip.config, rollout_wg.generate_sequences).answer
