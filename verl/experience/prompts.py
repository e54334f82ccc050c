"""Names of prompts and of the responses to them, the same in every run."""

from __future__ import annotations

from collections import Counter

import numpy as np

from verl.protocol import DataProto, replace_columns


def name_groups(prompts: DataProto, step: int, first_row: int = 0) -> DataProto:
    """Add each prompt's ``uid``, shared by its responses: step and row, so that it is the same in every run."""
    uids = np.array([f"{step}-{first_row + row}" for row in range(len(prompts))], dtype=object)
    return prompts | DataProto.from_dict(non_tensors={"uid": uids})


def name_samples(prompts: DataProto, step: int, n: int, first_prompt: int = 0) -> DataProto:
    """Name rows that are repeated already as :func:`name_groups` and :func:`repeat_prompts` would have named them.

    Rows with one ``uid`` are samples of one prompt, in their order; without that column, each ``n`` adjacent rows are.
    The given ids are replaced, so that what is sampled follows from the step and not from random ids.

    Args:
        prompts: rows to generate from, one for each response.
        step: the training step.
        n: responses per prompt.
        first_prompt: prompts that were named earlier in the step.
    """
    prompt_uids = prompts.non_tensor_batch.get("uid", np.arange(len(prompts)) // n)
    index_of: dict[object, int] = {}
    seen: Counter[object] = Counter()
    uids, indices = [], []
    for uid in prompt_uids.tolist():
        uids.append(f"{step}-{first_prompt + index_of.setdefault(uid, len(index_of))}")
        indices.append(seen[uid])
        seen[uid] += 1
    names = {"uid": np.array(uids, dtype=object), "sample_index": np.array(indices)}
    return replace_columns(prompts, DataProto.from_dict(non_tensors=names))


def repeat_prompts(prompts: DataProto, n: int) -> DataProto:
    """Repeat each prompt ``n`` times in adjacent rows; ``sample_index`` numbers the copies from 0."""
    repeated = prompts.repeat(n, interleave=True)
    siblings = np.tile(np.arange(n), len(prompts))
    return repeated | DataProto.from_dict(non_tensors={"sample_index": siblings})
