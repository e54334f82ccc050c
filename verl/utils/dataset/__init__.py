"""Data sets, and how the configuration chooses them."""

from verl.utils.dataset.build import create_rl_dataset, create_rl_sampler, create_sft_dataset
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset, sft_collate_fn
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.dataset.sft_dataset import SFTDataset

__all__ = [
    "MultiTurnSFTDataset",
    "RLHFDataset",
    "SFTDataset",
    "collate_fn",
    "create_rl_dataset",
    "create_rl_sampler",
    "create_sft_dataset",
    "sft_collate_fn",
]
