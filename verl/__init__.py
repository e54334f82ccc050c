"""verl: reinforcement-learning post-training of large language models.

One controller drives the data flow (prompts, rollout, reward, log-probs, values, advantages,
update); distributed workers compute. Start reading at ``verl/trainer/ppo/trainer.py``.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036  a clone may be used without pip, which would say so
    _NEEDS = (
        f"verl needs Python 3.11 or newer, and {sys.executable} is Python {sys.version.split()[0]}. Make an "
        "environment of a newer one: python3.11 -m venv .venv, or make PYTHON=python3.11 (docs/install.md)."
    )
    raise (SystemExit if sys.argv[:1] == ["-m"] else ImportError)(_NEEDS)

from typing import TYPE_CHECKING

from verl.base.lazy import on_first_use
from verl.compat import import_hooks

if TYPE_CHECKING:
    from verl.api.result import TrainingResult
    from verl.api.sampling import evaluate, generate
    from verl.api.training import sft, train
    from verl.protocol import DataProto

__version__ = "0.1.0"
__all__ = ["DataProto", "TrainingResult", "__version__", "evaluate", "generate", "sft", "train"]

# `import verl.errors` or `verl.utils` does not load torch.
__getattr__ = on_first_use(
    __name__,
    {
        "DataProto": "verl.protocol",
        "TrainingResult": "verl.api.result",
        "evaluate": "verl.api.sampling",
        "generate": "verl.api.sampling",
        "sft": "verl.api.training",
        "train": "verl.api.training",
    },
)

import_hooks.install()
