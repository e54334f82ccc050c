"""LoRA under strategy=megatron on two ranks: the numbers of peft on one, whoever holds which part of an adapter."""

import pytest
import torch
from peft import PeftModel
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.plugins.megatron.support import CONFIG, TP, megatron_engine
from tests.support.tiny_run import same
from tests.support.vision_models import tiny_vision_model_dir
from tests.vision.test_engine_with_images import ppo_batch
from tests.workers.engine.test_experts import CONFIGS
from tests.workers.support import (
    LAYOUTS,
    WHOLE,
    check_group_timeouts,
    make_engine,
    naive_outputs,
    ragged_batch,
    run_ranks,
    share,
    weights_of,
)
from verl.errors import CheckpointError, ConfigError
from verl.model_merger.fsdp import merge
from verl.testing.models import tiny_model_dir, tiny_tokenizer
from verl.workers.config import CriticConfig
from verl.workers.engine.model.adapters import ADAPTER_FOLDER
from verl.workers.losses import PolicyLoss, ValueLoss, sft_loss

pytest.importorskip("verl.plugins.megatron.library")

RANK = {"lora_rank": 3, "lora_alpha": 8}
OF_EXPERTS = {"lora": {"target_parameters": ["gate_up_proj", "down_proj"]}}
SOME = RANK | {"target_modules": ["q_proj", "v_proj", "up_proj"]}
PP, EP = {"pipeline_model_parallel_size": 2}, {"expert_model_parallel_size": 2}
CASES = {
    "dense": {"tensor": TP, "pipeline": PP},
    "some": {"tensor, whole sequences": TP | {"sequence_parallel": False, "use_remove_padding": False}},
    "experts": {"experts": EP, "tensor": TP},
}
MORE = {
    "dense": {
        "interleaved": PP | {"virtual_pipeline_model_parallel_size": 2},
        "data": {},
        "context": {"context_parallel_size": 2},
        "data, whole optimizer": {"use_distributed_optimizer": False},
    },
    "experts": {"tensor, whole experts": TP | EP | {"expert_tensor_parallel_size": 1}, "pipeline": PP},
    "latent": {"tensor": TP, "experts": EP},
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    settings = {"tie_word_embeddings": True, "num_hidden_layers": 4}
    dense = str(tiny_model_dir(folder / "dense", "qwen3", vocab=105, **settings))
    torch.manual_seed(0)
    config = CONFIGS["qwen3"].__class__(**(CONFIGS["qwen3"].to_dict() | {"norm_topk_prob": True}))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "experts")
    tiny_tokenizer().save_pretrained(folder / "experts")
    latent = str(tiny_model_dir(folder / "latent", "deepseek_v3", vocab=105))
    return {"dense": dense, "some": dense, "experts": str(folder / "experts"), "latent": latent}


def three_steps(engine, batch, layout="three"):
    mine = share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
    with engine.train_mode():
        return [engine.train_batch(mine, sft_loss, LAYOUTS[layout]) for _ in range(3)]


def log_probs_of(engine, batch):
    with engine.eval_mode():
        return engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]


def adapters_after(path, folder, **settings):
    """Adapters that one rank with FSDP trained for three steps, and the folder of peft that it wrote."""
    engine = make_engine(path, **settings)
    three_steps(engine, ragged_batch())
    engine.save_checkpoint(str(folder), 0, ("model",))
    return {"lora_adapter_path": str(folder / ADAPTER_FOLDER)}


# Of a dense layer, and one with shared experts besides those that are chosen.
LATENT = ["q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = {"dense": RANK, "some": SOME, "experts": RANK | OF_EXPERTS}
SETTINGS["latent"] = RANK | OF_EXPERTS | {"target_modules": LATENT}


def on_two_ranks(rank, world_size, folder, path, warm, cases):
    batch, found = ragged_batch(), {}
    for case, layout in cases.items():
        engine = megatron_engine(path, **warm, **layout)
        start = weights_of(engine)
        with engine.disable_adapter():
            reference = log_probs_of(engine, batch)
        metrics = three_steps(engine, batch)
        outputs = reference, log_probs_of(engine, batch)
        engine.save_checkpoint(str(folder / case), 3)
        held = engine.state(3).states
        after, weights = three_steps(engine, batch), weights_of(engine)
        engine.load_state(held)
        assert same((three_steps(engine, batch), weights_of(engine)), (after, weights))
        again = megatron_engine(path, **warm, **layout)
        again.load_checkpoint(str(folder / case))
        merged = weights_of(again)
        assert same((three_steps(again, batch), weights_of(again)), (after, weights))
        has_outputs = engine.is_mp_src_rank_with_outputs() and engine.get_data_parallel_size() == 1
        if cases == CASES["dense"]:
            torch.save(drawn_by(megatron_engine(path, **RANK, **layout)), folder / f"drawn {case} {rank}.pt")
        found[case] = metrics, start, merged, outputs if has_outputs else None
    check_group_timeouts()
    torch.save(found, folder / f"rank_{rank}.pt")
    if cases == CASES["dense"]:
        with pytest.raises(ConfigError, match="rank 1 has no layer with an adapter"):
            megatron_engine(path, **RANK, target_modules=r".*layers\.0\..*q_proj", **PP)


def drawn_by(engine):
    """New adapters."""
    return {name: tensor.clone() for name, tensor in engine.adapted_weights().adapters()}


def check(name, paths, folder, cases):
    """Compare layouts with one rank under FSDP, and what they saved with peft and the merger."""
    path, batch = paths[name], ragged_batch()
    warm = adapters_after(path, folder / "warm", **SETTINGS[name])
    run_ranks(on_two_ranks, 2, folder, path, warm, cases)
    if (
        cases == CASES["dense"]
    ):  # seed and name decide about new adapters, not back end, layout or what was drawn before
        known = drawn_by(make_engine(path, **RANK | {"target_modules": ["q_proj", "o_proj", "down_proj"]}))
        for case in cases:
            drawn = torch.load(folder / f"drawn {case} 1.pt", weights_only=True)
            assert {*known} < {*drawn}
            assert same({name: drawn[name] for name in known}, known)
    one = make_engine(path, **warm)
    start, metrics, weights = weights_of(one), three_steps(one, batch), weights_of(one)
    with torch.no_grad():
        base = naive_outputs(AutoModelForCausalLM.from_pretrained(path), batch)[0]
    for rank in range(2):
        found = torch.load(folder / f"rank_{rank}.pt", weights_only=False)
        for case in cases:
            case_metrics, case_start, case_weights, outputs = found[case]
            assert_close(case_start, start, atol=1e-6, rtol=0)
            for step, expected in zip(case_metrics, metrics, strict=True):
                assert {key: step[key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
            assert_close(case_weights, weights, atol=1e-5, rtol=0)
            if outputs is not None:
                assert_close(outputs[0], base, atol=1e-5, rtol=0)
                assert_close(outputs[1], log_probs_of(one, batch), atol=1e-5, rtol=0)
    mask = batch.batch["response_mask"].bool()
    for case in cases:
        adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), folder / case / ADAPTER_FOLDER)
        with torch.no_grad():
            ours = naive_outputs(adapted, batch)[0]
        assert_close(ours[mask], log_probs_of(one, batch)[mask], atol=1e-5, rtol=0)
        merge(folder / case, folder / f"{case}_merged")
        whole = AutoModelForCausalLM.from_pretrained(folder / f"{case}_merged").state_dict()
        assert_close({key: whole[key] for key in weights}, weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name", ["dense", pytest.param("some", marks=pytest.mark.slow), pytest.param("experts", marks=pytest.mark.slow)]
)
def test_two_ranks_are_peft_on_one(name, paths, tmp_path):
    check(name, paths, tmp_path, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_layouts_are_peft_on_one(name, paths, tmp_path):
    check(name, paths, tmp_path, MORE[name])


def test_one_rank_trains_a_critic_and_sends_its_adapters_apart(paths, tmp_path):
    path, batch = paths["dense"], ragged_batch()
    batch.batch["values"] = batch.batch["returns"] = torch.randn(batch.batch["response_mask"].shape)
    loss = ValueLoss(CriticConfig(cliprange_value=10.0))

    def updated(engine):
        with engine.train_mode():
            norms = [engine.train_batch(batch, loss, WHOLE)["grad_norm"] for _ in range(3)]
        return norms, weights_of(engine)

    critic = make_engine(path, "value_model", **RANK)
    updated(critic)
    critic.save_checkpoint(str(tmp_path / "critic"), 0, ("model",))
    warm = {"lora_adapter_path": str(tmp_path / "critic" / ADAPTER_FOLDER)}
    norms, weights = updated(make_engine(path, "value_model", **warm))
    found = updated(megatron_engine(path, "value_model", **warm))
    assert found[0] == pytest.approx(norms, rel=1e-5)
    assert_close(found[1], weights, atol=1e-5, rtol=0)

    warm = adapters_after(path, tmp_path / "actor", **RANK)
    engines = [megatron_engine(path, **warm), make_engine(path, **warm)]
    ours, theirs = (engine.adapted_weights() for engine in engines)
    assert ours.scales == theirs.scales
    assert same(dict(ours.base()), dict(theirs.base()))
    assert same([(n, t.clone()) for n, t in ours.adapters()], [(n, t.clone()) for n, t in theirs.adapters()])
    new = megatron_engine(path, **RANK)
    assert same(weights_of(new), weights_of(megatron_engine(path)))  # B is 0
    drawn = {name: tensor for name, tensor in new.adapted_weights().adapters() if ".lora_A." in name}
    assert all(0.9 < float(a.abs().max()) * a.shape[1] ** 0.5 < 1 for a in drawn.values())  # uniform within 1 / √in
    assert same({name: tensor for name, tensor in drawn_by(make_engine(path, **RANK)).items() if name in drawn}, drawn)


@pytest.mark.slow
def test_the_language_model_beside_a_tower_is_adapted(tmp_path):
    path = tiny_vision_model_dir(tmp_path / "model", "qwen3_vl")
    batch, loss = ppo_batch(path, tmp_path), PolicyLoss(CONFIG)

    def updated(engine):
        with engine.train_mode():
            norms = [engine.train_batch(batch, loss, WHOLE)["grad_norm"] for _ in range(3)]
        return norms, weights_of(engine)

    first = make_engine(path, **RANK)
    updated(first)
    first.save_checkpoint(str(tmp_path / "warm"), 0, ("model",))
    warm = {"lora_adapter_path": str(tmp_path / "warm" / ADAPTER_FOLDER)}
    norms, weights = updated(make_engine(path, **warm))
    engine = megatron_engine(path, **warm, enable_gradient_checkpointing=True)
    found = updated(engine)
    assert found[0] == pytest.approx(norms, rel=1e-5)
    assert_close(found[1], weights, atol=1e-5, rtol=0)
    engine.save_checkpoint(str(tmp_path / "saved"), 3)
    merge(tmp_path / "saved", tmp_path / "merged")


def test_what_cannot_be_trained_is_refused(paths, tmp_path):
    path = paths["dense"]
    with pytest.raises(ConfigError, match="strategy=megatron has no DoRA"):
        megatron_engine(path, **RANK, lora={"use_dora": True})
    with pytest.raises(ConfigError, match="this model has no adapters to switch off"):
        megatron_engine(path).disable_adapter()
    megatron_engine(path, **RANK).save_checkpoint(str(tmp_path / "saved"), 0, ("model",))
    with pytest.raises(CheckpointError, match="were trained with lora_alpha=8, and this run has lora_alpha=4"):
        megatron_engine(path, lora_rank=3, lora_alpha=4).load_checkpoint(str(tmp_path / "saved"), ("model",))
