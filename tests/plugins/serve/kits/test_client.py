"""The client of Tinker from PyPI, unmodified, against ``verl serve`` in a process of its own: `make test-tinker`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from verl.testing.models import tiny_model_dir

tinker = pytest.importorskip("tinker", reason="the client of Tinker is in an environment of its own: make test-tinker")

NAME = "tiny/char"
TEXTS = [f"{i}+{i}={2 * i}." for i in range(8)]


class Server:
    """``verl serve`` in a process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, tiny_model_dir(folder / "model")
        self.start()

    def start(self) -> None:
        settings = [
            *(
                "trainer.controller=local",
                "trainer.device=cpu",
                f"model.path={self.model}",
                f"server.model_name={NAME}",
            ),
            *(f"server.state_dir={self.folder / 'state'}", "server.port=0", "server.max_length=64"),
            *("server.max_lora_rank=8", "server.max_models=2"),
        ]
        self.log = self.folder / "serve.log"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment.pop("TINKER_API_KEY", None)
        with self.log.open("w") as log:
            command = [sys.executable, "-m", "verl.trainer.main_serve", *settings]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, env=environment)
        deadline = time.monotonic() + 120
        while not (printed := re.search(r"TINKER_BASE_URL=(\S+) TINKER_API_KEY=(\S+)", self.log.read_text())):
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.2)
        self.url, self.key = printed.groups()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def client(self) -> Any:
        return tinker.ServiceClient(base_url=self.url, api_key=self.key)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("serve"))
    yield server
    server.kill()


def supervised(tokenizer: Any, texts: Sequence[str]) -> list[Any]:
    """Data on which all targets count."""
    data = []
    for text in texts:
        ids = tokenizer.encode(text)
        inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    return data


def train(model: Any, data: list[Any], steps: int, loss: str = "cross_entropy", lr: float = 5e-3) -> list[float]:
    """Send passes and steps at once, and return the losses."""
    passes, updates = [], []
    for _ in range(steps):
        passes.append(model.forward_backward(data, loss))
        updates.append(model.optim_step(tinker.AdamParams(learning_rate=lr)))
    for update in updates:
        update.result()
    return [future.result().metrics["loss:sum"] for future in passes]


def test_supervised_training_then_samples(server):
    model = server.client().create_lora_training_client(base_model=NAME, rank=8, seed=1).result()
    tokenizer = model.get_tokenizer()
    losses = train(model, supervised(tokenizer, TEXTS), 40)
    tokens = sum(len(tokenizer.encode(text)) - 1 for text in TEXTS)
    print(
        "\nsupervised, loss per token:",
        *(f"{loss / tokens:.3f}" for loss in losses[::10]),
        f"{losses[-1] / tokens:.3f}",
    )
    assert losses[-1] < 0.2 * losses[0]
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(tokenizer.encode("3+3="))
    params = tinker.SamplingParams(max_tokens=4, temperature=0.0, stop=".")
    drawn = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result()
    texts = [tokenizer.decode(sequence.tokens) for sequence in drawn.sequences]
    print("greedy answers to 3+3=:", texts)
    assert texts == ["6.", "6."]
    assert [sequence.stop_reason for sequence in drawn.sequences] == ["stop", "stop"]
    assert drawn.prompt_logprobs[0] is None
    assert len(drawn.prompt_logprobs) == 4
    assert sampler.compute_logprobs(prompt).result() == drawn.prompt_logprobs
    for sequence in drawn.sequences:  # the log-probs of the trainer are those of the sampler
        ids = [*tokenizer.encode("3+3="), *sequence.tokens]
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
        )
        [scored] = model.forward([datum], "cross_entropy").result().loss_fn_outputs
        assert sequence.logprobs == pytest.approx(scored["logprobs"].tolist()[-len(sequence.tokens) :], abs=1e-3)


def test_a_loss_of_the_client_and_weights_that_follow_the_training(server):
    """``forward_backward_custom`` is cross entropy if the loss says so; a sampler "inflight" has the newest weights."""
    models = [server.client().create_lora_training_client(base_model=NAME, rank=4, seed=6).result() for _ in range(2)]
    data = supervised(models[0].get_tokenizer(), TEXTS)

    def custom(data: list[Any], log_probs: list[Any]) -> tuple[Any, dict[str, float]]:
        return -sum(values.sum() for values in log_probs), {}

    sampler = models[0].save_weights_and_get_sampling_client(kind="inflight").result()
    prompt = data[0].model_input
    before = sampler.compute_logprobs(prompt).result()
    for _ in range(3):
        models[0].forward_backward_custom(data, custom).result()
        models[0].optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    train(models[1], data, 3)
    ends = [model.forward(data, "cross_entropy").result().metrics["loss:sum"] for model in models]
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)
    assert sampler.compute_logprobs(prompt).result() == before
    models[0].save_weights_and_get_sampling_client(kind="inflight").result()
    after = sampler.compute_logprobs(prompt).result()
    assert sum(after[1:]) > sum(before[1:]) + 1


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_reinforcement_learning(server, loss):
    """The reward is the share of digits in a response; each step samples with the newest weights."""
    model = server.client().create_lora_training_client(base_model=NAME, rank=4, seed=2).result()
    tokenizer = model.get_tokenizer()
    prompt, rewards_of_steps = tokenizer.encode("Digits: "), []
    for _ in range(20):
        sampler = model.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=8, stop=[])
        sequences = sampler.sample(tinker.ModelInput.from_ints(prompt), 32, params).result().sequences
        texts = [[tokenizer.decode([token]) for token in sequence.tokens] for sequence in sequences]
        rewards = [sum(character.isdigit() for character in text) / len(text) for text in texts]
        mean, data = sum(rewards) / len(rewards), []
        rewards_of_steps.append(mean)
        for sequence, reward in zip(sequences, rewards, strict=True):
            ids, before = [*prompt, *sequence.tokens], len(prompt) - 1
            inputs = {
                "target_tokens": ids[1:],
                "logprobs": [0.0] * before + sequence.logprobs,
                "advantages": [0.0] * before + [reward - mean] * len(sequence.tokens),
            }
            data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
        train(model, data, 1, loss, lr=1e-2)
    print(
        f"\n{loss}, mean reward:", *(f"{reward:.2f}" for reward in rewards_of_steps[::4]), f"{rewards_of_steps[-1]:.2f}"
    )
    assert sum(rewards_of_steps[-3:]) / 3 > sum(rewards_of_steps[:3]) / 3 + 0.3


def test_clients_at_once_are_clients_apart(server):
    """Three models, with places for two, in three threads: the losses are those of one model after the other."""
    parts = [TEXTS[:3], TEXTS[3:5], TEXTS[5:]]

    def of_client(index: int) -> list[float]:
        model = server.client().create_lora_training_client(base_model=NAME, rank=4 + index, seed=index).result()
        return train(model, supervised(model.get_tokenizer(), parts[index]), 6)

    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(of_client, range(3)))
    apart = [of_client(index) for index in range(3)]
    largest = max(
        abs(a - b) / abs(b) for one, other in zip(together, apart, strict=True) for a, b in zip(one, other, strict=True)
    )
    print(f"\nthree clients at once and apart: largest relative difference of a loss {largest:.1e}")
    assert largest < 1e-5


def test_a_state_outlives_kill_9(server):
    """The server is killed and started again; training goes on from the saved state as if it had not been."""
    model = server.client().create_lora_training_client(base_model=NAME, rank=8, seed=5).result()
    data = supervised(model.get_tokenizer(), TEXTS)
    train(model, data, 3)
    path = model.save_state("third").result().path
    expected = train(model, data, 3)
    server.kill()
    server.start()
    client = server.client()
    again = client.create_training_client_from_state_with_optimizer(path).result()
    went_on = train(again, data, 3)
    print(f"\nafter kill -9, from {path}:", *went_on)
    print("without it:", *expected)
    assert went_on == expected
    weights_alone = client.create_training_client_from_state(path).result()
    assert train(weights_alone, data, 3)[0] == expected[0]
    rest = tinker.RestClient(base_url=server.url, api_key=server.key)
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 8


def test_errors_are_those_of_the_client(server):
    client = server.client()
    with pytest.raises(tinker.NotFoundError, match="'other/model' is not served here"):
        client.create_lora_training_client(base_model="other/model").result()
    with pytest.raises(tinker.BadRequestError, match="must be 1 to 8"):
        client.create_lora_training_client(base_model=NAME, rank=9).result()
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=server.url, api_key="tml-wrong").create_sampling_client(base_model=NAME).result()
    model = client.create_lora_training_client(base_model=NAME, rank=2).result()
    data = supervised(model.get_tokenizer(), TEXTS)
    refused = model.forward_backward(data, "gspo")
    step = model.optim_step(tinker.AdamParams())
    with pytest.raises(tinker.BadRequestError, match="there is no loss 'gspo' here"):
        refused.result()
    with pytest.raises(tinker.RequestFailedError, match="no step was made"):
        step.result()
    assert train(model, data, 2)[1] > 0, "the client goes on"
