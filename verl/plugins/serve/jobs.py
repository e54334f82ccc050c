"""Requests that wait for the ranks: in the order of their model, and each with a future that its client asks for.

Handlers of the web server put jobs; one thread takes them, several at once where they can be computed together.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from verl.base.types import JsonMapping
from verl.errors import VerlError
from verl.plugins.serve.adapters import AdapterSpec
from verl.plugins.serve.refusals import GONE, RefusedError

JobKind = Literal["create", "load", "forward", "forward_backward", "optim_step", "save", "sample"]
TOGETHER = ("forward", "forward_backward")
"""Kinds of jobs of several models that are one pass."""
KEPT_RESULTS = 256
"""Results that are kept after their clients had them, for those that ask again because the connection broke."""
MAX_UNFETCHED_BYTES = 2**30
"""Size of results that no client has fetched yet; beyond it the oldest are dropped."""
JOB_BYTES = 1024
"""Approximate overhead of a finished job, in bytes."""


@dataclass(frozen=True)
class Result:
    """The answer to a job."""

    body: bytes
    media_type: str


@dataclass(eq=False, kw_only=True)
class ModelState:
    """A model of a client."""

    model_id: str
    session_id: str
    spec: AdapterSpec
    user_metadata: JsonMapping | None = None
    slot: int | None = None
    """Slot of its adapter in the memory of the ranks; None while it is on the disk, or nowhere yet."""
    stash: Path | None = None
    """Folder of its adapter on the disk."""
    has_gradients: bool = False
    """True if gradients were added since its last step."""
    lacks_gradients: bool = False
    """True if a pass since its last step was refused or failed, so that the sum is not what the client wants."""
    last_used: int = 0
    lost: str | None = None
    """Why it cannot go on."""
    next_seq: int = 0
    waiting: dict[int, Job] = field(default_factory=dict)
    """Jobs by their ``seq``."""
    skipped: set[int] = field(default_factory=set)
    """``seq`` of requests that were refused."""

    def head(self) -> Job | None:
        """Return the next job in the order, if it has come."""
        while self.next_seq in self.skipped:
            self.skipped.remove(self.next_seq)
            self.next_seq += 1
        return self.waiting.get(self.next_seq)

    def heads(self, kind: JobKind) -> Iterator[Job]:
        """Iterate over the jobs of one kind that come next, one after the other."""
        seq = self.next_seq
        while seq in self.skipped or (seq in self.waiting and self.waiting[seq].kind == kind):
            if seq in self.waiting:
                yield self.waiting[seq]
            seq += 1


@dataclass(eq=False, kw_only=True)
class Job:
    """A request that waits, or was answered."""

    request_id: str
    kind: JobKind
    payload: object
    """Checked input of the computation; None once the job is answered."""
    responses: int = 0
    """Responses that a job of kind ``sample`` draws."""
    session_id: str | None = None
    """Session of a job of kind ``sample``; None outside sessions. Other jobs belong to the session of their model."""
    model: ModelState | None = None
    seq: int = 0
    weights: Path | None = None
    """Adapter weights of a job of kind ``sample``; None: the base model."""
    arrival: int = 0
    result: Future[Result] = field(default_factory=Future)

    def is_of(self, session_id: str) -> bool:
        """Return whether a session made this request."""
        return session_id == (self.session_id if self.model is None else self.model.session_id)


class JobBoard:
    """All models and jobs; methods may be called by any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._models: dict[str, ModelState] = {}
        self._jobs: dict[str, Job] = {}
        self._retrieved: deque[str] = deque()  # ids of jobs whose results were fetched
        self._unfetched: dict[str, int] = {}  # sizes of results that were not, the oldest first
        self._unfetched_bytes = 0
        self._sampling: deque[Job] = deque()
        self._arrivals = itertools.count()
        self._was_sampling = False

    # ---- handlers

    def add_model(self, model: ModelState) -> ModelState:
        """Add a model, unless one with its id is there: its client then sent the request again."""
        with self._changed:
            return self._models.setdefault(model.model_id, model)

    def model(self, model_id: str) -> ModelState:
        """Return a model.

        Raises:
            RefusedError: there is none, or it was lost.
        """
        with self._changed:
            model = self._models.get(model_id)
        if model is None:
            raise RefusedError(
                f"there is no model {model_id!r:.200} here. A server that was started again knows those that were "
                "saved: make one from its state (create_training_client_from_state_with_optimizer).",
                status=404,
            )
        if model.lost is not None:
            raise RefusedError(model.lost, status=GONE)
        return model

    def models(self) -> list[ModelState]:
        """Return all models."""
        with self._changed:
            return list(self._models.values())

    def put(self, job: Job) -> Job:
        """Add a job; return the earlier one if its client sent the same request again.

        Raises:
            RefusedError: later requests of its model were computed already.
        """
        with self._changed:
            if job.request_id in self._jobs:
                return self._jobs[job.request_id]
            if job.model is not None and job.seq < job.model.next_seq:
                raise RefusedError(f"request {job.request_id} came after later ones of its model.", status=GONE)
            job.arrival = next(self._arrivals)
            self._jobs[job.request_id] = job
            if job.model is None:
                self._sampling.append(job)
            else:
                job.model.waiting[job.seq] = job
            self._changed.notify_all()
            return job

    def note_retrieved(self, job: Job) -> None:
        """Note that a client has the result of a job; only the last such results are kept."""
        with self._changed:
            self._unfetched_bytes -= self._unfetched.pop(job.request_id, 0)
            if job.request_id not in self._retrieved:
                self._retrieved.append(job.request_id)
            if len(self._retrieved) > KEPT_RESULTS:
                self._drop(self._retrieved.popleft())

    def skip(self, model_id: str, seq: int, is_training: bool = False) -> None:
        """Let later requests of a model not wait for one that was refused; ``is_training`` if it adds gradients."""
        with self._changed:
            model = self._models.get(model_id)
            if model is not None and seq >= model.next_seq and seq not in model.waiting:
                model.skipped.add(seq)
                model.lacks_gradients |= is_training
                self._changed.notify_all()

    def job(self, request_id: str) -> Job:
        """Return a job.

        Raises:
            RefusedError: it is not known (any more).
        """
        with self._changed:
            if request_id not in self._jobs:
                raise RefusedError(
                    f"there is no request {request_id!r:.200} here (any more): results end with their session, and "
                    f"the oldest are dropped when more than {MAX_UNFETCHED_BYTES >> 20} MiB of them were not fetched.",
                    status=GONE,
                )
            return self._jobs[request_id]

    def is_waiting(self, session_id: str) -> bool:
        """Return whether a request of a session is not answered yet."""
        with self._changed:
            return any(job.is_of(session_id) and not job.result.done() for job in self._jobs.values())

    def drop_session(self, session_id: str) -> list[ModelState]:
        """Remove the models, requests and results of a session, and return the models; what waits is refused."""
        with self._changed:
            ended = [model for model in self._models.values() if model.session_id == session_id]
            for model in ended:
                del self._models[model.model_id]
                model.waiting.clear()
            jobs = [job for job in self._jobs.values() if job.is_of(session_id)]
            _refuse(jobs, RefusedError("the session was ended.", status=GONE))
            for job in jobs:
                self._drop(job.request_id)
            self._sampling = deque(job for job in self._sampling if not job.is_of(session_id))
            return ended

    def _drop(self, request_id: str) -> None:
        self._jobs.pop(request_id, None)
        self._unfetched_bytes -= self._unfetched.pop(request_id, 0)

    # ---- the thread that computes

    def take(self, most_models: int, most_responses: int, timeout_s: float) -> list[Job]:
        """Return jobs that can be computed at once, all of one kind; empty if none came within ``timeout_s``.

        Samples and training take turns.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._sampling or self._heads(), timeout_s)
            heads = self._heads()
            if self._sampling and (not heads or not self._was_sampling):
                self._was_sampling = True
                return self._samples(most_responses)
            self._was_sampling = False
            if not heads:
                return []
            kind = heads[0].kind
            if kind not in TOGETHER:
                return heads[:1]
            models = [job.model for job in heads if job.kind == kind][:most_models]
            return [job for model in models if model is not None for job in model.heads(kind)]

    def _heads(self) -> list[Job]:
        heads = [job for model in self._models.values() if (job := model.head()) is not None]
        return sorted(heads, key=lambda job: job.arrival)

    def _samples(self, most: int) -> list[Job]:
        """Take samples that are drawn with the weights of the first that waits."""
        weights, batch, remaining, count = self._sampling[0].weights, [], [], 0
        for job in self._sampling:
            fits = job.weights == weights and (not batch or count < most)
            (batch if fits else remaining).append(job)
            count += job.responses if fits else 0
        self._sampling = deque(remaining)
        return batch

    def answer(self, job: Job, outcome: Result | VerlError) -> None:
        """Give a job its result or its error, and let its model go on."""
        with self._changed:
            if job.model is not None:
                job.model.waiting.pop(job.seq, None)
                job.model.next_seq = max(job.model.next_seq, job.seq + 1)
            job.payload = None
            if job.result.done():  # its session was ended
                return
            if isinstance(outcome, VerlError):
                job.result.set_exception(outcome)
            else:
                job.result.set_result(outcome)
            size = JOB_BYTES + (len(outcome.body) if isinstance(outcome, Result) else 0)
            self._unfetched[job.request_id] = size
            self._unfetched_bytes += size
            while self._unfetched_bytes > MAX_UNFETCHED_BYTES and len(self._unfetched) > 1:
                self._drop(next(iter(self._unfetched)))
            self._changed.notify_all()

    def lose(self, reason: str) -> None:
        """Give up the models that are in the memory of the ranks; their requests get an error."""
        with self._changed:
            for model in self._models.values():
                if model.slot is not None:
                    model.lost, model.slot = reason, None
                    _refuse(model.waiting.values(), RefusedError(reason, status=GONE))
                    model.waiting.clear()

    def close(self, reason: str) -> None:
        """Answer all that waits with an error."""
        with self._changed:
            _refuse(self._jobs.values(), VerlError(reason))


def _refuse(jobs: Iterable[Job], error: VerlError) -> None:
    for job in jobs:
        if not job.result.done():
            job.result.set_exception(error)
