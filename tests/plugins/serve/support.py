"""A service in this process without threads: a request is answered as soon as its result is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from verl.config import FSDPEngineConfig, HFModelConfig, SamplerEngineConfig, ServeConfig, ServerConfig
from verl.config.trainer import PlacementConfig
from verl.plugins.serve.app import tinker_app
from verl.plugins.serve.clients import Clients
from verl.plugins.serve.computing import Computing
from verl.plugins.serve.files import StateFiles
from verl.plugins.serve.jobs import JobBoard
from verl.plugins.serve.messages import _MESSAGES
from verl.plugins.serve.service import limits_of
from verl.plugins.serve.worker import AdapterWorker
from verl.single_controller import local

KEY = "tml-of-the-tests"


def config_of(model: str, state_dir: Path, **server: Any) -> ServeConfig:
    """Settings of a service on the CPU."""
    settings = {"max_models": 2, "max_lora_rank": 4, "max_length": 32, "max_tokens_per_pass": 80} | server
    return ServeConfig(
        trainer=PlacementConfig(n_gpus_per_node=1, device="cpu", controller="local"),
        server=ServerConfig(state_dir=str(state_dir), **settings),
        model=HFModelConfig(path=model),
        engine=FSDPEngineConfig(dtype="float32"),
        rollout=SamplerEngineConfig(dtype="float32", max_num_seqs=8),
    )


class ServiceHere:
    """The service, and a client that asks it by plain HTTP."""

    def __init__(self, config: ServeConfig, group: Any) -> None:
        self.config, self.board = config, JobBoard()
        self.files = StateFiles(Path(config.server.state_dir))
        self.computing = Computing(config, self.board, self.files, group)
        self.clients = Clients(config, self.board, self.files, limits_of(config))
        self.http = TestClient(tinker_app(self.clients, KEY), headers={"X-API-Key": KEY})
        self.taken: list[list[str]] = []
        """Request ids of the jobs that were computed at once."""
        self.session = self.post("create_session", tags=[], sdk_version="0.38.0")["session_id"]

    def post(self, path: str, status: int = 200, /, **body: Any) -> Any:
        """Send JSON, check the status, and return the answer."""
        answer = self.http.post(f"/api/v1/{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.content else None

    def compute(self) -> None:
        """Compute what waits."""
        while jobs := self.board.take(self.config.server.max_models, 64, 0.0):
            self.taken.append([job.request_id for job in jobs])
            self.computing.do(jobs)

    def result(self, promise: Mapping[str, Any]) -> Any:
        """Return the result of a request: JSON, or log-probs and loss, or samples."""
        self.compute()
        answer = self.http.post("/api/v1/retrieve_future", json={"request_id": promise["request_id"]})
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "application/json":
            return answer.json()
        name = "SampleResponse" if "sample_sequence_ids" in promise else "ForwardBackwardOutput"
        return _MESSAGES[name].FromString(answer.content)

    def model(self, model_seq_id: int, rank: int = 4, seed: int = 1, **lora: Any) -> str:
        """Make a model of the session; return its id."""
        settings = {"rank": rank, "seed": seed} | lora
        promise = self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=model_seq_id,
            base_model=self.config.model.path,
            lora_config=settings,
        )
        return self.result(promise)["model_id"]

    def start_pass(self, model: str, seq: int, data: Sequence[bytes], loss: str = "cross_entropy", **more: Any) -> Any:
        """Send a pass; return the promise."""
        return self.send_pass(model, seq, data, loss, **more).json()

    def send_pass(
        self, model: str, seq: int, data: Sequence[bytes], loss: str = "cross_entropy", forward_only: bool = False,
        **settings: float,
    ) -> Any:  # fmt: skip
        """Send a pass; return the answer."""
        message = _MESSAGES["ForwardBackwardRequest"](
            model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only
        )
        for datum in data:
            message.data.add().ParseFromString(datum)
        for name, value in settings.items():
            message.loss_fn_config.add(key=name).value.number = value
        headers = {"content-type": "application/x-protobuf"}
        return self.http.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=headers)

    def step(self, model: str, seq: int, lr: float = 0.01, **adam: float) -> Any:
        """Send an optimizer step; return the promise."""
        return self.post("optim_step", model_id=model, seq_id=seq, adam_params={"learning_rate": lr} | adam)


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> bytes:
    """A sequence whose targets are its own next tokens, unless ``inputs`` has ``target_tokens``."""
    message = _MESSAGES["Datum"]()
    tensors = {"target_tokens": tokens[1:]} | inputs
    message.model_input.add().text.tokens = np.asarray(tokens[:-1], dtype=np.int32).tobytes()
    for name, values in tensors.items():
        is_whole = all(isinstance(value, int) for value in values)
        array = np.asarray(values, dtype=np.int64 if is_whole else np.float32)
        tensor = message.loss_fn_inputs.add(key=name).value
        tensor.dense, tensor.dtype = array.tobytes(), 2 if is_whole else 1
    return message.SerializeToString()


def log_probs_of(output: Any) -> list[np.ndarray]:
    """The log-probs of each datum in a result."""
    [record] = output.loss_fn_outputs
    [field] = record.fields
    values, bounds = np.frombuffer(field.value.data, np.float32), np.frombuffer(field.value.offsets, np.int64) // 4
    return [values[start:stop] for start, stop in pairwise(bounds)]


def loss_of(output: Any) -> float:
    """The loss in a result."""
    [metric] = output.metrics
    assert metric.key == "loss:sum"
    return metric.value


def start_group(config: ServeConfig) -> Any:
    """A worker of the service in this process."""
    group = local.WorkerGroup(
        ray_cls_with_init=local.WorkerGroup.describe(AdapterWorker, config=config, device_name="cpu")
    )
    group.init_model()
    return group
