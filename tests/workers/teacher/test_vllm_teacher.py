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
from tests.workers.support import P, R, ragged_batch, run_ranks
from tests.workers.teacher.test_alignment import rows
from verl.config import (
    DistillationConfig,
    DistillationLossConfig,
    DistillationTeacherModelConfig,
    HFModelConfig,
    TeacherInferenceConfig,
)
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir, tiny_tokenizer
from verl.testing.rollout_conformance import shape_of
from verl.workers.rollout.engine_process import LOOPBACK, EngineProcess
from verl.workers.rollout.vllm_rollout.settings import process_environment
from verl.workers.teacher.alignment import TextAlignment
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


@pytest.mark.slow  # test_endpoint.py asks a server of the same protocol
def test_the_server_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    teacher = tiny_model_dir(tmp_path / "teacher", seed=5, **shape_of("qwen3"))
    with served(teacher) as url:
        inference = TeacherInferenceConfig(name="openai", base_url=url, api_key_env="TEACHER_KEY", **LENGTHS)
        check_columns(inference, 5, teacher, 104, tmp_path)


def of_pairs(teacher: str, alignment: TextAlignment, batch: DataProto) -> torch.Tensor:
    """The log-prob of each span by a forward pass."""
    rows = alignment.rows(batch)
    model, width = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32), rows.places.shape[1]
    found = torch.zeros(rows.places.shape)
    for row, ids in enumerate(rows.rows.batch["input_ids"]):
        attended = rows.rows.batch["attention_mask"][row].bool()
        count = int(attended[-width:].sum())
        log_probs = model(input_ids=ids[attended][None]).logits[0].detach().log_softmax(-1)[:-1]
        found[row, :count] = log_probs.gather(-1, ids[attended][1:, None])[-count:, 0]
    return rows.columns(DataProto.from_dict(tensors={"teacher_logprobs": found})).batch["teacher_logprobs"]


def on_each_rank(rank: int, world_size: int, folder: Path, config: DistillationConfig, student: str) -> None:
    worker = TeacherEngineWorker(config, HFModelConfig(path=student), "cpu")
    worker.init_model()
    assert (worker.query_dispatch_info("teacher"), worker.query_collect_info("teacher")) == (0, rank == 0)
    columns = worker.compute_teacher_log_prob(torch.load(folder / "batch.pt", weights_only=False), "big")
    assert len(columns) == (2 if rank == 0 else 0)
    if rank == 0:
        torch.save(columns, folder / "columns.pt")


def test_an_engine_of_two_ranks_with_another_tokenizer(tmp_path: Path) -> None:
    """The teacher's tensor-parallel engine reads the rows of its first rank, in its own tokens."""
    characters, pairs = tiny_tokenizer(), tiny_tokenizer("bpe")
    student = tiny_model_dir(tmp_path / "policy")
    teacher = tiny_model_dir(tmp_path / "teacher", tokenizer="bpe", seed=5, **shape_of("qwen3"))
    inference = TeacherInferenceConfig(
        name="vllm",
        engine_kwargs={"vllm": KWARGS},
        **LENGTHS | {"response_length": 64, "tensor_model_parallel_size": 2},
    )
    models = {"big": DistillationTeacherModelConfig(model_path=teacher, inference=inference)}
    config = DistillationConfig(enabled=True, teacher_models=models, alignment="text")
    texts = characters(["The answer is 12.", "What is 3 plus 4?"], add_special_tokens=False)["input_ids"]
    batch = rows(characters, pairs, [*texts[0], characters.eos_token_id], texts[1])
    torch.save(batch, tmp_path / "batch.pt")
    run_ranks(on_each_rank, 2, tmp_path, config, student)
    columns = torch.load(tmp_path / "columns.pt", weights_only=False).batch
    expected = of_pairs(teacher, TextAlignment(characters, pairs, [characters.eos_token_id]), batch)
    assert_close(columns["teacher_logprobs"], expected, atol=2e-5, rtol=1e-5)
    assert columns["distillation_mask"].sum() == len(texts[0]) + 1 + len(texts[1])
