"""Weights reach an engine as the model's files have them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

from tests.support.vision_models import tiny_vision_model
from verl.errors import RolloutError
from verl.testing.models import tiny_model
from verl.testing.rollout_conformance import shape_of
from verl.utils.model_facts.prediction_heads import FurtherLayers
from verl.utils.sharded_tensor import DividedTensor
from verl.workers.rollout import file_names
from verl.workers.rollout.file_names import FileNames
from verl.workers.rollout.weights import ExpectedWeights

LAYER = "model.layers.1."
EXPERTS = f"{LAYER}mlp.experts."


@pytest.mark.parametrize(
    "family, router, of_an_expert",
    [
        ("qwen3_moe", "mlp.gate.weight", "mlp.experts.{}.{}.weight gate_proj up_proj down_proj"),
        ("mixtral", "block_sparse_moe.gate.weight", "block_sparse_moe.experts.{}.{}.weight w1 w3 w2"),
        ("deepseek_v3", "mlp.gate.weight", "mlp.experts.{}.{}.weight gate_proj up_proj down_proj"),
    ],
)
def test_experts_are_one_by_one_in_files(
    family: str, router: str, of_an_expert: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers joins all experts of a layer, and the two halves of what they compute first."""
    monkeypatch.setattr(file_names, "_PIECE_BYTES", 3 * 64 * 64 * 8)  # three experts at a time, and two at last
    with torch.device("meta"):
        names = FileNames(tiny_model(family, **shape_of(family)))
    form, gate, up, down = of_an_expert.split()
    weight = torch.ones(8, 64)
    assert list(names.convert(f"{LAYER}mlp.gate.weight", weight)) == [(f"{LAYER}{router}", weight)]
    joined = torch.arange(8 * 64 * 64).reshape(8, 64, 64)
    parts: dict[str, Tensor] = dict(names.convert(f"{EXPERTS}gate_up_proj", joined))
    parts |= dict(names.convert(f"{EXPERTS}down_proj", joined[:, :, :32]))
    assert len(parts) == 3 * 8
    for expert in range(8):
        for name, expected in ((gate, joined[expert, :32]), (up, joined[expert, 32:]), (down, joined[expert, :, :32])):
            assert torch.equal(parts[LAYER + form.format(expert, name)], expected)


def test_dense_models_have_the_names_of_their_files() -> None:
    with torch.device("meta"):
        model = tiny_model("qwen3")
    names = FileNames(model)
    for name, weight in model.state_dict().items():
        assert [(of_file, tensor is weight) for of_file, tensor in names.convert(name, weight)] == [(name, True)]


def test_heads_are_further_layers_that_come_all_or_not_at_all() -> None:
    with torch.device("meta"):
        model = tiny_model("deepseek_v3")
    weights = model.state_dict()
    heads = FurtherLayers.from_last_layer(2, 1, 64, {name: tuple(weight.shape) for name, weight in weights.items()})
    assert heads.shapes["model.layers.2.eh_proj.weight"] == (64, 128)
    joined = torch.ones(heads.shapes["model.layers.2.mlp.experts.gate_up_proj"])
    of_files = [name for name, _ in FileNames(model, heads).convert("model.layers.2.mlp.experts.gate_up_proj", joined)]
    halves = [f"{expert}.{half}_proj" for expert in range(len(joined)) for half in ("gate", "up")]
    assert sorted(of_files) == sorted(f"model.layers.2.mlp.experts.{half}.weight" for half in halves)
    expected = ExpectedWeights(model, torch.bfloat16, heads=heads)
    of_heads = {name: torch.ones(shape, device="meta") for name, shape in heads.shapes.items()}
    assert len(list(expected.checked(iter(weights.items()), 1))) + len(of_heads) == len(
        both := dict(expected.checked(iter((weights | of_heads).items()), 1))
    )
    assert both["model.layers.2.enorm.weight"].dtype == torch.bfloat16
    assert both["model.layers.2.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    del of_heads["model.layers.2.hnorm.weight"]
    with pytest.raises(RolloutError, match=r"model\.layers\.2\.hnorm\.weight is missing"):
        list(expected.checked(iter((weights | of_heads).items()), 1))


def test_experts_that_files_have_joined_and_transposed_keep_their_index_on_ranks_that_divide_them() -> None:
    with torch.device("meta"):
        names = FileNames(tiny_vision_model("qwen3_vl_moe"))
    name = "model.language_model.layers.1.mlp.experts.down_proj"
    assert names.can_divide(name)
    weight = torch.arange(4 * 64 * 24).reshape(4, 64, 24)
    in_file = torch.zeros(4, 24, 64, dtype=torch.long)
    for start, end in pairwise((0, 1, 4)):
        ((sent, part),) = names.convert_divided(name, DividedTensor(weight.shape, weight[start:end], (start, 0, 0)))
        assert (sent, part.shape, part.start) == (name, in_file.shape, (start, 0, 0))
        in_file[start : start + len(part.box)] = part.box
    assert torch.equal(in_file, weight.transpose(1, 2))


def test_rows_of_convolutions_that_files_have_apart_are_not_divided() -> None:
    """Which of the three a row belongs to, a part of the joined weight does not tell."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
    ids = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    config = OlmoHybridConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        linear_value_head_dim=16, **sizes, **ids,
    )  # fmt: skip
    with torch.device("meta"):
        names = FileNames(OlmoHybridForCausalLM(config))
    joined = torch.arange(96 * 4).reshape(96, 1, 4)
    name = f"{LAYER}linear_attn.conv1d.weight"
    assert [len(part) for _, part in names.convert(name, joined)] == [32, 32, 32]
    assert not names.can_divide(name)
    assert names.can_divide("model.layers.3.self_attn.q_proj.weight")
