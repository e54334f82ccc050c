"""Training and validation data: data sets, samplers, and their creation from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.base.lazy import on_first_use

if TYPE_CHECKING:
    from verl.datasets.build import create_rl_dataset, create_rl_sampler, create_sft_dataset
    from verl.datasets.multiturn_sft_dataset import MultiTurnSFTDataset, sft_collate_fn
    from verl.datasets.rl_dataset import RLHFDataset, collate_fn
    from verl.datasets.rm_dataset import RMDataset, pair_collate_fn
    from verl.datasets.sft_dataset import SFTDataset

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


# Scripts that only read files (verl.datasets.files) need neither torch nor transformers.
__getattr__ = on_first_use(
    __name__,
    {
        "MultiTurnSFTDataset": "verl.datasets.multiturn_sft_dataset",
        "RLHFDataset": "verl.datasets.rl_dataset",
        "RMDataset": "verl.datasets.rm_dataset",
        "SFTDataset": "verl.datasets.sft_dataset",
        "collate_fn": "verl.datasets.rl_dataset",
        "create_rl_dataset": "verl.datasets.build",
        "create_rl_sampler": "verl.datasets.build",
        "create_sft_dataset": "verl.datasets.build",
        "pair_collate_fn": "verl.datasets.rm_dataset",
        "sft_collate_fn": "verl.datasets.multiturn_sft_dataset",
    },
)
