"""verl: reinforcement-learning post-training of large language models.

One controller drives the data flow (prompts, rollout, reward, log-probs, values, advantages,
update); distributed workers compute. Start reading at ``verl/trainer/ppo/ray_trainer.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["DataProto", "__version__"]

if TYPE_CHECKING:
    from verl.protocol import DataProto


def __getattr__(name: str) -> object:
    # Lazy, so that `import verl.errors` or `verl.utils` does not load torch.
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module 'verl' has no attribute '{name}'")
