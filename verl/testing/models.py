"""Tiny models and tokenizers with random weights, made on the spot: nothing is downloaded.

    path = tiny_model_dir(tmp_path / "model", family="qwen3")      # config, weights, tokenizer
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = tiny_tokenizer("char")                             # 104 tokens, id 0 pads, id 1 ends

The weights are drawn with a large standard deviation, so that the next-token distribution is far from
flat: a test that mixes up positions, masks or rows then sees other numbers.
"""

from __future__ import annotations

import functools
import string
from pathlib import Path
from typing import Literal

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD, EOS, USER, ASSISTANT = "<pad>", "<eos>", "<user>", "<assistant>"
SPECIALS = [PAD, EOS, USER, ASSISTANT]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<assistant>{{ m['content'] }}<eos>"
    "{% elif m['role'] == 'user' %}<user>{{ m['content'] }}"
    "{% else %}{{ m['role'] }}: {{ m['content'] }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FAMILIES = {
    "qwen3": "Qwen3",
    "qwen2": "Qwen2",
    "llama": "Llama",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "mistral": "Mistral",
}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
MIXTURES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3_moe": ("Qwen3Moe", _EXPERTS | {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", _EXPERTS | {"num_local_experts": 8, "intermediate_size": 32}),
    # Of four groups of two experts two are chosen, then two experts; the first layer is dense.
    "deepseek_v3": (
        "DeepseekV3",
        _EXPERTS
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    ),
}
"""Mixtures of experts: the prefix of their classes, and fields of their configs; two experts compute each token."""
TASKS = {
    "causal_lm": "ForCausalLM",
    "token_classification": "ForTokenClassification",
    "sequence_classification": "ForSequenceClassification",
}


@functools.cache
def _core(kind: str) -> str:
    """The tokenizer's own JSON, so that every caller gets an object of its own."""
    if kind == "char":
        vocab = {token: i for i, token in enumerate(SPECIALS + list(string.printable))}
        core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        core.decoder = decoders.Fuse()
    elif kind == "bpe":
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=384,
            special_tokens=SPECIALS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        text = (f"What is {i} plus {i * 7 % 100}? The answer is {i + i * 7 % 100}." for i in range(300))
        core.train_from_iterator(text, trainer)
    else:
        raise ValueError(f"tokenizer kind '{kind}' is unknown; there are 'char' and 'bpe'")
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return core.to_str()


def tiny_tokenizer(kind: Literal["char", "bpe"] = "char") -> PreTrainedTokenizerFast:
    """A tokenizer with a chat template, a pad token (id 0) and an end token (id 1).

    ``char``: 104 tokens, the four special ones and one for each printable ASCII character; what is not
    printable ASCII is dropped. ``bpe``: 384 tokens, byte level, loses nothing.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_core(kind)),
        pad_token=PAD,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
    )


def tiny_model(
    family: str = "qwen3", vocab: int = 104, task: str = "causal_lm", seed: int = 0, **overrides: object
) -> PreTrainedModel:
    """A model of two layers of width 64 in fp32, with weights that depend on ``seed`` alone.

    Args:
        family: one of ``FAMILIES`` or ``MIXTURES``.
        vocab: rows of the embedding.
        task: one of ``TASKS``; the classification heads have one label unless ``num_labels`` is given.
        seed: of the random weights.
        overrides: fields of the Transformers config, for example ``num_hidden_layers=6``.
    """
    fields: dict[str, object] = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "attention_dropout": 0.0,
        "dtype": "float32",
    }
    if task != "causal_lm":
        fields["num_labels"] = 1
    if family == "qwen2":
        del fields["head_dim"]
    prefix, family_fields = MIXTURES[family] if family in MIXTURES else (FAMILIES[family], {})
    if family == "deepseek_v3":
        del fields["head_dim"]  # of its parts: qk_rope_head_dim and qk_nope_head_dim
    fields |= family_fields | overrides
    config = getattr(transformers, f"{prefix}Config")(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}{TASKS[task]}")(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero at birth; a forgotten bias would go unseen
                torch.nn.init.normal_(parameter, std=0.1)
    return model.float().eval()


def tiny_model_dir(
    path: str | Path,
    family: str = "qwen3",
    vocab: int | None = None,
    tokenizer: Literal["char", "bpe"] = "char",
    task: str = "causal_lm",
    seed: int = 0,
    **overrides: object,
) -> str:
    """Save a ``tiny_model`` and its tokenizer to ``path`` as ``save_pretrained`` does; returns the path.

    ``vocab`` is the tokenizer's size unless it is given.
    """
    own_tokenizer = tiny_tokenizer(tokenizer)
    tiny_model(family, vocab or len(own_tokenizer), task, seed, **overrides).save_pretrained(path)
    own_tokenizer.save_pretrained(path)
    return str(path)


def hollow_model_dir(path: str | Path) -> str:
    """A folder that has every file of a model and nothing in them, for checks that load no model; returns the path."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # the length of its header, and the header
    return str(folder)
