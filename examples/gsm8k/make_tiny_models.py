"""A tokenizer trained on the prompts of a parquet file, a random policy and a random reward model.

They let the GSM8K commands of ``docs/gsm8k.md`` run on any machine, without downloading a model.
Random weights learn no arithmetic in a few steps; point ``*.model.path`` at a real model for that.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{% set a = call['function']['arguments'] %}"
    '<tool_call>{"name": "{{ call[\'function\'][\'name\'] }}", "arguments": {{ a if a is string else a | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML turns."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )


def main() -> None:
    """Write ``policy/`` and ``reward_model/`` under the output folder."""
    parser = argparse.ArgumentParser(description="A tokenizer, a random policy and a random reward model.")
    parser.add_argument("--train_file", required=True, help="parquet made by examples/data_preprocess/gsm8k.py")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    prompts = pd.read_parquet(args.train_file)["prompt"]
    tokenizer = train_tokenizer([turn["content"] for prompt in prompts for turn in prompt], args.vocab_size)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    for name, model in {
        "policy": Qwen3ForCausalLM(Qwen3Config(**shape)),
        "reward_model": Qwen3ForSequenceClassification(Qwen3Config(**(shape | {"num_labels": 1}))),
    }.items():
        model.save_pretrained(args.output_dir / name)
        tokenizer.save_pretrained(args.output_dir / name)
    print(f"wrote {args.output_dir}/policy and {args.output_dir}/reward_model, vocabulary {len(tokenizer)}")


if __name__ == "__main__":
    main()
