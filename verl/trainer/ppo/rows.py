"""The data sets of a run, and the order of its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omegaconf import open_dict

from verl.agents.tool_agent import described_tools
from verl.config import DataConfig, PPOConfig, local_copies
from verl.datasets import create_rl_dataset, create_rl_sampler
from verl.trainer.config.load import data_section

if TYPE_CHECKING:
    from torch.utils.data import Dataset, Sampler
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


def prompt_settings(config: PPOConfig) -> DataConfig:
    """Return the section ``data`` with the tools of the run, which the policy reads in front of each prompt.

    So they count for the length of a prompt.
    """
    data = local_copies(config).data
    if tools := described_tools(config.actor_rollout_ref.rollout):
        data = replace(data, apply_chat_template_kwargs={**(data.apply_chat_template_kwargs or {}), "tools": tools})
    return data


def rl_datasets(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None = None
) -> tuple[Dataset, Dataset | None, Sampler[int]]:
    """Read the prompts that the section ``data`` names.

    Returns:
        the data set of training, that of validation (None without files of it), and the sampler of the first.

    Raises:
        DataError: a file is missing, or lacks what a prompt needs.
    """
    data = prompt_settings(config)
    section: Any = data_section(config)
    if section is config.data:
        section = data
    else:
        with open_dict(section):
            section.apply_chat_template_kwargs = data.apply_chat_template_kwargs
    train = create_rl_dataset(
        data.train_files, section, tokenizer, processor, is_train=True, max_samples=data.train_max_samples
    )
    val = None
    if data.val_files:
        val = create_rl_dataset(
            data.val_files, section, tokenizer, processor, is_train=False, max_samples=data.val_max_samples
        )
    return train, val, create_rl_sampler(data, train)
