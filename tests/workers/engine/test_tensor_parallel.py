"""Ranks that divide matrices under FSDP (tensor parallelism) over gloo: the same numbers as one rank, and as PyTorch.

``python -m pytest -m slow -s tests/workers/engine/test_tensor_parallel.py`` shows the largest differences.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from tests.workers.support import (
    LAYOUTS,
    WHOLE,
    make_engine,
    naive_update,
    ppo_batch,
    run_ranks,
    share,
    weights_of,
    with_kept_ids,
)
from verl.errors import ConfigError
from verl.model_merger.fsdp import merge
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir
from verl.workers.config import ActorConfig, CriticConfig
from verl.workers.engine.fsdp.sharding import _on_first_rank
from verl.workers.engine.fsdp.tensor_parallel import _OverVocabulary, check_division, divide_layers
from verl.workers.engine.model.divergence import FullDivergence
from verl.workers.losses import PolicyLoss, ValueLoss, sft_loss

CONFIG = ActorConfig(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, loss_agg_mode="seq-mean-token-mean")
STATE = ("model", "optimizer", "extra", "hf_model")
ODD = {"vocab_size": 105, "tie_word_embeddings": True}
TOP = {"log_probs", "entropy", "sum_pi_squared", "top_ids", "top_log_probs", "hidden"}


LORA = {"lora_rank": 4, "lora_alpha": 8}
BALANCED = {"override_config": {"router_aux_loss_coef": 0.01}}
SETTINGS = {"qwen3": {}, "qwen3_moe": BALANCED | {"use_remove_padding": False}, "values": LORA}


def tensor_parallel(path, **settings):
    return make_engine(path, tensor_parallel_size=2, **settings)


def rows_of(engine, batch):
    return share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())


def trained(engine, batch, steps=1, loss=None):
    """Metrics of the first of some steps on this rank's rows."""
    with engine.train_mode():
        metrics = [engine.train_batch(rows_of(engine, batch), loss or sft_loss, LAYOUTS["three"]) for _ in range(steps)]
    return metrics[0]


def of_divergence(engine, batch):
    """Divergences from a teacher, which is the model itself with other hidden states."""
    hidden = engine.infer_batch(batch, {"hidden"}, WHOLE)["hidden"]
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5))
    with_teacher = batch | DataProto.from_dict({"teacher_hidden": hidden + noise})
    engine.divergence = FullDivergence(kind="reverse_kl", teachers=[engine.output_matrix()])
    return engine.infer_batch(with_teacher, {"divergence", "agreement", "teacher_entropy"}, LAYOUTS["three"])


def few_tokens(rank):
    """A vocabulary of one token: the second rank has no row of it."""
    plain, mesh = torch.nn.Embedding(1, 4), init_device_mesh("cpu", (2,))
    dist.broadcast(plain.weight.data, src=0)
    embedding = torch.nn.Embedding(1, 4)
    embedding.weight.data.copy_(plain.weight.data)
    _OverVocabulary()._apply(embedding, mesh)
    found = embedding(torch.zeros(2, 3, dtype=torch.int64))
    assert torch.equal(found, plain.weight.expand(2, 3, 4))
    found.sum().backward()
    assert torch.equal(embedding.weight.grad.to_local(), torch.full((1 - rank, 4), 6.0))


def errors_of_the_first_rank(rank):
    """All ranks hear of an error of any kind; otherwise the second would wait in a collective."""

    def broken():
        raise KeyError("lm_head.weight")

    with pytest.raises(KeyError if rank == 0 else ConfigError, match=r"lm_head\.weight"):
        _on_first_rank(broken if rank == 0 else None, torch.device("cpu"))


def two_ranks(rank, world_size, folder, paths):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    found = {}
    for name, path in paths.items():
        engine = tensor_parallel(path, **SETTINGS[name])
        assert (engine.get_data_parallel_size(), engine.get_data_parallel_rank()) == (1, 0)
        assert engine.is_mp_src_rank_with_outputs() == (rank == 0)
        with engine.eval_mode():
            outputs = engine.infer_batch(batch, TOP, LAYOUTS["three"], 0.7, topk=3)
            outputs["kept"] = engine.infer_batch(with_kept_ids(batch), {"log_probs"}, WHOLE)["log_probs"]
            outputs |= of_divergence(engine, batch)
        found[name] = outputs, trained(engine, batch, 3, PolicyLoss(CONFIG)), weights_of(engine)
    critic = tensor_parallel(
        str(folder / "values"), model_type="value_model", enable_gradient_checkpointing=False, **LORA
    )
    found["values"] = (
        critic.infer_batch(batch, {"values"}, WHOLE),
        trained(critic, batch, 3, ValueLoss(CriticConfig())),
        weights_of(critic),
    )
    torch.save(found, folder / f"rank_{rank}.pt")
    engine = tensor_parallel(paths["qwen3"])
    engine.load_checkpoint(str(folder / "from_one"))
    trained(engine, batch)
    engine.save_checkpoint(str(folder / "from_two"), 2, STATE)
    snapshot = engine.state().states
    before = weights_of(engine)
    trained(engine, batch)
    engine.load_state(snapshot)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(engine).items())
    few_tokens(rank)
    errors_of_the_first_rank(rank)
    with pytest.raises(ConfigError, match=r"the adapters are of DoRA"):
        tensor_parallel(paths["qwen3"], lora_rank=2, lora={"use_dora": True})
    with pytest.raises(ConfigError, match="does not divide the 2 ranks"):
        make_engine(paths["qwen3"], tensor_parallel_size=3)
    dist.barrier()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    changes = {"qwen3": ODD, "qwen3_moe": {"num_hidden_layers": 1}}
    return {name: tiny_model_dir(folder / name, name, **changed) for name, changed in changes.items()}


@pytest.fixture(scope="module")
def batch(paths):
    return ppo_batch(paths["qwen3"])


@pytest.fixture(scope="module")
def folder(paths, batch, tmp_path_factory):
    """What two ranks left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(batch, folder / "batch.pt")
    tiny_model_dir(folder / "values", "qwen3", task="token_classification")
    one = make_engine(paths["qwen3"])
    trained(one, batch)
    one.save_checkpoint(str(folder / "from_one"), 1)
    run_ranks(two_ranks, 2, folder, paths)
    return folder


def expected_of(path, batch, settings, model_type="language_model"):
    one = make_engine(path, model_type=model_type, **settings)
    if model_type == "value_model":
        outputs = one.infer_batch(batch, {"values"}, WHOLE)
        return outputs, trained(one, batch, 3, ValueLoss(CriticConfig())), weights_of(one)
    outputs = one.infer_batch(batch, TOP, WHOLE, 0.7, topk=3)
    outputs["kept"] = one.infer_batch(with_kept_ids(batch), {"log_probs"}, WHOLE)["log_probs"]
    outputs |= of_divergence(one, batch)
    return outputs, trained(one, batch, 3, PolicyLoss(CONFIG)), weights_of(one)


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_equal_one(folder, paths, batch, name):
    path, model_type = (str(folder / name), "value_model") if name == "values" else (paths[name], "language_model")
    outputs, metrics, weights = expected_of(path, batch, SETTINGS[name], model_type)
    ranks = [torch.load(folder / f"rank_{rank}.pt", weights_only=True)[name] for rank in range(2)]
    for found, measured, moved in ranks:
        assert found.keys() == outputs.keys()
        for key, values in outputs.items():
            assert_close(found[key], values, atol=1e-5, rtol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
        assert measured == pytest.approx(metrics, rel=1e-5, abs=1e-5)
        assert moved.keys() == weights.keys()
        for key, weight in weights.items():
            assert_close(moved[key], weight, atol=2e-6, rtol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
    assert all(torch.equal(weight, ranks[1][2][key]) for key, weight in ranks[0][2].items())


def test_ppo_steps_equal_plain_pytorch(folder, paths, batch):
    weights, norm = naive_update(paths["qwen3"], batch, CONFIG, steps=3)
    _, metrics, moved = torch.load(folder / "rank_0.pt", weights_only=True)["qwen3"]
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for key, weight in weights.items():
        assert_close(moved[key], weight, atol=2e-6, rtol=1e-5)


def test_checkpoints_go_on_with_whole_matrices(folder, paths, batch, tmp_path):
    """A step on one rank, one on two that divide matrices, one on one rank: as three on one."""
    straight, resumed = make_engine(paths["qwen3"]), make_engine(paths["qwen3"])
    resumed.load_checkpoint(str(folder / "from_two"))
    assert resumed.weight_version == 2
    between = weights_of(resumed)
    exported = AutoModelForCausalLM.from_pretrained(folder / "from_two" / "huggingface").state_dict()
    merge(folder / "from_two", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, weight in between.items():
        assert torch.equal(exported[name], weight)
        assert torch.equal(merged[name], weight)
    trained(resumed, batch)
    trained(straight, batch, 3)
    for name, weight in weights_of(straight).items():
        assert_close(weights_of(resumed)[name], weight, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"num_key_value_heads": 1}, "num_key_value_heads=1 cannot be divided over 2 ranks.*Use one of 1"),
        ("qwen3", {"intermediate_size": 129}, "intermediate_size=129 cannot be divided"),
        ("qwen3_moe", {"num_experts": 9}, "num_experts=9 cannot be divided over 2 ranks"),
        ("longcat_flash", {"num_key_value_heads": 64}, "moe_identity_expert, which this engine does not know"),
        ("mamba", {}, "has no plan in Transformers"),
    ],
)
def test_models_that_cannot_be_divided(family, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_division(AutoConfig.for_model(family, **changes), 2)


def test_a_plan_that_leaves_out_a_norm_is_refused(paths):
    model = make_engine(paths["qwen3"]).model
    plan = model.hf.config.base_model_tp_plan
    model.hf.config.base_model_tp_plan = {name: style for name, style in plan.items() if "q_norm" not in name}
    with pytest.raises(ConfigError, match=r"says nothing of model.layers.0.self_attn.q_norm.weight"):
        divide_layers(model, init_device_mesh("cpu", (1,)), {})


FOUR = {
    "FSDP 2 x TP 2": {"tensor_parallel_size": 2},
    "TP 2, two copies": {"tensor_parallel_size": 2, "fsdp_size": 1},
    "TP 4": {"tensor_parallel_size": 4},
    "offloaded": {"tensor_parallel_size": 2, "offload_policy": True},
    "FSDP 2, two copies": {"fsdp_size": 2},
    "FSDP 4": {},
}


# Settings of models that are saved in one layout and go on in another.
OTHERS = {"mixtral": BALANCED, "deepseek_v3": LORA, "llama": LORA, "phi3": LORA}
RESUMES = [("FSDP 2 x TP 2", "TP 4"), ("TP 4", "FSDP 4"), ("FSDP 4", "FSDP 2 x TP 2")]


def four_ranks(rank, world_size, folder, paths):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    for name, settings in FOUR.items():
        engine = make_engine(paths["4 kv heads"], **settings)
        metrics = trained(engine, batch, 3, PolicyLoss(CONFIG))
        torch.save((metrics, weights_of(engine)), folder / f"{name}_{rank}.pt")
        engine = make_engine(paths["4 kv heads"], **settings)
        trained(engine, batch)
        engine.save_checkpoint(str(folder / f"from {name}"), 1, STATE)
    for name, settings in FOUR.items():
        for saved in FOUR:
            engine = make_engine(paths["4 kv heads"], **settings)
            engine.load_checkpoint(str(folder / f"from {saved}"))
            trained(engine, batch)
            weights = weights_of(engine)
            if rank == 0:
                torch.save(weights, folder / f"{saved} to {name}.pt")
    for name, path in paths.items():
        settings = OTHERS.get(name, {})
        engine = make_engine(path, **FOUR["FSDP 2 x TP 2"], **settings)
        metrics = trained(engine, batch, 3, PolicyLoss(CONFIG))
        torch.save((metrics, weights_of(engine)), folder / f"{name}_{rank}.pt")
        for saved, layout in RESUMES if settings else ():
            engine = make_engine(path, **FOUR[saved], **settings)
            trained(engine, batch)
            engine.save_checkpoint(str(folder / f"{name} from {saved}"), 1, STATE)
            engine = make_engine(path, **FOUR[layout], **settings)
            engine.load_checkpoint(str(folder / f"{name} from {saved}"))
            trained(engine, batch)
            weights = weights_of(engine)
            if rank == 0:
                torch.save(weights, folder / f"{name}, {saved} to {layout}.pt")


@pytest.mark.slow
def test_four_ranks_in_all_layouts(batch, tmp_path):
    kinds = {
        "4 kv heads": ("qwen3", ODD | {"num_key_value_heads": 4, "intermediate_size": 132}),
        "llama": ("llama", {"num_key_value_heads": 4, "vocab_size": 105, "attention_bias": True, "mlp_bias": True}),
        "qwen2": ("qwen2", {}),
        "mistral": ("mistral", {"sliding_window": 4}),
        "mixtral": ("mixtral", {"num_key_value_heads": 4}),
        "deepseek_v3": ("deepseek_v3", {}),
        "gemma2": ("gemma2", {"sliding_window": 4}),
    }
    paths = {name: tiny_model_dir(tmp_path / "models" / name, family, **c) for name, (family, c) in kinds.items()}
    for family in ("phi3", "olmo2"):  # fused or normed projections, whose outputs are gathered
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64, "intermediate_size": 128}
        config = AutoConfig.for_model(family, vocab_size=105, num_hidden_layers=2, pad_token_id=0, **sizes)
        paths[family] = str(tmp_path / "models" / family)
        AutoModelForCausalLM.from_config(config).save_pretrained(paths[family])
    torch.save(batch, tmp_path / "batch.pt")
    run_ranks(four_ranks, 4, tmp_path, paths)
    for name in [*FOUR, *paths]:
        one = make_engine(paths.get(name, paths["4 kv heads"]), **OTHERS.get(name, {}))
        metrics = trained(one, batch, 3, PolicyLoss(CONFIG))
        expected = weights_of(one)
        for rank in range(4):
            found, weights = torch.load(tmp_path / f"{name}_{rank}.pt", weights_only=True)
            assert found == pytest.approx(metrics, rel=1e-5, abs=1e-5)
            gap = max(float((weights[key] - weight).abs().max()) for key, weight in expected.items())
            assert gap < 1e-5
        print(f"{name}: {gap:.1e}")
    for name, settings in OTHERS.items():
        one = make_engine(paths[name], **settings)
        trained(one, batch, 2)
        expected = weights_of(one)
        for saved, layout in RESUMES:
            weights = torch.load(tmp_path / f"{name}, {saved} to {layout}.pt", weights_only=True)
            assert max(float((weights[key] - weight).abs().max()) for key, weight in expected.items()) < 1e-5
            exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} from {saved}" / "huggingface")
            resumed = make_engine(paths[name], **settings)
            resumed.load_checkpoint(str(tmp_path / f"{name} from {saved}"))
            found = exported.state_dict()
            assert all(torch.equal(found[key], weight) for key, weight in weights_of(resumed).items())
            if settings is LORA:
                adapters = str(tmp_path / f"{name} from {saved}" / "lora_adapter")
                loaded = weights_of(make_engine(paths[name], lora_adapter_path=adapters))
                assert all(torch.equal(found[key], weight) for key, weight in loaded.items())
    one = make_engine(paths["4 kv heads"])
    trained(one, batch, 2)
    expected = weights_of(one)
    for saved in FOUR:
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"from {saved}" / "huggingface").state_dict()
        resumed = make_engine(paths["4 kv heads"])
        resumed.load_checkpoint(str(tmp_path / f"from {saved}"))
        assert all(torch.equal(exported[key], weight) for key, weight in weights_of(resumed).items())
        for name in FOUR:
            weights = torch.load(tmp_path / f"{saved} to {name}.pt", weights_only=True)
            assert max(float((weights[key] - weight).abs().max()) for key, weight in expected.items()) < 1e-5
