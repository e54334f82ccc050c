"""Measure what `trainer.rollout_token_dump_freq` costs in a step: time and bytes of a file of tokens.

python -m benchmarks.token_dump --rows 512 --response 1024

Beside it stands the time of the samples as text (`trainer.rollout_data_dir`), of the same batch in the same process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from verl.experience.records import RecordFolder, generation_records
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir
from verl.trainer.ppo.token_dump import NUMBERS, TokenDump
from verl.utils import hf_tokenizer

ROUNDS = 3


def made_up_batch(rows: int, prompt: int, response: int, vocabulary: int) -> DataProto:
    """Random tokens and numbers; responses of random lengths."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(response // 4, response + 1, (rows, 1), generator=draw)
    mask = (torch.arange(response) < lengths).long()
    ids = torch.randint(5, vocabulary, (rows, prompt + response), generator=draw)
    tensors = {
        "input_ids": ids,
        "prompts": ids[:, :prompt],
        "responses": ids[:, prompt:] * mask,
        "attention_mask": torch.cat([torch.ones(rows, prompt, dtype=torch.long), mask], 1),
        "response_mask": mask,
        **{name: torch.randn(rows, response, generator=draw) * mask for name in NUMBERS[:7]},
    }
    names = {
        "uid": np.array([f"1-{row // 8}" for row in range(rows)], dtype=object),
        "sample_index": np.arange(rows) % 8,
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=names)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=1024)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = hf_tokenizer(tiny_model_dir(folder / "model", family="qwen3"))
        batch = made_up_batch(args.rows, args.prompt, args.response, len(tokenizer))
        tokens, texts = TokenDump(name, tokenizer, 1), RecordFolder(name)
        seconds: dict[str, list[float]] = {"tokens": [], "texts": []}
        for step in range(1, ROUNDS + 1):
            began = time.perf_counter()
            tokens.write(step, batch)
            seconds["tokens"].append(time.perf_counter() - began)
            began = time.perf_counter()
            texts.write(step, generation_records(step, tokenizer, batch, batch.batch["advantages"], {}))
            seconds["texts"].append(time.perf_counter() - began)
        count = int(batch.batch["response_mask"].sum())
        size = (folder / "1.arrow").stat().st_size
    best = {what: min(found) for what, found in seconds.items()}
    print(f"{args.rows} responses, {count:,} response tokens, 7 numbers each")
    print(f"tokens: {best['tokens']:.3f} s, {size / 2**20:.1f} MiB, {size / count:.1f} bytes per response token")
    print(f"texts:  {best['texts']:.3f} s; the tokens take {best['tokens'] / best['texts']:.2f} of that")


if __name__ == "__main__":
    main()
