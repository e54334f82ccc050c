"""Saving and resuming on one rank, the export, and what a damaged checkpoint says. Two ranks: test_two_ranks.py."""

import json
import pickle
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from tests.workers.support import LAYOUTS, WHOLE, make_engine, naive_outputs, ragged_batch, weights_of
from verl.checkpoint.states import from_arrays, to_arrays
from verl.errors import CheckpointError
from verl.model_merger import compare, merge
from verl.testing.models import tiny_model_dir
from verl.workers.config import CriticConfig
from verl.workers.losses import ValueLoss, sft_loss

ALL = ("model", "optimizer", "extra", "hf_model")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def batch():
    return ragged_batch()


def step(engine, batch, count=1):
    with engine.train_mode():
        for _ in range(count):
            metrics = engine.train_batch(batch, sft_loss, LAYOUTS["three"])
            engine.lr_scheduler_step()
    return metrics


@pytest.fixture(scope="module")
def saved(path, batch, tmp_path_factory):
    """A checkpoint after two steps."""
    engine = make_engine(path)
    step(engine, batch, 2)
    folder = tmp_path_factory.mktemp("checkpoint") / "actor"
    engine.save_checkpoint(str(folder), global_step=2, contents=ALL)
    return folder


def test_a_resumed_run_goes_on_bit_for_bit(path, batch, saved):
    straight, resumed = make_engine(path), make_engine(path)
    step(straight, batch, 2)
    resumed.load_checkpoint(str(saved), ALL)
    assert resumed.weight_version == 2
    assert resumed.scheduler.last_epoch == 2
    assert step(straight, batch) == step(resumed, batch)
    for name, weight in weights_of(straight).items():
        assert torch.equal(weight, weights_of(resumed)[name]), name


@pytest.mark.parametrize("placement", [{}, {"model_dtype": "bf16", "dtype": "bf16"}], ids=["fp32", "bf16"])
def test_a_state_held_in_memory_goes_back_bit_for_bit(path, batch, placement):
    engine, other = make_engine(path, **placement), make_engine(path, **placement)
    step(engine, batch)
    held = to_arrays(engine.state(1).states)
    kept = weights_of(engine)
    numbers = torch.rand(3)
    expected = step(engine, batch, 2)
    step(other, batch, 3)
    # Through a pickle with the buffers apart, and read only, as Ray hands them over.
    buffers = []
    message = pickle.dumps(held, protocol=5, buffer_callback=buffers.append)
    assert len(message) < 60_000 < sum(len(buffer.raw()) for buffer in buffers)
    received = from_arrays(pickle.loads(message, buffers=[bytes(buffer.raw()) for buffer in buffers]))
    for target in (engine, other):  # back in time, and into a process that has been elsewhere
        target.load_state(received)
        assert (target.weight_version, target.scheduler.last_epoch) == (1, 1)
        for name, weight in weights_of(target).items():
            assert torch.equal(weight, kept[name]), name
        assert torch.equal(torch.rand(3), numbers)
        assert step(target, batch, 2) == expected


def test_changed_optimizer_settings_hold_after_a_resume(path, saved):
    optimizer = {"lr": 0.5, "lr_warmup_steps": 8, "betas": (0.5, 0.6), "weight_decay": 0.25}
    engine, fresh = make_engine(path, optimizer=optimizer), make_engine(path, optimizer=optimizer)
    engine.load_checkpoint(str(saved), ALL)
    (group,) = engine.optimizer.param_groups
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.6), 0.25)
    assert all(int(state["step"]) == 2 for state in engine.optimizer.state.values())
    rates = [fresh.lr_scheduler_step() for _ in range(4)]
    assert rates[2] < rates[3] < 0.5
    assert group["lr"] == rates[2]
    assert [engine.lr_scheduler_step() for _ in range(2)] == rates[2:]


@pytest.mark.parametrize(
    ("optimizer", "problem"),
    [({"optimizer": "SGD", "override_optimizer_config": {}}, "is of AdamW, and this run has SGD, which"),
     ({"override_optimizer_config": {"amsgrad": True}}, "of AdamW, and this run has AdamW with amsgrad, which")],
)  # fmt: skip
def test_moments_of_another_optimizer_are_refused(path, saved, optimizer, problem):
    engine = make_engine(path, optimizer=optimizer)
    with pytest.raises(CheckpointError, match=problem + r" needs another one. .*load_contents=\[model,extra\]"):
        engine.load_checkpoint(str(saved), ALL)
    engine.load_checkpoint(str(saved), ("model", "extra"))


def test_a_state_before_the_first_step_goes_back(path, batch):
    engine = make_engine(path)
    start = engine.state().states
    first = step(engine, batch)
    engine.load_state(start)
    assert not engine.optimizer.state
    assert step(engine, batch) == first


def test_a_state_of_another_rank_is_refused(path):
    engine = make_engine(path)
    states = {name.replace("rank_0", "rank_1"): state for name, state in engine.state().states.items()}
    with pytest.raises(CheckpointError, match=r"rank 0 of 1 cannot load the state extra_state_world_size_1_rank_1.pt"):
        engine.load_state(states)


def test_random_numbers_go_on(path, saved):
    engine = make_engine(path)
    engine.save_checkpoint(str(saved.parent / "rng"), contents=("extra",))
    expected = torch.rand(3)
    torch.manual_seed(1)
    engine.load_checkpoint(str(saved.parent / "rng"), ("extra",))
    assert torch.equal(torch.rand(3), expected)


def test_layout(saved):
    assert {p.name for p in saved.iterdir()} == {
        "model_world_size_1_rank_0.pt",
        "optim_world_size_1_rank_0.pt",
        "extra_state_world_size_1_rank_0.pt",
        "fsdp_config.json",
        "huggingface",
    }
    assert json.loads((saved / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": 1}
    assert not saved.with_name("actor.partial").exists()
    # tied weights are written once
    state = torch.load(saved / "model_world_size_1_rank_0.pt", weights_only=True)
    assert "model.embed_tokens.weight" in state["tensors"]
    assert "lm_head.weight" not in state["tensors"]


def test_export_is_the_same_model_for_transformers(saved, batch, path):
    engine = make_engine(path, trained=False)
    engine.load_checkpoint(str(saved), ("model",))
    found = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
    model = AutoModelForCausalLM.from_pretrained(saved / "huggingface")
    with torch.no_grad():
        expected, _ = naive_outputs(model, batch)
    assert_close(found, expected, atol=1e-5, rtol=0)
    assert not torch.equal(model.model.norm.weight, AutoModelForCausalLM.from_pretrained(path).model.norm.weight)
    assert (
        AutoTokenizer.from_pretrained(saved / "huggingface").get_vocab()
        == AutoTokenizer.from_pretrained(path).get_vocab()
    )


TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
GENERATION = {"eos_token_id": [1, 2], "temperature": 0.6, "do_sample": True}


def bf16_base(folder, family="qwen3"):
    """A model in bf16 with two end tokens and, in its config, dropout."""
    path = tiny_model_dir(folder, family, attention_dropout=0.3)
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return path


def assert_files_of_base(folder):
    assert json.loads((folder / "generation_config.json").read_text()).items() > GENERATION.items()
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_models_and_adapters_have_the_precision_of_their_base_and_all_its_files(tmp_path):
    """With the chat template of the training; dropout, which it did not use, is still in the config."""
    engine = make_engine(bf16_base(tmp_path / "base"), custom_chat_template=TEMPLATE, lora_rank=2)
    engine.save_checkpoint(str(tmp_path / "actor"), contents=("model", "hf_model"))
    assert_files_of_base(tmp_path / "actor" / "huggingface")
    assert_files_of_base(tmp_path / "actor" / "lora_adapter")
    config = json.loads((tmp_path / "actor" / "huggingface" / "config.json").read_text())
    assert (config["dtype"], config["attention_dropout"]) == ("bfloat16", 0.3)


def test_merged_models_have_the_precision_of_their_base_unless_another_is_named(tmp_path):
    actor = tmp_path / "actor"
    engine = make_engine(bf16_base(tmp_path / "base"), custom_chat_template=TEMPLATE)
    engine.save_checkpoint(str(actor), contents=("model",))
    merge(actor, tmp_path / "narrow")
    compare(actor, tmp_path / "narrow")
    assert_files_of_base(tmp_path / "narrow")
    merge(actor, tmp_path / "wide", dtype="float32")
    narrow, wide = (load_file(tmp_path / name / "model.safetensors") for name in ("narrow", "wide"))
    for name, weight in weights_of(engine).items():
        assert torch.equal(wide[name], weight)
        assert torch.equal(narrow[name], weight.bfloat16())


def test_a_routers_bias_stays_in_fp32(tmp_path):
    engine = make_engine(bf16_base(tmp_path / "base", "deepseek_v3"))
    engine.save_checkpoint(str(tmp_path / "actor"), contents=("hf_model",))
    weights = load_file(tmp_path / "actor" / "huggingface" / "model.safetensors")
    wide = {name for name, weight in weights.items() if weight.dtype == torch.float32}
    assert wide == {name for name in weights if name.endswith("e_score_correction_bias")} != set()


def test_transformers_reads_the_score_where_it_was_trained_also_if_the_end_token_pads(path, batch, tmp_path):
    shutil.copytree(path, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "base")
    engine = make_engine(str(tmp_path / "base"), "reward_model")
    torch.nn.init.normal_(engine.model.head.weight)
    engine.save_checkpoint(str(tmp_path / "reward"), contents=("hf_model",))
    folder = tmp_path / "reward" / "huggingface"
    texts = ["<user>1<assistant>22<eos>", "<user>1 + 2<assistant>3<eos>"]
    trained = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
    rows = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        at_the_end = [trained(**tokenizer(text, return_tensors="pt")).logits[0, -1] for text in texts]
        assert_close(model(**rows).logits, torch.stack(at_the_end))
    assert not torch.equal(*at_the_end)


def test_a_value_model_is_exported_as_token_classification(path, batch, tmp_path):
    engine = make_engine(path, "value_model")
    with engine.train_mode():
        for _ in range(3):
            engine.train_batch(batch, ValueLoss(CriticConfig(cliprange_value=10.0)), WHOLE)
    values = engine.infer_batch(batch, {"values"}, WHOLE)["values"]
    assert values.abs().max() > 1e-3
    engine.save_checkpoint(str(tmp_path / "critic"), contents=("hf_model",))
    folder = str(tmp_path / "critic" / "huggingface")
    assert AutoConfig.from_pretrained(folder).architectures == ["Qwen3ForTokenClassification"]
    again = make_engine(folder, "value_model", trained=False).infer_batch(batch, {"values"}, WHOLE)["values"]
    assert_close(again, values, atol=1e-6, rtol=0)
    loaded, info = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(loaded.score.weight, weights_of(engine)["score.weight"])


def test_a_save_replaces_the_one_before_and_leaves_no_rest(path, tmp_path):
    engine = make_engine(path)
    folder = tmp_path / "actor"
    (tmp_path / "actor.partial").mkdir()
    (tmp_path / "actor.partial" / "leftover.pt").write_text("of a save that was killed")
    engine.save_checkpoint(str(folder))
    engine.save_checkpoint(str(folder), contents=("model",))
    assert sorted(p.name for p in folder.iterdir()) == [
        "fsdp_config.json",
        "huggingface",
        "model_world_size_1_rank_0.pt",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["actor"]


def damaged(saved, tmp_path, change):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    change(folder)
    return str(folder)


def cut(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def with_pickle(path, program):
    """The archive that PyTorch has written, with another pickle inside."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, program if name.endswith("/data.pkl") else data)


class Trap:
    def __reduce__(self):
        return (print, ("code ran",))


MODEL, OPTIM = "model_world_size_1_rank_0.pt", "optim_world_size_1_rank_0.pt"
NUMBERED = {"format": 1, "tensors": {0: torch.ones(2)}, "shapes": {0: [2]}, "first_rows": {0: 0}}


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda f: (f / "fsdp_config.json").unlink(), "fsdp_config.json is missing"),
        (lambda f: (f / "fsdp_config.json").write_text("{"), "fsdp_config.json cannot be read"),
        (lambda f: (f / MODEL).unlink(), f"{MODEL} is missing. The folder holds extra_state"),
        (lambda f: cut(f / MODEL), f"{MODEL} cannot be read"),
        (lambda f: cut(f / OPTIM), f"{OPTIM} cannot be read"),
        (lambda f: (f / MODEL).write_bytes(b""), f"{MODEL} cannot be read"),
        (lambda f: torch.save(Trap(), f / MODEL), f"{MODEL} cannot be read"),
        # of what was never remembered; to a list that is not there; a number without its bytes
        (lambda f: with_pickle(f / MODEL, b"\x80\x02h\x84."), f"{MODEL} cannot be read"),
        (lambda f: with_pickle(f / MODEL, b"\x80\x02a."), f"{MODEL} cannot be read"),
        (lambda f: with_pickle(f / MODEL, b"\x80\x02J\x01"), f"{MODEL} cannot be read"),
        (lambda f: torch.save(NUMBERED, f / MODEL), f"{MODEL} is damaged: its tensors, shapes and rows do not belong"),
        (lambda f: torch.save({"weights": 1}, f / MODEL), f"{MODEL}: 'weights' is a int, not a tensor"),
        (lambda f: (f / "fsdp_config.json").write_text('{"world_size": 2}'), "model_world_size_2_rank_0.pt is missing"),
    ],
)
def test_a_damaged_checkpoint_names_the_file(path, saved, tmp_path, change, problem, capsys):
    with pytest.raises(CheckpointError, match=problem):
        make_engine(path).load_checkpoint(damaged(saved, tmp_path, change))
    assert "code ran" not in capsys.readouterr().out


def test_a_checkpoint_of_another_model_is_refused(saved, tmp_path):
    other = make_engine(tiny_model_dir(tmp_path / "wide", "qwen3", intermediate_size=96, tie_word_embeddings=True))
    with pytest.raises(
        CheckpointError, match=r"gate_proj.weight' has shape \[128, 64\] in the checkpoint and \[96, 64\]"
    ):
        other.load_checkpoint(str(saved))
    deep = make_engine(tiny_model_dir(tmp_path / "deep", "qwen3", num_hidden_layers=3, tie_word_embeddings=True))
    with pytest.raises(CheckpointError, match=r"of another model: missing weights \['model.layers.2"):
        deep.load_checkpoint(str(saved))


def test_a_folder_that_cannot_be_written_is_an_error_and_the_old_save_stays(path, saved, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/actor"):
        make_engine(path).save_checkpoint(str(blocked / "actor"))
