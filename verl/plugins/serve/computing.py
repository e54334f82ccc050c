"""Computation of jobs by the ranks, and placement of adapters in their memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from verl.base.types import JsonMapping
from verl.config import ServeConfig
from verl.errors import NonFiniteError, ProcessLostError, ResourceError, VerlError
from verl.plugins.serve.adapters import SPEC_FILE
from verl.plugins.serve.data import TrainingRow, batch_of
from verl.plugins.serve.files import SavedPath, StateFiles, now
from verl.plugins.serve.jobs import Job, JobBoard, ModelState, Result
from verl.plugins.serve.messages import MEDIA_TYPE, Sampled, write_samples, write_training_result
from verl.plugins.serve.refusals import RefusedError
from verl.plugins.serve.worker import AdamSettings
from verl.protocol import DataProto
from verl.workers.engine.fsdp.adapter_slots import NO_SLOT
from verl.workers.rollout.request import RolloutOutput, RolloutRequest, SamplingParams

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup


@dataclass(frozen=True)
class LoadTask:
    """Load saved weights into a model."""

    path: SavedPath
    with_optimizer: bool


@dataclass(frozen=True)
class SaveTask:
    """Save the weights of a model."""

    folder: Path
    answer: JsonMapping
    """Body of the answer to the client."""
    with_optimizer: bool
    user_metadata: JsonMapping | None = None
    overwrite: bool = True
    """True if it replaces weights with its name."""


@dataclass(frozen=True)
class SampleTask:
    """Draw responses to a prompt."""

    prompt: list[int]
    sampling: tuple[SamplingParams, ...]
    """Sampling parameters of each response."""
    scored: int = 0
    """Number of the prompt's last tokens that are scored too."""
    wants_prompt: bool = False
    """True if the client asks for log-probs of the prompt."""


class Computing:
    """Answers jobs by a worker group; used by one thread.

    Args:
        config: of the service.
        board: where jobs come from.
        files: what clients save.
        group: the workers.
    """

    def __init__(self, config: ServeConfig, board: JobBoard, files: StateFiles, group: WorkerGroup) -> None:
        self.group = group
        self._board, self._files = board, files
        self._slots = config.server.max_models
        self._uses = 0

    def do(self, jobs: Sequence[Job]) -> None:
        """Answer jobs of one kind, each with its result or its error.

        Raises:
            ProcessLostError: a rank died; the jobs were answered with that.
        """
        jobs = [job for job in jobs if not job.result.done()]  # others ended with their session
        if not jobs:
            return
        try:
            outcomes = self._outcomes(jobs)
        except ProcessLostError as error:
            for job in jobs:
                self._fail(job, error)
            raise
        except VerlError as error:
            if len(jobs) == 1:
                self._fail(jobs[0], error)
                return
            for index, job in enumerate(jobs):  # one of them may be at fault
                try:
                    self.do([job])
                except ProcessLostError as lost:
                    for waiting in jobs[index + 1 :]:
                        self._fail(waiting, lost)
                    raise
            return
        for job, outcome in zip(jobs, outcomes, strict=True):
            self._board.answer(job, outcome)

    def _fail(self, job: Job, error: VerlError) -> None:
        if job.kind == "forward_backward" and job.model is not None:
            job.model.lacks_gradients = True
        self._board.answer(job, error)

    def _outcomes(self, jobs: Sequence[Job]) -> Sequence[Result]:
        kind = jobs[0].kind
        for job in jobs:
            if job.model is not None:
                self._uses += 1
                job.model.last_used = self._uses
        if kind == "sample":
            return self._sample(jobs)
        if kind in ("forward", "forward_backward"):
            return self._train(jobs, with_gradients=kind == "forward_backward")
        [job] = jobs
        model = cast(ModelState, job.model)
        if kind == "create":
            slot = self._free_slot([model])
            self.group.create_adapter(slot, model.spec)
            model.slot = slot
            return [_json({"model_id": model.model_id, "type": "create_model"})]
        if kind == "load":
            return [self._load(model, cast(LoadTask, job.payload))]
        self._place([model])
        if kind == "optim_step":
            return [self._step(model, cast(AdamSettings, job.payload))]
        task = cast(SaveTask, job.payload)
        if not task.overwrite and (task.folder / SPEC_FILE).is_file():
            raise RefusedError(
                f"{task.answer['path']} is saved already. Choose another name, or save_state(..., overwrite=True)."
            )
        notes = {"time": now(), "user_metadata": task.user_metadata}
        self.group.save_adapter(model.slot, str(task.folder), task.with_optimizer, notes)
        return [_json(task.answer)]

    # ---- adapters in memory

    def _place(self, models: Sequence[ModelState]) -> None:
        """Bring the adapters of models into the memory of the ranks."""
        for model in models:
            if model.slot is None:
                if model.stash is None:
                    raise ResourceError(f"the model {model.model_id} was not made: its first request failed.")
                slot = self._free_slot(models)
                self.group.load_adapter(slot, str(model.stash), True)
                shutil.rmtree(model.stash)
                model.slot, model.stash = slot, None

    def _free_slot(self, needed: Sequence[ModelState]) -> int:
        """Return a slot that is free, if necessary after writing the adapter used longest ago to the disk."""
        # Those that are needed may have ended meanwhile with their session.
        in_slots = [model for model in {*self._board.models(), *needed} if model.slot is not None]
        if free := {*range(self._slots)} - {model.slot for model in in_slots}:
            return min(free)
        model = min((model for model in in_slots if model not in needed), key=lambda model: model.last_used)
        slot, stash = cast(int, model.slot), self._files.running / f"stash-{model.model_id}"
        self.group.move_adapter_out(slot, str(stash))
        model.stash, model.slot = stash, None
        return slot

    def _load(self, model: ModelState, task: LoadTask) -> Result:
        folder, spec = self._files.saved(task.path), self._files.spec(task.path)
        is_new = model.slot is None
        slot = self._free_slot([model]) if model.slot is None else model.slot
        try:
            self.group.load_adapter(slot, str(folder), task.with_optimizer)
        except VerlError:
            model.slot = None if is_new else model.slot
            raise
        if model.stash is not None:
            shutil.rmtree(model.stash)
        model.slot, model.stash, model.has_gradients, model.lacks_gradients = slot, None, False, False
        model.spec = spec
        return _json({"path": task.path.text, "model_id": model.model_id, "type": "load_weights"})

    # ---- training

    def _step(self, model: ModelState, settings: AdamSettings) -> Result:
        lacks, has = model.lacks_gradients, model.has_gradients
        model.lacks_gradients = model.has_gradients = False
        if lacks or not has:
            self.group.clear_gradients(model.slot)
            why = "a forward_backward since the last step was refused or failed; gradients of others were cleared"
            why = why if lacks else "there was no forward_backward since the last step"
            raise RefusedError(f"no step was made: {why}.")
        return _json({"metrics": self.group.optim_step(model.slot, settings)[0]})

    def _train(self, jobs: Sequence[Job], with_gradients: bool) -> Sequence[Result]:
        models = list(dict.fromkeys(cast(ModelState, job.model) for job in jobs))
        self._place(models)
        parts = [cast(list[TrainingRow], job.payload) for job in jobs]
        slots = [cast(int, cast(ModelState, job.model).slot) for job in jobs]
        row_slots = [slot for slot, part in zip(slots, parts, strict=True) for _ in part]
        batch, batch_rows = batch_of([row for part in parts for row in part], row_slots, self.group.world_size)
        output = cast(DataProto, (self.group.forward_backward if with_gradients else self.group.forward)(batch))
        if not output.meta_info["finite"]:
            raise NonFiniteError(
                "the loss or its gradient is not finite, so that no gradients were added. Look for extreme logprobs "
                "or advantages, or a learning rate that spoiled the weights."
            )
        log_probs, losses = output.batch["log_probs"].numpy(), output.batch["losses"].tolist()
        results, first = [], 0
        for job, part in zip(jobs, parts, strict=True):
            job_rows, first = batch_rows[first : first + len(part)], first + len(part)
            cast(ModelState, job.model).has_gradients |= with_gradients
            target_log_probs = [log_probs[i, : len(row.tokens)] for i, row in zip(job_rows, part, strict=True)]
            metrics = {"loss:sum": float(sum(losses[i] for i in job_rows))}
            results.append(Result(write_training_result(target_log_probs, metrics), MEDIA_TYPE))
        return results

    # ---- sampling

    def _sample(self, jobs: Sequence[Job]) -> Sequence[Result]:
        weights, ranks = jobs[0].weights, self.group.world_size
        if weights is not None and not (weights / SPEC_FILE).is_file():
            raise RefusedError("the weights of this sampling session were deleted, or not saved yet.", status=404)
        folder = None if weights is None else str(weights)
        tasks = [cast(SampleTask, job.payload) for job in jobs]
        requests = [RolloutRequest(task.prompt, sampling) for task in tasks for sampling in task.sampling]
        dealt = self.group.sample([requests[rank::ranks] for rank in range(ranks)], [folder] * ranks)
        outputs: list[RolloutOutput] = [dealt[i % ranks][i // ranks] for i in range(len(requests))]
        scores = iter(self._prompt_scores([task for task in tasks if task.scored], folder))
        results, responses = [], iter(outputs)
        for task in tasks:
            samples = [_sampled(next(responses)) for _ in task.sampling]
            prompt: list[float] | None = None
            if task.wants_prompt:
                prompt = [float("nan")] * len(task.prompt)
                if task.scored:
                    prompt[len(prompt) - task.scored :] = next(scores)[-task.scored :].tolist()
            results.append(Result(write_samples(samples, prompt), MEDIA_TYPE))
        return results

    def _prompt_scores(self, tasks: Sequence[SampleTask], folder: str | None) -> list[np.ndarray]:
        """Compute the log-probs of the prompts' tokens after the first, by the training engine."""
        if not tasks:
            return []
        slot = NO_SLOT if folder is None else self.group.load_for_scoring(folder)[0]
        rows = [TrainingRow(np.array(task.prompt[:-1]), np.array(task.prompt[1:])) for task in tasks]
        batch, batch_rows = batch_of(rows, [slot] * len(rows), self.group.world_size)
        log_probs = self.group.forward(batch).batch["log_probs"].numpy()
        return [log_probs[i, : len(row.tokens)] for i, row in zip(batch_rows, rows, strict=True)]


def _sampled(output: RolloutOutput) -> Sampled:
    return Sampled(output.token_ids, output.log_probs, "stop" if output.finish_reason == "stop" else "length")


def _json(value: JsonMapping) -> Result:
    return Result(json.dumps(value).encode(), "application/json")
