"""Heads of multi-token prediction in a model folder, and what plain PyTorch makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.workers.support import EPS, LR, P, R, naive_outputs, naive_policy_loss
from verl.protocol import DataProto
from verl.utils.transformers_private import names_on_disk
from verl.workers.config import ActorConfig


class PlainHead(nn.Module):
    """One head, of the layers of Transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        config, last = model.config, model.model.layers[-1]
        norm = type(last.input_layernorm)
        self.layer = type(last)(config, config.num_hidden_layers - 1)
        self.enorm, self.hnorm, self.final = (norm(config.hidden_size) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def named(self, prefix: str) -> dict[str, Tensor]:
        """Its weights, as parameters and buffers, under the names that they have beside those of the model."""
        renamed = {"final.": "shared_head.norm.", "layer.": ""}
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        for old, new in renamed.items():
            tensors = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in tensors.items()}
        return {prefix + name: tensor for name, tensor in tensors.items()}


def add_heads(folder: str, count: int = 1, seed: int = 3) -> None:
    """Draw heads and add them to a model's file, with copies of the embedding and of the output matrix."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    weights = load_file(path := Path(folder) / "model.safetensors")
    for index in range(count):
        head, prefix = PlainHead(model), f"model.layers.{model.config.num_hidden_layers + index}."
        for parameter in head.parameters():
            parameter.data = torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0)
        for name, buffer in head.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
        named = {name: tensor.detach().contiguous() for name, tensor in head.named(prefix).items()}
        weights |= names_on_disk(model, {n: t for n, t in named.items() if not n.endswith("inv_freq")})
        weights[f"{prefix}embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
        weights[f"{prefix}shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    save_file(weights, path, metadata={"format": "pt"})


def plain_heads(model: Any, weights: Mapping[str, Tensor], count: int) -> nn.ModuleList:
    """The heads, with ``weights`` by the names that the model's own layers would have."""
    heads = nn.ModuleList(PlainHead(model) for _ in range(count))
    for index, head in enumerate(heads):
        for name, tensor in head.named(f"model.layers.{model.config.num_hidden_layers + index}.").items():  # type: ignore[operator]
            if not name.endswith("inv_freq"):
                tensor.data.copy_(weights[name])
    return heads


def naive_head_losses(model: Any, heads: Any, batch: DataProto, is_detached: bool) -> list[Tensor]:
    """Mean cross entropy of each head over the response tokens that it predicts, one sequence at a time."""
    columns, counts = batch.batch, [0] * len(heads)
    sums = [torch.zeros(()) for _ in heads]

    def kept(x: Tensor) -> Tensor:
        return x.detach() if is_detached else x

    for ids, seen, chosen in zip(
        columns["input_ids"], columns["attention_mask"].bool(), columns["response_mask"].bool(), strict=True
    ):
        tokens, start = ids[seen], int(seen[:P].sum())
        hidden = kept(model.model(input_ids=tokens[None]).last_hidden_state)
        embedded = kept(model.model.embed_tokens(tokens[None]))
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
        for k, head in enumerate(heads, 1):
            ahead = embedded.roll(-k, 1)
            x = head.eh_proj(torch.cat([head.enorm(ahead), head.hnorm(hidden)], -1))
            x = head.layer(
                x,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=model.model.rotary_emb(x, positions),
            )
            hidden = head.final(x)
            log_p = (hidden[0] @ kept(model.lm_head.weight).T).log_softmax(-1)
            for t in range(R):
                before = start + t - 1 - k
                if chosen[t] and before >= 0:
                    sums[k - 1] = sums[k - 1] - log_p[before, tokens[start + t]]
                    counts[k - 1] += 1
    return [total / count for total, count in zip(sums, counts, strict=True)]


def naive_update_with_heads(
    path: str,
    weights: Mapping[str, Tensor],
    batch: DataProto,
    config: ActorConfig,
    count: int,
    factor: float,
    is_detached: bool,
    steps: int = 2,
) -> tuple[dict[str, Tensor], float, list[float]]:
    """Weights after AdamW steps on the whole batch, the norm of the first gradient, and the heads' first losses."""
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    heads = plain_heads(model, weights, count)
    parameters = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1, eps=EPS)
    first, first_losses = 0.0, []
    for step in range(steps):
        optimizer.zero_grad()
        losses = naive_head_losses(model, heads, batch, is_detached)
        loss = naive_policy_loss(*naive_outputs(model, batch), batch, config)
        (loss + factor * torch.stack(losses).mean()).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        if step == 0:
            first, first_losses = norm, [one.item() for one in losses]
        optimizer.step()
    named = {name: p.detach().clone() for name, p in model.named_parameters()}
    for index, head in enumerate(heads):
        prefix = f"model.layers.{model.config.num_hidden_layers + index}."
        named |= {n: p.detach().clone() for n, p in head.named(prefix).items() if not n.endswith("inv_freq")}  # type: ignore[operator]
    return named, first, first_losses
