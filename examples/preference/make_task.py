"""A toy for preferences, made in a second: a tokenizer of letters, a tiny random Qwen3, pairs, and prompts for RL.

A response is a few letters, and the better one of a pair has a vowel. Nobody writes that rule down
for the trainers: the reward model and DPO learn it from the pairs.
"""

from __future__ import annotations

import argparse
import random
import string
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<assistant>{{ m['content'] }}<eos>{% else %}<user>{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONSONANTS = [letter for letter in string.ascii_lowercase if letter not in "aeiou"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each letter."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + list(string.ascii_lowercase))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Two layers with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def make_pairs(count: int, draw: random.Random) -> list[dict[str, str]]:
    """Prompt, a response with a vowel, and one without."""
    pairs = []
    for _ in range(count):
        worse = draw.choices(CONSONANTS, k=draw.randint(2, 6))
        better = list(worse)
        better[draw.randrange(len(better))] = draw.choice("aeiou")
        draw.shuffle(worse)
        prompt = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 4)))
        pairs.append({"prompt": prompt, "chosen": "".join(better), "rejected": "".join(worse)})
    return pairs


def main() -> None:
    """Write ``model/``, ``pairs_train.parquet``, ``pairs_val.parquet`` and ``prompts.parquet``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    tokenizer = make_tokenizer()
    make_model(tokenizer, args.seed).save_pretrained(args.output_dir / "model")
    tokenizer.save_pretrained(args.output_dir / "model")
    for split, count in (("train", args.pairs), ("val", 128)):
        pq.write_table(pa.Table.from_pylist(make_pairs(count, draw)), args.output_dir / f"pairs_{split}.parquet")
    prompts = [
        {
            "data_source": "vowels",
            "prompt": [{"role": "user", "content": pair["prompt"]}],
            "ability": "toy",
            "reward_model": {"style": "model", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i, pair in enumerate(make_pairs(128, draw))
    ]
    pq.write_table(pa.Table.from_pylist(prompts), args.output_dir / "prompts.parquet")
    print(f"wrote {args.output_dir}: a model, {args.pairs} + 128 pairs, {len(prompts)} prompts")


if __name__ == "__main__":
    main()
