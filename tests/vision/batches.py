"""Batches with pictures, and what a plain forward pass of Transformers makes of them, one sequence at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from tests.support.vision_models import film_rows, picture_rows, write_parquet
from tests.workers.support import EPS, LR, naive_policy_loss
from verl.datasets.rl_dataset import RLHFDataset, collate_fn
from verl.protocol import DataProto
from verl.utils import hf_processor, hf_tokenizer
from verl.workers.config import ActorConfig

P, R = 34, 5
"""Prompt and response length."""


def prompts(path: str, folder: Any, count: int = 6, text_every: int = 3) -> DataProto:
    """Prompts of ``picture_rows`` as the data set makes them."""
    return prompts_of(path, folder, picture_rows(count, text_every), P)


def film_prompts(path: str, folder: Any, count: int = 8, length: int = 120) -> DataProto:
    """Prompts of ``film_rows`` as the data set makes them."""
    return prompts_of(path, folder, film_rows(count), length)


def prompts_of(path: str, folder: Any, rows: list[dict[str, Any]], length: int) -> DataProto:
    """Prompts of rows as the data set makes them, padded to ``length``."""
    file = write_parquet(folder / "rows.parquet", rows)
    dataset = RLHFDataset(file, hf_tokenizer(path), {"max_prompt_length": length}, hf_processor(path))
    return DataProto.from_single_dict(collate_fn([dataset[i] for i in range(len(rows))]))


def picture_batch(path: str, folder: Any, count: int = 6, text_every: int = 3) -> DataProto:
    """Prompts and random responses of all lengths; row 0 has an empty one."""
    batch = prompts(path, folder, count, text_every)
    g = torch.Generator().manual_seed(0)
    response_mask = (torch.arange(R) < torch.tensor([0, R, 3, 1, 4, 2, 5, 3])[:count, None]).long()
    responses = torch.randint(4, 104, (count, R), generator=g) * response_mask
    columns = batch.batch
    tensors = {
        "prompts": columns["input_ids"],
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([columns["input_ids"], responses], dim=1),
        "attention_mask": torch.cat([columns["attention_mask"], response_mask], dim=1),
        "position_ids": continued(columns["position_ids"], response_mask),
        "advantages": torch.randn(count, R, generator=g) * response_mask,
        "noise": torch.randn(count, R, generator=g) * 0.4 * response_mask,
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=batch.non_tensor_batch)


def continued(prompt: Tensor, response_mask: Tensor) -> Tensor:
    """Positions of prompts, (bsz, 4, prompt_length), and of responses of text, each one further than the token before.

    Padding repeats the position of the last token.
    """
    steps = response_mask.cumsum(-1)[:, None]  # (bsz, 1, response_length): 1, 2, ...
    last = torch.stack([prompt[:, 0].amax(-1), *[prompt[:, 1:].amax((1, 2))] * 3], dim=1)  # (bsz, 4)
    return torch.cat([prompt, last[..., None] + steps], dim=-1)


def arguments_of(batch: DataProto, row: int) -> dict[str, Tensor]:
    """A row as arguments of the model's own forward pass, which computes the positions itself."""
    columns = batch.batch
    ids = columns["input_ids"][row][columns["attention_mask"][row].bool()][None]
    images = dict(batch.non_tensor_batch["multi_modal_inputs"][row])
    return {"input_ids": ids, "mm_token_type_ids": (ids == 106).int(), **images}


def naive_log_probs(model: Any, batch: DataProto) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of the response tokens, (bsz, R), by full logits."""
    columns, found = batch.batch, []
    for row in range(len(batch)):
        given = arguments_of(batch, row)
        log_p = model(**given).logits[0].float().log_softmax(-1)
        start, length = int(columns["attention_mask"][row, :P].sum()), int(columns["response_mask"][row].sum())
        before = log_p[start - 1 : start - 1 + length]
        chosen = before.gather(1, given["input_ids"][0, start:, None]).squeeze(1)
        zeros = log_p.new_zeros(R - length)
        entropy = -(before.exp() * before).sum(-1)
        found.append((torch.cat([chosen, zeros]), torch.cat([entropy, zeros])))
    log_probs, entropies = zip(*found, strict=True)
    return torch.stack(log_probs), torch.stack(entropies)


def naive_steps(path: str, batch: DataProto, config: ActorConfig, steps: int = 2) -> tuple[dict[str, Tensor], float]:
    """Weights after AdamW steps on the whole batch, and the norm of the first gradient."""
    model = AutoModelForImageTextToText.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, eps=EPS)
    first = 0.0
    for step in range(steps):
        optimizer.zero_grad()
        naive_policy_loss(*naive_log_probs(model, batch), batch, config).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        first = float(norm) if step == 0 else first
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, first
