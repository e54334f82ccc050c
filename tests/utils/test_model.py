from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl.errors import ConfigError
from verl.testing.models import tiny_model, tiny_model_dir
from verl.utils import hf_tokenizer
from verl.utils.model import (
    check_tokenizer_fits,
    compute_position_id_with_mask,
    convert_weight_keys,
    empty_causal_lm,
    eos_token_ids,
    extract_multi_modal_inputs,
    get_generation_config,
    load_causal_lm,
    load_hf_config,
    print_model_size,
    resolve_model_path,
    torch_dtype,
    unknown_ids,
    update_model_config,
)

CPU = torch.device("cpu")


def test_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert resolve_model_path("~/m") == str(tmp_path / "m")
    assert resolve_model_path("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    for missing in ("~/none", "./none", str(tmp_path / "none"), "a/b/none"):
        with pytest.raises(ConfigError, match="does not exist"):
            resolve_model_path(missing)


def test_dtypes():
    assert torch_dtype("bf16") is torch_dtype("bfloat16") is torch_dtype(torch.bfloat16) is torch.bfloat16
    with pytest.raises(ConfigError, match=r"dtype 'int4' is unknown. Use one of: bfloat16"):
        torch_dtype("int4")


def test_overrides_replace_fields_that_exist(tmp_path):
    path = tiny_model_dir(tmp_path)
    config = load_hf_config(path, {"max_position_embeddings": 77, "attn_implementation": "eager"})
    assert config.max_position_embeddings == 77
    assert config._attn_implementation == "eager"
    with pytest.raises(ConfigError, match=r"override_config.num_hiden_layers.*Did you mean 'num_hidden_layers'"):
        load_hf_config(path, {"num_hiden_layers": 3})


def test_a_folder_without_config_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json"):
        load_hf_config(str(tmp_path))


@pytest.mark.parametrize("tied", [False, True])
def test_load_causal_lm_gives_the_saved_weights(tmp_path, tied):
    path = tiny_model_dir(tmp_path, tie_word_embeddings=tied)
    module = load_causal_lm(path, load_hf_config(path), torch.float32)
    saved = tiny_model(tie_word_embeddings=tied).state_dict()
    assert set(module.state_dict()) == set(saved)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in module.state_dict().items())


def test_missing_weights_are_not_filled_with_random_numbers(tmp_path):
    path = tiny_model_dir(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"do not contain 1 weights of Qwen3ForCausalLM: model.norm.weight"):
        load_causal_lm(path, load_hf_config(path), torch.float32)


def test_weights_that_do_not_fit_are_told_in_one_sentence_without_the_table_of_transformers(tmp_path, caplog, capfd):
    path = tiny_model_dir(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"vision.bias": torch.zeros(2)}, file, metadata={"format": "pt"})
    load_causal_lm(path, load_hf_config(path), torch.float32)
    assert "holds 1 weights that Qwen3ForCausalLM does not use: vision.bias" in caplog.text
    shape = list(weights["model.norm.weight"].shape)
    save_file(weights | {"model.norm.weight": torch.zeros(3)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"model\.norm\.weight has \[3\], and \[{shape[0]}\] is needed"):
        load_causal_lm(path, load_hf_config(path), torch.float32)
    assert "LOAD REPORT" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "gemma"])
def test_an_empty_model_filled_with_weights_computes_the_same(tmp_path, family):
    """What is no weight (the rotary frequencies) must be there without reading anything."""
    model = tiny_model(family)
    empty = empty_causal_lm(load_hf_config(tiny_model_dir(tmp_path, family)), torch.float32, CPU)
    empty.load_state_dict(model.state_dict())
    ids = torch.arange(10, 60)[None]
    with torch.no_grad():
        assert torch.equal(empty(ids).logits, model(ids).logits)


def test_end_tokens_are_those_of_the_tokenizer_and_of_the_generation_config(tmp_path):
    path = tiny_model_dir(tmp_path)
    tokenizer, file = hf_tokenizer(path), tmp_path / "generation_config.json"
    for written, expected in (([7, 5], (1, 5, 7)), (3, (1, 3)), (None, (1,))):
        file.write_text(json.dumps({"eos_token_id": written}))
        assert eos_token_ids(path, tokenizer) == expected
    file.unlink()
    assert eos_token_ids(path, tokenizer) == (1,)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no response would ever end"):
        eos_token_ids(path, tokenizer)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    path = tiny_model_dir(tmp_path, tokenizer="bpe")
    tokenizer = hf_tokenizer(path)
    check_tokenizer_fits(tokenizer, load_hf_config(path))
    check_tokenizer_fits(tokenizer, load_hf_config(path, {"vocab_size": 400}))
    with pytest.raises(ConfigError, match=r"has id 383, and the embedding has 383 rows.*at least 384"):
        check_tokenizer_fits(tokenizer, load_hf_config(path, {"vocab_size": 383}))


def test_an_added_token_that_no_text_uses_needs_no_embedding(tmp_path, caplog):
    path = tiny_model_dir(tmp_path)
    tokenizer, config = hf_tokenizer(path), load_hf_config(path)
    assert unknown_ids(tokenizer, config) == []
    assert unknown_ids(tokenizer, load_hf_config(path, {"vocab_size": 107})) == [104, 105, 106]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    check_tokenizer_fits(tokenizer, config)  # as in a model for text alone of a family that also sees
    assert "'<image>' (id 104; the embedding has 104 rows)" in caplog.text
    for attribute, value in (("chat_template", "{{ '<image>' }}"), ("pad_token", "<image>")):
        changed = copy.deepcopy(tokenizer)
        setattr(changed, attribute, value)
        with pytest.raises(ConfigError, match="token '<image>' has id 104"):
            check_tokenizer_fits(changed, config)


def test_what_workers_of_users_ask_of_a_model(tmp_path, capsys):
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
    model = tiny_model()
    print_model_size(model)
    assert (
        capsys.readouterr().out == f"Qwen3ForCausalLM has {sum(p.numel() for p in model.parameters()):,} parameters\n"
    )
    update_model_config(model.config, {"pad_token_id": 7, "new_token_id": 8})
    assert (model.config.pad_token_id, model.config.new_token_id) == (7, 8)
    with pytest.raises(ConfigError, match=r"override_config\.hiden_size: Qwen3Config has no such field"):
        update_model_config(model.config, {"hiden_size": 1})
    assert get_generation_config(str(tmp_path)) is None
    model.save_pretrained(tmp_path)
    assert get_generation_config(str(tmp_path)).eos_token_id == 1
    assert convert_weight_keys(model.state_dict(), model).keys() == load_file(tmp_path / "model.safetensors").keys()
    rows = [{"pixels": torch.tensor([1])}, {}, {"pixels": torch.tensor([2, 3])}]
    assert extract_multi_modal_inputs(rows)["pixels"].tolist() == [1, 2, 3]
    assert extract_multi_modal_inputs(rows, [2, 1])["pixels"].tolist() == [2, 3]
