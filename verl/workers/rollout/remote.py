"""Rollout with vLLM or SGLang: memory, weights, generation, and the restart of an engine that crashed or hung.

Inside :meth:`RemoteRollout.awake` the loss of an engine changes no response: a new engine is started, the weights are
loaded and verified again, and only the unanswered requests are repeated, each with its own seed. All ranks gather
weights collectively, so after each part of the work they exchange one number to agree whether an engine was lost.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from verl.errors import ConfigError, EngineLostError, ProcessLostError, RolloutError
from verl.protocol import DataProto
from verl.utils.model import empty_causal_lm, torch_dtype
from verl.utils.model_facts.prediction_heads import FurtherLayers, head_count
from verl.utils.model_facts.time_limits import time_limits
from verl.utils.sharded_tensor import DividedTensor
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.rollout.base import NO_WEIGHTS, BaseRollout, RolloutOutput, RolloutRequest, Weights
from verl.workers.rollout.client import MEMORY, EngineClient, PartialResponse, PendingRequests
from verl.workers.rollout.engine_kwargs import applies_adapters, launch_settings
from verl.workers.rollout.engine_process import EngineProcess
from verl.workers.rollout.file_names import FileNames
from verl.workers.rollout.machines import EngineMachines, NodeReporter
from verl.workers.rollout.ranks import EnginePlacement, MachineRanks, RankExchange, engine_group
from verl.workers.rollout.request import SamplingParams, kept_table
from verl.workers.rollout.request_queue import RequestQueue
from verl.workers.rollout.scoring import ScoreRequest, TokenScores
from verl.workers.rollout.state import REQUEST_FIELDS, EngineState
from verl.workers.rollout.weights import ExpectedWeights, FileBuffer, SharedBuffer, SharedPart, buffer_for, in_files

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Largest number of restarts in a row without a finished ``generate`` between them."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
"""Pause before the first restart, doubled before each further one up to the longest."""
_POLL_S = 0.5
"""Seconds between reports of the state of a working engine."""
_MIB = 2**20


class _State(IntEnum):
    """Result of a part of the work on one rank. All ranks act on the largest value among them."""

    DONE = 0
    AGAIN = 1
    """The engine was lost and replaced; the new one has no weights, so the work must be repeated."""
    FAILED = 2
    LOST = 3
    """The engine was lost and not replaced."""


class _Lack(IntEnum):
    """Part of a version of the weights that a rank lacks. All ranks gather the part that any of them lacks."""

    NOTHING = 0
    ADAPTERS = 1
    ALL = 2


class RemoteRollout(BaseRollout):
    """Generate with vLLM or SGLang; arguments as for :class:`BaseRollout`.

    Each group of ``rollout.ranks_per_engine`` consecutive ranks shares one engine: the first rank starts it and
    generates, the others only take part in gathering the weights. An engine is a server, in either ``rollout.mode``; it
    may run in another Python environment (``rollout.engine_kwargs.<engine>.python``). If its ranks are on several
    machines, the first rank on each further one starts the engine's processes there, and ends them; all start anew
    together (:mod:`.machines`).

    Subclasses translate settings and requests into the engine's own format.

    Raises:
        ConfigError: the number of ranks is not a multiple of the ranks per engine, or a setting does not fit the
            engine.
    """

    scores_tokens = True
    starts_at_once: ClassVar[bool]
    """True if the constructor starts the engine and puts it to sleep; otherwise the first :meth:`wake` starts it."""

    def set_up(self) -> None:
        """See :meth:`BaseRollout.set_up`."""
        config = self.config
        self.applies_adapters = applies_adapters(config, self.model_config)
        self.restarts = 0
        """Number of engines that were started to replace a lost one."""
        self._losses: list[str] = []
        """Messages of the losses since the last finished ``generate``."""
        self._source: tuple[Weights, int] | None = None
        """The function that returns the weights, and their version; set only inside :meth:`awake`."""
        self._engine: EngineClient | None = None
        self._holds_base = False
        """True if the engine has the base weights of a model whose adapters it applies."""
        self.sent_bytes = 0
        """Bytes of weights that the engine was given at the last update; 0 on ranks without an engine."""
        self._asleep: set[str] = set()
        """Parts of the engine's memory that are released."""
        self._queue: RequestQueue | None = None
        """Source of requests that are answered one by one."""
        self._draws = False
        """True while the engine has requests."""
        self._gives_memory_back = config.free_cache_engine and self.device.type == "cuda"
        self._exchange_all = RankExchange()
        self._buffer: SharedBuffer | None = None
        """Memory for the weights of this rank's engine alone."""
        self._arguments = self._engine_arguments()
        self.ranks_per_engine = config.ranks_per_engine
        setting = f"rollout.tensor_model_parallel_size={config.tensor_model_parallel_size}"
        if config.pipeline_model_parallel_size > 1:
            setting += f" times pipeline_model_parallel_size={config.pipeline_model_parallel_size}"
        if config.shares_experts:
            setting += f" times data_parallel_size={config.data_parallel_size}"
        rank, self.leads = engine_group(self.ranks_per_engine, setting)
        placement = EnginePlacement.from_rank(rank, self.ranks_per_engine, self.device)
        self._devices = placement.devices
        self._machines: EngineMachines | None = None
        """Machines of the engine, if it has several."""
        self._node: tuple[EngineProcess, NodeReporter] | None = None
        """The engine's processes on this machine, if its server is on another."""
        self._in_step = self.ranks_per_engine > 1 and max(self._exchange_all(placement.nodes)) > 1
        """True if there are engines with several machines, so that all machines write the weights part by part."""
        if self._in_step:
            machines = EngineMachines(rank, self.ranks_per_engine, placement)
            self._machines = machines if placement.nodes > 1 else None
        if self._machines is not None and self.applies_adapters:
            raise ConfigError(
                f"rollout.merge_adapters=false: adapters reach an engine in files, and the {self.ranks_per_engine} "
                f"ranks of this one are on {placement.nodes} machines. Set rollout.merge_adapters=true."
            )
        self._machine_buffer: SharedBuffer | None = None
        """Memory for the weights of all engines of this machine."""
        self._ranks_of_machines: Mapping[str, Sequence[int]] = {}
        # A GPU has the gathered weights already, and its engine reads them there: one copy for each GPU.
        if self.ranks_per_engine > 1 or self.device.type == "cpu":
            machine = MachineRanks(in_step=self._in_step)
            if machine.size > 1 or self._in_step:
                self._machine_buffer = FileBuffer(ranks=machine)
                self._ranks_of_machines = machine.ranks_of_machines
                # Quantization needs the largest number of a full row. All ranks decide alike: gathering is collective.
                are_several = min(map(len, machine.ranks_of_machines.values())) > 1
                self.takes_divided = config.quantization is None and (are_several or self._in_step)
        self._launch = launch_settings(config, time_limits(self.model_config.path).start_s(config.name))
        dtype = torch_dtype(config.dtype)
        trust = self.model_config.trust_remote_code
        self._empty_model = empty_causal_lm(self.hf_config, dtype, torch.device("meta"), trust)
        heads = self._heads()
        self._expected = ExpectedWeights(self._empty_model, dtype, heads=heads)
        self._file_names = FileNames(self._empty_model, heads)
        if self.starts_at_once:
            self._release_cached()
            if self._machines is not None:
                self._start_together(self._machines)
            elif self.leads:
                self._start_or_replace()

    def _heads(self) -> FurtherLayers | None:
        """Return the heads of multi-token prediction by which the engine proposes tokens, if it does."""
        text, count = self.hf_config.get_text_config(), head_count(self.hf_config.to_dict())
        if not (self.model_config.mtp.is_in_rollout and count):
            return None
        shapes = {name: tuple(tensor.shape) for name, tensor in self._empty_model.state_dict().items()}
        return FurtherLayers.from_last_layer(text.num_hidden_layers, count, text.hidden_size, shapes)

    @abstractmethod
    def _engine_arguments(self) -> dict[str, Any]:
        """Return the engine's own arguments by name."""

    @abstractmethod
    def _start(self) -> EngineClient:
        """Start an engine with all memory allocated and without weights; called on leading ranks only."""

    @abstractmethod
    def _start_node(self, machines: EngineMachines) -> EngineProcess:
        """Start the processes of an engine on this machine, whose server is on another; do not wait for them."""

    @abstractmethod
    def _partial(self, request: RolloutRequest) -> PartialResponse:
        """Translate a request into the engine's format."""

    # ---- memory and weights

    def wake(self) -> None:
        """Start the engine if none runs, and allocate its memory: with ``multi_stage_wake_up`` only the weights'."""
        if self._machines is not None:
            self._start_together(self._machines)
        elif self.leads and self._engine is None:
            self._start_or_replace()
        self._wake_for_weights()

    def _wake_for_weights(self) -> None:
        self._wake_memory(["weights"] if self.config.multi_stage_wake_up else MEMORY)

    def _wake_memory(self, parts: Sequence[str]) -> None:
        parts = [part for part in parts if part in self._asleep]
        if parts and self._engine is not None:
            self._engine.wake(parts)
            self._asleep -= set(parts)

    def _sleep_memory(self, engine: EngineClient) -> None:
        if self._gives_memory_back and (parts := [part for part in MEMORY if part not in self._asleep]):
            engine.sleep(parts)
            self._asleep = set(MEMORY)

    def sleep(self) -> None:
        """Drop the weights and, on a GPU, release all memory, if ``rollout.free_cache_engine`` is set."""
        if not self.config.free_cache_engine:
            return
        self.weight_version = NO_WEIGHTS
        try:
            if self._engine is not None:
                self._sleep_memory(self._engine)
        except EngineLostError as error:
            logger.warning(
                "%s engine lost at the end of its work; the next wake starts another. %s", self.config.name, error
            )
            self._end_lost(error)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :meth:`BaseRollout.load_weights`. Tied weights may be given under one of their names or under all.

        The transfer is verified by a checksum of each tensor, computed in the engine's own processes.
        """
        with self._loading(version):
            self._send(weights, version)

    def _load_adapted(self, weights: AdaptedWeights, version: int, gathered: _Lack, lacks: _Lack) -> None:
        """Load the parts that this rank lacks, and gather those that any rank lacks."""
        base = iter(weights.base() if gathered == _Lack.ALL else ())
        adapters = iter(weights.scaled_adapters())
        try:
            if lacks != _Lack.NOTHING:
                with self._loading(version):
                    if gathered == _Lack.ALL:
                        self._send(base, version, is_for_engine=lacks == _Lack.ALL)
                    self._holds_base = True
                    self._send_adapters(adapters, version)
            elif gathered == _Lack.ALL:
                self._send(base, version, is_for_engine=False)
        finally:
            _finish(base)
            _finish(adapters)

    @contextmanager
    def _loading(self, version: int) -> Iterator[None]:
        """Wake the engine for new weights, which it holds in ``version`` after the context."""
        if self._machines is None:
            self.wake()
        else:  # its ranks start it together, which not all of them may do here
            self._wake_for_weights()
        self.weight_version, self._holds_base, self.sent_bytes = NO_WEIGHTS, False, 0
        began = time.perf_counter()
        yield
        # With multi_stage_wake_up, the cache's memory is allocated only now, after the transfer.
        self._wake_memory(MEMORY)
        self.weight_version = version
        if self._engine is not None:
            seconds, size = time.perf_counter() - began, self.sent_bytes / _MIB
            logger.info("%s engine: version %d loaded, %.1f MiB in %.3f s", self.config.name, version, size, seconds)

    def _send(self, weights: Iterable[tuple[str, Tensor]], version: int, is_for_engine: bool = True) -> None:
        """Send weights to this rank's engine, and take part in gathering and writing them for other ranks' engines."""
        weights = iter(weights)
        checked = self._expected.checked(weights, version)
        engine = self._engine if is_for_engine else None
        parts: Iterator[SharedPart] = iter(())
        try:
            buffer = self._buffer_of(engine)
            if buffer is not None:
                bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes * _MIB
                parts = buffer.parts(self._in_files(checked), bucket_bytes)
            if engine is not None:
                self.sent_bytes += engine.load_weights(parts)
        finally:
            if self._machine_buffer is not None and self._writes_together:
                _finish(parts)  # the other ranks wait for what this one writes, also if its engine was lost
            _finish(checked if engine is None else weights)

    def _buffer_of(self, engine: EngineClient | None) -> SharedBuffer | None:
        """Return where the weights are written; None if nobody reads them from there."""
        if self._machine_buffer is not None and self._writes_together:
            return self._machine_buffer
        if engine is not None and self._buffer is None:
            self._buffer = buffer_for(self.device, engine.weights_devices())
        return self._buffer if engine is not None else None

    @property
    def _writes_together(self) -> bool:
        """True if all ranks take part in a transfer of weights."""
        return self._source is not None or self._in_step

    def _send_adapters(self, adapters: Iterable[tuple[str, Tensor]], version: int) -> None:
        checked = self._expected.checked_adapters(adapters, version)
        if self._engine is not None:
            self.sent_bytes += self._engine.load_adapters(self._adapters_of(checked))

    def _in_files(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | DividedTensor]]:
        """Return weights as the model's files have them, which engines read too."""
        return in_files(weights, self._file_names, self._ranks_of_machines, self.device)

    def _adapters_of(self, adapters: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Return adapters as the engine takes them."""
        return adapters

    @contextmanager
    def awake(self, weights: Weights, version: int) -> Iterator[Self]:
        """See :meth:`BaseRollout.awake`. ``weights`` is called again after the loss of an engine, on all ranks.

        Raises:
            ProcessLostError: more than ``MAX_RESTARTS`` engines were lost without a finished ``generate``.
        """
        self._source = weights, version
        try:
            self._make_ready()
            self.report_state()
            yield self
        finally:
            self._source = None
            self.sleep()
            self.report_state()

    def _release_cached(self) -> None:
        """Release the GPU memory that passes and loading left cached in this process, on all ranks. Collective.

        An engine has an allocator of its own, and memory on the GPUs of several ranks. vLLM refuses to start if that of
        others changes meanwhile.
        """
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            self._exchange_all(0)

    def _make_ready(self) -> None:
        """Wake the engines and load the weights on all ranks, until no engine is lost in between."""
        assert self._source is not None
        weights, version = self._source
        self._release_cached()
        ready = False
        while not ready:
            ready = self._collectively(self.wake)
            lacks = self._lack_of(version)
            if ready and (gathered := _Lack(max(self._exchange(lacks)))):
                load = functools.partial(self._load_or_gather, weights, version, gathered, lacks)
                ready = self._collectively(load)

    def _lack_of(self, version: int) -> _Lack:
        if self.weight_version == version:
            return _Lack.NOTHING
        return _Lack.ADAPTERS if self._holds_base else _Lack.ALL

    def _load_or_gather(self, weights: Weights, version: int, gathered: _Lack, lacks: _Lack) -> None:
        if isinstance(weights, AdaptedWeights):
            self._load_adapted(weights, version, gathered, lacks)
        elif lacks:
            self.load_weights(weights(), version)
        else:  # another rank needs the weights, and gathering them is collective
            self._send(weights(), version, is_for_engine=False)

    # ---- what it is doing

    def state(self) -> EngineState:
        """See :meth:`BaseRollout.state`. Requests that wait for the engine here count as waiting."""
        values: dict[str, float] = {}
        if self._engine is not None:
            with contextlib.suppress(EngineLostError):  # the thread that waits for its answers replaces it
                values.update(self._engine.statistics())
                if not self._draws:  # it counts what was aborted until it draws again
                    values |= dict.fromkeys(values.keys() & REQUEST_FIELDS, 0)
        if self._queue is not None and "requests_waiting" in values:
            values["requests_waiting"] += self._queue.waiting
        return EngineState(weight_version=self.weight_version, **values)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Report the state of the engine now and then while it draws responses and this thread waits for them."""
        if self.on_state is None:
            yield
            return
        over = Event()

        def report() -> None:
            while not over.wait(_POLL_S):
                self.report_state()  # that this thread runs is no sign of life

        self._draws = True
        thread = Thread(target=report, name="engine-state", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._draws = False

    # ---- generation

    def generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        """See :meth:`BaseRollout.generate`. Collective inside :meth:`awake`."""
        if not self.leads:
            raise RolloutError("this rank shares an engine with others and does not lead: the first of them generates.")
        self.check_requests(requests)
        return self._generate(requests)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """See :meth:`BaseRollout.generate_sequences`. Collective inside :meth:`awake`."""
        if self.leads:
            return super().generate_sequences(prompts)
        self._generate([])
        return DataProto()

    def _generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        outputs: dict[int, RolloutOutput] = {}
        with self.until_aborted() as aborted:
            while not self._collectively(lambda: self._ask(requests, outputs, aborted)):
                self._make_ready()
        self._losses.clear()
        return [outputs[request_id] for request_id in range(len(requests))]

    def _ask(self, requests: list[RolloutRequest], outputs: dict[int, RolloutOutput], aborted: Event) -> None:
        """Generate for all requests without an output and add the results, also the finished ones of a lost engine."""
        left = {
            request_id: self._partial(request)
            for request_id, request in enumerate(requests)
            if request_id not in outputs
        }
        if not left:
            return
        try:
            if aborted.is_set():  # aborted while the engine was restarted: the rest stays empty
                pass
            elif self._engine is None:
                raise EngineLostError(f"the {self.config.name} engine was lost, and no other one was started yet.")
            else:
                with self._drawing():
                    self._engine.generate([*left.values()], aborted)
        except EngineLostError:
            outputs |= self._outputs(
                {request_id: response for request_id, response in left.items() if response.is_done}
            )
            raise
        outputs |= self._outputs(left)

    def _outputs(self, responses: Mapping[int, PartialResponse]) -> dict[int, RolloutOutput]:
        width = self.config.kept_ids_width
        outputs = {
            request_id: RolloutOutput(
                response.token_ids,
                response.log_probs,
                response.finish_reason,
                self.weight_version,
                num_preempted=response.num_preempted,
                kept_ids=kept_table(response.kept_ids, width) if response.request.returns_kept_ids else None,
            )
            for request_id, response in responses.items()
        }
        self.check_finite(outputs.values())
        return outputs

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenScores]:
        """See :meth:`BaseRollout.score`. Collective inside :meth:`awake`; ranks that do not lead pass no requests.

        One more token than those of a request must fit into the engine's context.
        """
        if requests and not self.leads:
            raise RolloutError("this rank shares an engine with others and does not lead: the first of them scores.")
        self.check_requests([request.as_prompt for request in requests])
        self._check_top_k(max((request.top_k for request in requests), default=0))
        scores: dict[int, TokenScores] = {}
        while not self._collectively(lambda: self._ask_scores(requests, scores)):
            self._make_ready()
        self._losses.clear()
        return [scores[request_id] for request_id in range(len(requests))]

    def _ask_scores(self, requests: Sequence[ScoreRequest], scores: dict[int, TokenScores]) -> None:
        """Add the scores of all requests that have none; those that came before a loss of the engine stay."""
        left = {request_id: request for request_id, request in enumerate(requests) if request_id not in scores}
        if not left:
            return
        if self._engine is None:
            raise EngineLostError(f"the {self.config.name} engine was lost, and no other one was started yet.")
        self._engine.score(left, scores.__setitem__, unknown_ids=self.unknown_ids, has_adapters=self._holds_base)

    def _check_top_k(self, top_k: int) -> None:
        """Raise RolloutError if the engine returns fewer most likely tokens."""

    def _ends(self, sampling: SamplingParams) -> frozenset[int]:
        """Return the tokens that end a response."""
        return frozenset({*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)})

    def serve(self, queue: RequestQueue) -> None:
        """See :meth:`BaseRollout.serve`. Collective inside :meth:`awake`: it ends when the queues of all ranks do.

        After the loss of its engine a rank that is alone starts another one, loads the weights again and repeats the
        unanswered requests. Several ranks gather weights together, which they cannot while others serve: there the
        lost engine's requests, and those that still come, are answered with EngineLostError, so that other engines can
        take them, and the lost engine is replaced at the end.
        """
        requests = PendingRequests(
            queue,
            self.config.max_num_seqs,
            lambda request: self.check_requests([request]),
            self._partial,
            lambda response: self._outputs({0: response})[0],
        )
        self._queue = queue
        try:
            while not self._collectively(lambda: self._answer(requests)):
                self._make_ready()
        finally:
            self._queue = None
        self._losses.clear()

    def _answer(self, requests: PendingRequests) -> None:
        """Answer requests until there will be no more; raise EngineLostError if the engine was lost meanwhile."""
        try:
            while self.leads and requests.wait():
                if self._engine is None:
                    raise EngineLostError(f"the {self.config.name} engine does not run; `awake` starts it.")
                with self.until_aborted() as aborted, self._drawing():
                    self._engine.serve(requests, aborted)
        except EngineLostError as error:
            if requests.has_progress:
                self._losses.clear()
            if self._source is not None and self._exchange_all.is_alone:
                requests.repeat()
                raise
            lost = EngineLostError(self._end_lost(error))
            logger.warning("%s engine lost; its requests are handed back. %s", self.config.name, lost)
            requests.refuse_all(lost)
            raise lost from error

    # ---- restarts

    def _collectively(self, work: Callable[[], None]) -> bool:
        """Run a collective part of the work.

        Returns:
            Whether it succeeded on all ranks; if not, some ranks replaced their engine, and the new one has no weights.

        Raises:
            RolloutError: another rank failed; that rank raises the cause.
            EngineLostError: an engine was lost and not replaced.
        """
        try:
            state = self._attempt(work)
        except Exception as error:  # the other ranks wait for this one, whatever it raises; raised again below
            self._exchange(_State.LOST if isinstance(error, ProcessLostError) else _State.FAILED)
            raise
        states = self._exchange(state)
        worst = max(states)
        if worst >= _State.FAILED:
            kind = EngineLostError if worst == _State.LOST else RolloutError
            raise kind(f"the rollout of rank {states.index(worst)} failed, and this rank cannot go on alone.")
        return worst == _State.DONE

    def _attempt(self, work: Callable[[], None]) -> _State:
        try:
            work()
        except EngineLostError as error:
            if self._source is None:  # outside `awake` there are no weights for another engine
                raise EngineLostError(self._end_lost(error)) from error
            self._replace(error)
            return _State.AGAIN
        return _State.DONE

    def _exchange(self, value: int) -> list[int]:
        # Outside `awake` the other ranks may be doing something else, so nothing collective may be called.
        return [int(value)] if self._source is None else self._exchange_all(int(value))

    def _start_engine(self) -> None:
        self._asleep, self._holds_base = set(), False
        self._engine = self._start()
        if self.starts_at_once:
            self._sleep_memory(self._engine)

    def _start_together(self, machines: EngineMachines) -> None:
        """Start the engine's processes on all its machines, unless all run. Collective over its ranks."""
        node_runs = self._node is not None and self._node[0].is_running
        if machines.have_all(node_runs if machines.serves_nothing else not self.leads or self._engine is not None):
            return
        self._end_engine()
        self.weight_version, self._holds_base = NO_WEIGHTS, False  # the engine may have ended without an error here
        machines.meet()
        if machines.serves_nothing:
            with machines.reporting_failure():
                process = self._start_node(machines)
            self._node = process, machines.report(process)
        elif self.leads:
            try:
                self._start_engine()
            except RolloutError as error:
                if self._losses:  # a start that fails by itself counts as a loss too: see `_replace`
                    raise EngineLostError(str(error)) from error
                raise

    def _end_engine(self) -> Path | None:
        if self._node is not None:
            process, reporter = self._node
            self._node = None
            reporter.close()
            return process.kill()
        engine, self._engine = self._engine, None
        return engine.kill() if engine is not None else None

    def _end_lost(self, error: RolloutError) -> str:
        """End the remaining processes of a lost engine; return the error's text with the path of the engine's log."""
        self.weight_version, self._holds_base = NO_WEIGHTS, False
        log = self._end_engine()
        return f"{error}{f' The whole log: {log}.' if log else ''}"

    def _start_or_replace(self) -> None:
        """Start an engine, and replace it if it is lost during the start."""
        try:
            self._start_engine()
        except EngineLostError as error:
            self._replace(error)

    def _replace(self, error: RolloutError) -> None:
        """Start another engine in place of a lost one; raise EngineLostError after too many losses."""
        while True:
            self._losses.append(self._end_lost(error))
            count = len(self._losses)
            if count > MAX_RESTARTS:
                raise EngineLostError(
                    f"the {self.config.name} engine was lost {count} times without a finished generation; the first "
                    f"time: {self._losses[0]}\nThe last time: {self._losses[-1]}"
                ) from error
            pause_s = min(FIRST_PAUSE_S * 2 ** (count - 1), MAX_PAUSE_S)
            logger.warning(
                "%s engine lost; restart %d of %d in %g s. %s",
                *(self.config.name, count, MAX_RESTARTS, pause_s, self._losses[-1]),
            )
            time.sleep(pause_s)
            self.restarts += 1
            if self._machines is not None:
                return  # its ranks start it together, in the next `wake`
            try:
                self._start_engine()
                return
            # A start that fails by itself counts as a loss too: the lost engine's memory may not be free yet.
            except RolloutError as next_error:
                error = next_error


def _finish(collective: Iterator[object]) -> None:
    """Iterate to the end: gathering is collective, so every rank must finish it, also after an error."""
    for _ in collective:
        pass
