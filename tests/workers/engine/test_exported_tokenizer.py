"""The tokenizer of an exported folder can be read by the Transformers releases 4 and 5."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from verl.config import HFModelConfig
from verl.testing.models import tiny_model_dir, tiny_tokenizer
from verl.workers.engine.model.export import _write_tokenizer


def test_class_and_special_tokens_have_the_names_that_transformers_4_reads(tmp_path: Path):
    path = tiny_model_dir(tmp_path / "model")
    tokenizer = tiny_tokenizer("char")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>"]})
    tokenizer.save_pretrained(path)
    (tmp_path / "out").mkdir()
    _write_tokenizer(HFModelConfig(path=path), AutoConfig.from_pretrained(path), tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    # Transformers 4.57 has no class TokenizersBackend, and takes extra_special_tokens for a mapping.
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<a>"]
    assert "extra_special_tokens" not in settings
    read = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert read("1<a>2")["input_ids"] == tokenizer("1<a>2")["input_ids"]
    assert read.all_special_tokens == tokenizer.all_special_tokens
