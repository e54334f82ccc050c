"""LoRA in the engine against peft and AdamW by hand, on one rank and on two; files, bad input."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3MoeConfig,
)

from tests.workers.support import (
    EPS,
    LAYOUTS,
    LR,
    WHOLE,
    make_engine,
    naive_outputs,
    ragged_batch,
    run_ranks,
    share,
    weights_of,
)
from verl.backends.cpu.whole_weights import WholeWeights
from verl.errors import CheckpointError, ConfigError
from verl.testing.models import MIXTURES, tiny_model_dir, tiny_tokenizer
from verl.utils.sharded_tensor import full_tensor
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.config import CriticConfig
from verl.workers.engine.model.adapters import ADAPTER_FOLDER, AdapterTarget, linear_adapters, merged
from verl.workers.engine.model.headed import trained_parameters
from verl.workers.losses import ValueLoss, sft_loss
from verl.workers.rollout.weights import write_adapters

RANK = {"lora_rank": 4, "lora_alpha": 8}
VARIANTS = {
    "all linear layers": RANK,
    "some": RANK | {"target_modules": ["q_proj", "down_proj"], "exclude_modules": r".*layers\.0.*"},
    "rsLoRA": RANK | {"lora": {"use_rslora": True}},
    "DoRA": RANK | {"lora": {"use_dora": True}},
}
ON_TWO_RANKS = ("all linear layers", "DoRA")
STATE = ("model", "optimizer", "extra")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    # rows that do not divide over two ranks, and biases of attention beside the adapters
    odd = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 65, "hidden_size": 28}
    return tiny_model_dir(tmp_path_factory.mktemp("odd"), "qwen2", vocab=105, tie_word_embeddings=True, **odd)


def adapters_of(engine, folder):
    """The adapters as peft's files have them."""
    engine.save_checkpoint(str(folder), 0, ("model",))
    return load_file(folder / ADAPTER_FOLDER / "adapter_model.safetensors")


def gradients_of(engine):
    parameters = trained_parameters(engine.model).items()
    return {name: full_tensor(p.grad, engine.device).clone() for name, p in parameters}


def nll(model, batch):
    mask = batch.batch["response_mask"]
    return -(naive_outputs(model, batch)[0] * mask).sum() / mask.sum()


def move_adapters(engine, batch):
    """Two steps, after which B is not 0."""
    with engine.train_mode():
        for _ in range(2):
            engine.train_batch(batch, sft_loss, LAYOUTS["three"])


def on_each_rank(rank, world_size, folder, path):
    mine = share(ragged_batch(), rank, world_size)
    for case in ON_TWO_RANKS:
        engine = make_engine(path, **VARIANTS[case])
        move_adapters(engine, mine)
        adapters_of(engine, folder / case)
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(mine, sft_loss, WHOLE)
        torch.save(gradients_of(engine), folder / f"{case}_{rank}.pt")
    engine = make_engine(path, ulysses_sequence_parallel_size=2, **RANK)
    move_adapters(engine, ragged_batch())  # both have all rows, and share their tokens
    adapters_of(engine, folder / "shared sequences")
    engine = make_engine(path, **RANK)
    engine.load_checkpoint(str(folder / "from_one"), STATE)  # written by one rank after two steps
    whole = WholeWeights(engine.model, engine.mesh.get_group("shard"))
    before, bytes_of_all = {name: tensor.clone() for name, tensor in whole}, whole.copied_bytes
    move_adapters(engine, mine)
    after = {name: tensor.clone() for name, tensor in whole}
    torch.save((bytes_of_all, whole.copied_bytes, before, after), folder / f"weights_{rank}.pt")
    adapters_of(engine, folder / "resumed")


@pytest.fixture(scope="module")
def folder(path, tmp_path_factory):
    """What two ranks left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    one = make_engine(path, **RANK)
    move_adapters(one, ragged_batch())
    one.save_checkpoint(str(folder / "from_one"), 2, STATE)
    run_ranks(on_each_rank, 2, folder, path)
    return folder


@pytest.mark.parametrize("case", VARIANTS)
def test_updates_are_those_of_peft_on_one_rank_and_two(path, folder, tmp_path, case):
    batch, engine = ragged_batch(), make_engine(path, **VARIANTS[case])
    adapters_of(engine, tmp_path / "start")
    oracle = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path), tmp_path / "start" / ADAPTER_FOLDER, is_trainable=True
    )
    optimizer = torch.optim.AdamW([p for p in oracle.parameters() if p.requires_grad], lr=LR, weight_decay=0.1, eps=EPS)
    for _ in range(2):
        optimizer.zero_grad()
        nll(oracle, batch).backward()
        torch.nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
        optimizer.step()
    optimizer.zero_grad()
    nll(oracle, batch).backward()
    expected = {name.removeprefix("base_model.model."): p for name, p in oracle.named_parameters() if p.requires_grad}

    move_adapters(engine, batch)
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(batch, sft_loss, LAYOUTS["one by one"])
    found = trained_parameters(engine.model)
    assert found.keys() == expected.keys()
    assert {id(p) for group in engine.optimizer.param_groups for p in group["params"]} == {*map(id, found.values())}
    for name, parameter in expected.items():
        assert_close(found[name].detach(), parameter.detach(), atol=1e-5, rtol=0)
        assert_close(found[name].grad, parameter.grad, atol=1e-5, rtol=0)
    if case in ON_TWO_RANKS:
        saved = load_file(folder / case / ADAPTER_FOLDER / "adapter_model.safetensors")
        for name, values in adapters_of(engine, tmp_path).items():
            assert_close(saved[name], values, atol=1e-5, rtol=0)
        for name, values in torch.load(folder / f"{case}_1.pt", weights_only=True).items():
            assert_close(values, found[name].grad, atol=1e-5, rtol=0)
    if case == "all linear layers":
        shared = load_file(folder / "shared sequences" / ADAPTER_FOLDER / "adapter_model.safetensors")
        for name, values in adapters_of(engine, tmp_path).items():
            assert_close(shared[name], values, atol=1e-5, rtol=0)


def peft_of_the_same_gradients(engine, path, saved, batch):
    """The model with the adapters that the engine saved, whose gradients are the engine's."""
    oracle = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path), saved / ADAPTER_FOLDER, is_trainable=True
    )
    nll(oracle, batch).backward()
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(batch, sft_loss, LAYOUTS["three"])
    expected = {name: p.grad for name, p in oracle.named_parameters() if p.requires_grad}
    found = {f"base_model.model.{name}": grad for name, grad in gradients_of(engine).items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, atol=1e-5, rtol=0, msg=name)
    return oracle


def test_scales_and_formats_by_hand(tmp_path):
    """s = 2, B A = 2⁻⁹: bf16 has no number between 1 and 1 + 2⁻⁷, so a sum of bf16s would lose the adapter."""
    targets = {"up": AdapterTarget("up.weight", 2.0)}
    weights = [
        ("up.base_layer.weight", torch.ones(1, 1, dtype=torch.bfloat16)),
        ("up.lora_A.default.weight", torch.full((1, 1), 2.0**-9)),
        ("up.lora_B.default.weight", torch.full((1, 1), 1.0)),
    ]
    [(name, weight)] = merged(weights, targets)
    assert (name, weight.dtype, weight.item()) == ("up.weight", torch.float32, 1 + 2**-8)
    adapted = AdaptedWeights(lambda: (), lambda: linear_adapters(weights[1:]), {"up": 2.0})
    sent = dict(adapted.scaled_adapters())  # such engines apply the product alone
    assert {name: one.item() for name, one in sent.items()} == {"up.lora_A.weight": 2**-9, "up.lora_B.weight": 2.0}
    config = json.loads((write_adapters(sent, [tmp_path])[0] / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == 1  # s is in B already


@pytest.mark.parametrize("family", ["llama", "gemma", *MIXTURES])
def test_gradients_of_other_models_are_those_of_peft(family, tmp_path):
    batch, engine = ragged_batch(), make_engine(tiny_model_dir(tmp_path / "model", family), **RANK)
    move_adapters(engine, batch)
    adapters_of(engine, tmp_path / "saved")
    peft_of_the_same_gradients(engine, tmp_path / "model", tmp_path / "saved", batch)


@pytest.mark.parametrize("case", ON_TWO_RANKS)
def test_merged_weights_score_as_adapters_do(path, folder, case):
    """Exported from an engine, and by peft from the files of two ranks."""
    batch = ragged_batch()
    engine = make_engine(path, lora_adapter_path=str(folder / case / ADAPTER_FOLDER))
    found = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        base = naive_outputs(model, batch)[0]
        with engine.disable_adapter():
            assert_close(engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"], base, atol=1e-5, rtol=0)
        assert (found - base).abs().max() > 0.01
        by_peft = PeftModel.from_pretrained(model, folder / case / ADAPTER_FOLDER).merge_and_unload()
        assert_close(naive_outputs(by_peft, batch)[0], found, atol=1e-5, rtol=0)
        weights = weights_of(engine)
        assert weights.keys() == dict(by_peft.named_parameters()).keys()
        for name, weight in by_peft.named_parameters():
            assert_close(weights[name], weight.detach(), atol=1e-6, rtol=0)


def test_the_base_is_the_same_numbers_as_a_separate_reference(path):
    batch, engine, reference = ragged_batch(), make_engine(path, **RANK), make_engine(path, trained=False)
    move_adapters(engine, batch)
    with engine.eval_mode(), engine.disable_adapter():
        found = engine.infer_batch(batch, {"log_probs"}, LAYOUTS["three"])["log_probs"]
    assert_close(found, reference.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"], atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="no adapters to switch off"):
        reference.disable_adapter()


def test_a_checkpoint_holds_adapters_alone_and_resumes_bit_by_bit(path, folder, tmp_path):
    batch, engine = ragged_batch(), make_engine(path, **RANK)
    move_adapters(engine, batch)
    engine.save_checkpoint(str(tmp_path / "at_2"), 2, (*STATE, "hf_model"))
    files = {kind: torch.load(tmp_path / "at_2" / f"{kind}_world_size_1_rank_0.pt") for kind in ("model", "optim")}
    assert files["model"]["tensors"].keys() == trained_parameters(engine.model).keys()
    assert {name.rsplit("/", 1)[0] for name in files["optim"]["tensors"]} == files["model"]["tensors"].keys()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "at_2" / "huggingface")
    with torch.no_grad():
        found = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
        assert_close(naive_outputs(exported, batch)[0], found, atol=1e-5, rtol=0)
    move_adapters(engine, batch)
    expected = adapters_of(engine, tmp_path / "at_4")

    other = make_engine(path, seed=7, **RANK)
    other.load_checkpoint(str(tmp_path / "at_2"), STATE)
    assert other.weight_version == 2
    move_adapters(other, batch)
    found = adapters_of(other, tmp_path / "again")
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    two = load_file(folder / "resumed" / ADAPTER_FOLDER / "adapter_model.safetensors")
    for name, values in expected.items():
        assert_close(two[name], values, atol=1e-5, rtol=0)
    with pytest.raises(CheckpointError, match="another model: missing weights"):
        make_engine(path).load_checkpoint(str(tmp_path / "at_2"), STATE)
    with pytest.raises(CheckpointError, match="trained with lora_alpha=8, and this run has lora_alpha=16"):
        make_engine(path, lora_rank=4).load_checkpoint(str(tmp_path / "at_2"), STATE)
    with pytest.raises(CheckpointError, match=r"has shape \[4, 28\] in the checkpoint and \[2, 28\] here"):
        make_engine(path, lora_rank=2, lora_alpha=8).load_checkpoint(str(tmp_path / "at_2"), STATE)


def test_an_update_of_weights_carries_adapters_alone(path, folder):
    (all_0, changed_0, before, after), (all_1, changed_1, *_) = (
        torch.load(folder / f"weights_{rank}.pt", weights_only=True) for rank in (0, 1)
    )
    trained = {name for name in before if ".lora_" in name}
    assert all_0 + all_1 == sum(tensor.nbytes for tensor in before.values())
    assert changed_0 + changed_1 == sum(before[name].nbytes for name in trained)
    assert changed_0 + changed_1 < (all_0 + all_1) / 4
    model = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    for name, tensor in after.items():
        if name in trained:
            assert not torch.equal(tensor, before[name])
        else:
            assert torch.equal(tensor, model[name.replace(".base_layer.", ".")])


EXPERTS = RANK | {"lora": {"target_parameters": ["gate_up_proj", "experts.down_proj"]}}


def on_each_rank_with_experts(rank, world_size, folder, path):
    engine = make_engine(path, **EXPERTS)
    move_adapters(engine, share(ragged_batch(), rank, world_size))
    adapters_of(engine, folder / "two")


@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_of_experts_are_those_of_peft(family, tmp_path):
    path, batch = tiny_model_dir(tmp_path / "model", family), ragged_batch()
    engine = make_engine(path, **EXPERTS)
    move_adapters(engine, batch)
    saved = adapters_of(engine, tmp_path / "saved")
    of_experts = {name for name in saved if ".experts." in name}
    assert of_experts
    assert all(saved[name].abs().max() > 0 for name in of_experts)
    oracle = peft_of_the_same_gradients(engine, path, tmp_path / "saved", batch)
    with torch.no_grad():
        log_probs = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
        by_peft = oracle.merge_and_unload()
        weights = weights_of(engine)
        assert weights.keys() == by_peft.state_dict().keys()
        for name, weight in by_peft.named_parameters():
            assert_close(weights[name], weight.detach(), atol=1e-6, rtol=0)
        assert_close(naive_outputs(by_peft, batch)[0], log_probs, atol=1e-5, rtol=0)
        with engine.disable_adapter():
            base = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
        plain = naive_outputs(AutoModelForCausalLM.from_pretrained(path), batch)[0]
        assert_close(base, plain, atol=1e-5, rtol=0)
        assert (log_probs - base).abs().max() > 0.01
    again = make_engine(path, lora_adapter_path=str(tmp_path / "saved" / ADAPTER_FOLDER))
    assert torch.equal(again.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"], log_probs)
    with pytest.raises(ConfigError, match="has adapters of experts, and the rollout engine applies those of linear"):
        engine.adapted_weights()
    if family == "qwen3_moe":
        run_ranks(on_each_rank_with_experts, 2, tmp_path, path)
        two = load_file(tmp_path / "two" / ADAPTER_FOLDER / "adapter_model.safetensors")
        for name, values in saved.items():
            assert_close(two[name], values, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "names", "message"),
    [
        ("qwen3_moe", ["gate_proj"], r"has no gate_proj\. Its weights of several experts are down_proj, gate_up_proj"),
        ("qwen3_moe", ["gate.weight"], r"gate\.weight of Qwen3MoeForCausalLM, which is no weight \(experts, out, in\)"),
        ("qwen2", ["down_proj"], "has no down_proj. Its weights of several experts are none"),
    ],
)
def test_parameters_that_are_no_experts_are_refused(family, names, message, tmp_path):
    path = tiny_model_dir(tmp_path, family)
    with pytest.raises(ConfigError, match=message):
        make_engine(path, **RANK, lora={"target_parameters": names})


def test_experts_without_adapters_are_told(tmp_path, caplog):
    """Their weights are one tensor for all experts, which is no linear layer."""
    sizes = {"vocab_size": 104, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, **experts, initializer_range=0.2))
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    batch, engine = ragged_batch(), make_engine(str(tmp_path), **RANK)
    assert "have no adapters and stay as they are: model.layers.0.mlp.experts.gate_up_proj" in caplog.text
    move_adapters(engine, batch)
    with torch.no_grad():
        model.load_state_dict(weights_of(engine))
        found = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
        assert_close(naive_outputs(model, batch)[0], found, atol=1e-5, rtol=0)


HEADS_OF_PEFT = {"classifier", "score"}


@pytest.mark.parametrize("kind", ["value_model", "reward_model"])
def test_a_scalar_head_is_trained_and_saved_with_the_adapters(path, tmp_path, kind):
    batch, engine = ragged_batch(), make_engine(path, kind, optimizer={"lr": 1e-2}, **RANK)
    loss = ValueLoss(CriticConfig(cliprange_value=50.0)) if kind == "value_model" else scores_loss
    with engine.train_mode():
        for _ in range(3):
            engine.train_batch(batch, loss, WHOLE)
    trained = trained_parameters(engine.model)
    assert {name for name in trained if ".lora_" not in name} <= {"score.weight", "score.bias"}
    assert trained["score.weight"].abs().max() > 0
    engine.save_checkpoint(str(tmp_path), 3, ("model", "hf_model"))
    auto = AutoModelForTokenClassification if kind == "value_model" else AutoModelForSequenceClassification
    oracle = PeftModel.from_pretrained(auto.from_pretrained(path, num_labels=1), tmp_path / ADAPTER_FOLDER)
    exported = auto.from_pretrained(tmp_path / "huggingface")
    again = make_engine(str(tmp_path / "huggingface"), kind, trained=False)
    name = "values" if kind == "value_model" else "scores"
    expected = engine.infer_batch(batch, {name}, WHOLE)[name]
    assert_close(again.infer_batch(batch, {name}, WHOLE)[name], expected, atol=1e-5, rtol=0)
    oracle.save_pretrained(tmp_path / "by_peft")  # with the names of both heads that such models may have
    assert set(json.loads((tmp_path / "by_peft/adapter_config.json").read_text())["modules_to_save"]) == HEADS_OF_PEFT
    on = make_engine(path, kind, lora_adapter_path=str(tmp_path / "by_peft"))
    assert_close(on.infer_batch(batch, {name}, WHOLE)[name], expected, atol=1e-5, rtol=0)
    ids = batch.batch["input_ids"][1:2][:, batch.batch["attention_mask"][1].bool()]
    with torch.no_grad():
        assert_close(oracle(ids).logits, exported(ids).logits, atol=1e-5, rtol=0)
        assert exported(ids).logits.abs().max() > 0.01


def scores_loss(columns, batch, totals):
    mask = batch.batch["response_mask"]
    return ((columns["scores"] - batch.batch["returns"]) ** 2 * mask).sum() / mask.sum(), {}


scores_loss.outputs = frozenset({"scores"})


def test_a_base_in_less_than_fp32_keeps_fp32_adapters(path):
    batch = ragged_batch()
    engine = make_engine(path, model_dtype="bf16", dtype="bf16", **RANK)
    kinds = {(p.requires_grad, p.dtype) for p in engine.model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    with torch.no_grad():
        base = naive_outputs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), batch)[0]
    before = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
    move_adapters(engine, batch)
    after = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
    assert (after - base).abs().max() > 3 * (before - base).abs().max()
    with engine.disable_adapter():
        assert torch.equal(engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"], before)


def changed(folder, **settings):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"target_modules": ["q_prj"]}, "linear layers are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_p"),
        ({"target_modules": ["q_proj", "wo"]}, "Qwen2ForCausalLM has no layer for wo"),
        ({"target_modules": "q_proj"}, "or a regular expression that matches whole names"),
        ({"exclude_modules": r".*"}, "linear layers are down_proj"),
        ({"target_modules": ["lm_head"]}, "lm_head, which is no linear layer below the head"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens, which is no linear layer"),
        ({"lora_adapter_path": "/nowhere"}, "is not a folder of adapters"),
    ],
)
def test_adapters_that_fit_nowhere_are_refused(path, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(path, **(RANK | settings))


def test_layers_are_excluded_by_the_endings_of_their_names(path):
    for targets in ({}, {"target_modules": ["q_proj", "k_proj", "v_proj"]}):
        names = trained_parameters(make_engine(path, **RANK, **targets, exclude_modules=["k_proj"]).model)
        assert {name.split(".")[4] for name in names} >= {"q_proj", "v_proj"}
        assert not [name for name in names if ".k_proj." in name]


def test_trained_adapters_that_cannot_be_used_are_refused(path, tmp_path):
    folder = tmp_path / ADAPTER_FOLDER
    adapters = adapters_of(make_engine(path, **RANK), tmp_path)
    with pytest.raises(ConfigError, match=r"lora_rank=8, but the adapters in .* have rank 4"):
        make_engine(path, lora_adapter_path=str(folder), lora_rank=8)
    save_file(adapters | {"more": torch.zeros(1)}, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"of another model: the model has no more\. Name the model"):
        make_engine(path, lora_adapter_path=str(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read"):
        make_engine(path, lora_adapter_path=str(folder))
    changed(folder, bias="all")
    with pytest.raises(ConfigError, match="have bias='all'; only 'none' is supported"):
        make_engine(path, lora_adapter_path=str(folder))
