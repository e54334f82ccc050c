"""What engines compute with a teacher, in every layout: the numbers of full logits in plain PyTorch.

The teacher is a Gemma of another width with soft caps, or two of them; the policy is a Qwen.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.plugins.megatron.support import TP, megatron_engine
from tests.workers.engine.test_shared_prompts import groups_of_rows
from tests.workers.support import make_engine, run_ranks
from verl.algorithms import agg_loss
from verl.algorithms.distillation import distillation_loss_info, evaluate_distillation_loss
from verl.config import DistillationLossConfig
from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir
from verl.workers.engine import BaseEngine, FunctionLoss, MicroBatchConfig
from verl.workers.engine.model.divergence import FullDivergence

P, K, TEMPERATURE, BETA = 6, 5, 0.7, 0.3
CONFIG = DistillationLossConfig(beta=BETA)
PATHS = {
    "policy": ("qwen3", {}),
    "one": ("gemma2", {"seed": 1, "hidden_size": 24}),
    "two": ("qwen2", {"seed": 2, "hidden_size": 40}),
    "megatron": ("qwen3", {"seed": 3, "hidden_size": 64}),
}
WHOLE = MicroBatchConfig()
TEACHER_OUTPUTS = {"log_probs", "entropy", "top_ids", "top_log_probs", "hidden"}


class Distillation:
    """A divergence of the most likely tokens and one of the whole vocabulary, of each half, by global denominators."""

    outputs = frozenset({"topk_log_probs", "divergence", "agreement", "teacher_entropy"})
    rows_per_unit = 1

    def __call__(self, outputs, micro_batch: DataProto, totals):
        assert "teacher_hidden" not in micro_batch.batch.keys()
        columns, mask = dict(micro_batch.batch.items()), micro_batch.batch["response_mask"]
        total, metrics = torch.zeros(()), {}
        for name in ("jsd_topk", "reverse_kl"):
            losses, of_loss = evaluate_distillation_loss(distillation_loss_info(name), outputs, columns, CONFIG)
            counts = {"dp_size": totals.dp_size, "batch_num_tokens": totals.batch_num_tokens}
            total, metrics = total + agg_loss(losses, mask, "token-mean", **counts), metrics | of_loss
        return total, metrics


def log_softmax(model: Any, batch: DataProto) -> Tensor:
    """(response tokens, V) in the order of rows, by full logits of one sequence at a time."""
    rows = []
    columns = batch.batch
    for ids, seen, chosen in zip(
        columns["input_ids"], columns["attention_mask"].bool(), columns["response_mask"].bool(), strict=True
    ):
        logits = model(input_ids=ids[seen][None]).logits[0].float() / TEMPERATURE
        before = int(seen[:P].sum()) - 1 + chosen.nonzero().flatten()
        rows.append(logits.log_softmax(-1)[before])
    return torch.cat(rows)


def rows_for(batch: DataProto, teachers: list[BaseEngine], micro: MicroBatchConfig) -> tuple[DataProto, FullDivergence]:
    """The columns of teachers, each of which has every second row, or all; and what the policy compares with."""
    index = torch.arange(len(batch)) % len(teachers)
    found, matrices = [], []
    for teacher in teachers:
        with teacher.eval_mode():
            found.append(teacher.infer_batch(batch, TEACHER_OUTPUTS, micro, TEMPERATURE, topk=K))
            matrices.append(teacher.output_matrix())
    width = max(columns["hidden"].shape[-1] for columns in found)
    for columns in found:
        columns["hidden"] = torch.nn.functional.pad(columns["hidden"], (0, width - columns["hidden"].shape[-1]))
    chosen = {name: torch.stack([found[int(t)][name][row] for row, t in enumerate(index)]) for name in found[0]}
    columns = {"teacher_topk_ids": chosen["top_ids"], "teacher_topk_logprobs": chosen["top_log_probs"]}
    columns |= {"teacher_hidden": chosen["hidden"], "teacher_logprobs": chosen["log_probs"]}
    columns |= {"teacher_entropys": chosen["entropy"], "teacher_index": index}
    matrices = [matrix.at(TEMPERATURE) for matrix in matrices]
    return batch | DataProto.from_dict(tensors=columns), FullDivergence(kind="reverse_kl", teachers=matrices)


def gradients(engine: BaseEngine, batch: DataProto, spec: FullDivergence, micro: MicroBatchConfig) -> Any:
    engine.divergence = spec
    with engine.train_mode():
        metrics = engine.train_batch(batch, Distillation(), micro, TEMPERATURE)
    return metrics, {name: weight.clone() for name, weight in engine.get_per_tensor_param()}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model_dir(folder / name, family, **settings) for name, (family, settings) in PATHS.items()}


@pytest.fixture(scope="module")
def batch() -> DataProto:
    return groups_of_rows([4, 1, 3], seed=7)


class Reference:
    """Plain PyTorch on the whole batch: teachers' columns, and the policy after one step."""

    def __init__(self, paths: dict[str, str], batch: DataProto, *teachers: str) -> None:
        mask = batch.batch["response_mask"].bool()
        self.rows = rows = mask.nonzero()[:, 0]
        with torch.no_grad():
            each = [log_softmax(AutoModelForCausalLM.from_pretrained(paths[name]), batch) for name in teachers]
        self.log_q = torch.stack([each[int(row) % len(each)][i] for i, row in enumerate(rows)])
        model = AutoModelForCausalLM.from_pretrained(paths["policy"])
        log_p = log_softmax(model, batch)
        top = self.log_q.topk(K).indices
        p, q = (torch.cat([x.exp().gather(-1, top), 1 - x.exp().gather(-1, top).sum(-1, True)], -1)
                for x in (log_p, self.log_q))  # fmt: skip
        m = BETA * q + (1 - BETA) * p
        losses = (BETA * q * (q / m).log() + (1 - BETA) * p * (p / m).log()).sum(-1)
        losses = losses + (log_p.exp() * (log_p - self.log_q)).sum(-1)
        losses.mean().backward()
        self.metrics = {
            "distillation/agreement": (log_p.argmax(-1) == top[:, 0]).float().mean().item(),
            "distillation/teacher_entropy": -(self.log_q.exp() * self.log_q).sum(-1).mean().item(),
            "distillation/student_tail": p[:, -1].mean().item(),
            "distillation/teacher_tail": q[:, -1].mean().item(),
        }
        assert len(teachers) == 1 or 0 < self.metrics["distillation/agreement"] < 1
        self.metrics["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-4).step()
        self.weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def check_columns(self, batch: DataProto, rows: slice = slice(None)) -> None:
        """Log-probs of the teachers in the batch of one rank, which has these rows."""
        columns, mask = batch.batch, batch.batch["response_mask"].bool()
        log_q = torch.cat([self.log_q[self.rows == row] for row in range(8)[rows]])
        targets = batch.batch["responses"][mask]
        assert_close(columns["teacher_logprobs"][mask], log_q.gather(-1, targets[:, None])[:, 0], atol=1e-5, rtol=0)
        values, ids = log_q.topk(K)
        assert_close(columns["teacher_topk_logprobs"][mask], values, atol=1e-5, rtol=0)
        assert torch.equal(columns["teacher_topk_ids"][mask].long(), ids)
        assert columns["teacher_topk_ids"].dtype == torch.int32
        assert not columns["teacher_hidden"][~mask].any()

    def check_step(self, metrics: dict[str, float], weights: dict[str, Tensor]) -> None:
        """The policy after one step."""
        for name, value in self.metrics.items():
            assert metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
        for name, weight in self.weights.items():
            assert_close(weights[name], weight, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packed": ({}, {}),
    "padded": ({"use_remove_padding": False}, {"micro_batch_size_per_gpu": 3}),
    "shared prompts": ({}, {"use_dynamic_bsz": True, "max_token_len_per_gpu": 30, "shares_prompts": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank(layout: str, paths: dict[str, str], batch: DataProto):
    settings, passes = LAYOUTS[layout]
    micro = MicroBatchConfig(**passes)
    for names in (["one"], ["two", "one"]) if layout == "packed" else (["two", "one"],):
        reference = Reference(paths, batch, *names)
        teachers: list[BaseEngine] = [make_engine(paths[name], trained=False, **settings) for name in names]
        with_teacher, spec = rows_for(batch, teachers, micro)
        reference.check_columns(with_teacher)
        reference.check_step(*gradients(make_engine(paths["policy"], **settings), with_teacher, spec, micro))


RANKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two ranks": ({}, {"micro_batch_size_per_gpu": 1}),
    "ulysses": ({"ulysses_sequence_parallel_size": 2}, {"micro_batch_size_per_gpu": 3}),
    "ulysses, padded": ({"ulysses_sequence_parallel_size": 2, "use_remove_padding": False}, {}),
}


def on_two_ranks(rank: int, world_size: int, folder: Path, paths: dict[str, str]) -> None:
    batch, references = torch.load(folder / "batch.pt", weights_only=False)
    for settings, passes in RANKS.values():
        teachers = [make_engine(paths[name], trained=False, **settings) for name in ("two", "one")]
        engine, micro = make_engine(paths["policy"], **settings), MicroBatchConfig(**passes)
        size = engine.get_data_parallel_size()
        # Rows 0, 2, ... have the first teacher and 1, 3, ... the second one, so each rank takes a half of the batch.
        rows = slice(rank * 4, rank * 4 + 4) if size == 2 else slice(None)
        with_teacher, spec = rows_for(batch.select_idxs(list(range(8)[rows])), teachers, micro)
        references["fsdp"].check_columns(with_teacher, rows)
        references["fsdp"].check_step(*gradients(engine, with_teacher, spec, micro))
    if importlib.util.find_spec("megatron") is None:
        return
    for settings in (TP, {"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}):
        engine = megatron_engine(paths["policy"], **settings)
        teacher = megatron_engine(paths["megatron"], trained=False, **settings)
        with_teacher, spec = rows_for(batch, [teacher], WHOLE)
        if teacher.is_mp_src_rank_with_outputs():
            references["megatron"].check_columns(with_teacher)
        references["megatron"].check_step(*gradients(engine, with_teacher, spec, WHOLE))


def test_two_ranks(paths: dict[str, str], batch: DataProto, tmp_path: Path):
    references = {"fsdp": Reference(paths, batch, "two", "one"), "megatron": Reference(paths, batch, "megatron")}
    torch.save((batch, references), tmp_path / "batch.pt")
    run_ranks(on_two_ranks, 2, tmp_path, paths)


def test_rows_of_a_teacher_beyond_the_vocabulary_of_the_policy_have_no_probability(tmp_path: Path, batch: DataProto):
    path, ids = tiny_model_dir(tmp_path / "padded", "qwen3", seed=4, vocab=160), 104
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path)
        log_q = log_softmax(model, batch)[:, :ids].log_softmax(-1)  # of the ids that both have
    teacher, mask = make_engine(path, trained=False), batch.batch["response_mask"].bool()
    teacher.ids_below = ids
    found = teacher.infer_batch(batch, TEACHER_OUTPUTS, WHOLE, TEMPERATURE, topk=K)
    values, best = log_q.topk(K)
    assert torch.equal(found["top_ids"][mask].long(), best)
    sampled = log_q.gather(-1, batch.batch["responses"][mask][:, None])[:, 0]
    expected = {"log_probs": sampled, "entropy": -(log_q.exp() * log_q).sum(-1), "top_log_probs": values}
    for name, column in expected.items():
        assert_close(found[name][mask], column, atol=1e-5, rtol=0)


def test_what_cannot_be_computed_is_refused(paths: dict[str, str], batch: DataProto):
    engine = make_engine(paths["policy"], trained=False)
    with pytest.raises(ConfigError, match=r"topk=105: the model has 104 tokens\. Use 1 to 104"):
        engine.infer_batch(batch, {"top_ids"}, WHOLE, topk=105)
    with pytest.raises(SchemaError, match="topk_log_probs needs the column 'teacher_topk_ids'"):
        engine.infer_batch(batch, {"topk_log_probs"}, WHOLE)
    other = DataProto.from_dict(tensors={"teacher_topk_ids": torch.full((8, 8, 2), 104, dtype=torch.int32)})
    with pytest.raises(SchemaError, match="most likely tokens have the id 104, and the policy's vocabulary has 104"):
        engine.infer_batch(batch | other, {"log_probs"}, WHOLE)
    with pytest.raises(ConfigError, match="a value_model has no output matrix"):
        make_engine(paths["policy"], "value_model", trained=False).output_matrix()


def test_the_output_matrix_of_a_model_that_is_trained_stays(paths: dict[str, str], batch: DataProto):
    """A model that teaches itself: its matrix is that of before the update."""
    engine = make_engine(paths["policy"])
    matrix = engine.output_matrix()
    before = matrix.weight.clone()
    with engine.train_mode():
        engine.train_batch(batch, FunctionLoss(lambda outputs, *_: (outputs["log_probs"].sum(), {})), WHOLE)
    assert torch.equal(matrix.weight, before)
    assert not torch.equal(engine.output_matrix().weight, before)
