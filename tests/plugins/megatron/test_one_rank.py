"""strategy=megatron on one rank: the numbers of plain PyTorch, and what is refused."""

import math
from contextlib import ExitStack

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests import forks
from tests.plugins.megatron.support import batch_that_drew_padding, megatron_engine
from tests.support.tiny_run import same
from tests.workers.support import (
    LAYOUTS,
    WHOLE,
    make_engine,
    naive_outputs,
    naive_update,
    ppo_batch,
    ragged_batch,
    weights_of,
)
from verl.checkpoint.states import from_arrays, to_arrays
from verl.config import McoreEngineConfig
from verl.errors import CheckpointError, ConfigError
from verl.testing.models import tiny_model_dir
from verl.workers.config import ActorConfig, CriticConfig
from verl.workers.losses import PolicyLoss, ValueLoss, sft_loss

pytest.importorskip("verl.plugins.megatron.library")

JOIN = """
import sys
import torch
import torch.distributed as dist
from verl.plugins.megatron import library
from verl.plugins.megatron.groups import Layout, join

def replaced():
    modules = [m for n, m in sys.modules.items() if n.startswith("megatron.core.") and "torch" in vars(m)]
    states = library.tensor_parallel.random._get_cuda_rng_state
    return len(modules), sum(m.torch is not torch for m in modules), states.__module__.startswith("verl.")

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layout = Layout(1, 1, 1, 1, 1, 1)
for device in ("cuda", "cpu"):
    try:
        join(layout, torch.device(device), 0)
    except (RuntimeError, AssertionError):  # of PyTorch, where there is no CUDA
        assert device == "cuda" and not torch.cuda.is_available()
    print(*replaced())
"""
CONFIG = ActorConfig(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, loss_agg_mode="seq-mean-token-mean")
FAMILIES = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {"num_key_value_heads": 1}),
    "windows": ("mistral", {"sliding_window": 4}),
    "experts": ("qwen3_moe", {}),
    "scaled": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model_dir(folder / name, family, **changes) for name, (family, changes) in FAMILIES.items()}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "experts"])
def test_outputs_and_updates_are_those_of_plain_pytorch(paths, family):
    path, packed = paths[family], family != "qwen2"
    plain = batch_that_drew_padding()
    with torch.no_grad():
        log_probs, entropy = naive_outputs(AutoModelForCausalLM.from_pretrained(path), plain, temperature=0.7)
    batch = ppo_batch(path, plain)
    engine = megatron_engine(path, use_remove_padding=packed)
    with engine.eval_mode():
        found = engine.infer_batch(batch, {"log_probs", "entropy"}, LAYOUTS["three"], temperature=0.7)
    assert_close(found["log_probs"], log_probs, atol=1e-5, rtol=0)
    assert_close(found["entropy"], entropy, atol=1e-5, rtol=0)
    expected, norm = naive_update(path, batch, CONFIG)
    with engine.train_mode():
        first = engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS["by tokens"])
        engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS["one by one"])
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)
    weights = weights_of(engine)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert_close(weight, expected[name], atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert engine.weight_version == 2


@pytest.mark.parametrize(
    ("model", "how", "takes_less"),
    [
        ("llama", {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}, True),
        ("llama", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}, True),
        ("llama", {"recompute_granularity": "selective"}, False),  # attention alone, which makes no matrix of scores
        ("llama", {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}, True),
        ("experts", {"recompute_granularity": "selective", "recompute_modules": ["moe"]}, True),
    ],
    ids=["block", "uniform", "attention", "parts", "experts"],
)
def test_recomputation_gives_the_same_bits(paths, model, how, takes_less):
    """Of two layers; the memory is what autograd keeps of a forward pass."""
    found, kept = [], []
    for override in ({}, how):
        settings = {"enable_gradient_checkpointing": False, "override_transformer_config": override}
        engine = megatron_engine(paths[model], **settings)
        weights = {parameter.untyped_storage().data_ptr() for parameter in engine.model.pieces.parameters()}
        tensors: dict[int, int] = {}
        hooks = ExitStack()

        def keep(tensor, weights=weights, tensors=tensors):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                tensors[storage.data_ptr()] = storage.nbytes()
            return tensor

        def begin(*_, hooks=hooks, keep=keep):
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))

        engine.model.first.register_forward_pre_hook(begin)
        engine.model.first.register_forward_hook(lambda *_, hooks=hooks: hooks.close())
        with engine.train_mode():
            metrics = engine.train_batch(ragged_batch(), sft_loss, WHOLE)
        found.append((weights_of(engine), metrics))
        kept.append(sum(tensors.values()))
    assert same(*found)
    assert (kept[1] < kept[0]) is takes_less


def test_flags_of_speed_are_passed_on_or_named_in_the_log(paths, caplog):
    on = ("deallocate_pipeline_outputs", "gradient_accumulation_fusion", "moe_enable_deepep", "moe_permute_fusion")
    flags = dict.fromkeys((*on, "apply_rope_fusion", "overlap_p2p_comm_warmup_flush"), True)
    flags |= {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32", "bias_dropout_fusion": False}
    engine = megatron_engine(paths["experts"], dtype="bfloat16", override_transformer_config=flags)
    megatron_engine(paths["experts"], dtype="bfloat16", override_transformer_config=flags)
    assert [record.message for record in caplog.records] == [
        "no effect: flags of megatron.override_transformer_config: gradient_accumulation_fusion (it takes a GPU); "
        "moe_enable_deepep (it belongs to moe_token_dispatcher_type=flex); moe_permute_fusion (it takes a GPU); "
        "apply_rope_fusion (rotary angles follow each token's position, which the fused kernel does not take); "
        "overlap_p2p_comm_warmup_flush (the pipeline is not interleaved); "
        "moe_token_dispatcher_type (it takes a GPU; alltoall is used)"
    ]
    config = engine.model.first.config
    assert (config.deallocate_pipeline_outputs, config.gradient_accumulation_fusion) == (True, False)
    assert (config.moe_token_dispatcher_type, config.moe_enable_deepep) == ("alltoall", False)
    # The router multiplies in fp32, not in bfloat16.
    router, hidden = engine.model.first.decoder.layers[0].mlp.router, torch.randn(3, 2, 64).bfloat16()
    weights, chosen = router(hidden)
    probabilities = (hidden.flatten(0, 1).float() @ router.weight.float().t()).softmax(-1)
    top = probabilities.topk(2).values
    assert weights.dtype == torch.float32
    shares = [x / x.sum(-1, keepdim=True) for x in (weights, top)]
    assert_close(shares[0][chosen].sort().values, shares[1].flatten().sort().values)
    caplog.clear()
    megatron_engine(paths["llama"], override_transformer_config={"moe_router_dtype": "fp32"})
    assert "moe_router_dtype (the model has no experts)" in caplog.text
    caplog.clear()
    idle = {"account_for_loss_in_pipeline_split": True, "moe_deepep_num_sms": 20}
    megatron_engine(paths["experts"], override_transformer_config=idle)
    assert "account_for_loss_in_pipeline_split (there is no pipeline); moe_deepep_num_sms (it belongs to" in caplog.text


def test_value_and_reward_models_are_those_of_fsdp(paths, tmp_path):
    path = tiny_model_dir(tmp_path / "values", "qwen3", task="token_classification")
    batch = ragged_batch()
    ours, theirs = megatron_engine(path, "value_model"), make_engine(path, "value_model")
    for engine in (ours, theirs):
        with engine.train_mode():
            engine.train_batch(batch, ValueLoss(CriticConfig()), LAYOUTS["three"])
    values = [engine.infer_batch(batch, {"values"}, WHOLE)["values"] for engine in (ours, theirs)]
    assert_close(*values, atol=1e-5, rtol=0)
    rewards = tiny_model_dir(tmp_path / "rewards", "qwen3", task="sequence_classification")
    models = (
        megatron_engine(rewards, "reward_model", trained=False),
        make_engine(rewards, "reward_model", trained=False),
    )
    scores = [engine.infer_batch(batch, {"scores"}, WHOLE)["scores"] for engine in models]
    assert_close(*scores, atol=1e-5, rtol=0)
    fresh = megatron_engine(paths["qwen3"], "value_model").infer_batch(batch, {"values"}, WHOLE)["values"]
    assert not fresh.any()  # a new head is zero


def test_only_cpus_replace_parts_of_megatron():
    """In a fresh process, as one that has used a CPU keeps what was replaced."""
    found = forks.run(["-c", JOIN])
    assert found.returncode == 0, found.stderr
    on_cuda, on_cpu = (line.split() for line in found.stdout.splitlines()[-2:])
    assert int(on_cuda[0]) > 10
    assert on_cuda[1:] == ["0", "False"]
    assert on_cpu[1:] == [on_cuda[0], "True"]


def test_a_run_goes_on_bit_by_bit_from_disk_and_from_memory(paths, tmp_path):
    batch = ragged_batch()
    engine = megatron_engine(paths["qwen2"])
    with engine.train_mode():
        engine.train_batch(batch, sft_loss, WHOLE)
    held = from_arrays(to_arrays(engine.state(1).states))
    engine.save_checkpoint(str(tmp_path / "saved"), 1, ("model", "optimizer", "extra", "hf_model"))
    with engine.train_mode():
        after = engine.train_batch(batch, sft_loss, WHOLE)
    weights = weights_of(engine)
    resumed = megatron_engine(paths["qwen2"], use_distributed_optimizer=False)
    resumed.load_checkpoint(str(tmp_path / "saved"))
    assert resumed.weight_version == 1
    for again, restore in ((engine, lambda: engine.load_state(held)), (resumed, lambda: None)):
        restore()
        with again.train_mode():
            assert same(again.train_batch(batch, sft_loss, WHOLE), after)
        assert same(weights_of(again), weights)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "huggingface")
    engine.load_state(held)
    assert same(dict(exported.named_parameters()), weights_of(engine))


def test_an_exported_critic_is_a_token_classifier(paths, tmp_path):
    engine = megatron_engine(paths["qwen3"], "value_model")
    engine.save_checkpoint(str(tmp_path / "saved"), 1, ("hf_model",))
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "saved" / "huggingface")
    assert model.score.out_features == 1


def test_a_damaged_checkpoint_is_refused(paths, tmp_path):
    engine = megatron_engine(paths["qwen3"])
    engine.save_checkpoint(str(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match="of another model: missing weights"):
        megatron_engine(paths["qwen2"]).load_checkpoint(str(tmp_path / "saved"))
    file = tmp_path / "saved" / "model_world_size_1_rank_0.pt"
    state = torch.load(file, weights_only=True)
    state["boxes"][3]["values"] = state["boxes"][3]["values"][:1].clone()
    torch.save(state, file)
    with pytest.raises(CheckpointError, match=r"do not contain all parts of 'model\.layers"):
        engine.load_checkpoint(str(tmp_path / "saved"))
    state["boxes"][3]["start"] = [64]
    torch.save(state, file)
    with pytest.raises(CheckpointError, match="is no box of a tensor"):
        engine.load_checkpoint(str(tmp_path / "saved"))
    (tmp_path / "saved" / "megatron_config.json").unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint of strategy=megatron"):
        engine.load_checkpoint(str(tmp_path / "saved"))


def test_an_update_that_is_not_finite_changes_nothing(paths):
    engine = megatron_engine(paths["qwen3"])
    before = weights_of(engine)
    batch = ragged_batch()

    def broken(outputs, micro_batch, totals):
        loss = outputs["log_probs"].sum()
        return loss * math.nan, {"loss": loss}

    def steep(outputs, micro_batch, totals):
        loss = outputs["log_probs"].sum()
        return loss * 1e38 * 1e10, {"loss": loss}

    with engine.train_mode():
        assert engine.train_batch(batch, broken, WHOLE)["skipped_steps"] == 1
        assert engine.non_finite[0].kind in ("term", "output")
        assert engine.train_batch(batch, steep, WHOLE)["skipped_steps"] == 1
    assert same(weights_of(engine), before)
    assert engine.weight_version == 0


@pytest.mark.parametrize("dtype", ["fp32", "bfloat16"])
@pytest.mark.parametrize("distributed", [True, False])
def test_a_model_that_left_the_device_goes_on_bit_by_bit(paths, dtype, distributed):
    """The CPU's memory in the place of a GPU's: it is freed and filled again below all views of it."""
    batch = ragged_batch()
    found = []
    for leaves in (False, True):
        engine = megatron_engine(paths["qwen3"], dtype=dtype, use_distributed_optimizer=distributed)
        engine.train_batch(batch, sft_loss, WHOLE)
        parts = [*engine.model.pieces.parameters(), *engine.optimizer.tensors(), *engine.optimizer.buffers()]
        for part in ("weights", "optimizer", "gradients") if leaves else ():
            engine.memory.offload(part)
            engine.memory.offload(part)
        assert leaves == (not any(tensor.untyped_storage().nbytes() for tensor in parts))
        for part in ("weights", "optimizer", "gradients"):
            engine.memory.restore(part)
        found.append((engine.train_batch(batch, sft_loss, WHOLE), weights_of(engine)))
    assert same(*found)


def test_gradients_are_kept_or_zero_when_they_are_back(paths):
    engine = megatron_engine(paths["qwen3"])
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(ragged_batch(), sft_loss, WHOLE)
    before = [gradient.clone() for gradient in engine.optimizer.buffers()]
    assert any(gradient.any() for gradient in before)
    for keep, after in ((True, before), (False, [torch.zeros_like(gradient) for gradient in before])):
        engine.memory.offload("gradients", keep)
        engine.memory.restore("gradients")
        assert same(list(engine.optimizer.buffers()), after)


def test_bfloat16_keeps_fp32_weights(paths):
    """A step of 1e-3 on weights around 0.2 is below what bfloat16 resolves in most of them, 2^-8 of their size."""
    engine = megatron_engine(paths["qwen3"], dtype="bfloat16")
    assert {p.dtype for p in weights_of(engine).values()} == {torch.bfloat16}
    with engine.train_mode():
        engine.train_batch(ragged_batch(), sft_loss, WHOLE)
    stored = engine.state(1).states["model_world_size_1_rank_0.pt"]["boxes"]
    assert {box["values"].dtype for box in stored} == {torch.float32}
    fine = [bool((box["values"] != box["values"].bfloat16().float()).any()) for box in stored]
    assert all(fine)


def test_what_is_refused(paths, tmp_path):
    for key, value, why in (
        ("override_ddp_config", {"a": 1}, "gradients are summed in fp32"),
        ("use_dist_checkpointing", True, "reads the weights from it"),
    ):
        with pytest.raises(ConfigError, match=f"megatron.*{why}"):
            megatron_engine(paths["qwen3"], **{key: value})
    with pytest.raises(
        ConfigError, match=r"no gemma2 models[^$]*a model of llama, mistral, qwen2, qwen3, .*mixtral, qwen3_moe"
    ):
        megatron_engine(tiny_model_dir(tmp_path / "gemma", "gemma2"))
    with pytest.raises(ConfigError, match="does not divide the 1 ranks"):
        megatron_engine(paths["qwen3"], tensor_model_parallel_size=2)
    tiny_model_dir(tmp_path / "empty", "qwen3")
    (tmp_path / "empty" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        megatron_engine(str(tmp_path / "empty"))
    assert [problem.key for problem in McoreEngineConfig(dtype="fp16").problems("actor.megatron")] == [
        "actor.megatron.dtype"
    ]


@pytest.mark.parametrize("packed", [True, False])
def test_positions_are_those_of_the_batch(paths, packed):
    batch = ragged_batch()
    batch.batch["position_ids"][1] *= 2
    engines = [make(paths["qwen3"], use_remove_padding=packed) for make in (megatron_engine, make_engine)]
    ours, theirs = (engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"] for engine in engines)
    assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_torch_load_reads_no_more_classes_than_before():
    from megatron.core.safe_globals import SAFE_GLOBALS

    assert not set(SAFE_GLOBALS) & set(torch.serialization.get_safe_globals())


def test_used_gradients_leave_the_memory_of_an_idle_model(paths):
    engine = megatron_engine(paths["qwen3"])
    engine.device = torch.device("meta")  # stands for a GPU: memory of a CPU is never freed

    def sizes() -> set[bool]:
        return {bool(buffer.untyped_storage().nbytes()) for buffer in engine.optimizer.buffers()}

    with engine.train_mode():
        assert sizes() == {True}
        assert all(buffer.eq(0).all() for buffer in engine.optimizer.buffers())
    assert sizes() == {False}
    with engine.train_mode():
        engine._has_gradients = True  # an update that goes on in another call
    assert sizes() == {True}
