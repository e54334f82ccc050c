"""Folders that ``python -m verl.model_merger`` wrote, in a vLLM without verl; ``make test-vllm SLOW=1``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.vision_models import heads_of_32, picture, tiny_vision_model_dir
from tests.workers.rollout.vllm_engines import KWARGS, needs_vllm
from tests.workers.support import make_engine
from verl.model_merger.__main__ import main
from verl.testing.models import tiny_model_dir
from verl.utils import hf_processor, hf_tokenizer

pytestmark = [needs_vllm, pytest.mark.slow]
TEXTS = ["What is 3 plus 4?", "make 12 of [3, 4, 5]", "z"]
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>What is this?"
TOKENS = 8
PROGRAM = """
import json, sys
from PIL import Image
from vllm import LLM, SamplingParams
folder, picture, texts, arguments = json.loads(sys.argv[1])
image = {"multi_modal_data": {"image": Image.open(picture)}} if picture else {}
engine = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4, **arguments)
wanted = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
for answer in engine.generate([{"prompt": text, **image} for text in texts], wanted):
    drawn = answer.outputs[0]
    log_probs = [place[token].logprob for place, token in zip(drawn.logprobs, drawn.token_ids)]
    print("FOUND" + json.dumps([answer.prompt_token_ids, list(drawn.token_ids), log_probs]))
"""


def in_vllm(
    folder: Path, texts: list[str], image: Path | None = None
) -> list[tuple[list[int], list[int], list[float]]]:
    """Ids of prompts, greedy tokens and their log-probs, from a process of its own."""
    arguments = KWARGS | ({"mm_processor_cache_gb": 0, "skip_mm_profiling": True} if image else {})
    given = json.dumps([str(folder), image and str(image), texts, arguments])
    done = subprocess.run([sys.executable, "-c", PROGRAM, given], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.removeprefix("FOUND") for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert len(lines) == len(texts)
    return [tuple(json.loads(line)) for line in lines]


def save_changed(path: str, folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Shards of the model at ``path`` after a change of all that is trained, and the whole weights then."""
    engine = make_engine(path, **settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in engine.model.named_parameters():
            if ".lora_" in name:  # half of them are zero at first
                parameter.normal_(std=0.3)
            else:
                parameter.mul_(1.1)
    engine.save_checkpoint(str(folder))
    return {name: tensor.detach().clone() for name, tensor in engine.get_per_tensor_param()}


@torch.no_grad()
def check(model: Any, ids: list[int], tokens: list[int], log_probs: list[float], **inputs: Any) -> None:
    """Compare with one forward pass of Transformers over prompt and response."""
    whole = torch.tensor([ids + tokens])
    if inputs:
        inputs["mm_token_type_ids"] = (whole == model.config.image_token_id).long()
    found = model.eval()(input_ids=whole, **inputs).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    assert len(tokens) == TOKENS
    assert found.argmax(-1).tolist() == tokens
    torch.testing.assert_close(torch.tensor(log_probs), found.max(-1).values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_text(lora_rank: int, tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path / "model", head_dim=32)
    weights = save_changed(path, tmp_path / "actor", lora_rank=lora_rank)
    assert main(["merge", "--backend=fsdp", f"--local_dir={tmp_path}/actor", f"--target_dir={tmp_path}/out"]) == 0
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    if lora_rank:
        model = PeftModel.from_pretrained(model, str(tmp_path / "actor" / "lora_adapter"))
    else:
        model.load_state_dict(weights)
    tokenizer = hf_tokenizer(path)
    for text, (ids, tokens, log_probs) in zip(TEXTS, in_vllm(tmp_path / "out", TEXTS), strict=True):
        assert ids == tokenizer(text)["input_ids"]
        check(model, ids, tokens, log_probs)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM needs torchvision for images")
def test_images(tmp_path: Path) -> None:
    """vLLM makes tokens and pixels with the exported processor, here the model's own does."""
    path = tiny_vision_model_dir(tmp_path / "model", "qwen2_5_vl", **heads_of_32("qwen2_5_vl"))
    weights = save_changed(path, tmp_path / "actor")
    assert main(["merge", "--backend=fsdp", f"--local_dir={tmp_path}/actor", f"--target_dir={tmp_path}/out"]) == 0
    model = AutoModelForImageTextToText.from_pretrained(path)
    model.load_state_dict(weights)
    image = picture("red", "circle")
    image.save(tmp_path / "picture.png")
    ((ids, tokens, log_probs),) = in_vllm(tmp_path / "out", [PICTURE], tmp_path / "picture.png")
    inputs = hf_processor(path)(text=[PICTURE], images=[image], return_tensors="pt")
    assert ids == inputs["input_ids"][0].tolist()
    assert ids.count(model.config.image_token_id) > 1
    kept = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    check(model, ids, tokens, log_probs, **kept)
