"""Two ranks over gloo in one start of two processes: the same numbers as plain PyTorch on one."""

import json
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.workers.support import (
    EPS,
    LAYOUTS,
    WHOLE,
    has_fast_layers,
    make_engine,
    naive_outputs,
    naive_update,
    ppo_batch,
    run_ranks,
    share,
    weights_of,
)
from verl.algorithms import LOSS_AGG_MODES
from verl.backends.cpu.collectives import SharedReduceScatter
from verl.errors import CheckpointError, ConfigError
from verl.testing.models import tiny_model_dir
from verl.utils.sharded_tensor import full_tensor
from verl.workers.config import ActorConfig, FSDPOptimizerConfig
from verl.workers.engine import MicroBatchConfig
from verl.workers.engine.optimizer import build_optimizer
from verl.workers.losses import PolicyLoss, sft_loss

CPU = torch.device("cpu")
# Muon iterates in bf16: where the rounding of a gradient differs, a weight may differ by about 1 % of a step.
MUON = {"optimizer": "Muon", "lr": 3e-4, "override_optimizer_config": {"adamw": {"eps": EPS}}}
STATE = ("model", "optimizer", "extra")


def config_for(mode):
    return ActorConfig(loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)


@contextmanager
def counted_sums():
    """The sizes of gradients that are summed over the ranks in a block."""
    sizes, add = [], SharedReduceScatter.__call__

    def counted(self, output_tensor, *args, **kwargs):
        sizes.append(output_tensor.numel())
        add(self, output_tensor, *args, **kwargs)

    SharedReduceScatter.__call__ = counted
    try:
        yield sizes
    finally:
        SharedReduceScatter.__call__ = add


def two_steps(engine, mine, mode, micro):
    with engine.train_mode():
        first = engine.train_batch(mine, PolicyLoss(config_for(mode)), micro)
        engine.train_batch(mine, PolicyLoss(config_for(mode)), micro)
    return first


def on_each_rank(rank, world_size, folder, path):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    mine = share(batch, rank, world_size)
    cases = {mode: ({}, "three") for mode in LOSS_AGG_MODES} | {
        "padded": ({"use_remove_padding": False}, "one by one"),
        "by tokens": ({}, "by tokens"),
        "kept activations": ({"enable_gradient_checkpointing": False}, "three"),
        "kept gathered": ({"reshard_after_forward": False, "forward_prefetch": True}, "three"),
        "two copies": ({"fsdp_size": 1}, "three"),
        "one sum per mini-batch": ({"use_no_sync_for_gradient_accumulation": True}, "three"),
    }
    weights, metrics, log_probs, sums = {}, {}, {}, {}
    for case, (settings, layout) in cases.items():
        engine = make_engine(path, **settings)
        assert has_fast_layers(engine)
        log_probs[case] = engine.infer_batch(mine, {"log_probs"}, LAYOUTS[layout])["log_probs"]
        with counted_sums() as reduced:
            metrics[case] = two_steps(engine, mine, case if case in LOSS_AGG_MODES else "token-mean", LAYOUTS[layout])
        sums[case] = len(reduced)
        weights[case] = weights_of(engine)
    torch.save(
        {"weights": weights, "metrics": metrics, "log_probs": log_probs, "sums": sums}, folder / f"rank_{rank}.pt"
    )
    uneven(rank, path, batch, folder)
    checkpoints(rank, path, batch, folder)
    muon(rank, path, batch, folder)


def uneven(rank, path, batch, folder):
    """Ranks with other numbers of passes, a rank without a valid token, an error on one rank alone."""
    engine = make_engine(path)
    mine = batch.select_idxs([0]) if rank == 0 else batch.select_idxs([1, 2, 3])
    with engine.train_mode():
        metrics = engine.train_batch(mine, sft_loss, MicroBatchConfig(micro_batch_size_per_gpu=1))
    torch.save({"weights": weights_of(engine), "metrics": metrics}, folder / f"uneven_{rank}.pt")
    micro = MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=10)  # too little for rank 1 only
    with pytest.raises(ConfigError, match="does not fit into a micro-batch of 10"):
        engine.infer_batch(mine, {"log_probs"}, micro)


def checkpoints(rank, path, batch, folder):
    mine = share(batch, rank, 2)
    engine = make_engine(path)
    engine.load_checkpoint(str(folder / "from_one"), STATE)  # written by one rank after one step
    with engine.train_mode():
        engine.train_batch(mine, sft_loss, WHOLE)
    held, weights = engine.state(2).states, weights_of(engine)
    engine.save_checkpoint(str(folder / "from_two"), 2, (*STATE, "hf_model"))
    with engine.train_mode():
        after = engine.train_batch(mine, sft_loss, WHOLE)
    engine.load_state(held)
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(engine).items())
    with engine.train_mode():
        assert engine.train_batch(mine, sft_loss, WHOLE) == after
    engine.load_state(held)
    blocked = "/proc/nowhere" if rank == 1 else str(folder / "fine")
    with pytest.raises(CheckpointError, match="rank 1"):
        engine.save_checkpoint(blocked)
    dist.barrier()
    if rank == 0:
        (folder / "from_two" / "model_world_size_2_rank_1.pt").rename(folder / "hidden.pt")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"model_world_size_2_rank_1.pt is missing"):
        engine.load_checkpoint(str(folder / "from_two"))
    if rank == 0:
        (folder / "hidden.pt").rename(folder / "from_two" / "model_world_size_2_rank_1.pt")


def muon(rank, path, batch, folder):
    """Two steps, the second once more after the first was saved; and an update of experts and of three matrices."""
    mine = share(batch, rank, 2)
    straight, resumed = make_engine(path, optimizer=MUON), make_engine(path, optimizer=MUON)
    with straight.train_mode():
        straight.train_batch(mine, sft_loss, WHOLE)
    straight.save_checkpoint(str(folder / "muon"), 1, STATE)
    resumed.load_checkpoint(str(folder / "muon"), STATE)
    for engine in (straight, resumed):
        with engine.train_mode():
            engine.train_batch(mine, sft_loss, WHOLE)
    weights = weights_of(straight)
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(resumed).items())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    updated = [
        full_tensor(weight, CPU) for weight in muon_step(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
    ]
    torch.save({"weights": weights, "updated": updated}, folder / f"muon_{rank}.pt")


def muon_step(placed):
    """Three experts, and matrices of odd sizes, two of them with fewer rows than some ranks would take."""
    g = torch.Generator().manual_seed(3)
    shapes = [(3, 4, 2), (5, 3), (2, 9), (7, 4)]
    weights = [nn.Parameter(placed(torch.randn(shape, generator=g))) for shape in shapes]
    for weight in weights:
        weight.grad = placed(torch.randn(weight.shape, generator=g))
    config = FSDPOptimizerConfig(optimizer="Muon", lr=0.1)
    build_optimizer(weights, config, weights).step()
    return [weight.detach() for weight in weights]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    # 3 heads of 10 and a vocabulary of 105: no weight divides evenly over two ranks
    odd = {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "intermediate_size": 65,
        "hidden_size": 33,
    }
    return tiny_model_dir(tmp_path_factory.mktemp("odd"), "qwen3", vocab=105, tie_word_embeddings=True, **odd)


@pytest.fixture(scope="module")
def batch(path):
    return ppo_batch(path)


@pytest.fixture(scope="module")
def folder(path, batch, tmp_path_factory):
    """What two ranks left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(batch, folder / "batch.pt")
    one = make_engine(path)
    with one.train_mode():
        one.train_batch(batch, sft_loss, WHOLE)
    one.save_checkpoint(str(folder / "from_one"), 1, STATE)
    run_ranks(on_each_rank, 2, folder, path)
    return folder


def load(folder, name):
    return torch.load(folder / name, weights_only=True)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_two_ppo_steps_equal_plain_pytorch(folder, path, batch, mode):
    expected, norm = naive_update(path, batch, config_for(mode))
    found = load(folder, "rank_0.pt")
    assert found["metrics"][mode]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, weight in found["weights"][mode].items():
        assert_close(weight, expected[name], atol=2e-6, rtol=1e-5)


def test_no_layout_or_placement_changes_the_result(folder, batch):
    ranks = [load(folder, f"rank_{rank}.pt") for rank in range(2)]
    reference = ranks[0]["weights"]["token-mean"]
    for case, weights in ranks[0]["weights"].items():
        assert ranks[0]["metrics"][case] == ranks[1]["metrics"][case]
        assert all(torch.equal(weight, ranks[1]["weights"][case][name]) for name, weight in weights.items())
        if case not in LOSS_AGG_MODES:
            assert ranks[0]["metrics"][case] == pytest.approx(ranks[0]["metrics"]["token-mean"], rel=1e-4)
            for name, weight in weights.items():
                assert_close(weight, reference[name], atol=2e-6, rtol=1e-5)


def test_gradients_are_summed_once_per_mini_batch_if_asked(folder):
    # Two mini-batches of two passes each; two layers and the root are a unit each.
    sums = load(folder, "rank_0.pt")["sums"]
    assert (sums["token-mean"], sums["one sum per mini-batch"]) == (2 * 2 * 3, 2 * 3)


def test_each_rank_gets_the_log_probs_of_its_rows(folder, path, batch):
    with torch.no_grad():
        expected, _ = naive_outputs(AutoModelForCausalLM.from_pretrained(path), batch)
    for rank in range(2):
        for log_probs in load(folder, f"rank_{rank}.pt")["log_probs"].values():
            assert_close(log_probs, expected[rank::2], atol=1e-5, rtol=0)


def test_ranks_with_other_numbers_of_passes(folder, path, batch):
    alone = make_engine(path)
    with alone.train_mode():
        metrics = alone.train_batch(batch.select_idxs([0, 1, 2, 3]), sft_loss, WHOLE)
    found = load(folder, "uneven_0.pt")
    assert found["metrics"] == pytest.approx(metrics, rel=1e-5)
    for name, weight in weights_of(alone).items():
        assert_close(found["weights"][name], weight, atol=2e-6, rtol=1e-5)


def test_one_rank_to_two_to_one(folder, path, batch):
    """A step on one rank, saved, a step on two, saved, a step on one: as three steps on one."""
    straight, resumed = make_engine(path), make_engine(path)
    resumed.load_checkpoint(str(folder / "from_two"), STATE)
    assert resumed.weight_version == 2
    for engine, steps in ((straight, 3), (resumed, 1)):
        with engine.train_mode():
            for _ in range(steps):
                engine.train_batch(batch, sft_loss, WHOLE)
    for name, weight in weights_of(straight).items():
        assert_close(weights_of(resumed)[name], weight, atol=2e-6, rtol=1e-5)


def test_checkpoint_of_two_ranks(folder, path, batch):
    saved = folder / "from_two"
    assert json.loads((saved / "fsdp_config.json").read_text())["world_size"] == 2
    parts = [load(saved, f"model_world_size_2_rank_{rank}.pt") for rank in range(2)]
    name = "model.embed_tokens.weight"
    assert [part["tensors"][name].shape[0] for part in parts] == [53, 52]
    exported = AutoModelForCausalLM.from_pretrained(saved / "huggingface")
    assert torch.equal(exported.model.embed_tokens.weight, torch.cat([part["tensors"][name] for part in parts]))
    assert torch.equal(exported.lm_head.weight, exported.model.embed_tokens.weight)
    assert not (folder / "fine").exists()  # one rank failed, so nothing was put in place


def test_muon_on_two_ranks_is_muon_on_one(folder, path, batch):
    straight, resumed = make_engine(path, optimizer=MUON), make_engine(path, optimizer=MUON)
    before = weights_of(straight)
    resumed.load_checkpoint(str(folder / "muon"), STATE)
    for engine, steps in ((straight, 2), (resumed, 1)):
        with engine.train_mode():
            for _ in range(steps):
                engine.train_batch(batch, sft_loss, WHOLE)
    found = [load(folder, f"muon_{rank}.pt") for rank in range(2)]
    for name, weight in weights_of(straight).items():
        assert torch.equal(found[0]["weights"][name], found[1]["weights"][name])
        assert_close(found[0]["weights"][name], weight, atol=1e-5, rtol=1e-5)
        assert_close(weights_of(resumed)[name], weight, atol=1e-5, rtol=1e-5)
        assert (weight - before[name]).abs().max() > 1e-4
    updated = muon_step(lambda tensor: tensor)
    assert all(torch.equal(weight, found[0]["updated"][index]) for index, weight in enumerate(updated))


def on_four_ranks(rank, world_size, folder, path):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    engine = make_engine(path, fsdp_size=2)
    sizes = {name: (p.placements, p.to_local().numel(), p.numel()) for name, p in engine.model.named_parameters()}
    metrics = two_steps(engine, share(batch, rank, world_size), "token-mean", LAYOUTS["three"])
    of_muon = make_engine(path, fsdp_size=2, optimizer=MUON)
    with of_muon.train_mode():
        for _ in range(2):
            of_muon.train_batch(share(batch, rank, world_size), sft_loss, WHOLE)
    results = {"sizes": sizes, "weights": weights_of(engine), "metrics": metrics, "muon": weights_of(of_muon)}
    torch.save(results, folder / f"hybrid_{rank}.pt")


@pytest.mark.slow
def test_two_copies_over_two_ranks_each(path, batch, folder, tmp_path):
    torch.save(batch, tmp_path / "batch.pt")
    run_ranks(on_four_ranks, 4, tmp_path, path)
    found = [torch.load(tmp_path / f"hybrid_{rank}.pt", weights_only=False) for rank in range(4)]
    for name, (placements, _, whole) in found[0]["sizes"].items():
        assert [placement.is_replicate() for placement in placements] == [True, False]
        held = [of_rank["sizes"][name][1] for of_rank in found]
        assert held[0] + held[1] == whole  # one copy lies on ranks 0 and 1
        assert held[2:] == held[:2]  # the other on ranks 2 and 3
    two_ranks = torch.load(folder / "rank_0.pt", weights_only=False)
    assert_close(found[3]["weights"], two_ranks["weights"]["token-mean"], rtol=1e-5, atol=1e-6)
    assert_close(found[3]["muon"], load(folder, "muon_0.pt")["weights"], rtol=1e-5, atol=1e-5)
    assert found[0]["metrics"]["actor/pg_loss"] == pytest.approx(
        two_ranks["metrics"]["token-mean"]["actor/pg_loss"], rel=1e-5, abs=1e-7
    )
