"""Merging models with images and mixtures of experts, whole or with adapters: what is compared sees every part."""

import json
import shutil
from typing import Any

import fsspec
import pytest
import torch
from peft import PeftModel
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.vision_models import DENSE_FAMILIES, tiny_vision_model_dir
from tests.workers.support import make_engine
from verl.base.fs import copy_to_local
from verl.model_merger.__main__ import main
from verl.model_merger.lora import PublicAdapted
from verl.model_merger.probes import probes
from verl.testing.models import MIXTURES, tiny_model_dir
from verl.vision.families import FAMILIES


def run(command, folder, *more):
    return main([command, "--backend", "fsdp", "--local_dir", str(folder), *map(str, more)])


def engine_with_adapters(path, of_experts=()):
    """An engine whose adapters have been drawn, so that both factors matter."""
    engine = make_engine(path, lora_rank=4, lora_alpha=16, lora={"target_parameters": of_experts})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in engine.model.named_parameters():
            if ".lora_" in name:
                weight.normal_(std=0.3, generator=generator)
    return engine


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_a_vision_tower_is_compared_too(family, tmp_path, caplog):
    """Weights and text tell nothing about what the config says of the tower; a picture does."""
    path = tiny_vision_model_dir(tmp_path / "model", family)
    make_engine(path).save_checkpoint(str(tmp_path / "actor"))
    out = tmp_path / "out"
    assert run("merge", tmp_path / "actor", "--target_dir", out) == 0
    fields = json.loads((out / "config.json").read_text())
    assert fields["vision_config"]["hidden_act"] != "relu"
    fields["vision_config"]["hidden_act"] = "relu"
    (out / "config.json").write_text(json.dumps(fields))
    assert run("test", tmp_path / "actor", "--test_hf_dir", out) == 1
    assert "its logits differ by" in caplog.text


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_adapters_are_merged_as_peft_applies_them(family, tmp_path):
    has_images = family in FAMILIES
    make = tiny_vision_model_dir if has_images else tiny_model_dir
    auto = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    path, actor = make(tmp_path / "model", family), tmp_path / "actor"
    engine_with_adapters(
        path, ("gate_up_proj", "down_proj") if "moe" in family or family in MIXTURES else ()
    ).save_checkpoint(str(actor))
    assert run("merge", actor, "--target_dir", tmp_path / "out") == 0
    assert run("test", actor, "--test_hf_dir", tmp_path / "out") == 0
    merged, base = (auto.from_pretrained(folder) for folder in (tmp_path / "out", path))
    picture = probes(merged.config)[-1]
    with torch.no_grad():
        found, before = (model(**picture).logits for model in (merged, base))
        expected = PeftModel.from_pretrained(base, str(actor / "lora_adapter"))(**picture).logits
    assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (found - before).abs().max() > 0.1


def test_adapters_of_a_remote_model_name_it_and_are_merged_into_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store, url = fsspec.filesystem("memory"), "memory://models/of_adapters"
    store.put(tiny_model_dir(tmp_path / "model"), url, recursive=True)
    engine_with_adapters(copy_to_local(url)).save_checkpoint(str(tmp_path / "actor"))
    shutil.rmtree(tmp_path / "cache")  # as on another machine
    about = json.loads((tmp_path / "actor/lora_adapter/adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == url
    assert run("merge", tmp_path / "actor", "--target_dir", tmp_path / "out") == 0
    assert run("test", tmp_path / "actor", "--test_hf_dir", tmp_path / "out") == 0
    store.rm(url, recursive=True)
    shutil.rmtree(tmp_path / "cache")
    assert run("merge", tmp_path / "actor", "--target_dir", tmp_path / "again") == 1
    assert f"adapters of the model {url}, which cannot be read" in caplog.text


@pytest.mark.parametrize("family", ["qwen3", "qwen2_5_vl", "qwen3_moe"])
def test_what_verl_0_8_merged_is_compared_with_its_parts(family, tmp_path):
    """The weights given to the comparison count for nothing where it takes them apart."""
    make = tiny_vision_model_dir if family in FAMILIES else tiny_model_dir
    auto: Any = AutoModelForImageTextToText if family in FAMILIES else AutoModelForCausalLM
    engine = engine_with_adapters(make(tmp_path / "model", family))
    actor = tmp_path / "actor"
    engine.save_checkpoint(str(actor))
    (actor / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 16}))
    weights = {f"base_model.model.{name}": p.detach() for name, p in engine.model.named_parameters()}
    public, apart, base = PublicAdapted(weights, actor), *(auto.from_pretrained(tmp_path / "model") for _ in range(2))
    expected = PeftModel.from_pretrained(base, str(actor / "lora_adapter"))
    with torch.no_grad():
        for name, module in apart.named_modules():
            if f"base_model.model.{name}.lora_A.default.weight" in weights:
                module.weight.zero_()
        public.take_apart(apart)
        probe = probes(apart.config)[-1]
        assert_close(apart(**probe).logits, expected(**probe).logits, atol=1e-4, rtol=1e-4)
