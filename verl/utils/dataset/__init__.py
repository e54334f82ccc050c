"""Training and validation data: data sets, samplers, and their creation from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.base.lazy import on_first_use

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


# Scripts that only read files (verl.utils.dataset.files) need neither torch nor transformers.
__getattr__ = on_first_use(
    __name__,
    {
        "MultiTurnSFTDataset": "verl.utils.dataset.multiturn_sft_dataset",
        "RLHFDataset": "verl.utils.dataset.rl_dataset",
        "RMDataset": "verl.utils.dataset.rm_dataset",
        "SFTDataset": "verl.utils.dataset.sft_dataset",
        "collate_fn": "verl.utils.dataset.rl_dataset",
        "create_rl_dataset": "verl.utils.dataset.build",
        "create_rl_sampler": "verl.utils.dataset.build",
        "create_sft_dataset": "verl.utils.dataset.build",
        "pair_collate_fn": "verl.utils.dataset.rm_dataset",
        "sft_collate_fn": "verl.utils.dataset.multiturn_sft_dataset",
    },
)
