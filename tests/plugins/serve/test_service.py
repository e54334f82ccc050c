"""The service by plain HTTP over a tiny model: passes, steps, order, saved weights, samples, and refusals."""

from __future__ import annotations

import copy
import fcntl
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.plugins.serve.support import ServiceHere, config_of, datum, log_probs_of, loss_of, start_group
from verl.config import FSDPEngineConfig
from verl.errors import ConfigError, ProcessLostError
from verl.plugins.serve.files import StateFiles
from verl.testing.models import tiny_model_dir
from verl.workers.engine.fsdp.adapter_slots import AdapterSlotsEngine

TEXTS = [[5, 9, 13, 40, 41, 7], [8, 30, 31, 9], [17, 18, 19, 20, 21, 22, 23, 24], [50, 51, 52]]
DATA = [datum(text, weights=[1.0] * (len(text) - 1)) for text in TEXTS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def group(model: str, tmp_path_factory: pytest.TempPathFactory):
    return start_group(config_of(model, tmp_path_factory.mktemp("state")))


@pytest.fixture
def service(model: str, group, tmp_path: Path) -> ServiceHere:
    return ServiceHere(config_of(model, tmp_path / "state"), group)


def saved(service: ServiceHere, model: str, seq: int, name: str) -> dict[str, torch.Tensor]:
    """Weights and moments of a model, by saving its state."""
    path = service.result(service.post("save_weights", model_id=model, seq_id=seq, path=name))["path"]
    assert path == f"tinker://{model}/weights/{name}"
    folder = Path(service.config.server.state_dir) / model / "weights" / name
    return load_file(folder / "adapter_model.safetensors") | load_file(folder / "optimizer.safetensors")


def train(service: ServiceHere, model: str, data: list[bytes], steps: int, first: int = 1) -> None:
    for seq in range(first, first + 2 * steps, 2):
        service.result(service.start_pass(model, seq, data))
        service.result(service.step(model, seq + 1))


def hf_log_probs(hf: torch.nn.Module, text: list[int]) -> torch.Tensor:
    ids = torch.tensor([text])
    return hf(ids[:, :-1]).logits.log_softmax(-1)[0].gather(-1, ids[0, 1:, None])[:, 0].detach()


def test_models_of_several_clients_in_one_pass_train_as_apart(service, model):
    """Ranks, scales, layers and losses differ; the saved adapters and log-probs are those of Transformers with peft."""
    settings = [{"rank": 4, "seed": 1}, {"rank": 3, "seed": 2, "train_mlp": False}]
    policy = [datum(text, logprobs=[-4.0] * (len(text) - 1), advantages=[0.5] * (len(text) - 1)) for text in TEXTS]
    losses = [("cross_entropy", DATA[:3]), ("importance_sampling", policy[1:])]
    together = [service.model(index, **of) for index, of in enumerate(settings)]
    for seq in (1, 3):
        passes = [service.start_pass(m, seq, data, loss) for m, (loss, data) in zip(together, losses, strict=True)]
        outputs = [service.result(promise) for promise in passes]
        assert service.taken[-1] == [f"{m}:{seq}" for m in together], "one call for both"
        for m in together:
            service.result(service.step(m, seq + 1))
    joint = [saved(service, m, 5, "end") for m in together]
    for index, (of, (loss, data)) in enumerate(zip(settings, losses, strict=True)):
        alone = service.model(2 + index, **of)
        for seq in (1, 3):
            apart = service.result(service.start_pass(alone, seq, data, loss))
            service.result(service.step(alone, seq + 1))
        weights = saved(service, alone, 5, "end")
        assert weights.keys() == joint[index].keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(joint[index][name], tensor, rtol=1e-5, atol=1e-5)
        assert loss_of(outputs[index]) == pytest.approx(loss_of(apart), abs=1e-4)
        for one, other in zip(log_probs_of(outputs[index]), log_probs_of(apart), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    assert any("mlp" in name for name in joint[0])
    assert not any("mlp" in name for name in joint[1])
    # The files are those of peft, and the service computes what Transformers does with them.
    folder = Path(service.config.server.state_dir) / together[1] / "weights" / "end"
    hf = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(folder)).eval()
    output = service.result(service.start_pass(together[1], 6, policy, "importance_sampling", forward_only=True))
    expected = [hf_log_probs(hf, text) for text in TEXTS]
    for one, other in zip(log_probs_of(output), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    assert loss_of(output) == pytest.approx(sum(float(-0.5 * (e + 4.0).exp().sum()) for e in expected), rel=1e-4)
    assert not torch.equal(expected[0], hf_log_probs(AutoModelForCausalLM.from_pretrained(model), TEXTS[0]))


def test_gradients_add_up_until_a_step(service):
    """Two passes and a step are one pass over all data, and the loss is a sum: twice the data twice the gradient."""
    one, parts = service.model(0), service.model(1)
    service.start_pass(one, 1, DATA)
    norm = service.result(service.step(one, 2))["metrics"]["grad_norm:mean"]
    service.result(service.start_pass(parts, 1, DATA[:1]))  # passes that wait together are one
    service.start_pass(parts, 2, DATA[1:])
    assert service.result(service.step(parts, 3))["metrics"]["grad_norm:mean"] == pytest.approx(norm, rel=1e-5)
    service.start_pass(one, 3, DATA)
    once = service.result(service.step(one, 4))["metrics"]["grad_norm:mean"]
    service.start_pass(parts, 4, [*DATA, *DATA])
    assert service.result(service.step(parts, 5))["metrics"]["grad_norm:mean"] == pytest.approx(2 * once, rel=1e-4)


def test_a_step_is_that_of_adamw_with_the_settings_of_the_client(service):
    """In the first step the moments are those of the clipped gradient, and A, whose gradient is 0, only decays."""
    first = saved(service, service.model(0), 1, "first")
    for number, limit in ((1, 1e9), (2, 0.5)):
        model = service.model(number)
        service.start_pass(model, 1, DATA)
        step = service.step(model, 2, lr=0.01, beta1=0.6, beta2=0.7, weight_decay=0.5, grad_clip_norm=limit)
        norm = service.result(step)["metrics"]["grad_norm:mean"]
        assert norm > 0.5
        state = saved(service, model, 3, "after")
        mean, square = (
            torch.cat([tensor.flatten() for name, tensor in state.items() if name.endswith(moment)])
            for moment in (".exp_avg", ".exp_avg_sq")
        )
        assert float(mean.norm()) / (1 - 0.6) == pytest.approx(min(limit, norm), rel=1e-4)
        torch.testing.assert_close(square / (1 - 0.7), (mean / (1 - 0.6)).square())
        for name in [name for name in first if name.endswith("lora_A.weight")]:
            torch.testing.assert_close(state[name], (1 - 0.01 * 0.5) * first[name])


def test_a_state_is_loaded_bit_for_bit_and_goes_on_as_if_nothing_had_been(service):
    """Also by a later server, and after the places of the ranks went to other models."""
    model = service.model(0)
    train(service, model, DATA, 2)
    before = saved(service, model, 5, "middle")
    train(service, model, DATA[1:], 2, first=6)
    end = saved(service, model, 10, "end")
    later = ServiceHere(service.config, service.computing.group)
    path = f"tinker://{model}/weights/middle"
    body = {"session_id": later.session, "model_seq_id": 0, "path": path, "optimizer": True}
    assert later.result(later.post("load_weights", **body))["model_id"] == f"{later.session}:train:0"
    loaded = f"{later.session}:train:0"
    same = saved(later, loaded, 1, "same")
    assert same.keys() == before.keys()
    assert all(torch.equal(same[name], before[name]) for name in same)
    assert float(before["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"].abs().max()) > 0
    later.start_pass(loaded, 2, DATA[1:])
    for seed in (1, 2):  # two slots: this model is moved to the disk with its gradients
        later.model(seed, seed=seed)
    assert later.board.model(loaded).slot is None
    later.result(later.step(loaded, 3))
    train(later, loaded, DATA[1:], 1, first=4)
    again = saved(later, loaded, 6, "end")
    assert all(torch.equal(again[name], end[name]) for name in again)
    weights_alone = later.result(later.post("load_weights", **body | {"model_seq_id": 3, "optimizer": False}))[
        "model_id"
    ]
    reset = saved(later, weights_alone, 1, "reset")
    assert all(torch.equal(reset[name], before[name]) == ("exp_avg" not in name) for name in reset)


@pytest.mark.parametrize("log_prob, advantage", [(-1e4, 1.0), (-4.5, 5e37)])
def test_a_pass_that_is_not_finite_harms_nobody_else(service, log_prob: float, advantage: float):
    """exp(log p + 10,000) overflows, or the gradient alone: its client is told, and the pass with it counts."""
    one, other = service.model(0), service.model(1)
    extreme = [datum(TEXTS[0], logprobs=[log_prob] * 5, advantages=[advantage] * 5)]
    promises = [service.start_pass(one, 1, extreme, "importance_sampling"), service.start_pass(other, 1, DATA)]
    assert "the loss or its gradient is not finite" in service.result(promises[0])["error"]
    assert loss_of(service.result(promises[1])) > 0
    assert "no step was made" in service.result(service.step(one, 2))["error"]
    assert 0 < service.result(service.step(other, 2))["metrics"]["grad_norm:mean"] < 1e4
    train(service, one, DATA, 1, first=3)


class LostGroup:
    """A worker group of which a rank died."""

    def __getattr__(self, name: str):
        raise ProcessLostError("rank 1 died")


def test_no_step_lacks_a_pass_that_a_dead_rank_had(service):
    """Of a model on the disk, which is not lost with the ranks."""
    group, model = service.computing.group, service.model(0)
    service.result(service.start_pass(model, 1, DATA))
    for model_seq_id in (1, 2):
        service.model(model_seq_id)
    assert service.board.model(model).slot is None
    promise = service.start_pass(model, 2, DATA)
    service.computing.group = LostGroup()
    with pytest.raises(ProcessLostError):
        service.compute()
    service.board.lose("a rank died")
    service.computing.group = group
    assert "rank 1 died" in service.result(promise)["error"]
    assert (
        "no step was made: a forward_backward since the last step was"
        in service.result(service.step(model, 3))["error"]
    )


def test_requests_of_a_model_run_in_order_and_once(service):
    """Chunks may come in any order, a request may come again, and one that was refused holds nobody up."""
    model = service.model(0)
    step = service.step(model, 4)
    service.start_pass(model, 3, DATA[:1])
    service.compute()
    assert service.send_pass(model, 2, [datum([5, 6, 500], weights=[1, 1])]).status_code == 400
    first = service.start_pass(model, 1, DATA[1:])
    assert service.start_pass(model, 1, DATA[1:]) == first
    service.result(first)
    assert service.taken[-2:] == [[f"{model}:1", f"{model}:3"], [f"{model}:4"]]
    # Of the data of this step a part was refused.
    error = service.result(step)
    assert error["category"] == "user"
    assert "no step was made: a forward_backward since the last step was refused" in error["error"]
    assert "there was no forward_backward" in service.result(service.step(model, 5))["error"]
    train(service, model, DATA, 1, first=6)


def test_samples_are_those_of_their_weights_and_seeds(service):
    """Of a saved adapter, of a trained model, and of the base, with log-probs of prompts and responses."""
    model, prompt = service.model(0), [5, 9, 13]
    train(service, model, DATA[:1], 8)
    ids = service.post("save_weights_for_sampler", model_id=model, seq_id=17, sampling_session_seq_id=0)
    sampler = service.result(ids)["sampling_session_id"]
    named = service.result(service.post("save_weights_for_sampler", model_id=model, seq_id=18, path="named"))["path"]
    assert named == f"tinker://{model}/sampler_weights/named"
    body = {
        "sampling_session_id": sampler,
        "num_samples": 3,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        "sampling_params": {"max_tokens": 5, "temperature": 1.0, "seed": 7},
        "prompt_logprobs": True,
    }
    promises = [service.post("asample", **body, seq_id=0)]
    other = {"session_id": service.session, "sampling_session_seq_id": 1, "model_path": named}
    again = service.post("create_sampling_session", **other)["sampling_session_id"]
    promises.append(service.post("asample", **body | {"sampling_session_id": again}, seq_id=0))
    assert len(set(promises[0]["sample_sequence_ids"])) == 3
    base = {"session_id": service.session, "sampling_session_seq_id": 2, "base_model": service.config.model.path}
    of_base = service.post("create_sampling_session", **base)["sampling_session_id"]
    greedy = copy.deepcopy(body) | {"sampling_session_id": of_base, "num_samples": 1, "prompt_logprobs": False}
    greedy["sampling_params"] = {"max_tokens": 4, "temperature": 0}
    promises.append(service.post("asample", **greedy, seq_id=0))  # waits beside those of other weights
    one, same, from_base = (service.result(promise) for promise in promises)
    assert one == same
    responses = [np.frombuffer(sequence.tokens, np.int32).tolist() for sequence in one.sequences]
    assert {len(response) for response in responses} == {5} or any(r[-1] == 1 for r in responses)
    assert len({tuple(response) for response in responses}) > 1
    assert np.isnan(np.frombuffer(one.prompt_logprobs, np.float32)).tolist() == [True, False, False]
    whole = [datum([*prompt, *response]) for response in responses]
    scored = log_probs_of(service.result(service.start_pass(model, 19, whole, forward_only=True)))
    for sequence, values in zip(one.sequences, scored, strict=True):
        np.testing.assert_allclose(np.frombuffer(sequence.logprobs, np.float32), values[2:], atol=1e-4)
        np.testing.assert_allclose(np.frombuffer(one.prompt_logprobs, np.float32)[1:], values[:2], atol=1e-4)
    assert sum(values[2:].sum() for values in scored) > -30, "it has learned this text"
    [first] = from_base.sequences
    tokens = np.frombuffer(first.tokens, np.int32).tolist()
    stopped = {"max_tokens": 4, "temperature": 0, "stop": [tokens[1]]}
    [second] = service.result(service.post("asample", **greedy | {"sampling_params": stopped}, seq_id=1)).sequences
    assert np.frombuffer(second.tokens, np.int32).tolist() == tokens[:2]
    assert (first.stop_reason, second.stop_reason) == (1, 0)
    # The first of three responses is the one of one; weights that are saved again under their name are other weights.
    alone = body | {"sampling_session_id": again, "num_samples": 1, "prompt_logprobs_last_n": 1}
    before = service.result(service.post("asample", **alone, seq_id=1))
    assert before.sequences[0].tokens == one.sequences[0].tokens
    scores, last = (np.frombuffer(result.prompt_logprobs, np.float32) for result in (one, before))
    np.testing.assert_allclose(last, [np.nan, np.nan, scores[2]], atol=1e-5)
    train(service, model, DATA[1:2], 2, first=20)
    service.result(service.post("save_weights_for_sampler", model_id=model, seq_id=24, path="named"))
    after = service.result(service.post("asample", **alone, seq_id=2))
    assert abs(np.frombuffer(after.prompt_logprobs, np.float32)[2] - scores[2]) > 1e-3
    assert after.sequences[0].logprobs != before.sequences[0].logprobs


def test_an_adapter_that_overflows_harms_no_other():
    """Rows 0 and 1 of A are of slot 0, rows 2 and 3 of slot 1, whose product is infinite."""
    engine = SimpleNamespace(_token_factors=torch.tensor([[2.0, 2.0, 0.0, 0.0]]))
    output = torch.tensor([[1.0, 3.0, float("inf"), float("nan")]])
    selected = AdapterSlotsEngine._select(cast(Any, engine), nn.Identity(), (), output)
    assert selected is not None
    assert selected.tolist() == [[2, 6, 0, 0]]


ONES = [1.0, 1.0]


@pytest.mark.parametrize(
    "data, more, message",
    [
        ([datum([5, 6, 7], weights=ONES)], {"loss": "dpo"}, "there is no loss 'dpo' here. Use one of cross_entropy, "),
        ([datum([5, 6, 7], weights=ONES)], {"beta": 1.0}, "loss_fn_config: cross_entropy has no 'beta'. It has none."),
        ([datum([5, 6, 7], weights=[1.0])], {}, "datum 0: weights has 1 values for 2 tokens."),
        (
            [*DATA, datum([5, 6, 200], weights=ONES)],
            {},
            "datum 4: target_tokens[1] is 200, and the model has the tokens 0",
        ),
        ([datum([5, -1, 7], weights=ONES)], {}, "datum 0: model_input[1] is -1"),
        ([datum([5, 6, 7], target_tokens=[6, 7.5])], {}, "datum 0: target_tokens[1] is 7.5, and the model has"),
        ([datum([5, 6, 7], weights=[1.0, float("nan")])], {}, "datum 0: weights[1] is nan. Send finite numbers."),
        ([datum([5] * 34, weights=[1.0] * 33)], {}, "datum 0 has 33 tokens; a sequence has 1 to 32 (server.max_length"),
        (
            [datum([5, 6, 7], weights=ONES)],
            {"loss": "ppo"},
            "datum 0 lacks logprobs. loss_fn_inputs of ppo: target_tokens",
        ),
        ([datum([5, 6, 7], mask=ONES)], {}, "datum 0 has 'mask', which cross_entropy does not read."),
        ([], {}, "there is no datum. Send at least one."),
        ([b"\x0a\x02\x12\x00"], {}, "datum 0 has an image or a sound; this service trains on text alone."),
    ],
)
def test_wrong_data_is_refused_before_anything_is_computed(service, data, more, message):
    model = service.model(0)
    answer = service.send_pass(model, 1, data, **more)
    assert answer.status_code == 400
    assert message in answer.json()["error"]
    train(service, model, DATA[:1], 0, first=2)
    service.result(service.start_pass(model, 2, DATA[:1]))


def test_weights_that_are_gone_or_have_no_optimizer_end_no_service(service):
    """A model that cannot load something goes on as it was."""
    model = service.model(0)
    train(service, model, DATA, 1)
    loss = loss_of(service.result(service.start_pass(model, 3, DATA, forward_only=True)))
    path = service.result(service.post("save_weights_for_sampler", model_id=model, seq_id=4, path="alone"))["path"]
    load = {"model_id": model, "seq_id": 5, "path": path, "optimizer": True}
    assert (
        "has weights without a state of the optimizer" in service.result(service.post("load_weights", **load))["error"]
    )
    assert loss_of(service.result(service.start_pass(model, 6, DATA))) == pytest.approx(loss)
    of = {"session_id": service.session, "sampling_session_seq_id": 1, "model_path": path}
    sampler = service.post("create_sampling_session", **of)["sampling_session_id"]
    prompt = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 2}}
    promise = service.post("asample", **prompt, sampling_session_id=sampler, seq_id=0)
    service.http.delete(f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/alone")
    assert "were deleted, or not saved yet" in service.result(promise)["error"]


def test_gradients_that_nothing_scales_are_not_computed_in_fp16(tmp_path):
    config = replace(config_of("model", tmp_path), engine=FSDPEngineConfig(dtype="fp16"))
    assert [problem.key for problem in config.problems("")] == ["engine.dtype"]


def test_a_folder_has_one_service(tmp_path):
    with open(tmp_path / "run.lock", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        (tmp_path / ".running" / "of-the-other").mkdir(parents=True)
        with pytest.raises(
            ConfigError, match=r"server.state_dir=.* another run writes into .* has not written its name"
        ):
            StateFiles(tmp_path)
    assert (tmp_path / ".running" / "of-the-other").is_dir()


def test_results_end_with_their_session(service, monkeypatch):
    """Also samples that wait; of live sessions the oldest results go that nobody fetched, beyond a bound."""
    other = service.post("create_session")["session_id"]
    samples = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 1}}
    ids = []
    for session, seqs in ((service.session, 1), (other, 3)):
        base = {"session_id": session, "sampling_session_seq_id": 0, "base_model": service.config.model.path}
        sampler = service.post("create_sampling_session", **base)["sampling_session_id"]
        for seq in range(seqs):
            ids.append(service.post("asample", **samples, sampling_session_id=sampler, seq_id=seq)["request_id"])
    service.post(f"sessions/{service.session}/finish", 204)
    monkeypatch.setattr("verl.plugins.serve.jobs.MAX_UNFETCHED_BYTES", 3000)
    service.compute()
    assert service.taken == [ids[1:]], "what waits of an ended session is not computed"
    # Each of the three has 1,024 bytes and its result: two fit.
    for request_id, status in zip(ids, (410, 410, 200, 200), strict=True):
        answer = service.http.post("/api/v1/retrieve_future", json={"request_id": request_id})
        assert answer.status_code == status
        assert (status == 200) or "results end with their session" in answer.json()["error"]
    service.post(f"sessions/{other}/finish", 204)
    assert service.http.post("/api/v1/retrieve_future", json={"request_id": ids[3]}).status_code == 410


def test_sessions_of_crashed_clients_end(service, monkeypatch):
    lost, alive = service.session, service.post("create_session")["session_id"]
    model = service.model(0)
    waiting = service.step(model, 1)
    monkeypatch.setattr("verl.plugins.serve.clients.SILENT_S", -1.0)
    service.post("create_session")
    assert lost in service.clients.session_ids(), "a request of it waits"
    assert alive not in service.clients.session_ids()
    service.result(waiting)
    service.post("create_session")
    assert lost not in service.clients.session_ids()
    assert service.board.models() == []
    monkeypatch.undo()
    alive = service.post("create_session")["session_id"]
    service.post("create_session")
    assert alive in service.clients.session_ids()


def test_bodies_are_bounded(service, monkeypatch):
    monkeypatch.setattr("verl.plugins.serve.app.MAX_BODY_BYTES", 2**20)
    for path in ("create_session", "forward_backward"):
        answer = service.http.post(f"/api/v1/{path}", content=b" " * 2**20 + b"{}")
        assert (answer.status_code, answer.json()["error"]) == (
            413,
            "the body has more than 1 MiB. Send less data at once.",
        )


def test_a_damaged_folder_hides_no_other(service):
    """The client's type of a run has ``corrupted``."""
    models = [service.model(index) for index in range(4)]
    for model in models:
        for seq, name in ((1, "a"), (2, "b")):
            service.result(service.post("save_weights", model_id=model, seq_id=seq, path=name))
    root = Path(service.config.server.state_dir)
    (root / models[0] / "weights" / "b" / "verl_adapter.json").write_text('{"spec": ')
    (root / models[1] / "run.json").write_text("{}")
    described = json.loads((root / models[3] / "run.json").read_text())
    (root / models[3] / "run.json").write_text(json.dumps(described | {"spec": None}))
    runs = {run["training_run_id"]: run for run in service.http.get("/api/v1/training_runs").json()["training_runs"]}
    assert [runs[model]["corrupted"] for model in models] == [True, True, False, True]
    assert [runs[model]["last_checkpoint"]["checkpoint_id"] for model in models] == [f"weights/{n}" for n in "abbb"]
    assert service.http.get(f"/api/v1/training_runs/{models[2]}").json()["lora_rank"] == 4
    saved_of = service.http.get(f"/api/v1/training_runs/{models[0]}/checkpoints").json()["checkpoints"]
    assert [checkpoint["checkpoint_id"] for checkpoint in saved_of] == ["weights/a"]


def test_what_does_not_exist_or_is_not_served_is_refused(service):
    lora, base = {"rank": 4}, service.config.model.path
    session = {"session_id": service.session, "model_seq_id": 7}
    prompt = {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 2}, "base_model": base}
    refused = [
        (
            "create_model",
            404,
            session | {"base_model": "gpt", "lora_config": lora},
            "base_model='gpt' is not served here",
        ),
        ("create_model", 400, session | {"base_model": base, "lora_config": {"rank": 5}}, "must be 1 to 4"),
        (
            "create_model",
            410,
            {"session_id": "s", "model_seq_id": 0, "base_model": base, "lora_config": lora},
            "no session",
        ),
        (
            "create_model",
            400,
            session | {"base_model": base, "lora_config": lora, "model_seq_id": 10**300},
            "model_seq_id: ",
        ),
        ("load_weights", 400, session | {"path": "/etc", "optimizer": True}, "is no path of saved weights"),
        (
            "load_weights",
            404,
            session | {"path": "tinker://a/weights/b", "optimizer": True},
            "there are no saved weights",
        ),
        ("load_weights", 400, session | {"path": "tinker://../weights/b", "optimizer": True}, "cannot be a name"),
        ("optim_step", 404, {"model_id": "x", "seq_id": 1, "adam_params": {}}, "there is no model 'x' here"),
        ("asample", 400, prompt | {"topk_prompt_logprobs": 3}, "topk_prompt_logprobs=3 is not served here"),
        (
            "asample",
            400,
            prompt | {"sampling_params": {"max_tokens": 40}},
            "max_tokens=40 must be 1 to 31 after 1 tokens",
        ),
        ("asample", 400, prompt | {"sampling_params": {"top_p": 0}}, "top_p=0.0 must be in (0, 1]"),
        ("asample", 400, prompt | {"prompt": {"chunks": [{"tokens": [999]}]}}, "prompt[0] is 999"),
        ("asample", 400, prompt | {"sampling_params": {"top_k": 10**20}}, "top_k: Input should be less than"),
        ("asample", 400, prompt | {"sampling_params": {"stop": [10**20]}}, "sampling_params.stop[0] is 1000"),
        ("create_model", 400, session | {"base_model": base, "lora_config": {"rank": 4, "seed": 10**20}}, "seed: "),
        ("optim_step", 400, {"model_id": "x", "seq_id": 1, "adam_params": {"learning_rate": 1e300}}, "learning_rate: "),
        ("optim_step", 400, {"model_id": "x", "seq_id": 1, "adam_params": {"eps": 0}}, "adam_params.eps: Input should"),
        ("retrieve_future", 410, {"request_id": "x"}, "there is no request 'x' here"),
        ("create_session", 400, {"tags": 3}, "tags: Input should be a valid list"),
    ]
    for path, status, body, message in refused:
        assert message in service.post(path, status, **body)["error"]
    assert service.http.get("/api/v1/healthz", headers={"X-API-Key": "tml-other"}).status_code == 401
    model = service.model(0)
    service.result(service.post("save_weights", model_id=model, seq_id=1, path="a"))
    again = {"model_id": model, "path": "a"}
    error = service.result(service.post("save_weights", seq_id=2, **again))["error"]
    assert f"tinker://{model}/weights/a is saved already. Choose another name" in error
    assert "error" not in service.result(service.post("save_weights", seq_id=3, overwrite=True, **again))
    assert [
        c["checkpoint_id"] for c in service.http.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"]
    ] == ["weights/a"]
    assert service.http.get("/api/v1/training_runs").json()["cursor"]["total_count"] == 1
    assert "limit='x' must be" in service.http.get("/api/v1/training_runs?limit=x").json()["error"]
    assert "is no JSON" in service.http.post("/api/v1/retrieve_future", content=b"{").json()["error"]
    assert service.http.delete(f"/api/v1/training_runs/{model}/checkpoints/weights/a").status_code == 204
    service.post(f"sessions/{service.session}/finish", 204, reason={"type": "success"})
    assert "there is no model" in service.post("optim_step", 404, model_id=model, seq_id=2, adam_params={})["error"]
