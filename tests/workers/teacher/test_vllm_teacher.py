"""Teachers in the real vLLM: an engine of ours, and vLLM's own OpenAI-compatible server; by ``make test-vllm``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.workers.groups import start
from tests.workers.rollout.vllm_engines import KWARGS, needs_vllm
from tests.workers.support import P, R, ragged_batch
from verl.config import (
    DistillationConfig,
    DistillationLossConfig,
    DistillationTeacherModelConfig,
    HFModelConfig,
    TeacherInferenceConfig,
)
from verl.testing.models import tiny_model_dir
from verl.testing.rollout_conformance import shape_of
from verl.workers.rollout.engine_process import LOOPBACK, EngineProcess
from verl.workers.rollout.vllm_rollout.settings import process_environment
from verl.workers.teacher.engine import TeacherEngineWorker

pytestmark = needs_vllm
KEY = "sk-of-the-teacher"


@contextmanager
def served(model: str) -> Iterator[str]:
    """Serve a model by vLLM's own server, with its tokenizer."""

    def command(port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", LOOPBACK, "--port", str(port)),
            *("--model", model, "--served-model-name", "big", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "64"),
            *("--kv-cache-memory-bytes", str(KWARGS["kv_cache_memory_bytes"])),
        ]

    environment = process_environment(torch.device("cpu")) | {"VLLM_API_KEY": KEY}
    server = EngineProcess("vllm", command, token=KEY, environment=environment)
    server.start()
    try:
        yield f"{server.base_url}/v1"
    finally:
        server.stop()


def check_columns(inference: TeacherInferenceConfig, topk: int, teacher: str, vocab: int, path: Path) -> None:
    """The columns of a worker are those of a forward pass of the folder ``teacher`` over the first ``vocab`` ids."""
    name = teacher if inference.name == "vllm" else "big"
    models = {"big": DistillationTeacherModelConfig(model_path=name, inference=inference)}
    loss = DistillationLossConfig(loss_mode="forward_kl_topk", topk=topk)
    config = DistillationConfig(enabled=True, teacher_models=models, distillation_loss=loss)
    student = HFModelConfig(path=tiny_model_dir(path / "policy"))
    batch = ragged_batch()
    columns = start(TeacherEngineWorker, config=config, student=student).compute_teacher_log_prob(batch).batch
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    for row, ids in enumerate(batch.batch["input_ids"]):
        attended = batch.batch["attention_mask"][row].bool()
        logits = model(input_ids=ids[attended][None]).logits[0].detach()[:, :vocab]
        log_probs = (logits / inference.temperature).log_softmax(-1)
        count = int(attended[P:].sum())
        before = log_probs[len(log_probs) - count - 1 : -1]
        learnt = batch.batch["response_mask"][row, :count].bool()
        of_tokens = before.gather(-1, batch.batch["responses"][row, :count, None]).squeeze(-1)
        assert_close(columns["teacher_logprobs"][row, :count], of_tokens * learnt, atol=2e-5, rtol=1e-5)
        best = before.topk(topk).values[learnt]
        assert_close(columns["teacher_topk_logprobs"][row, :count][learnt], best, atol=2e-5, rtol=1e-5)
        at_ids = before.gather(-1, columns["teacher_topk_ids"][row, :count].long())[learnt]
        assert_close(at_ids, best, atol=2e-5, rtol=1e-5)
    assert not columns["teacher_logprobs"][batch.batch["response_mask"] == 0].any()


LENGTHS = {"prompt_length": P, "response_length": R, "dtype": "float32", "tensor_model_parallel_size": 1}


def test_an_engine_at_another_temperature_and_with_a_padded_embedding(tmp_path: Path) -> None:
    """With more most likely tokens than vLLM returns by default; of the embedding's 128 rows 104 are tokens."""
    teacher = tiny_model_dir(tmp_path / "teacher", vocab=128, seed=5, **shape_of("qwen3"))
    inference = TeacherInferenceConfig(name="vllm", temperature=0.7, engine_kwargs={"vllm": KWARGS}, **LENGTHS)
    check_columns(inference, 24, teacher, 104, tmp_path)


def test_the_server_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    teacher = tiny_model_dir(tmp_path / "teacher", seed=5, **shape_of("qwen3"))
    with served(teacher) as url:
        inference = TeacherInferenceConfig(name="openai", base_url=url, api_key_env="TEACHER_KEY", **LENGTHS)
        check_columns(inference, 5, teacher, 104, tmp_path)
