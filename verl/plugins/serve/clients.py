"""Requests of clients: sessions, models, saved weights. They are checked here, and put on the board."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from verl.base.types import JsonMapping, JsonObject
from verl.config import ServeConfig
from verl.errors import ConfigError
from verl.plugins.serve import protocol
from verl.plugins.serve.adapters import AdapterSpec
from verl.plugins.serve.computing import LoadTask, SampleTask, SaveTask
from verl.plugins.serve.data import ModelLimits, check_tokens, checked_rows
from verl.plugins.serve.files import SavedPath, StateFiles, checked_name, now
from verl.plugins.serve.jobs import Job, JobBoard, JobKind, ModelState
from verl.plugins.serve.messages import TrainingData
from verl.plugins.serve.refusals import GONE, RefusedError
from verl.plugins.serve.worker import AdamSettings
from verl.workers.rollout.request import SamplingParams, sample_seed

NO_HEAD = (
    "train_unembed has no effect here: adapters are on the linear layers of attention and MLPs, and the output layer "
    "stays that of the base model."
)
SILENT_S = 3600.0
"""A session that is silent for so long ends when another begins; clients send a heartbeat every few seconds."""
_NOT_HERE = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "target_prompt_logprobs": None,
    "prompt_alt_tokens_k": 0,
}
"""Parameters of a sample that must have these values."""


@dataclass
class ClientSession:
    """Session of a client."""

    session_id: str
    user_metadata: JsonMapping | None
    display_name: str | None
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    heard_at: float = field(default_factory=time.monotonic)
    """Time of the last heartbeat or request."""


@dataclass
class Sampler:
    """A sampling session."""

    sampler_id: str
    weights: Path | None
    """Folder of the adapter; None samples with the base model."""
    path: str | None
    """The ``tinker://`` path that the client asked for."""
    session_id: str | None = None
    """The session that opened it; None for a single request without one."""
    members: int = 1
    """Processes that take part."""


class Clients:
    """All sessions of a service; used by the thread of the web server.

    Args:
        config: of the service.
        board: where jobs go.
        files: what clients save.
        limits: of the base model.
    """

    def __init__(self, config: ServeConfig, board: JobBoard, files: StateFiles, limits: ModelLimits) -> None:
        self.board = board
        self._config, self._files, self._limits = config, files, limits
        self._sessions: dict[str, ClientSession] = {}
        self._samplers: dict[str, Sampler] = {}

    # ---- the service

    def capabilities(self) -> JsonMapping:
        """Describe the base model."""
        model = {
            "model_name": self._config.name,
            "max_context_length": self._limits.max_length,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    def flags(self) -> JsonMapping:
        """Tell clients how to send requests."""
        return {
            "pjwt_auth_enabled": False,
            "use_pyqwest_transport": False,
            "proto_compress_fwdbwd": False,
            "parallel_fwdbwd_chunks": True,
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": False,
            "sample_join_sampling_session": True,
        }

    # ---- sessions

    def create_session(self, body: protocol.CreateSession) -> JsonMapping:
        """Open a session."""
        self._end_silent()
        session_id = f"s{secrets.token_hex(8)}"
        self._sessions[session_id] = ClientSession(session_id, body.user_metadata, body.display_name)
        return {"session_id": session_id, "type": "create_session", "info_message": NO_HEAD}

    def heartbeat(self, body: protocol.OfSession) -> JsonMapping:
        """Answer that a session goes on."""
        self._session(body.session_id)
        return {"type": "session_heartbeat"}

    def _end_silent(self) -> None:
        """End the sessions of clients that have crashed: they send no heartbeats, and have no requests that wait."""
        heard_since = time.monotonic() - SILENT_S
        for session_id in [s.session_id for s in self._sessions.values() if s.heard_at < heard_since]:
            if not self.board.is_waiting(session_id):
                self.finish(session_id)

    def _session(self, session_id: str) -> ClientSession:
        if session_id not in self._sessions:
            raise RefusedError(f"there is no session {session_id!r:.100}. Make a new ServiceClient.", status=GONE)
        session = self._sessions[session_id]
        session.heard_at = time.monotonic()
        return session

    def finish(self, session_id: str) -> None:
        """End a session: its models, requests, results and the weights that only it samples with are dropped."""
        session = self._session(session_id)
        for model in self.board.drop_session(session_id):
            if model.stash is not None:
                shutil.rmtree(model.stash, ignore_errors=True)
        for sampler_id in session.samplers:
            sampler = self._samplers.pop(sampler_id, None)
            if sampler is not None and sampler.weights is not None and sampler.weights.parent == self._files.running:
                shutil.rmtree(sampler.weights, ignore_errors=True)
        del self._sessions[session_id]

    def session_ids(self) -> list[str]:
        """Return the open sessions."""
        return list(self._sessions)

    def session(self, session_id: str) -> JsonMapping:
        """Describe a session."""
        session = self._session(session_id)
        return {
            "training_run_ids": session.models,
            "sampler_ids": session.samplers,
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    # ---- models

    def create_model(self, body: protocol.CreateModel) -> Job:
        """Make a model."""
        self._check_base(body.base_model)
        self._check_optimizer(body.optimizer_config)
        lora = body.lora_config
        if lora is None:
            raise RefusedError("lora_config is missing: this service trains LoRA adapters, not all weights.")
        most = self._config.server.max_lora_rank
        if not 1 <= lora.rank <= most:
            raise RefusedError(
                f"lora_config.rank={lora.rank} must be 1 to {most} (server.max_lora_rank of the service)."
            )
        if not (lora.train_attn or lora.train_mlp):
            raise RefusedError(f"nothing would be trained: set train_attn or train_mlp. {NO_HEAD}")
        model_id = self._new_id(body.session_id, body.model_seq_id)
        seed = lora.seed if lora.seed is not None else sample_seed(self._config.server.seed, 0, model_id, 0)
        spec = AdapterSpec(
            base_model=self._config.name,
            rank=lora.rank,
            seed=seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
        )
        return self._start_model(model_id, body.session_id, spec, body.user_metadata, "create", None)

    def _new_id(self, session_id: str, model_seq_id: int) -> str:
        self._session(session_id)
        return f"{session_id}:train:{model_seq_id}"  # clients compute it too

    def _start_model(
        self,
        model_id: str,
        session_id: str,
        spec: AdapterSpec,
        user_metadata: JsonMapping | None,
        kind: JobKind,
        payload: LoadTask | None,
    ) -> Job:
        new = ModelState(model_id=model_id, session_id=session_id, spec=spec, user_metadata=user_metadata)
        model = self.board.add_model(new)
        if model is new:
            self._session(session_id).models.append(model_id)
            described = {"training_run_id": model_id, "base_model": spec.base_model, "created": now()}
            self._files.write_run(model_id, described | {"spec": asdict(spec), "user_metadata": user_metadata})
        return self.board.put(Job(request_id=f"{model_id}:0", kind=kind, payload=payload, model=model))

    def _check_base(self, name: str | None) -> None:
        names = {self._config.name, self._config.model.path}
        if name is not None and name not in names:
            raise RefusedError(f"base_model={name!r:.200} is not served here; {self._config.name!r} is.", status=404)

    def _check_optimizer(self, optimizer: protocol.OptimizerKind | None) -> None:
        if optimizer is not None and optimizer.type != "adamw":
            raise RefusedError(f"the optimizer {optimizer.type!r:.100} is not served here; adamw is.")

    def info(self, body: protocol.OfModel) -> JsonMapping:
        """Describe a model."""
        model = self.board.model(body.model_id)
        tokenizer = self._config.model.tokenizer_path or self._config.model.path
        return {
            "type": "get_info",
            "model_data": {"arch": "lora", "model_name": model.spec.base_model, "tokenizer_id": tokenizer},
            "model_id": model.model_id,
            "is_lora": True,
            "lora_rank": model.spec.rank,
            "model_name": model.spec.base_model,
        }

    def _ordered(self, model_id: str, seq: int, kind: JobKind, payload: object) -> Job:
        model = self.board.model(model_id)
        return self.board.put(Job(request_id=f"{model_id}:{seq}", kind=kind, payload=payload, model=model, seq=seq))

    def train(self, data: TrainingData) -> Job:
        """Make a pass with or without gradients."""
        self.board.model(data.model_id)
        rows = checked_rows(data.data(), data.loss, data.settings, self._limits)
        kind: JobKind = "forward" if data.forward_only else "forward_backward"
        return self._ordered(data.model_id, data.seq_id, kind, rows)

    def optim_step(self, body: protocol.OptimStep) -> Job:
        """Make an optimizer step."""
        if body.adam_params is None:
            raise RefusedError("adam_params is missing: this service steps with AdamW.")
        return self._ordered(body.model_id, body.seq_id, "optim_step", AdamSettings(**dict(body.adam_params)))

    # ---- saved weights

    def save_state(self, body: protocol.SaveWeights) -> Job:
        """Save weights and optimizer."""
        name = body.path or f"step-{body.seq_id}"
        path = self._path_to_save(body, "weights", name)
        answer = {"path": path.text, "type": "save_weights"}
        task = SaveTask(self._files.folder(path), answer, True, body.user_metadata, body.overwrite)
        return self._ordered(body.model_id, body.seq_id, "save", task)

    def save_for_sampler(self, body: protocol.SaveWeights) -> Job:
        """Save weights under a name, or for a new sampling session."""
        model = self.board.model(body.model_id)
        answer: JsonObject = {"type": "save_weights_for_sampler"}
        if body.path is not None:
            path = self._path_to_save(body, "sampler_weights", body.path)
            task = SaveTask(self._files.folder(path), answer | {"path": path.text}, False, body.user_metadata)
            return self._ordered(body.model_id, body.seq_id, "save", task)
        if body.sampling_session_seq_id is None:
            raise RefusedError("give path, or sampling_session_seq_id for weights without a name.")
        sampler_id = f"{model.session_id}:sample:{body.sampling_session_seq_id}"
        # Sessions of kind "inflight" sample with the newest weights that were saved so.
        name = f"inflight-{model.model_id}" if body.kind == "inflight" else sampler_id
        folder = self._files.running / name
        job = self._ordered(
            body.model_id,
            body.seq_id,
            "save",
            SaveTask(folder, answer | {"sampling_session_id": sampler_id}, False),
        )
        self._add_sampler(Sampler(sampler_id, folder, None, model.session_id))
        return job

    def _path_to_save(self, body: protocol.SaveWeights, kind: str, name: str) -> SavedPath:
        self.board.model(body.model_id)
        return SavedPath(body.model_id, kind, checked_name(name))

    def load(self, body: protocol.LoadWeights) -> Job:
        """Load saved weights into a model, or into a new one."""
        path = SavedPath.parse(body.path)
        self._check_base(body.base_model)
        self._check_optimizer(body.optimizer_config)
        spec, task = self._files.spec(path), LoadTask(path, body.optimizer)
        self._check_spec(spec, path)
        if body.session_id is not None and body.model_seq_id is not None:
            model_id = self._new_id(body.session_id, body.model_seq_id)
            return self._start_model(model_id, body.session_id, spec, body.user_metadata, "load", task)
        if body.model_id is None or body.seq_id is None:
            raise RefusedError("give session_id and model_seq_id for a new model, or model_id and seq_id.")
        return self._ordered(body.model_id, body.seq_id, "load", task)

    def _check_spec(self, spec: AdapterSpec, path: SavedPath) -> None:
        self._check_base(spec.base_model)
        if spec.rank > self._config.server.max_lora_rank:
            raise RefusedError(
                f"{path.text} has rank {spec.rank}, and this service has room for {self._config.server.max_lora_rank}. "
                "Start it with a larger server.max_lora_rank."
            )

    def weights_info(self, body: protocol.OfPath) -> JsonMapping:
        """Describe saved weights."""
        spec = self._files.spec(SavedPath.parse(body.tinker_path))
        return {
            "base_model": spec.base_model,
            "is_lora": True,
            "lora_rank": spec.rank,
            "train_unembed": False,
            "train_mlp": spec.train_mlp,
            "train_attn": spec.train_attn,
        }

    def runs(self, query: Mapping[str, str]) -> JsonMapping:
        """List models of which something was written."""
        page = {"limit": query.get("limit", "20"), "offset": query.get("offset", "0")}
        for name, text in page.items():
            if not text.isdecimal():
                raise RefusedError(f"{name}={text!r:.60} must be a whole number of at least 0.")
        limit, offset = int(page["limit"]), int(page["offset"])
        runs = self._files.runs()
        shown = [self._described(run) for run in runs[offset : offset + limit]]
        return {"training_runs": shown, "cursor": {"offset": offset, "limit": limit, "total_count": len(runs)}}

    def run(self, run_id: str) -> JsonMapping:
        """Describe a model of which something was written."""
        for run in self._files.runs():
            if run["training_run_id"] == run_id:
                return self._described(run)
        raise RefusedError(f"there is no training run {run_id!r:.200}.", status=404)

    def _described(self, run: JsonMapping) -> JsonMapping:
        newest: JsonObject = {}
        checkpoints, damaged = self._files.checkpoints(run["training_run_id"])
        for checkpoint in checkpoints:
            newest[checkpoint["checkpoint_type"]] = checkpoint
        return {
            "corrupted": bool(damaged) or run.get("corrupted", False),
            "training_run_id": run["training_run_id"],
            "base_model": run["base_model"],
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": run["spec"]["rank"],
            "last_request_time": run["created"],
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
            "user_metadata": run["user_metadata"],
        }

    def checkpoints(self, run_id: str) -> JsonMapping:
        """List what is saved of a model."""
        return {"checkpoints": self._files.checkpoints(checked_name(run_id))[0]}

    def delete(self, run_id: str, checkpoint: str) -> None:
        """Delete saved weights."""
        self._files.delete(SavedPath.parse(f"tinker://{run_id}/{checkpoint}"))

    # ---- sampling

    def create_sampling_session(self, body: protocol.CreateSamplingSession) -> JsonMapping:
        """Open a sampling session."""
        session = self._session(body.session_id)
        sampler_id = f"{session.session_id}:sample:{body.sampling_session_seq_id}"
        self._add_sampler(self._sampler_of(sampler_id, body.model_path, body.base_model, session.session_id))
        return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}

    def _sampler_of(
        self, sampler_id: str, model_path: str | None, base_model: str | None, session_id: str | None = None
    ) -> Sampler:
        self._check_base(base_model)
        if model_path is None:
            if base_model is None:
                raise RefusedError("give model_path or base_model.")
            return Sampler(sampler_id, None, None, session_id)
        path = SavedPath.parse(model_path)
        self._check_spec(self._files.spec(path), path)
        return Sampler(sampler_id, self._files.saved(path), model_path, session_id)

    def _add_sampler(self, sampler: Sampler) -> None:
        if sampler.sampler_id not in self._samplers and sampler.session_id is not None:
            self._samplers[sampler.sampler_id] = sampler
            self._session(sampler.session_id).samplers.append(sampler.sampler_id)

    def _sampler(self, sampler_id: str) -> Sampler:
        if sampler_id not in self._samplers:
            raise RefusedError(f"there is no sampling session {sampler_id!r:.200} here (any more).", status=404)
        return self._samplers[sampler_id]

    def join_sampling_session(self, body: protocol.JoinSamplingSession) -> JsonMapping:
        """Give another process of a sampling session its index."""
        sampler = self._sampler(body.sampling_session_id)
        joined, sampler.members = sampler.members, sampler.members + 1
        return {"client_counter": joined, "type": "join_sampling_session"}

    def sampler(self, sampler_id: str) -> JsonMapping:
        """Describe a sampling session."""
        sampler = self._sampler(sampler_id)
        return {"sampler_id": sampler_id, "base_model": self._config.name, "model_path": sampler.path}

    def sample(self, body: protocol.SampleRequest) -> Job:
        """Draw responses."""
        if body.sampling_session_id is not None:
            sampler, name = self._sampler(body.sampling_session_id), f"{body.sampling_session_id}:{body.seq_id}"
        else:
            sampler = self._sampler_of("", body.model_path, body.base_model)
            name = f"sample:{secrets.token_hex(8)}"
        for parameter, only in _NOT_HERE.items():
            if (value := getattr(body, parameter)) != only:
                raise RefusedError(f"{parameter}={value!r:.60} is not served here; leave it out.")
        if body.record_stability_info:
            raise RefusedError("record_stability_info is not served here; leave it out.")
        task = self._sample_task(body, name)
        return self.board.put(
            Job(
                request_id=name,
                kind="sample",
                payload=task,
                responses=body.num_samples,
                session_id=sampler.session_id,
                weights=sampler.weights,
            )
        )

    def _sample_task(self, body: protocol.SampleRequest, name: str) -> SampleTask:
        if other := [chunk.type for chunk in body.prompt.chunks if chunk.type != "encoded_text"]:
            raise RefusedError(f"the prompt has a chunk of type {other[0]!r:.60}; this service reads text alone.")
        prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        settings, limit = body.sampling_params, self._limits.max_length
        if not prompt or len(prompt) >= limit:
            raise RefusedError(
                f"the prompt has {len(prompt)} tokens; it needs 1 to {limit - 1}, and prompt and response together at "
                f"most {limit} (server.max_length of the service)."
            )
        check_tokens(np.asarray(prompt), self._limits, "prompt")
        room = limit - len(prompt)
        if settings.max_tokens is not None and not 1 <= settings.max_tokens <= room:
            raise RefusedError(f"max_tokens={settings.max_tokens} must be 1 to {room} after {len(prompt)} tokens.")
        stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop or []
        texts, ids = [s for s in stop if isinstance(s, str)], [s for s in stop if isinstance(s, int)]
        check_tokens(np.asarray(ids), self._limits, "sampling_params.stop")
        seed, source = (self._config.server.seed, name) if settings.seed is None else (settings.seed, "seed")
        try:
            sampling = tuple(
                SamplingParams(
                    max_tokens=settings.max_tokens or room,
                    seed=sample_seed(seed, 0, source, index),
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    top_k=settings.top_k,
                    stop=tuple(texts),
                    stop_token_ids=tuple(ids),
                    ignore_eos=settings.stop == [],
                )
                for index in range(body.num_samples)
            )
        except ConfigError as error:
            raise RefusedError(str(error)) from error
        wants_prompt = bool(body.prompt_logprobs)
        last = body.prompt_logprobs_last_n
        if last is not None and not (wants_prompt and 1 <= last <= len(prompt) - 1):
            raise RefusedError(f"prompt_logprobs_last_n={last} needs prompt_logprobs, and 1 to {len(prompt) - 1}.")
        scored = (last or len(prompt) - 1) if wants_prompt else 0
        return SampleTask(prompt, sampling, scored, wants_prompt)
