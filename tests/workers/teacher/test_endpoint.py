"""A teacher behind an endpoint, over HTTP: scores of a forward pass, retries, keys, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from tests.workers.groups import start
from tests.workers.support import naive_outputs, ragged_batch
from tests.workers.teacher.completions_server import CompletionsServer
from verl.config import (
    DistillationConfig,
    DistillationLossConfig,
    DistillationTeacherModelConfig,
    HFModelConfig,
    TeacherInferenceConfig,
)
from verl.errors import ConfigError, RolloutError
from verl.testing.models import tiny_model, tiny_model_dir, tiny_tokenizer
from verl.workers.rollout.scoring import ScoreRequest
from verl.workers.teacher.endpoint import EndpointTeacher
from verl.workers.teacher.engine import TeacherEngineWorker
from verl.workers.teacher.tokenizers import check_teacher_tokenizers

ASKED = [ScoreRequest([10, 20, 30, 50, 3, 77], start=3), ScoreRequest([7, 60], start=1)]


def server(**settings: object) -> CompletionsServer:
    return CompletionsServer(tiny_model(seed=5), tiny_tokenizer(), **settings)


def teacher(url: str, **settings: object) -> DistillationTeacherModelConfig:
    inference = TeacherInferenceConfig(name="openai", base_url=url, **settings)
    return DistillationTeacherModelConfig(model_path="big", inference=inference)


def connect(url: str, top_k: int = 0, **settings: object) -> EndpointTeacher:
    return EndpointTeacher("distillation.teacher_models.big", teacher(url, **settings), tiny_tokenizer(), top_k)


@pytest.mark.parametrize("form", ["prompt_logprobs", "echo"])
def test_scores_are_those_of_the_model_in_both_forms_of_answers(form: str) -> None:
    served = server(form=form)
    with served.running() as url:
        scores = connect(url).score(ASKED)
    for asked, of_tokens in zip(ASKED, scores, strict=True):
        logits = served.model(input_ids=torch.tensor([asked.token_ids])).logits[0, asked.start - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(asked.scored_ids)[:, None]).squeeze(-1)
        assert_close(of_tokens.log_probs, expected.detach(), atol=1e-5, rtol=1e-5)
    assert served.bodies[-1]["model"] == "big"


@pytest.mark.parametrize("topk", [None, 6])
def test_the_columns_of_a_worker_are_those_of_a_forward_pass(topk: int | None, tmp_path: Path) -> None:
    """Rows without a token of the policy, with tokens of tools between its own, and of all lengths."""
    batch, served = ragged_batch(), server()
    mask = batch.batch["response_mask"]
    loss = DistillationLossConfig(loss_mode="forward_kl_topk" if topk else "k1", topk=topk)
    with served.running() as url:
        config = DistillationConfig(enabled=True, teacher_models={"big": teacher(url)}, distillation_loss=loss)
        student = HFModelConfig(path=tiny_model_dir(tmp_path))
        group = start(TeacherEngineWorker, config=config, student=student)
        columns = group.compute_teacher_log_prob(batch).batch
        with pytest.raises(ConfigError, match="has the teachers big"):
            group.compute_teacher_log_prob(batch, teacher="small")
    assert_close(columns["teacher_logprobs"], naive_outputs(served.model, batch)[0].detach() * mask)
    assert set(columns.keys()) == {"teacher_logprobs", *(["teacher_topk_ids", "teacher_topk_logprobs"] if topk else [])}
    if not topk:
        return
    for row, ids in enumerate(batch.batch["input_ids"]):
        attended = batch.batch["attention_mask"][row].bool()
        logits = served.model(input_ids=ids[attended][None]).logits[0].log_softmax(-1).detach()
        count = int(attended[-mask.shape[1] :].sum())
        best = logits[len(logits) - count - 1 : -1].topk(topk)
        learnt = mask[row, :count].bool()
        assert_close(columns["teacher_topk_logprobs"][row, :count][learnt], best.values[learnt])
        assert columns["teacher_topk_ids"][row, :count][learnt].tolist() == best.indices[learnt].tolist()
    assert not columns["teacher_topk_logprobs"][mask == 0].any()


def test_a_busy_endpoint_is_asked_again_and_a_lost_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    served = server()
    with served.running() as url:
        asked = connect(url)
        served.failures += [503, 429]
        assert len(asked.score(ASKED[:1])) == 1
        served.failures += [400]
        with pytest.raises(RolloutError, match=f"big at {url} answered with status 400: .*overloaded"):
            asked.score(ASKED[:1])
    monkeypatch.setattr(asked, "_client", asked._client.with_options(max_retries=0))
    with pytest.raises(RolloutError, match="gave no answer in 6 attempts of at most 600 s"):
        asked.score(ASKED[:1])


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(key="sk-of-the-teacher").running() as url:
        with pytest.raises(ConfigError, match=r"status 401: .*Incorrect API key provided"):
            connect(url)
        monkeypatch.delenv("TEACHER_KEY", raising=False)
        with pytest.raises(ConfigError, match=r"inference.api_key_env=TEACHER_KEY: there is no environment variable"):
            connect(url, api_key_env="TEACHER_KEY")
        monkeypatch.setenv("TEACHER_KEY", "sk-of-the-teacher")
        assert len(connect(url, api_key_env="TEACHER_KEY").score(ASKED)) == 2


def test_what_is_refused_at_the_start(tmp_path: Path) -> None:
    with server(form="none").running() as url:
        shown = r'.*"logprobs": null'
        words = f"gives no log-probs of prompts, so .* prompt_logprobs: {shown}.* echo: {shown}"
        with pytest.raises(ConfigError, match=words):
            connect(url)
    with server(form="echo").running() as url, pytest.raises(ConfigError, match="echo names most likely tokens by"):
        connect(url, top_k=4)
    other = CompletionsServer(tiny_model(vocab=384), tiny_tokenizer("bpe"))
    tiny_tokenizer().save_pretrained(tmp_path)
    with other.running() as url:
        section = DistillationConfig(enabled=True, teacher_models={"big": teacher(url)})
        with pytest.raises(ConfigError, match=r"another tokenizer than the policy: token \d+ is"):
            check_teacher_tokenizers(section, HFModelConfig(path=str(tmp_path)))  # in the driver


def test_a_temperature_that_an_endpoint_does_not_apply_is_refused() -> None:
    with server().running() as url, pytest.raises(RolloutError, match=r"at temperature 1, and 0\.7 is asked for"):
        connect(url).score([ScoreRequest([1, 2, 3], start=1, temperature=0.7)])
