"""The engine with images: log-probs and updates of a plain forward pass, in every layout, on one rank and on two."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.vision_models import DENSE_FAMILIES, tiny_vision_model_dir
from tests.vision.batches import P, arguments_of, naive_log_probs, naive_steps, picture_batch
from tests.workers.support import make_engine, run_ranks, share, weights_of, with_log_probs
from verl.errors import ConfigError, SchemaError
from verl.model_merger import merge
from verl.protocol.shared import SharedTensors
from verl.utils.image_reward_models import token_classifier
from verl.vision.families import TEXT_PLACES
from verl.workers.config import ActorConfig
from verl.workers.engine import MicroBatchConfig
from verl.workers.losses import PolicyLoss

LAYOUTS = {
    "whole": MicroBatchConfig(),
    "one by one": MicroBatchConfig(micro_batch_size_per_gpu=1),
    "by tokens": MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=60),
}
CONFIG = ActorConfig(loss_agg_mode="token-mean", entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)


@pytest.fixture(scope="module", params=DENSE_FAMILIES)
def family_path(request, tmp_path_factory):
    return tiny_vision_model_dir(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_vision_model_dir(tmp_path_factory.mktemp("model"))


def ppo_batch(path, folder):
    plain = picture_batch(path, folder)
    with torch.no_grad():
        log_probs, _ = naive_log_probs(AutoModelForImageTextToText.from_pretrained(path), plain)
    return with_log_probs(plain, log_probs)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_log_probs_are_those_of_the_models_own_forward(family_path, packed, tmp_path):
    batch = picture_batch(family_path, tmp_path)
    with torch.no_grad():
        log_probs, entropy = naive_log_probs(AutoModelForImageTextToText.from_pretrained(family_path), batch)
    engine = make_engine(family_path, trained=False, use_remove_padding=packed)
    assert engine.is_packed == packed
    for micro in LAYOUTS.values():
        found = engine.infer_batch(batch, {"log_probs", "entropy"}, micro)
        assert_close(found["log_probs"], log_probs, atol=1e-5, rtol=0)
        assert_close(found["entropy"], entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_are_those_of_plain_pytorch(family_path, layout, tmp_path):
    batch = ppo_batch(family_path, tmp_path)
    expected, norm = naive_steps(family_path, batch, CONFIG)
    engine = make_engine(family_path)
    with engine.train_mode():
        first = engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS[layout])
        engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS[layout])
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
    found = weights_of(engine)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert_close(found[name], weight, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    start = AutoModelForImageTextToText.from_pretrained(family_path)
    moved = {n for n, p in start.named_parameters() if not torch.equal(p, found[n])}
    assert {"model.visual.patch_embed.proj.weight"} < moved  # the gradient went through the projector and the tower


def test_a_token_of_images_that_the_policy_drew_is_text(path, tmp_path):
    batch = picture_batch(path, tmp_path)
    columns = {name: tensor.clone() for name, tensor in batch.batch.items()}
    columns["input_ids"][1, P + 1] = columns["responses"][1, 1] = 106
    drawn = type(batch).from_dict(tensors=columns, non_tensors=batch.non_tensor_batch)
    engine = make_engine(path, trained=False)
    before, after = (engine.infer_batch(b, {"log_probs"}, LAYOUTS["whole"])["log_probs"] for b in (batch, drawn))
    assert torch.equal(before[1, :1], after[1, :1])
    assert bool((before[1, 1:] != after[1, 1:]).all())
    others = [0, 2, 3, 4, 5]
    assert_close(before[others], after[others], atol=1e-6, rtol=0)
    # also where its mask is 0 by now, and where it is in the prompt, as a row of an earlier turn of the policy has it
    later = drawn.select_idxs([1])
    later.batch["response_mask"][0, :3] = 0
    found = engine.infer_batch(later, {"log_probs"}, LAYOUTS["whole"])["log_probs"]
    assert_close(found[0, 3:], after[1, 3:], atol=1e-5, rtol=0)
    row = later.batch
    prompt = int(row["attention_mask"][0, :P].sum())
    images = SharedTensors({**later.non_tensor_batch["multi_modal_inputs"][0], TEXT_PLACES: torch.tensor([prompt + 1])})
    moved = {name: row[name] for name in ("input_ids", "attention_mask", "position_ids")}
    moved |= {name: row[name][:, 3:] for name in ("responses", "response_mask")}
    forked = type(batch).from_dict(
        tensors=moved, non_tensors={"multi_modal_inputs": np.fromiter([images], dtype=object, count=1)}
    )
    found = engine.infer_batch(forked, {"log_probs"}, LAYOUTS["whole"])["log_probs"]
    assert_close(found[0], after[1, 3:], atol=1e-5, rtol=0)


def test_image_tokens_without_their_images_are_refused(path, tmp_path):
    batch = picture_batch(path, tmp_path)
    engine = make_engine(path, trained=False)
    with pytest.raises(SchemaError, match=r"row 0 of the batch has 4 image tokens, and the images .* make 0"):
        engine.infer_batch(batch.select(non_tensor_batch_keys=[]), {"log_probs"}, LAYOUTS["whole"])
    flat = {name: t[:, 0] if t.dim() == 3 else t for name, t in batch.batch.items()}
    flat_batch = type(batch).from_dict(tensors=flat, non_tensors=batch.non_tensor_batch)
    with pytest.raises(SchemaError, match=r"need \(bsz, 4, length\)"):
        engine.infer_batch(flat_batch, {"log_probs"}, LAYOUTS["whole"])
    texts = flat_batch.select_idxs([2, 5])  # which need no axes
    expected = engine.infer_batch(batch.select_idxs([2, 5]), {"log_probs"}, LAYOUTS["whole"])["log_probs"]
    assert torch.equal(engine.infer_batch(texts, {"log_probs"}, LAYOUTS["whole"])["log_probs"], expected)


def test_values_with_images(path, tmp_path):
    batch = picture_batch(path, tmp_path)
    engine = make_engine(path, "value_model", trained=False)
    torch.nn.init.normal_(engine.model.head.weight, std=0.5)
    values = engine.infer_batch(batch, {"values"}, LAYOUTS["whole"])["values"]
    for micro in LAYOUTS.values():
        assert_close(engine.infer_batch(batch, {"values"}, micro)["values"], values, atol=1e-5, rtol=0)
    assert float(values.abs().max()) > 0.1


def test_a_critic_is_exported_and_merged(family_path, tmp_path):
    family = AutoConfig.from_pretrained(family_path).model_type
    batch = picture_batch(family_path, tmp_path)
    engine = make_engine(family_path, "value_model")
    torch.nn.init.normal_(engine.model.head.weight, std=0.5)
    torch.nn.init.ones_(engine.model.head.bias)
    values = engine.infer_batch(batch, {"values"}, LAYOUTS["whole"])["values"]
    engine.save_checkpoint(str(tmp_path / "saved"), 1, ("model", "hf_model"))
    merge(tmp_path / "saved", tmp_path / "merged", is_value_model=True)
    for folder in (tmp_path / "saved" / "huggingface", tmp_path / "merged"):
        model = token_classifier(family).from_pretrained(folder).eval()
        for row in (1, 2):  # one with an image, and one of text
            given = arguments_of(batch, row)
            length = int(batch.batch["response_mask"][row].sum())
            with torch.no_grad():
                found = model(**given).logits[0, -length - 1 : -1, 0]  # before each response token
            assert_close(found, values[row, :length], atol=1e-5, rtol=0)
        again = make_engine(str(folder), "value_model", trained=False)
        assert_close(again.infer_batch(batch, {"values"}, LAYOUTS["whole"])["values"], values, atol=1e-6, rtol=0)


def on_each_rank(rank, world_size, folder, path):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    result = {}
    for case, micro in LAYOUTS.items():
        mine = share(batch, rank, world_size)
        engine = make_engine(path)
        found = engine.infer_batch(mine, {"log_probs"}, micro)["log_probs"]
        with engine.train_mode():
            norm = engine.train_batch(mine, PolicyLoss(CONFIG), micro)["grad_norm"]
            engine.train_batch(mine, PolicyLoss(CONFIG), micro)
        result[case] = found, norm, weights_of(engine)
    # One rank has all images, the other only texts: rows 2 and 5.
    mine = batch.select_idxs([0, 1, 3, 4] if rank == 0 else [2, 5])
    engine = make_engine(path)
    with engine.train_mode():
        norm = engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS["one by one"])["grad_norm"]
        engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS["one by one"])
    result["apart"] = None, norm, weights_of(engine)
    torch.save(result, folder / f"rank_{rank}.pt")


def test_two_ranks_make_the_steps_of_one_also_if_one_has_only_texts(path, tmp_path):
    batch = ppo_batch(path, tmp_path)
    torch.save(batch, tmp_path / "batch.pt")
    expected, norm = naive_steps(path, batch, CONFIG)
    run_ranks(on_each_rank, 2, tmp_path, path)
    with torch.no_grad():
        log_probs, _ = naive_log_probs(AutoModelForImageTextToText.from_pretrained(path), batch)
    for rank in range(2):
        for case, (found, own_norm, weights) in torch.load(tmp_path / f"rank_{rank}.pt").items():
            if found is not None:
                assert_close(found, log_probs[rank::2], atol=1e-5, rtol=0)
            assert own_norm == pytest.approx(norm, rel=1e-4), case
            for name, weight in expected.items():
                assert_close(weights[name], weight, atol=1e-5, rtol=0, msg=lambda t, n=name, c=case: f"{c} {n}: {t}")


FAMILIES_WITH_RANKS = (*DENSE_FAMILIES, "qwen3_vl_moe")


def on_ranks_with_the_same_rows(rank, world_size, folder, key):
    for family in FAMILIES_WITH_RANKS:
        path, batch = str(folder / family / "model"), torch.load(folder / family / "batch.pt", weights_only=False)
        result = {}
        # Alone in a pass, a row of text has no image, and one of both ranks has no token of one.
        for packed, layout in ((True, "one by one"), (False, "whole")):
            engine = make_engine(path, use_remove_padding=packed, **{key: 2})
            assert engine.is_packed == packed
            found = engine.infer_batch(batch, {"log_probs"}, LAYOUTS[layout])["log_probs"]
            with engine.train_mode():
                norm = engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS[layout])["grad_norm"]
                engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS[layout])
            result[f"{layout}, packed={packed}"] = found, norm, weights_of(engine)
        torch.save(result, folder / family / f"rank_{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["ulysses_sequence_parallel_size", "tensor_parallel_size"])
def test_ranks_with_the_same_rows_make_the_steps_of_plain_pytorch(key, tmp_path):
    expected = {}
    for family in FAMILIES_WITH_RANKS:
        path = tiny_vision_model_dir(tmp_path / family / "model", family)
        batch = ppo_batch(path, tmp_path / family)
        torch.save(batch, tmp_path / family / "batch.pt")
        with torch.no_grad():
            log_probs, _ = naive_log_probs(AutoModelForImageTextToText.from_pretrained(path), batch)
        expected[family] = log_probs, *naive_steps(path, batch, CONFIG)
    run_ranks(on_ranks_with_the_same_rows, 2, tmp_path, key)
    for family, (log_probs, weights, norm) in expected.items():
        for rank in range(2):
            for case, (found, own_norm, own) in torch.load(tmp_path / family / f"rank_{rank}.pt").items():
                assert_close(found, log_probs, atol=1e-5, rtol=0)
                assert own_norm == pytest.approx(norm, rel=1e-4), (family, case)
                for name, weight in weights.items():
                    assert_close(own[name], weight, atol=1e-5, rtol=0, msg=lambda t, n=name, c=case: f"{c} {n}: {t}")


def test_a_frozen_tower_stays_and_the_language_model_learns(path, tmp_path):
    batch = ppo_batch(path, tmp_path)
    start = {name: p.clone() for name, p in AutoModelForImageTextToText.from_pretrained(path).named_parameters()}
    engine = make_engine(path, frozen=("visual",))
    with engine.train_mode():
        engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS["one by one"])
    for name, weight in weights_of(engine).items():
        assert torch.equal(weight, start[name]) == (".visual." in name), name


def test_adapters_are_for_the_language_model_alone(path, tmp_path):
    batch = ppo_batch(path, tmp_path)
    engine = make_engine(path, lora_rank=4, target_modules=("q_proj", "down_proj"))  # the tower has a down_proj too
    bound = {name.rpartition(".")[2] for name in engine.adapters}
    assert bound == {"q_proj", "down_proj"}
    assert len(engine.adapters) == 4
    assert all(".language_model." in name for name in engine.adapters)
    before = engine.infer_batch(batch, {"log_probs"}, LAYOUTS["whole"])["log_probs"]
    with engine.train_mode():
        engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS["whole"])
        engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS["whole"])
    with engine.disable_adapter():
        assert torch.equal(engine.infer_batch(batch, {"log_probs"}, LAYOUTS["whole"])["log_probs"], before)
    with pytest.raises(ConfigError, match="a layer of the vision tower"):
        make_engine(path, lora_rank=4, target_modules=r".*visual.*qkv")
