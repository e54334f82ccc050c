"""Weights of a model folder, read layer by layer, against Transformers' whole model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.vision_models import tiny_vision_model_dir
from verl.errors import ConfigError
from verl.testing.models import MIXTURES, tiny_model_dir
from verl.utils.folder_weights import FolderWeights, files_of_weights
from verl.vision.families import FAMILIES
from verl.workers.engine.model.headed import own_state


def in_layers(folder):
    """Divide the weights of ``folder`` into a file for each layer and one for the rest."""
    weights, files = load_file(folder / "model.safetensors"), {}
    for name in weights:
        layer = name.partition(".layers.")[2].partition(".")[0] or "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = weights[name]
    for file, part in files.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", *MIXTURES, *FAMILIES])
def test_every_weight_is_that_of_transformers(family, tmp_path):
    is_vision = family in FAMILIES
    (tiny_vision_model_dir if is_vision else tiny_model_dir)(tmp_path, family)
    in_layers(tmp_path)
    auto = AutoModelForImageTextToText if is_vision else AutoModelForCausalLM
    expected = own_state(auto.from_pretrained(tmp_path))
    folder = FolderWeights(auto, str(tmp_path), AutoConfig.from_pretrained(tmp_path))
    parts = [dict(part) for part in folder.parts()]
    assert len(parts) > 2
    found = {name: tensor for part in parts for name, tensor in part.items()}
    assert found.keys() >= expected.keys()
    assert sum(map(len, parts)) == len(found)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert all(parameter.is_meta for parameter in folder.model.parameters())
    reads, read = [], folder.read
    folder.read = lambda unit: reads.append(unit) or read(unit)
    assert all(torch.equal(folder.weight(name), weight) for name, weight in expected.items())
    if not is_vision:  # where files have another name for a layer, it shows in reading
        layers = [unit for unit in reads if ".layers." in unit]
        assert layers == [unit for unit in folder.units if ".layers." in unit]


def test_what_the_files_lack_or_hold_wrongly_is_named(tmp_path):
    tiny_model_dir(tmp_path, "qwen3")
    weights, config = load_file(tmp_path / "model.safetensors"), AutoConfig.from_pretrained(tmp_path)

    def opened(changed):
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return FolderWeights(AutoModelForCausalLM, str(tmp_path), config)

    norm = "model.layers.1.input_layernorm.weight"
    with pytest.raises(ConfigError, match=rf"do not contain 1 weights of Qwen3ForCausalLM: {norm}"):
        opened({name: weight for name, weight in weights.items() if name != norm})
    with pytest.raises(ConfigError, match=rf"{norm} has \[3\], and \[64\] is needed"):
        opened(weights | {norm: torch.ones(3)})
    with pytest.raises(ConfigError, match=rf"not finite .*{norm} \(64 of 64 values\)"):
        list(opened(weights | {norm: torch.full((64,), torch.nan)}))


def test_buffers_of_whole_numbers_are_read_and_formats_of_8_bits_are_refused(tmp_path):
    tiny_model_dir(tmp_path, "qwen3")
    weights, config = load_file(tmp_path / "model.safetensors"), AutoConfig.from_pretrained(tmp_path)
    norm = "model.layers.1.input_layernorm.weight"

    def opened(changed):
        save_file(weights | changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return FolderWeights(AutoModelForCausalLM, str(tmp_path), config)

    # As old files of GPT-2 and CLIP have them; Transformers leaves them out.
    more = {"model.layers.0.mask": torch.ones(2, dtype=torch.bool), "model.layers.0.position_ids": torch.arange(3)}
    folder = opened(more)
    assert folder.dtype is weights[norm].dtype
    assert torch.equal(folder.weight(norm), weights[norm])
    with pytest.raises(ConfigError, match=rf"{norm} in .* is stored as F8_E4M3"):
        opened({norm: weights[norm].to(torch.float8_e4m3fn)})


@pytest.mark.parametrize("index", ['{"weight_map": {"a', "{}", "[]", '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named_and_not_read_beside_the_single_file(index, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"index\.json does not say which file has which weight"):
        files_of_weights(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert files_of_weights(tmp_path) == {"a": "model.safetensors"}
