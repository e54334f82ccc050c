"""verl: reinforcement-learning post-training of large language models.

One controller drives the data flow (prompts, rollout, reward, log-probs, values, advantages,
update); distributed workers compute. Start reading at ``verl/trainer/ppo/ray_trainer.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.base import doors
from verl.base.lazy import on_first_use

__version__ = "0.1.0"
__all__ = ["DataProto", "__version__"]

if TYPE_CHECKING:
    from verl.protocol import DataProto

doors.install()


# `import verl.errors` or `verl.utils` does not load torch.
__getattr__ = on_first_use(__name__, {"DataProto": "verl.protocol"})
