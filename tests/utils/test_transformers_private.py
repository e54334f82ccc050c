"""The private parts of Transformers are where they were, and mean what they meant."""

from __future__ import annotations

import ast
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from verl.testing.models import tiny_model, tiny_model_dir, tiny_tokenizer
from verl.utils import transformers_private as private
from verl.vision.families import FAMILIES

ROOT = Path(__file__).parents[2]


def test_the_attention_of_a_config_is_read_and_set():
    config = tiny_model("qwen3").config
    private.set_attention(config, "eager")
    assert private.attention_of(config) == "eager"
    assert AutoModelForCausalLM.from_config(config).config._attn_implementation == "eager"
    assert private.attention_of(PretrainedConfig()) is None


def test_the_load_report_is_held_back_unless_loading_fails(tmp_path):
    path, heard = tiny_model_dir(tmp_path), []
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())
    log = logging.getLogger("transformers.modeling_utils")
    log.addHandler(listener)
    try:
        for error in (None, RuntimeError("look at the above report")):
            with pytest.raises(RuntimeError) if error else nullcontext(), private.without_load_report():
                AutoModelForSequenceClassification.from_pretrained(path)  # the files lack its head
                log.warning("something else")
                if error:
                    raise error
    finally:
        log.removeHandler(listener)
    assert [text.partition("\n")[0] for text in heard][:2] == ["something else", "something else"]
    assert len(heard) == 3
    assert "LOAD REPORT" in heard[2]
    assert "score.weight" in heard[2]


def test_a_registered_attention_is_called():
    called = []

    def attention(module, query, key, value, *args, **kwargs):
        called.append(type(module).__name__)
        return query.transpose(1, 2).contiguous(), None

    private.ALL_ATTENTION_FUNCTIONS.register("verl_test", attention)
    model = tiny_model("qwen3")
    assert private.takes_any_attention(model)
    model.set_attn_implementation("verl_test")
    model(input_ids=torch.tensor([[1, 2]]))
    assert len(called) == model.config.num_hidden_layers
    assert isinstance(private.ALL_ATTENTION_FUNCTIONS, AttentionInterface)


def test_the_repeated_layers_are_named():
    model = tiny_model("qwen3")
    layers = {type(module).__name__ for module in model.modules()}
    assert private.layer_class_names(model) == {"Qwen3DecoderLayer"} <= layers


def test_a_model_whose_ties_are_forgotten_saves_both_weights(tmp_path):
    from safetensors.torch import load_file

    model = tiny_model("qwen3", tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    private.forget_ties(model)
    model.save_pretrained(tmp_path)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= load_file(tmp_path / "model.safetensors").keys()


def test_no_weight_is_initialised():
    with private.no_init_weights(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_model("qwen3").config)
    assert model.lm_head.weight.device.type == "meta"


def test_classifiers_by_type_of_model():
    assert private.sequence_classifier_of("qwen3") == "Qwen3ForSequenceClassification"
    assert private.token_classifier_of("qwen3") == "Qwen3ForTokenClassification"
    assert private.sequence_classifier_of("no such type") is None
    # verl.utils.image_reward_models would take the place of one that Transformers had.
    assert not any(map(private.sequence_classifier_of, FAMILIES))
    assert private.token_classifier_of("no such type") is None


def test_code_of_a_model_is_known_by_the_name_of_its_module():
    assert private.is_from_model_folder("transformers_modules.folder.modeling_own")
    assert not private.is_from_model_folder("transformers.models.qwen3.modeling_qwen3")


def test_what_a_tokenizer_declares(tmp_path):
    assert "tokenizer_class" in private.get_tokenizer_config(tiny_model_dir(tmp_path))


def test_a_layer_of_a_cache_takes_views_of_a_buffer():
    layer = private.DynamicLayer()
    keys = torch.zeros(1, 1, 2, 4)
    layer.lazy_initialization(keys, keys)
    found, _ = layer.update(keys, keys)
    assert found.shape[2] == layer.keys.shape[2] == 2


def test_nothing_else_imports_from_below_the_top_of_transformers():
    guilty = []
    for path in (ROOT / "verl").rglob("*.py"):
        if path.name == "transformers_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
                guilty.append(f"{path.relative_to(ROOT)}:{node.lineno} imports from {node.module}")
            if isinstance(node, ast.Attribute | ast.Constant):
                name = node.attr if isinstance(node, ast.Attribute) else node.value
                if name in ("_attn_implementation", "_supports_attention_backend", "_no_split_modules"):
                    guilty.append(f"{path.relative_to(ROOT)}:{node.lineno} uses {name}")
    assert not guilty, "\n".join(guilty)


MESSAGES = [
    {"role": "user", "content": "ü <b>'\"</b>", "name": None},
    {"role": "assistant", "content": None, "thinking": "so", "tool_calls": [{"function": {"name": "f"}}]},
]
SHOWS_ALL = "{{ messages | tojson }}|{{ tools | tojson }}|{{ add_generation_prompt }}|{{ eos_token }}|{{ extra }}"


def test_values_of_json_are_rendered_as_by_apply_chat_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = SHOWS_ALL
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rendered = private.json_renderer(tokenizer, {"extra": 3})
    assert rendered is not None
    for given in (None, tools):
        expected = tokenizer.apply_chat_template(
            MESSAGES, tools=given, tokenize=False, add_generation_prompt=True, extra=3
        )
        assert rendered(MESSAGES, given, True) == expected
    assert '"reasoning_content": "so"' in expected  # names of thoughts are aliased
    assert '"name": null' not in expected


def test_only_plain_templates_and_variables_are_rendered_from_json():
    class Own(type(tiny_tokenizer())):
        def apply_chat_template(self, *args, **kwargs):
            return "own"

    plain, own = tiny_tokenizer(), tiny_tokenizer()
    own.__class__ = Own
    assert private.json_renderer(plain, {}) is not None
    assert private.json_renderer(own, {}) is None
    for variables in ({"extra": object()}, {"extra": (1,)}, {"continue_final_message": True}, {"documents": []}):
        assert private.json_renderer(plain, variables) is None
    plain.chat_template = {"default": "-", "tool_use": "+"}
    assert private.json_renderer(plain, {}) is None


def test_tokens_are_decoded_as_by_the_tokenizer():
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.eos_token_id, *tokenizer("a b")["input_ids"], tokenizer.eos_token_id]
    for skips in (False, True):
        assert private.decoded(tokenizer, ids, skips) == tokenizer.decode(ids, skip_special_tokens=skips)
