"""Models that no rank can hold whole: two ranks start from a model folder and export to one."""

import ctypes
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen3MoeConfig

from tests.workers.support import make_engine, run_ranks
from verl.config import FSDPEngineConfig, HFModelConfig
from verl.errors import CheckpointError
from verl.testing.models import tiny_model
from verl.utils.sharded_tensor import full_tensor
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import sharded_model
from verl.workers.engine.model.export import WeightFiles, write_in_turn
from verl.workers.engine.model.headed import own_state

MIB = 1 << 20
M_MMAP_THRESHOLD = -3  # of mallopt(3)


def anonymous_bytes():
    """Memory of this process that no file backs."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


class Peak:
    """The largest increase of :func:`anonymous_bytes` inside the context."""

    def __enter__(self):
        self.first = self.most = anonymous_bytes()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.done.wait(0.001):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_):
        self.most = max(self.most, anonymous_bytes())
        self.done.set()
        self.thread.join()
        self.increase = self.most - self.first


def build(path):
    settings = FSDPEngineConfig(forward_only=True, dtype="fp32")
    engine = EngineRegistry.new(
        "language_model", "fsdp2", model_config=HFModelConfig(path=path), engine_config=settings, device_name="cpu"
    )
    return engine.build(torch.float32)


def whole(model):
    return {name: getattr(x, "full_tensor", lambda x=x: x)().clone() for name, x in own_state(model).items()}


def on_two_ranks(rank, world_size, folder, paths):
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # else the backend would keep what is freed for later use
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    devices = []  # of the weights that FSDP divides: on a GPU it would move them there whole
    shard = sharded_model.shard_model

    def watched(model, *args):
        devices.append({parameter.device.type for parameter in model.parameters()})
        shard(model, *args)

    sharded_model.shard_model = watched
    build(paths["experts"])  # imports and process groups are none of the model's memory
    with Peak() as peak:
        model = build(paths["large"])
    found = {"peak": peak.increase, "devices": devices}
    for name, path in paths.items():
        model = build(path)
        found[name] = weights = whole(model)
        for key, parameter in model.named_parameters():  # as an engine in bf16 gets it
            gathered = full_tensor(parameter, torch.device("cpu"), torch.bfloat16)
            assert gathered.dtype == torch.bfloat16
            assert torch.equal(gathered, weights[key].bfloat16())
        given = ((key, weights[key]) for key, _ in model.named_parameters())
        if name == "large":
            with Peak() as peak:
                write_in_turn(given, model, folder / name, 4 * MIB)
            found["peak of export"] = peak.increase
        else:
            WeightFiles.collect(given, model, 1).write(folder / name)
    (folder / "full").touch()
    with pytest.raises(CheckpointError, match=r"cannot export the model: .*full.* \(rank 1\)"):
        write_in_turn(iter(weights.items()), model, folder / ("full" if rank else "empty"), 1)
    torch.save(found, folder / f"rank_{rank}.pt")


def save(model, folder):
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    bias = Glm4MoeConfig(**sizes, vocab_size=40, moe_intermediate_size=8, n_routed_experts=4, first_k_dense_replace=1)
    experts = Qwen3MoeConfig(
        **sizes, vocab_size=40, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, head_dim=8
    )
    many = {**sizes, "hidden_size": 256, "num_hidden_layers": 16, "num_attention_heads": 4, "head_dim": 64}
    large = Qwen3MoeConfig(**many, vocab_size=104, moe_intermediate_size=512, num_experts=4, num_experts_per_tok=2)
    with_buffer = AutoModelForCausalLM.from_config(bias)
    nn.init.normal_(with_buffer.model.layers[1].mlp.gate.e_score_correction_bias)
    return {
        "experts": save(AutoModelForCausalLM.from_config(experts), folder / "experts"),
        "large": save(AutoModelForCausalLM.from_config(large).to(torch.bfloat16), folder / "large"),
        "buffer": save(with_buffer, folder / "buffer"),
        "backbone": save(tiny_model("qwen3", tie_word_embeddings=True).model, folder / "backbone"),
    }


@pytest.fixture(scope="module")
def ranks(paths, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(on_two_ranks, 2, folder, paths)
    return folder, [torch.load(folder / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


def test_no_rank_holds_the_model_at_the_start(ranks, paths):
    """Each has half of it in fp32, and for a moment one layer whose experts the files have one by one, 3 MiB."""
    fp32 = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(paths["large"]).parameters()) * 4
    for found in ranks[1]:
        assert fp32 / 2 < found["peak"] + 4 * MIB
        assert found["peak"] < 0.75 * fp32
        assert found["devices"] == [{"meta"}] * (2 + len(paths))


@pytest.mark.parametrize("name", ["experts", "large", "buffer", "backbone"])
def test_ranks_have_the_weights_of_the_files(ranks, paths, name):
    expected = own_state(AutoModelForCausalLM.from_pretrained(paths[name], dtype=torch.float32))
    for found in ranks[1]:
        assert found[name].keys() == expected.keys()
        assert all(torch.equal(found[name][key], weight) for key, weight in expected.items())


@pytest.mark.parametrize("name", ["experts", "large", "backbone"])
def test_ranks_export_what_transformers_saves(ranks, paths, tmp_path, name):
    """The same names, shapes, formats (those of the base) and bytes, in files of which each rank held its own."""
    folder = ranks[0] / name
    AutoModelForCausalLM.from_pretrained(paths[name]).save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in expected.values())
    parts = {file: load_file(folder / file) for file in set(index["weight_map"].values())}
    assert {path.name for path in folder.glob("*.safetensors")} == parts.keys()
    for key, weight in expected.items():
        found = parts[index["weight_map"][key]][key]
        assert found.dtype == weight.dtype
        assert torch.equal(found, weight)


def test_no_rank_holds_the_model_during_an_export(ranks):
    """A file ends with the layer, of 3.5 MiB, that fills it with 4 MiB, and Transformers' names of it may be copies."""
    files = list((ranks[0] / "large").glob("*.safetensors"))
    assert len(files) > 4
    assert max(path.stat().st_size for path in files) < 8 * MIB
    for found in ranks[1]:
        assert found["peak of export"] < 32 * MIB < sum(path.stat().st_size for path in files) * 2 / 3


def test_a_small_model_is_one_file(paths, tmp_path):
    engine = make_engine(paths["backbone"], trained=False)
    files = WeightFiles.collect(engine.get_per_tensor_param(), engine.model)
    assert (list(files.tensors), files.index) == (["model.safetensors"], None)
