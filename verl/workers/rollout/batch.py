"""Between batch columns and requests, the same for every engine.

In (rows are prompts, each already repeated ``n`` times by the driver):
    input_ids, attention_mask    (bsz, prompt_length), padded on the left
    uid, sample_index            id of the prompt, and position among its siblings
    meta_info                    global_steps; validate: sample with rollout.val_kwargs;
                                 do_sample: overrides the configured one (False: greedy)

Out:
    prompts                          (bsz, prompt_length), the very tensor that came in as input_ids
    responses, response_mask,
    rollout_log_probs                (bsz, response_length), padded on the right
    input_ids, attention_mask,
    position_ids                     (bsz, prompt_length + response_length)
    finish_reason, weight_version    one per row
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from verl.errors import RolloutError, SchemaError
from verl.protocol import DataProto
from verl.schema import require
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import RolloutOutput, RolloutRequest, SamplingParams
from verl.workers.rollout.sampling import sample_seed


def requests_from_prompts(prompts: DataProto, config: RolloutConfig) -> list[RolloutRequest]:
    """One request per row, with the row's own seed.

    Raises:
        SchemaError: a column is missing, or a prompt is not padded on the left alone.
        RolloutError: a prompt is empty or longer than ``config.prompt_length``.
    """
    require(prompts, ("input_ids", "attention_mask", "uid", "sample_index"), "generate_sequences")
    assert prompts.batch is not None
    step = int(prompts.meta_info.get("global_steps", 0))
    template = sampling_for(config, bool(prompts.meta_info.get("validate", False)), prompts.meta_info.get("do_sample"))
    uids, indices = prompts.non_tensor_batch["uid"], prompts.non_tensor_batch["sample_index"]
    rows = _unpadded(prompts.batch["input_ids"], prompts.batch["attention_mask"], uids, config.prompt_length)
    return [
        RolloutRequest(row, replace(template, seed=sample_seed(config.seed, step, uid, int(index))))
        for row, uid, index in zip(rows, uids, indices, strict=True)
    ]


def sampling_for(config: RolloutConfig, validate: bool, do_sample: bool | None = None) -> SamplingParams:
    """``rollout``'s own parameters, or those of ``rollout.val_kwargs``, with seed 0.

    ``do_sample`` None leaves the decision to the configuration; False is temperature 0, as is a
    configured ``do_sample=false``.
    """
    source = config.val_kwargs if validate else config
    samples = source.do_sample if do_sample is None else do_sample
    max_tokens = config.val_kwargs.max_tokens if validate else None
    return SamplingParams(
        max_tokens=max_tokens or config.response_length,
        seed=0,
        temperature=source.temperature if samples else 0.0,
        top_p=source.top_p,
        top_k=source.top_k,
        min_p=source.min_p,
        stop=config.stop if source.stop is None else source.stop,
        stop_token_ids=config.stop_token_ids if source.stop_token_ids is None else source.stop_token_ids,
        ignore_eos=config.ignore_eos,
    )


def _unpadded(input_ids: Tensor, attention_mask: Tensor, uids: np.ndarray, prompt_length: int) -> list[list[int]]:
    lengths = attention_mask.sum(-1).tolist()
    not_left_padded = (attention_mask[:, 1:] < attention_mask[:, :-1]).any(-1).tolist()
    rows = []
    for ids, length, broken, uid in zip(input_ids.tolist(), lengths, not_left_padded, uids, strict=True):
        if broken:
            raise SchemaError(
                f"prompt {uid!r}: attention_mask must be zeros, then ones; prompts are padded on the left."
            )
        if length == 0:
            raise RolloutError(f"prompt {uid!r} is empty; a model needs at least one token to go on from.")
        if length > prompt_length:
            raise RolloutError(
                f"prompt {uid!r} has {length} tokens, more than rollout.prompt_length={prompt_length}. Raise it "
                "(data.max_prompt_length), or set data.filter_overlong_prompts=true or data.truncation=left."
            )
        rows.append(ids[-length:])
    return rows


def columns_from_outputs(
    prompts: DataProto, outputs: list[RolloutOutput], response_length: int, pad_token_id: int
) -> DataProto:
    """The columns that generation adds, see the head of this file."""
    assert prompts.batch is not None
    bsz = len(outputs)
    lengths = torch.tensor([len(output.token_ids) for output in outputs])
    response_mask = (torch.arange(response_length) < lengths[:, None]).long()  # (bsz, response_length)
    responses = torch.full((bsz, response_length), pad_token_id)
    log_probs = torch.zeros(bsz, response_length)
    chosen = response_mask.bool()
    responses[chosen] = torch.tensor([token for output in outputs for token in output.token_ids], dtype=torch.long)
    log_probs[chosen] = torch.tensor([value for output in outputs for value in output.log_probs], dtype=torch.float)

    prompt_ids, prompt_mask = prompts.batch["input_ids"].cpu(), prompts.batch["attention_mask"].cpu()
    attention_mask = torch.cat([prompt_mask, response_mask], dim=-1)
    return DataProto.from_dict(
        tensors={
            "prompts": prompt_ids,
            "responses": responses,
            "response_mask": response_mask,
            "rollout_log_probs": log_probs,
            "input_ids": torch.cat([prompt_ids, responses], dim=-1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        },
        non_tensors={
            "finish_reason": np.array([output.finish_reason for output in outputs], dtype=object),
            "weight_version": np.array([output.weight_version for output in outputs]),
        },
    )
