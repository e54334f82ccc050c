"""A model may be a GGUF file: it becomes a model folder with the same numbers, tokens and ends, once."""

import importlib.util
import json
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.support.gguf_files import write_gguf
from verl.base.fs import source_of
from verl.errors import ConfigError
from verl.testing.models import tiny_model, tiny_tokenizer
from verl.utils.model import eos_token_ids, get_generation_config, load_hf_config, resolve_model_path
from verl.utils.model_facts.model_files import config_entries, longest_context
from verl.utils.tokenizer import hf_tokenizer

TEXT = "What is 12 + 345?\n\n67, Zürich"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model("llama", vocab=384, tie_word_embeddings=True)


@pytest.fixture
def file(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    return write_gguf(model, tiny_tokenizer("bpe"), tmp_path / "tiny.gguf")


def test_the_folder_has_the_numbers_tokens_and_ends_of_the_file(model, file, caplog):
    folder = resolve_model_path(str(file))
    assert "converting" in caplog.text
    ids = torch.arange(4, 40).view(1, -1)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    written, original = hf_tokenizer(str(file)), tiny_tokenizer("bpe")
    assert written(TEXT).input_ids == original(TEXT).input_ids
    messages = [{"role": "user", "content": TEXT}]
    chats = [t.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) for t in (written, original)]
    assert chats[0] == chats[1]
    assert eos_token_ids(str(file), written) == (1,)
    assert get_generation_config(str(file)).pad_token_id == 0
    assert load_hf_config(str(file)).tie_word_embeddings


def test_a_file_is_converted_once_and_again_when_it_changes(model, file, caplog):
    assert config_entries(file) == {}  # checks of settings convert nothing
    folder = resolve_model_path(str(file))
    assert source_of(folder) == str(file)
    assert config_entries(file)["model_type"] == "llama"
    assert longest_context(str(file)) == 4096
    caplog.clear()
    assert resolve_model_path(str(file)) == folder
    assert not caplog.text
    with file.open("ab") as opened:
        opened.write(bytes(32))
    assert resolve_model_path(str(file)) != folder


def test_quantized_weights_become_fp32_with_exactly_their_values(model, tmp_path):
    kind = gguf.GGMLQuantizationType.Q4_1
    file = write_gguf(model, tiny_tokenizer("bpe"), tmp_path / "q4.gguf", kind)
    loaded = AutoModelForCausalLM.from_pretrained(resolve_model_path(str(file)), dtype="auto")
    weight, original = (m.get_parameter("model.layers.1.mlp.up_proj.weight") for m in (loaded, model))
    assert loaded.dtype == torch.float32
    blocks = gguf.quants.quantize(original.detach().numpy(), kind)
    assert torch.equal(weight, torch.from_numpy(gguf.quants.dequantize(blocks, kind)))
    assert not torch.equal(weight, original)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("is_exact", [True, False])
def test_weights_of_16_bits_keep_their_format_only_if_it_holds_the_norms_in_fp32_too(tmp_path, kind, is_exact):
    model = tiny_model("llama", vocab=384, tie_word_embeddings=True)
    with torch.no_grad():
        model.model.norm.weight.fill_(1.5 if is_exact else 1.0001)
    file = write_gguf(model, tiny_tokenizer("bpe"), tmp_path / "a.gguf", gguf.GGMLQuantizationType[kind])
    loaded = AutoModelForCausalLM.from_pretrained(resolve_model_path(str(file)), dtype="auto")
    assert loaded.dtype == ({"F16": torch.float16, "BF16": torch.bfloat16}[kind] if is_exact else torch.float32)
    assert torch.equal(loaded.model.norm.weight.float(), model.model.norm.weight)


def test_text_is_split_by_the_rules_that_the_file_names(model, tmp_path, caplog):
    files = {split: write_gguf(model, tiny_tokenizer("bpe"), tmp_path / f"{split}.gguf", split=split)
             for split in ("smollm", "my-rules")}  # fmt: skip
    apart = tiny_tokenizer("bpe")
    apart.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    splits = hf_tokenizer(str(files["smollm"])).backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert splits == apart.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in splits] == ["a", "ĠĠ", "1", "2"]
    assert "rules" not in caplog.text
    resolve_model_path(str(files["my-rules"]))
    assert "by the rules 'my-rules'" in caplog.text


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_cut_file_is_refused_by_its_name(file, cache, share):
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ConfigError, match=r"tiny\.gguf' is (cut or damaged|no GGUF file)"):
        resolve_model_path(str(file))
    assert not list(cache.rglob("config.json"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"version https://git-lfs", "only a pointer of Git LFS"),
        (b"\x00" * 64, r"is no GGUF file: it begins with b'\\x00"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path, content, message):
    file = tmp_path / "model.gguf"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        resolve_model_path(str(file))


def test_a_missing_package_is_named_with_its_command(file, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    with pytest.raises(ConfigError, match="needs the package gguf: pip install 'gguf"):
        resolve_model_path(str(file))


def test_an_architecture_that_transformers_does_not_know(tmp_path):
    file = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(file, "strange")
    writer.add_tokenizer_model("gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"strange\.gguf' cannot be converted: .*strange"):
        resolve_model_path(str(file))


@pytest.mark.slow
def test_adapters_of_a_gguf_file_are_trained_merged_and_generate(file, tmp_path):
    import verl
    from verl.model_merger.__main__ import main

    rows = [{"prompt": "What is 1 + 1?", "completion": "2"}] * 4
    result = verl.sft(str(file), rows, lora_rank=4, lr=0.1, total_training_steps=2, output_dir=tmp_path / "run")
    [adapters] = tmp_path.rglob("adapter_config.json")
    assert json.loads(adapters.read_text())["base_model_name_or_path"] == str(file)
    main(["merge", "--local_dir", str(adapters.parents[1]), "--target_dir", str(tmp_path / "merged")])
    texts = []
    for model in (str(file), tmp_path / "merged", result):
        [row] = verl.generate(model, ["What is 1 + 1?"], do_sample=False, response_length=8)
        texts += row["responses"]
    assert texts[1] == texts[2] != texts[0]
