from __future__ import annotations

import json
import logging

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from verl.datasets.chat import require_chat_template
from verl.errors import ConfigError, DataError
from verl.testing.models import FAMILIES, tiny_model_dir, tiny_tokenizer
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.tokenizer import normalize_token_ids

MESSAGES = [{"role": "user", "content": "1 + 2?"}]


def save_without(folder, *fields):
    tokenizer = tiny_tokenizer("char")
    bare = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        **{k: v for k, v in {"pad_token": "<pad>", "eos_token": "<eos>"}.items() if k not in fields},
    )
    bare.save_pretrained(folder)
    return str(folder)


def test_it_loads_and_speaks(tmp_path):
    tokenizer = hf_tokenizer(tiny_model_dir(tmp_path))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == "<user>1 + 2?<assistant>"
    require_chat_template(tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_becomes_the_same_tokens_in_every_model_folder(tmp_path, family):
    tokenizer, text = hf_tokenizer(tiny_model_dir(tmp_path, family)), "12 + ab\n c"
    assert len(tokenizer) == 104
    assert tokenizer(text)["input_ids"] == tiny_tokenizer("char")(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_missing_folder_is_named_with_its_neighbour(tmp_path):
    (tmp_path / "qwen-tiny").mkdir()
    with pytest.raises(ConfigError, match=r"qwen-tyni' does not exist. Did you mean '.*qwen-tiny'"):
        hf_tokenizer(str(tmp_path / "qwen-tyni"))


def test_a_file_is_not_a_folder(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        hf_tokenizer(str(file))


def test_a_folder_without_tokenizer_says_what_belongs_there(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer.json and tokenizer_config.json"):
        hf_tokenizer(str(tmp_path))


def test_the_end_token_pads_where_there_is_no_pad_token_and_that_is_said(tmp_path, caplog):
    path = save_without(tmp_path, "pad_token")
    with caplog.at_level(logging.WARNING):
        tokenizer = hf_tokenizer(path)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    assert "has no pad token: padding with its end token '<eos>' (id 1)" in caplog.text
    assert hf_tokenizer(path, correct_pad_token=False).pad_token_id is None


def test_nothing_to_pad_with_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a pad token nor an end token"):
        hf_tokenizer(save_without(tmp_path, "pad_token", "eos_token"))


def test_no_chat_template_is_refused_with_the_remedies(tmp_path):
    path = save_without(tmp_path)
    with pytest.raises(ConfigError, match=r"no chat template.*custom_chat_template"):
        require_chat_template(hf_tokenizer(path))
    tokenizer = hf_tokenizer(path, chat_template="{{ messages[0]['content'] }}!")
    require_chat_template(tokenizer)
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "1 + 2?!"


def test_a_template_is_text_or_a_file_that_writes_the_messages(tmp_path):
    path, file = tiny_model_dir(tmp_path / "model"), tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}")
    tokenizer = hf_tokenizer(path, chat_template=str(file))
    assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "[user]1 + 2?"
    for neither in (str(tmp_path / "absent.jinja"), str(tmp_path), "chatml"):
        with pytest.raises(ConfigError, match=r"is neither Jinja text, .*, nor a file with it"):
            hf_tokenizer(path, chat_template=neither)
    tokenizer.chat_template = "{% for m in messages %}{{ m['text'] }}{% endfor %}!"
    with pytest.raises(ConfigError, match=r"writes nothing of the messages: .* it makes '!'"):
        require_chat_template(tokenizer)
    tokenizer.chat_template = "{% for m in %}"
    with pytest.raises(ConfigError, match=r"cannot be read: .* \(line 1\)"):
        require_chat_template(tokenizer)


def test_a_model_of_text_has_no_processor(tmp_path):
    assert hf_processor(tiny_model_dir(tmp_path)) is None


def test_files_of_a_processor_that_make_none_are_an_error_or_said(tmp_path, caplog):
    path, file = tiny_model_dir(tmp_path), tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"image_processor_type": "NoSuchProcessor"}))
    with caplog.at_level(logging.WARNING):
        assert hf_processor(path) is None
    assert "Transformers makes none of them" in caplog.text
    file.write_text("{")
    with pytest.raises(ConfigError, match="processor of"):
        hf_processor(path)


def test_ids_of_a_text_become_one_list():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("ab").input_ids
    texts = (ids, tokenizer("ab"), tokenizer("ab", return_tensors="pt"), torch.tensor(ids), [ids])
    assert [normalize_token_ids(text) for text in texts] == [ids] * len(texts)
    for wrong in (tokenizer(["ab", "ab"]), "ab", [[ids]]):
        with pytest.raises(DataError, match="the ids of one text are a list of integers"):
            normalize_token_ids(wrong)
