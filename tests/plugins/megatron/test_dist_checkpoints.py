"""Weights from checkpoints that megatron-core itself wrote, equal bit for bit to those of the model folder."""

import pytest
import torch
import torch.distributed as dist

from tests.plugins.megatron.dist_checkpoints import save_as_core
from tests.plugins.megatron.support import TP, megatron_engine
from tests.support.tiny_run import same
from tests.workers.support import run_ranks, weights_of
from verl.checkpoint.core_weights import DistFiles
from verl.errors import CheckpointError
from verl.testing.models import tiny_model_dir

pytest.importorskip("verl.plugins.megatron.library")

PP = {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
APART = {"singleton_local_shards": True}
"""One tensor for each layer and expert, and for gate and up projection."""


def from_checkpoint(path, folder, prefix="", **settings):
    dist_checkpoint = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(folder)}
    return megatron_engine(path, trained=False, **dist_checkpoint, dist_checkpointing_prefix=prefix, **settings)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen2", None),  # biases, and one embedding for input and output
        ("qwen3", APART),
        ("qwen3_moe", None),
        ("qwen3_moe", APART),
        ("deepseek_v3", None),  # latent attention, a dense layer, shared experts, a bias of the router
    ],
)
def test_every_form_of_names_gives_the_weights_of_the_model_folder(tmp_path, family, form):
    path = tiny_model_dir(tmp_path / "model", family, **({"tie_word_embeddings": True} if family == "qwen2" else {}))
    engine = megatron_engine(path, trained=False)
    save_as_core(engine, tmp_path / "core", form, prefix="model.", vocab=engine.model.text_config.vocab_size + 37)
    read = from_checkpoint(path, tmp_path / "core", prefix="model.")
    weights = weights_of(engine)
    assert same(weights_of(read), weights)
    files = DistFiles(str(tmp_path / "core"), "model.", read.model.text_config)
    draws = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        start = [int(torch.randint(size, (), generator=draws)) for size in weight.shape]
        size = [1 + int(torch.randint(n - a, (), generator=draws)) for a, n in zip(start, weight.shape, strict=True)]
        part = weight[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
        assert same(files.read(name, tuple(weight.shape), (tuple(start), tuple(size))), part), (name, start, size)


def test_what_does_not_fit_is_an_error_before_training(tmp_path):
    path = tiny_model_dir(tmp_path / "model", "qwen3")
    folder = tmp_path / "core"
    save_as_core(megatron_engine(path, trained=False), folder)
    value_model = from_checkpoint(path, folder, model_type="value_model")
    assert not weights_of(value_model)["score.weight"].any()  # a policy's checkpoint has a head of the vocabulary
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.embedding.*: set dist_checkpointing_prefix to ''"):
        from_checkpoint(path, folder, prefix="model.")
    for family, settings, message in (
        ("qwen3", {"num_hidden_layers": 3}, r"'decoder\.layers.* has the shape \[2, .*which should begin with \[3\]"),
        ("qwen3", {"hidden_size": 32}, r"has the shape .*, and model\.embed_tokens\.weight needs \[\d+, 32\]"),
        ("qwen2", {}, r"no tensor for the weight model\.layers\.0\.self_attn\.q_proj\.bias: neither"),
        ("qwen3", {"tie_word_embeddings": True}, "output projection apart from the embedding"),
    ):
        other = tiny_model_dir(tmp_path / f"{family} {settings}", family, **settings)
        with pytest.raises(CheckpointError, match=message):
            from_checkpoint(other, folder)


def on_two_ranks(rank, world_size, folder, dense, mixture):
    expected = {path: weights_of(megatron_engine(path, trained=False)) for path in (dense, mixture)}
    written = {}
    for path, settings in ((dense, TP), (mixture, EP), (mixture, TP)):
        engine = megatron_engine(path, trained=False, **settings)
        written[len(written)] = path, folder / f"core_{len(written)}"
        save_as_core(engine, written[len(written) - 1][1])
        dist.barrier()
    layouts = {dense: (TP, PP | {"virtual_pipeline_model_parallel_size": 2}, {}), mixture: (EP, TP, PP)}
    for path, checkpoint in written.values():
        for settings in layouts[path]:
            weights = weights_of(from_checkpoint(path, checkpoint, **settings))
            assert same(weights, expected[path]), (checkpoint.name, settings)
    torch.save(True, folder / f"passed_{rank}.pt")


@pytest.mark.slow
def test_checkpoints_of_two_ranks_are_read_under_every_layout(tmp_path):
    """Written under TP 2 and EP 2; read under TP 2, PP 2 (interleaved for the dense model), EP 2 and data parallel."""
    dense = tiny_model_dir(tmp_path / "dense", "qwen3", num_hidden_layers=4)
    mixture = tiny_model_dir(tmp_path / "mixture", "qwen3_moe")
    run_ranks(on_two_ranks, 2, tmp_path, dense, mixture)
    assert all((tmp_path / f"passed_{rank}.pt").is_file() for rank in range(2))
