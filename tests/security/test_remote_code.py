"""trust_remote_code: off unless asked for, everywhere; refused with the key to set; said when it is on."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from tests.security.malicious import code_bomb, torch_bomb, with_remote_code, with_tokenizer_code
from verl.config.base import BaseConfig, config_fields, meta_of
from verl.errors import CheckpointError, ConfigError
from verl.model_merger import compare, merge
from verl.model_merger.__main__ import parser
from verl.model_merger.lazy_weights import LazyWeights
from verl.testing.models import tiny_model_dir
from verl.trainer.config import GenerationConfig, PPOConfig, SFTConfig
from verl.utils import hf_processor, hf_tokenizer, model_code
from verl.utils.model import load_causal_lm, load_hf_config
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.engine.model.headed import _classifier
from verl.workers.rollout.sglang_rollout.settings import engine_arguments as sglang_arguments
from verl.workers.rollout.vllm_rollout.settings import command_line
from verl.workers.rollout.vllm_rollout.settings import engine_arguments as vllm_arguments

CPU = torch.device("cpu")


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """What malicious files would leave behind; nothing of the kind may be there in the end."""
    mark = tmp_path / "code-ran"
    yield mark
    assert not mark.exists()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(tiny_model_dir(tmp_path / "model"))


# ---- off by default ------------------------------------------------------------------------------


def trust_fields(cls: type, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every ``trust_remote_code`` below a section class: dotted key and default."""
    config = cls()
    for name, field in config_fields(cls).items():
        value = getattr(config, name)
        if name == "trust_remote_code":
            yield f"{path}{name}", (value, meta_of(field).interpolation)
        elif isinstance(value, BaseConfig):
            yield from trust_fields(type(value), f"{path}{name}.")


@pytest.mark.parametrize("root, least", [(PPOConfig, 3), (SFTConfig, 1), (GenerationConfig, 1)])
def test_every_setting_is_off(root: type, least: int):
    found = dict(trust_fields(root))
    assert len(found) >= least
    for key, (value, interpolation) in found.items():
        assert value is False, key
        assert interpolation in (None, "${oc.select:actor_rollout_ref.model.trust_remote_code,false}"), key


def test_the_merger_is_off_unless_asked():
    arguments = ["merge", "--backend", "fsdp", "--local_dir", "x"]
    assert parser().parse_args(arguments).trust_remote_code is False
    assert parser().parse_args([*arguments, "--trust-remote-code"]).trust_remote_code is True


def test_engines_are_off_unless_asked(model: Path):
    rollout, hf_config = RolloutConfig(name="vllm"), load_hf_config(str(model))
    off, on = HFModelConfig(path=str(model)), HFModelConfig(path=str(model), trust_remote_code=True)
    assert vllm_arguments(rollout, off, 64, CPU)["trust_remote_code"] is False
    assert vllm_arguments(rollout, on, 64, CPU)["trust_remote_code"] is True
    assert "--trust-remote-code" not in command_line(vllm_arguments(rollout, off, 64, CPU))
    assert "--trust-remote-code" in command_line(vllm_arguments(rollout, on, 64, CPU))
    rollout = dataclasses.replace(rollout, name="sglang")
    assert sglang_arguments(rollout, off, hf_config, 64, CPU)["trust_remote_code"] is False
    assert sglang_arguments(rollout, on, hf_config, 64, CPU)["trust_remote_code"] is True


# ---- refused -------------------------------------------------------------------------------------


def test_a_config_with_code_is_refused_with_the_key_to_set(model: Path, mark: Path):
    with_remote_code(model, mark)
    with pytest.raises(ConfigError, match=r"configuration_evil\.py, modeling_evil\.py.*set trust_remote_code=true"):
        load_hf_config(str(model))


def test_code_that_transformers_can_do_without_is_not_run(model: Path, mark: Path):
    plain = load_hf_config(str(model))
    with_remote_code(model, mark, model_type=None)
    config = load_hf_config(str(model))
    assert type(config) is type(plain)
    assert type(load_causal_lm(str(model), config, torch.float32)).__name__ == "Qwen3ForCausalLM"


def test_a_tokenizer_with_code_is_refused_and_nobody_is_asked(model: Path, mark: Path, monkeypatch: pytest.MonkeyPatch):
    def ask(prompt: str = "") -> str:
        raise AssertionError("a run that nobody watches must not ask")

    monkeypatch.setattr("builtins.input", ask)
    with_tokenizer_code(model, mark)
    hf_tokenizer(str(model))  # Transformers has a tokenizer of its own for this model
    (model / "config.json").unlink()
    asked: list[dict[str, Any]] = [{}, {"trust_remote_code": False}]
    for arguments in asked:
        with pytest.raises(ConfigError, match=r"tokenization_evil\.py.*set trust_remote_code=true"):
            hf_tokenizer(str(model), **arguments)


def test_a_processor_with_code_is_refused(model: Path, mark: Path):
    (model / "processor_config.json").write_text(
        json.dumps({"processor_class": "Evil", "auto_map": {"AutoProcessor": "processing_evil.Evil"}})
    )
    (model / "processing_evil.py").write_text(code_bomb(mark))
    with pytest.raises(ConfigError, match=r"processing_evil\.py.*set trust_remote_code=true"):
        hf_processor(str(model))


def test_the_merger_refuses_code(model: Path, mark: Path, tmp_path: Path):
    with_remote_code(model, mark)
    (tmp_path / "actor").mkdir()
    model.rename(tmp_path / "actor" / "huggingface")
    with pytest.raises(ConfigError, match=r"--trust-remote-code of verl merge"):
        merge(tmp_path / "actor", tmp_path / "merged", trust_remote_code=False)


@pytest.mark.parametrize("where", ["top", "part"])
def test_a_config_cannot_bring_kernels(tmp_path: Path, where: str):
    path = Path(tiny_model_dir(tmp_path / "model", family="gemma"))
    config = json.loads((path / "config.json").read_text())
    config["attn_implementation" if where == "top" else "_attn_implementation"] = "evil/kernel"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"attention kernel 'evil/kernel'.*override_config.attn_implementation"):
        load_hf_config(str(path))
    assert load_hf_config(str(path), {"attn_implementation": "sdpa"})._attn_implementation == "sdpa"


# ---- said ----------------------------------------------------------------------------------------


def test_code_that_was_asked_for_runs_and_the_run_says_so(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    ran = tmp_path / "asked-for"
    with_remote_code(model, ran)
    model_code._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        config = load_hf_config(str(model), trust_remote_code=True)
        load_causal_lm(str(model), config, torch.float32, trust_remote_code=True)
    assert ran.is_dir()
    said = [record.getMessage() for record in caplog.records if "trust_remote_code=true" in record.getMessage()]
    assert [str(model) in text for text in said] == [True, True]
    assert "configuration_evil.py" in said[0]
    assert "modeling_evil.py" in said[1]


def test_a_model_without_code_is_loaded_without_a_word(model: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        config = load_hf_config(str(model), trust_remote_code=True)
        load_causal_lm(str(model), config, torch.float32, trust_remote_code=True)
        hf_tokenizer(str(model), trust_remote_code=True)
    assert "trust_remote_code" not in caplog.text


# ---- weights -------------------------------------------------------------------------------------


def honest_weights(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    return weights


def test_weights_in_a_pickle_run_nothing(model: Path, mark: Path):
    torch_bomb(model / "pytorch_model.bin", mark, **honest_weights(model))
    config = load_hf_config(str(model))
    with pytest.raises(ConfigError, match=r"pickle with more in it than weights.*safetensors"):
        load_causal_lm(str(model), config, torch.float32)


def test_honest_weights_in_a_pickle_are_read(model: Path):
    torch.save(honest_weights(model), model / "pytorch_model.bin")
    load_causal_lm(str(model), load_hf_config(str(model)), torch.float32)


def test_sharded_weights_in_pickles_run_nothing(model: Path, mark: Path):
    weights = honest_weights(model)
    torch_bomb(model / "pytorch_model-00001-of-00001.bin", mark, **weights)
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "pytorch_model-00001-of-00001.bin")}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="pickle with more in it than weights"):
        load_causal_lm(str(model), load_hf_config(str(model)), torch.float32)


def test_the_merger_reads_no_code_from_the_folder_it_compares_with(
    model: Path, mark: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    weights = honest_weights(model)
    (tmp_path / "actor" / "huggingface").mkdir(parents=True)
    shutil.copy(model / "config.json", tmp_path / "actor" / "huggingface")
    torch_bomb(model / "pytorch_model.bin", mark, **weights)
    monkeypatch.setattr("verl.model_merger.fsdp.saved_weights", lambda folder: LazyWeights.from_tensors(weights))
    with pytest.raises(CheckpointError, match="pickle with more in it than weights"):
        compare(tmp_path / "actor", str(model))


def test_a_value_model_reads_no_code(model: Path, mark: Path):
    path = Path(tiny_model_dir(model.with_name("value"), task="token_classification"))
    torch_bomb(path / "pytorch_model.bin", mark, **honest_weights(path))
    config, hf_config = HFModelConfig(path=str(path)), load_hf_config(str(path))
    with pytest.raises(ConfigError, match="pickle with more in it than weights"):
        _classifier(AutoModelForTokenClassification, "value model", config, hf_config, torch.float32, True)


def test_an_adapter_in_the_model_folder_runs_nothing(model: Path, mark: Path):
    """Transformers loads an adapter that lies beside a model by itself."""
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(model), "target_modules": ["q_proj"], "r": 2}
    (model / "adapter_config.json").write_text(json.dumps(adapter | {"task_type": "CAUSAL_LM"}))
    torch_bomb(model / "adapter_model.bin", mark)
    with pytest.raises(ConfigError, match=r"cannot be read: .*(adapter_model\.safetensors|pickle)"):
        load_causal_lm(str(model), load_hf_config(str(model)), torch.float32)
