"""Batches of texts as a rollout would return them."""

import numpy as np
import torch

from verl import DataProto
from verl.testing.models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
LENGTH = 6


def batch_of(texts, truths=None, sources="countdown", prompt="p", **columns):
    """Responses padded at the right to LENGTH; an <eos> is part of a response where it fits.

    Args:
        texts: one response per row; an empty one has no token at all.
        truths: ground truths, or None for no ``reward_model`` column.
        sources: one data source for all rows, or one per row.
        columns: more tensor or non-tensor columns.
    """
    rows = [TOKENIZER(text + "<eos>", add_special_tokens=False)["input_ids"][:LENGTH] if text else [] for text in texts]
    responses = torch.tensor([ids + [0] * (LENGTH - len(ids)) for ids in rows])
    response_mask = torch.tensor([[1] * len(ids) + [0] * (LENGTH - len(ids)) for ids in rows])
    prompts = torch.tensor([[0, *TOKENIZER(prompt, add_special_tokens=False)["input_ids"]]] * len(texts))
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": torch.cat([(prompts != 0).long(), response_mask], dim=1),
        "response_mask": response_mask,
    }
    others = {
        "data_source": [sources] * len(texts) if isinstance(sources, str) else sources,
        "uid": [f"u{row}" for row in range(len(texts))],
        "extra_info": [{"row": row} for row in range(len(texts))],
    }
    if truths is not None:
        others["reward_model"] = [{"style": "rule", "ground_truth": truth} for truth in truths]
    for name, values in columns.items():
        (tensors if isinstance(values, torch.Tensor) else others)[name] = values
    arrays = {name: np.fromiter(values, dtype=object, count=len(texts)) for name, values in others.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors=arrays)
