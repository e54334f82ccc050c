"""Data sets, and how the configuration chooses them."""

from verl.utils.dataset.build import create_rl_dataset, create_rl_sampler
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

__all__ = ["RLHFDataset", "collate_fn", "create_rl_dataset", "create_rl_sampler"]
