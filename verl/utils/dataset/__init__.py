"""Data sets, and how the configuration chooses them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.utils.dataset.build import create_rl_dataset, create_rl_sampler, create_sft_dataset
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset, sft_collate_fn
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
    from verl.utils.dataset.rm_dataset import RMDataset, pair_collate_fn
    from verl.utils.dataset.sft_dataset import SFTDataset

__all__ = [
    "MultiTurnSFTDataset",
    "RLHFDataset",
    "RMDataset",
    "SFTDataset",
    "collate_fn",
    "create_rl_dataset",
    "create_rl_sampler",
    "create_sft_dataset",
    "pair_collate_fn",
    "sft_collate_fn",
]

MODULES = ("build", "multiturn_sft_dataset", "rl_dataset", "rm_dataset", "sft_dataset")


def __getattr__(name: str) -> Any:
    # Lazy: scripts that only read files (verl.utils.dataset.files) need neither torch nor transformers.
    if name in __all__:
        modules = (importlib.import_module(f"verl.utils.dataset.{module}") for module in MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module 'verl.utils.dataset' has no attribute '{name}'")
