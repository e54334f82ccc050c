"""strategy=megatron with images on two ranks over gloo: the numbers of plain PyTorch in every layout."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.plugins.megatron.support import megatron_engine
from tests.support.tiny_run import same
from tests.support.vision_models import tiny_vision_model_dir
from tests.vision.batches import naive_log_probs, naive_steps
from tests.vision.test_engine_with_images import CONFIG, LAYOUTS, ppo_batch
from tests.workers.support import make_engine, run_ranks, share, weights_of
from verl.model_merger import merge
from verl.workers.losses import PolicyLoss

pytest.importorskip("verl.plugins.megatron.library")

TP, PP, CP = ({f"{name}_parallel_size": 2} for name in ("tensor_model", "pipeline_model", "context"))
RECOMPUTED = {"enable_gradient_checkpointing": True}
PADDED = {"use_remove_padding": False}
CASES = {
    "tensor": (TP | RECOMPUTED, "by tokens"),
    "tensor, padded, whole sequences": (TP | PADDED | {"sequence_parallel": False}, "whole"),
    "tensor, padded": (TP | PADDED, "whole"),
    "pipeline": (PP | RECOMPUTED, "one by one"),
    "context": (CP, "by tokens"),
    "context, padded": (CP | PADDED, "whole"),
    "data": ({}, "one by one"),
}
FEW = ("tensor", "tensor, padded, whole sequences", "pipeline")
FAMILIES = ("qwen2_5_vl", "qwen3_vl_moe")


def on_two_ranks(rank, world_size, folder, cases, families):
    for family in families:
        path, batch = str(folder / family / "model"), torch.load(folder / family / "batch.pt", weights_only=False)
        result = {}
        for case in cases:
            settings, layout = CASES[case]
            if family == "qwen3_vl_moe" and "sequence_parallel" in settings:  # experts need it
                settings = TP | PADDED | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
            engine = megatron_engine(path, **settings)
            mine = share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
            with engine.eval_mode():
                outputs = engine.infer_batch(mine, {"log_probs", "entropy"}, LAYOUTS[layout])
            with engine.train_mode():
                norm = engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])["grad_norm"]
                engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])
            place = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
            computed = outputs if engine.is_mp_src_rank_with_outputs() else None
            result[case] = computed, norm, weights_of(engine), place
        torch.save(result, folder / family / f"rank_{rank}.pt")
    if "pipeline" in cases and "qwen2_5_vl" in families:
        with_frozen_tower(rank, folder, str(folder / "qwen2_5_vl" / "model"))


def with_frozen_tower(rank, folder, path):
    """The tower stays; what one layout saved after a step goes on in another and in memory."""
    batch = torch.load(folder / "qwen2_5_vl" / "batch.pt", weights_only=False)
    loss, micro = PolicyLoss(CONFIG), LAYOUTS["whole"]
    engine = megatron_engine(path, **PP, frozen=("visual",))
    start = weights_of(engine)
    with engine.train_mode():
        engine.train_batch(batch, loss, micro)
    engine.save_checkpoint(str(folder / "saved"), 1, ("model", "optimizer", "extra", "hf_model"))
    held, after = engine.state(1).states, weights_of(engine)
    with engine.train_mode():
        engine.train_batch(batch, loss, micro)
    twice = weights_of(engine)
    for name, weight in twice.items():
        assert torch.equal(weight, start[name]) == (".visual." in name), name
    engine.load_state(held)
    assert same(weights_of(engine), after)
    with engine.train_mode():
        engine.train_batch(batch, loss, micro)
    assert same(weights_of(engine), twice)
    engine = megatron_engine(path, **TP, frozen=("visual",))
    engine.load_checkpoint(str(folder / "saved"))
    with engine.train_mode():
        engine.train_batch(batch, loss, micro)
    for name, weight in weights_of(engine).items():
        assert_close(weight, twice[name], atol=1e-5, rtol=0)
    if rank == 0:
        torch.save((after, twice), folder / "frozen.pt")


def compare(tmp_path, cases, families):
    expected = {}
    for family in families:
        path = tiny_vision_model_dir(tmp_path / family / "model", family)
        batch = ppo_batch(path, tmp_path / family)
        torch.save(batch, tmp_path / family / "batch.pt")
        with torch.no_grad():
            outputs = naive_log_probs(AutoModelForImageTextToText.from_pretrained(path), batch)
        expected[family] = outputs, *naive_steps(path, batch, CONFIG)
    run_ranks(on_two_ranks, 2, tmp_path, cases, families)
    for family, (outputs, weights, norm) in expected.items():
        for rank in range(2):
            for case, (computed, own_norm, own, place) in torch.load(tmp_path / family / f"rank_{rank}.pt").items():
                if computed is not None:
                    for name, column in zip(("log_probs", "entropy"), outputs, strict=True):
                        assert_close(computed[name], column[place[0] :: place[1]], atol=1e-5, rtol=0)
                assert own_norm == pytest.approx(norm, rel=1e-5), (family, case)
                assert own.keys() == weights.keys()
                for name, weight in weights.items():
                    assert_close(own[name], weight, atol=1e-5, rtol=0, msg=lambda t, n=name, c=case: f"{c} {n}: {t}")


def test_two_ranks_make_the_steps_of_plain_pytorch(tmp_path):
    compare(tmp_path, FEW, FAMILIES)
    # Folders of Qwen2.5-VL have other names than its weights in memory.
    after, twice = torch.load(tmp_path / "frozen.pt")
    merge(tmp_path / "saved", tmp_path / "merged")
    for folder in (tmp_path / "merged", tmp_path / "saved" / "huggingface"):
        assert same(dict(AutoModelForImageTextToText.from_pretrained(folder).named_parameters()), after)
    batch = torch.load(tmp_path / "qwen2_5_vl" / "batch.pt", weights_only=False)
    engine = make_engine(str(tmp_path / "qwen2_5_vl" / "model"), frozen=("visual",))
    with engine.train_mode():
        for _ in range(2):
            engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS["whole"])
    for name, weight in weights_of(engine).items():
        assert_close(weight, twice[name], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_other_layouts_make_the_steps_of_plain_pytorch(tmp_path):
    compare(tmp_path, CASES.keys() - set(FEW), FAMILIES)


@pytest.mark.slow
def test_features_of_several_depths_without_experts(tmp_path):
    compare(tmp_path, CASES, ["qwen3_vl"])
