"""Runs trajectories in one process: verl's own agent loops in the caller's event loop, each of users in a thread.

Code of users that blocks stops only its own conversation, and an error costs only its own trajectory: verl's loops run
tools, simulated users and environments in other threads, and users' loops get a thread with an event loop of their own.
A trajectory that does not end in its time is cancelled; if it does not end even then, it is left behind and can do no
more harm: the policy refuses it, and on Ray a process with such a thread is replaced after the rollout.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from verl.agents.environment_agent import EnvironmentAgentLoop
from verl.agents.images import INPUTS, NO_IMAGES, as_inputs, images_of_sequence, with_text_places
from verl.agents.loop import (
    AGENT_LOOPS,
    JUDGE_ADDRESS,
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    DictConfigWrap,
    LoopEntry,
    TrajectoryError,
    read_agent_loops,
    require_judge,
)
from verl.agents.parsers import is_built_in_parser
from verl.agents.partial_responses import SingleTurn
from verl.agents.policy import AsyncLLMServerManager, ContextFullError, SampleId
from verl.agents.single_turn import SingleTurnAgentLoop
from verl.agents.tool_agent import ToolAgentLoop
from verl.agents.turns import (
    DrawnTurn,
    drawn_kept_ids,
    drawn_log_probs,
    drawn_routing,
    drawn_weight_versions,
    oldest_version,
    preemptions,
    sampled_like,
)
from verl.base.import_utils import user_code
from verl.base.registry import suggest
from verl.base.types import JsonMapping
from verl.config import PPOConfig, RolloutConfig
from verl.config.agent import TrajectoryStatus
from verl.errors import ConfigError, VerlError
from verl.protocol.shared import SharedTensors
from verl.serving.connection import Connection
from verl.tools.threads import DaemonThreads, in_thread
from verl.vision.families import VisionConfig
from verl.vision.prompts import ImagePrompts
from verl.workers.rollout.request import RolloutOutput, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

logger = logging.getLogger(__name__)
T = TypeVar("T")

AGENT_LOOPS.add("program_agent", LoopEntry("verl.plugins.endpoint.program_agent.ProgramAgentLoop"))
NEVER_BLOCKING = (SingleTurnAgentLoop, ToolAgentLoop, EnvironmentAgentLoop)
"""Agent loops that run no code of users in their own thread, unless the parser of tool calls is a user's."""

COLUMNS = (
    *("prompts", "responses", "response_mask", "rollout_log_probs", "weight_versions"),
    *("input_ids", "attention_mask", "position_ids"),
    *("finish_reason", "weight_version", "trajectory_status", "trajectory_message", "__num_turns__", "reward_score"),
    *("uid", "sample_index", "trajectory_id", "agent", "token_level_scores", "reward_status", "score"),
    *("trajectory_conversation", "agent_loop_metrics"),
)
"""Columns of the batch that an agent loop cannot set."""

SAMPLING_PARAMS = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
"""Entries of an agent loop's ``sampling_params``: those of a request that a loop may pass on."""
END_GRACE_S = 5.0
"""Seconds that a cancelled trajectory may take to end before it is abandoned."""


def trajectory_id(uid: str, sample_index: int) -> str:
    """Name the trajectory that is response ``sample_index`` to the prompt ``uid``."""
    return f"{uid}/{sample_index}"


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One prompt to answer."""

    agent_name: str
    sample: SampleId
    sampling: SamplingParams
    row: JsonMapping
    """Columns of the data set."""
    returns_routing: bool = False
    """Record the experts that each token went to."""
    returns_kept_ids: bool = False
    """Record the tokens that truncated sampling kept."""
    is_trained_on: bool = True
    """True if the policy is trained on it; not in validation, nor where it is a greedy baseline."""

    is_plain: bool = False
    """True if it stands for a row of the ranks' ``generate_sequences``: one turn, which takes no place of
    ``rollout.agent.max_concurrent``, and as long as it needs."""
    resume_from: RolloutOutput | None = None
    """Partial response of a single turn from an earlier run, which it continues."""

    @property
    def name(self) -> str:
        """See :func:`trajectory_id`."""
        return trajectory_id(self.sample.uid, self.sample.sample_index)

    def to_train_on(self, turns: Sequence[DrawnTurn]) -> list[DrawnTurn]:
        """Return the turns that training may score: drawn from the probabilities that it computes.

        Where nothing is trained on, these are all turns.
        """
        return sampled_like(turns, self.sampling) if self.is_trained_on else list(turns)


@dataclass(frozen=True)
class TrajectoryResult:
    """Result of a trajectory: its sequences, or why it failed."""

    outputs: tuple[AgentLoopOutput, ...]
    """The training sequences, at least one; after a failure, the tokens up to the last turn of the policy."""
    message: str = ""
    """Why it failed."""
    weight_version: int = -1
    """Oldest version of the weights that drew a turn."""

    @property
    def status(self) -> TrajectoryStatus:
        """Return the end of the trajectory: that of its last sequence which is not ``done``."""
        failures: list[TrajectoryStatus] = [output.status for output in self.outputs if output.status != "done"]
        return failures[-1] if failures else "done"


@dataclass(frozen=True, kw_only=True)
class TrajectoryProgress:
    """Counts of trajectories under way by their activity."""

    running: int = 0
    """Trajectories that have begun, without those that wait for a place (``rollout.agent.max_concurrent``)."""
    at_engines: int = 0
    """Running trajectories with a request under way, whether an engine samples it or it waits for one."""
    placeless: int = 0
    """Trajectories that wait for a place, or in a new process for the first engines."""
    waiting_requests: int = 0
    """Requests that no engine has: engines sleep, or have no room."""
    oldest_s: float = 0.0
    """Seconds since the oldest of the running ones has begun."""

    @property
    def in_tools(self) -> int:
        """Running trajectories that ask no engine: they wait for tools, users or programs."""
        return self.running - self.at_engines

    @staticmethod
    def total(parts: Iterable[TrajectoryProgress]) -> TrajectoryProgress:
        """Return the progress of several processes together."""
        progress = list(parts)
        return TrajectoryProgress(
            running=sum(part.running for part in progress),
            at_engines=sum(part.at_engines for part in progress),
            placeless=sum(part.placeless for part in progress),
            waiting_requests=sum(part.waiting_requests for part in progress),
            oldest_s=max((part.oldest_s for part in progress), default=0.0),
        )


@dataclass
class _RunningTrajectory:
    """A trajectory in its thread."""

    result: Future[TrajectoryResult] = field(default_factory=Future)
    thread_end: Future[None] = field(default_factory=Future)
    loop: asyncio.AbstractEventLoop | None = None
    task: asyncio.Task[object] | None = None
    cancelled_as: TrajectoryStatus | None = None
    """Its status if it was cancelled, whatever the user's code makes of that."""

    def cancel(self, status: TrajectoryStatus) -> None:
        """Cancel the user's coroutine, from any thread."""
        self.cancelled_as = status
        if self.loop is not None and self.task is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.task.cancel)

    def settle(self, result: TrajectoryResult) -> None:
        """Give the result, unless there is one."""
        if not self.result.done():
            self.result.set_result(result)


def agent_loops(config: PPOConfig) -> dict[str, LoopEntry]:
    """Return the agent loops that rows can name; those that the configuration names are loaded and checked.

    Raises:
        ConfigError: ``agent_loop_config_path`` cannot be read, or a class of it cannot be loaded, or there is no
            ``default_agent_loop``.
    """
    settings = config.actor_rollout_ref.rollout.agent
    path = settings.agent_loop_config_path
    configured_loops = read_agent_loops(path) if path else {}
    entries = {name: AGENT_LOOPS.get(name) for name in AGENT_LOOPS} | configured_loops
    if settings.default_agent_loop not in entries:
        near = suggest(settings.default_agent_loop, list(entries))
        raise ConfigError(
            f"actor_rollout_ref.rollout.agent.default_agent_loop={settings.default_agent_loop}: there is no such agent "
            f"loop.{near} There are: {', '.join(sorted(entries))}; agent_loop_config_path adds your own."
        )
    for name in {*configured_loops, settings.default_agent_loop}:
        entries[name].load().check_arguments(entries[name].arguments)
    return entries


def check_agent_loops(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, names: Iterable[str]) -> None:
    """Load and prepare agent loops once, so that what is wrong with them is found before a process starts.

    Args:
        config: the whole configuration.
        tokenizer: the policy's.
        names: the agent loops that prompts ask for.

    Raises:
        ConfigError: one of them does not exist, or it, its tools or its settings are wrong.
    """
    loops = agent_loops(config)
    for name in dict.fromkeys(names):
        loop = _named_loop(loops, name).load()
        if JUDGE_ADDRESS in inspect.signature(loop.run).parameters:
            require_judge(config, f"the agent loop '{name}' ({JUDGE_ADDRESS} of its run)")
        loop.discard(loop.prepare(config, tokenizer))


def _named_loop(loops: Mapping[str, LoopEntry], name: str) -> LoopEntry:
    if name not in loops:
        names = ", ".join(sorted(loops))
        raise ConfigError(f"unknown agent loop '{name}'.{suggest(str(name), list(loops))} Known: {names}.")
    return loops[name]


class AgentLoopWorker:
    """Runs the trajectories of one process.

    Args:
        config: the whole configuration.
        tokenizer: the policy's.
        processor: the multi-modal processor, if the model has one.
        connection: the way to the engines.
        asleep_s: returns for how many seconds engines have slept so far; a trajectory whose request waits for them does
            not use up its time.

    Raises:
        ConfigError: ``agent_loop_config_path`` cannot be read.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None,
        connection: Connection,
        asleep_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._config, self._asleep_s = config, asleep_s
        self._rollout = config.actor_rollout_ref.rollout
        self._tokenizer, self._processor, self._connection = tokenizer, processor, connection
        self._images = ImagePrompts.from_processor(processor)
        self._vocabulary = len(tokenizer)
        self._loops = agent_loops(config)
        self._shared: dict[type[AgentLoopBase], object] = {}
        self._preparing = threading.Lock()
        default = self._rollout.default_agent_loop
        self._shared_by(self._loops[default].load())  # here, so that what is wrong with it ends the run
        parser_is_ours = is_built_in_parser(self._rollout.multi_turn.format)
        self._never_blocking = NEVER_BLOCKING if parser_is_ours else (SingleTurnAgentLoop,)
        self._places = asyncio.Semaphore(self._rollout.agent.max_concurrent)
        self.abandoned = 0
        """Number of threads that were left behind."""
        self._placeless = 0
        self._running: dict[AsyncLLMServerManager, float] = {}
        """Start time of each trajectory that has a place."""
        self._single_turns: dict[str, SingleTurn] = {}
        """Single turns under way, and those whose columns nobody has taken yet, by the name of the trajectory."""
        self._ending: set[asyncio.Task[TrajectoryResult]] = set()
        """Cancelled trajectories that wait for tools which they called; an event loop alone would forget them."""

    async def run(self, trajectory: Trajectory) -> TrajectoryResult:
        """Run a trajectory to its end. Cancelling the call cancels the trajectory.

        :meth:`forget` it when its result is no more needed here.
        """
        connection = self._connection
        if self._can_be_saved(trajectory):
            connection = self._single_turns[trajectory.name] = SingleTurn(connection, trajectory.resume_from)
        policy = AsyncLLMServerManager(
            self._rollout,
            connection,
            trajectory.sample,
            trajectory.sampling,
            self._images,
            trajectory.returns_routing,
            trajectory.returns_kept_ids,
            self._asleep_s,
        )
        if not trajectory.is_plain:
            self._placeless += 1
            try:
                await self._places.acquire()
            finally:
                self._placeless -= 1
        self._running[policy] = time.monotonic()
        try:
            if trajectory.is_plain:
                return await self._answered(trajectory, policy)
            if self._class_named(trajectory.agent_name) in self._never_blocking:
                return await self._run_here(trajectory, policy)
            return await self._run_in_thread(trajectory, policy)
        finally:
            del self._running[policy]
            policy.close()
            if not trajectory.is_plain:
                self._places.release()

    def _class_named(self, agent_name: str) -> type[AgentLoopBase] | None:
        entry = self._loops.get(agent_name)  # an unknown name fails its trajectory later, with a message
        return None if entry is None else entry.load()

    def _can_be_saved(self, trajectory: Trajectory) -> bool:
        """Return whether a checkpoint may hold the tokens of its unfinished response.

        It may not for agents, whose programs cannot go on in another process; nor with recorded experts, which would be
        missing for these tokens.
        """
        is_single = self._class_named(trajectory.agent_name) is SingleTurnAgentLoop
        is_first = trajectory.sample.attempt == 0
        return is_single and is_first and trajectory.is_trained_on and not trajectory.returns_routing

    def partial_responses(self, by_conversation: Mapping[str, RolloutOutput]) -> dict[str, RolloutOutput]:
        """Return the responses of single turns, finished or partial, by the name of the trajectory.

        Args:
            by_conversation: see :meth:`verl.serving.router.Router.partial_responses`.
        """
        responses = {name: turn.partial_response(by_conversation) for name, turn in self._single_turns.items()}
        return {name: response for name, response in responses.items() if response is not None and response.token_ids}

    def forget(self, trajectory: Trajectory) -> None:
        """Free what :meth:`drawn` returns of a trajectory."""
        self._single_turns.pop(trajectory.name, None)

    def progress(self, waiting_requests: int = 0) -> TrajectoryProgress:
        """Return what the trajectories of this process are doing; from any thread."""
        running = list(self._running.items())
        return TrajectoryProgress(
            running=len(running),
            at_engines=sum(policy.is_asking for policy, _ in running),
            placeless=self._placeless,
            waiting_requests=waiting_requests,
            oldest_s=max((time.monotonic() - began for _, began in running), default=0.0),
        )

    async def _wait_for(self, ended: asyncio.Future[TrajectoryResult], policy: AsyncLLMServerManager) -> None:
        """Wait until a trajectory has ended or its time is up."""
        began = time.monotonic()
        while not ended.done():
            used_s = time.monotonic() - began - policy.held_s
            if used_s >= self._rollout.agent.trajectory_timeout_s:
                return
            await asyncio.wait({ended}, timeout=self._rollout.agent.trajectory_timeout_s - used_s)

    async def _run_here(self, trajectory: Trajectory, policy: AsyncLLMServerManager) -> TrajectoryResult:
        running = asyncio.create_task(self._answered(trajectory, policy))
        limit_s = self._rollout.agent.trajectory_timeout_s
        try:
            await self._wait_for(running, policy)
            if running.done():
                return running.result()
        finally:
            policy.close()
            if running.cancel():
                self._ending.add(running)
                running.add_done_callback(self._end)
        await asyncio.wait({running}, timeout=END_GRACE_S)
        return self._failed(trajectory, policy, "timeout", _too_long(limit_s))

    def _end(self, cancelled: asyncio.Task[TrajectoryResult]) -> None:
        self._ending.discard(cancelled)
        if not cancelled.cancelled() and (error := cancelled.exception()) is not None:
            logger.debug("a cancelled trajectory ended with an error: %s", error)

    async def _run_in_thread(self, trajectory: Trajectory, policy: AsyncLLMServerManager) -> TrajectoryResult:
        limit_s = self._rollout.agent.trajectory_timeout_s
        attempt = _RunningTrajectory()
        name = f"trajectory {trajectory.sample.name}"
        threading.Thread(target=self._in_thread, args=(attempt, trajectory, policy), name=name, daemon=True).start()
        result, thread_end = asyncio.wrap_future(attempt.result), asyncio.wrap_future(attempt.thread_end)
        try:
            await self._wait_for(result, policy)
            if not result.done():
                attempt.cancel("timeout")
            policy.close()
            # What the user's code started beside its coroutine is cancelled, too.
            await asyncio.wait({thread_end}, timeout=END_GRACE_S)
        except asyncio.CancelledError:
            attempt.cancel("cancelled")
            policy.close()
            raise
        if not thread_end.done():
            self.abandoned += 1
        if result.done():
            return result.result()
        message = f"{_too_long(limit_s)}, and did not end when it was cancelled"
        return self._failed(trajectory, policy, "timeout", message)

    def _in_thread(self, attempt: _RunningTrajectory, trajectory: Trajectory, policy: AsyncLLMServerManager) -> None:
        try:
            asyncio.run(self._settled(attempt, trajectory, policy))
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError) as error:  # raised by a task of the user's code
            message = f"agent loop '{trajectory.agent_name}' raised {type(error).__name__}: {error}".rstrip(": ")
            attempt.settle(self._failed(trajectory, policy, attempt.cancelled_as or "agent_error", message))
        finally:
            attempt.thread_end.set_result(None)

    async def _settled(
        self, attempt: _RunningTrajectory, trajectory: Trajectory, policy: AsyncLLMServerManager
    ) -> None:
        attempt.loop, attempt.task = asyncio.get_running_loop(), asyncio.current_task()
        attempt.loop.set_default_executor(DaemonThreads())  # a function that blocks must not delay the exit
        try:
            result = await self._answered(trajectory, policy)
        except asyncio.CancelledError:
            if attempt.cancelled_as is None:
                raise
        except Exception as error:  # noqa: BLE001 - the caller, in another thread, raises it
            attempt.result.set_exception(error)
            return
        if attempt.cancelled_as is not None:
            is_late = attempt.cancelled_as == "timeout"
            message = _too_long(self._rollout.agent.trajectory_timeout_s) if is_late else "it was cancelled"
            result = self._failed(trajectory, policy, attempt.cancelled_as, message)
        attempt.settle(result)

    async def _answered(self, trajectory: Trajectory, policy: AsyncLLMServerManager) -> TrajectoryResult:
        try:
            with user_code(f"agent loop '{trajectory.agent_name}'"):
                loop = await self._loop(trajectory, policy)
                sampling = {name: getattr(trajectory.sampling, name) for name in SAMPLING_PARAMS}
                try:
                    returned = await loop.run(sampling, **trajectory.row)
                finally:
                    await loop.end_trajectory()
            outputs = self._checked(returned, policy.turns, trajectory)
            return TrajectoryResult(outputs, "", oldest_version(policy.turns))
        except ContextFullError as error:
            return self._failed(trajectory, policy, "context_full", str(error))
        except TrajectoryError as error:
            return self._failed(trajectory, policy, error.status, str(error))
        except VerlError as error:
            return self._failed(trajectory, policy, "agent_error", str(error))

    async def _loop(self, trajectory: Trajectory, policy: AsyncLLMServerManager) -> AgentLoopBase:
        entry = _named_loop(self._loops, trajectory.agent_name)
        loop, arguments = entry.load(), entry.arguments
        if loop not in self._shared:
            await in_thread(self._shared_by, loop)  # it loads tools, which is code of users
        agent_loop = loop.__new__(loop)
        agent_loop.shared = self._shared[loop]  # before __init__, which may read the tools
        # Only loops of users read keys of their own, for which the whole configuration has to be composed.
        config = self._config if loop.__module__.startswith("verl.") else self._composed
        parameters = inspect.signature(loop).parameters
        data = "data_config" if "data_config" in parameters and "dataset_config" not in parameters else "dataset_config"
        data_section = {data: DictConfigWrap(config.data)}
        agent_loop.__init__(
            DictConfigWrap(config), policy, self._tokenizer, self._processor, **data_section, **arguments
        )
        return agent_loop

    @functools.cached_property
    def _composed(self) -> DictConfig:
        """The configuration for loops of users, which may read keys that they have added to it."""
        composed: Any = OmegaConf.merge(self._config.composed, self._config.to_dict())
        OmegaConf.set_struct(composed, True)
        return composed

    def close(self) -> None:
        """Free what the trajectories have shared."""
        with self._preparing:
            for loop, shared in self._shared.items():
                loop.discard(shared)
            self._shared.clear()

    def _shared_by(self, loop: type[AgentLoopBase]) -> object:
        with self._preparing:
            if loop not in self._shared:
                self._shared[loop] = loop.prepare(self._config, self._tokenizer)
            return self._shared[loop]

    # ---- outputs

    def _checked(
        self, returned: Any, turns: Sequence[DrawnTurn], trajectory: Trajectory
    ) -> tuple[AgentLoopOutput, ...]:
        """Check what a loop returned and give it the log-probs that the engines returned."""
        outputs = returned if isinstance(returned, list) else [returned]
        if invalid := [type(output).__name__ for output in outputs if not isinstance(output, AgentLoopOutput)]:
            raise ConfigError(f"run() returned {invalid[0]}; it returns an AgentLoopOutput, or a list of them.")
        if not outputs:
            raise ConfigError("run() returned an empty list; it returns at least one AgentLoopOutput.")
        _check_drawn_once(outputs, turns)
        _check_scores(outputs)
        checked = [self._checked_output(output, turns, trajectory) for output in outputs]
        # A sequence without a token of the policy teaches nothing, and has no place for a score.
        trained = [output for output in checked if any(output.response_mask)] or checked[-1:]
        metrics = trained[-1].metrics
        if metrics.num_preempted < 0:
            metrics = metrics.model_copy(update={"num_preempted": preemptions(turns)})
        return (*trained[:-1], trained[-1].model_copy(update={"metrics": metrics}))

    def _checked_output(
        self, output: AgentLoopOutput, turns: Sequence[DrawnTurn], trajectory: Trajectory
    ) -> AgentLoopOutput:
        with user_code("run() returned an AgentLoopOutput that was changed after it was made"):
            output = AgentLoopOutput.model_validate(dict(output))
        longest, most = self._rollout.prompt_length, self._rollout.response_length
        if not 0 < len(output.prompt_ids) <= longest:
            raise ConfigError(
                f"the prompt has {len(output.prompt_ids)} tokens; it may have 1 to data.max_prompt_length={longest}."
            )
        tokens, row = [*output.prompt_ids, *output.response_ids], trajectory.row
        sampled_log_probs = drawn_log_probs(tokens, turns)
        own_turns = trajectory.to_train_on(turns)
        trained = drawn_log_probs(tokens, own_turns)[len(output.prompt_ids) :]
        for index, (mask, log_prob) in enumerate(zip(output.response_mask, trained, strict=True)):
            if mask and log_prob is None:
                foreign_turns = [turn for turn in turns if all(turn is not policy_turn for policy_turn in own_turns)]
                _raise_not_trainable(
                    index, tokens[: len(output.prompt_ids) + index + 1], foreign_turns, trajectory.sampling
                )
        self._check_foreign(output, sampled_log_probs[len(output.prompt_ids) :])
        _check_additions(output, row)
        images, end = self._images_of(output, [value is not None for value in sampled_log_probs], turns, row)
        is_cut, most = len(output.response_ids) > most, min(most, end - len(output.prompt_ids))
        pairs = zip(output.response_mask, trained, strict=True)
        return output.model_copy(
            update={
                "response_ids": output.response_ids[:most],
                "response_mask": output.response_mask[:most],
                "response_logprobs": [value if mask and value is not None else 0.0 for mask, value in pairs][:most],
                "routed_experts": drawn_routing([*output.prompt_ids, *output.response_ids[:most]], turns),
                "weight_versions": drawn_weight_versions(tokens, turns)[len(output.prompt_ids) :][:most],
                "kept_ids": _kept_ids(tokens, own_turns, slice(len(output.prompt_ids), len(output.prompt_ids) + most)),
                "multi_modal_data": images,
                "status": "context_full" if is_cut and output.status == "done" else output.status,
            }
        )

    def _images_of(
        self,
        output: AgentLoopOutput,
        is_sampled: Sequence[bool],
        turns: Sequence[DrawnTurn],
        row: JsonMapping,
    ) -> tuple[dict[str, SharedTensors] | None, int]:
        """Return the inputs of a sequence's images, None for those of the row, and how many tokens of it may stay.

        ``is_sampled`` tells which tokens of prompt and response the policy drew.
        """
        ids = [*output.prompt_ids, *output.response_ids]
        data = dict(output.multi_modal_data or {})
        values = data.pop(INPUTS, None) if INPUTS in data else data.pop("images", None)
        if unread := [name for name, value in data.items() if value]:
            raise ConfigError(
                f"multi_modal_data has {', '.join(unread)}, which is not read in this version. Give images alone."
            )
        named = None if values is None else as_inputs(values, self._images, "multi_modal_data")
        if self._images is None:
            return None, len(ids)
        row_value = row.get(INPUTS)
        row_images = (
            row_value if isinstance(row_value, SharedTensors) else as_inputs(row_value, self._images, "the row")
        )
        most = len(output.prompt_ids) + self._rollout.response_length
        images, end = images_of_sequence(ids, is_sampled, turns, named, row_images, most, self._images.config)
        images = with_text_places(images, ids[:end], is_sampled, len(output.prompt_ids), self._images.config)
        is_of_row = images is row_value or not (len(images) or len(row_images))
        return (None if is_of_row else {INPUTS: images}), end

    def _check_foreign(self, output: AgentLoopOutput, log_probs: Sequence[float | None]) -> None:
        """Check the tokens that the policy did not draw, which the trainer's model reads."""
        tokens_with_log_probs = zip(output.response_ids, log_probs, strict=True)
        foreign = [*output.prompt_ids, *(token for token, log_prob in tokens_with_log_probs if log_prob is None)]
        if invalid := [token for token in foreign if not 0 <= token < self._vocabulary]:
            raise ConfigError(
                f"token {invalid[0]} is none of the {self._vocabulary} tokens of the vocabulary. Encode text with "
                "self.tokenizer or self.apply_chat_template."
            )

    def _failed(
        self, trajectory: Trajectory, policy: AsyncLLMServerManager, status: TrajectoryStatus, message: str
    ) -> TrajectoryResult:
        logger.info("trajectory %s ended with %s: %s", trajectory.sample.name, status, message)
        vision = None if self._images is None else self._images.config
        return failed(trajectory, tuple(policy.turns), status, message, self._rollout, vision)


def failed(
    trajectory: Trajectory,
    turns: Sequence[DrawnTurn],
    status: TrajectoryStatus,
    message: str,
    rollout: RolloutConfig,
    vision: VisionConfig | None = None,
) -> TrajectoryResult:
    """Make the result of a trajectory without an output: what the policy drew last, and all before it."""
    prompt = _first_prompt(trajectory, turns, rollout.prompt_length)
    all_turns = turns
    turns = [turn for turn in turns if turn.prompt_ids[: len(prompt)] == prompt]
    written = [*turns[-1].prompt_ids, *turns[-1].token_ids] if turns else prompt
    values = drawn_log_probs(written, turns)
    trained = drawn_log_probs(written, trajectory.to_train_on(turns))
    images, end = None, len(prompt) + rollout.response_length
    if vision is not None and turns:
        is_drawn = [value is not None for value in values]
        images, end = images_of_sequence(written, is_drawn, turns, None, NO_IMAGES, end, vision)
    response = slice(len(prompt), end)
    output = AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=written[response],
        response_mask=[int(value is not None) for value in trained[response]],
        response_logprobs=[value or 0.0 for value in trained[response]],
        num_turns=1 + len(turns),
        metrics=AgentLoopMetrics(
            generate_sequences=sum(turn.seconds for turn in all_turns), num_preempted=preemptions(all_turns)
        ),
        status=status,
        routed_experts=drawn_routing(written[:end], turns),
        weight_versions=drawn_weight_versions(written, turns)[response],
        kept_ids=_kept_ids(written, trajectory.to_train_on(turns), response),
        multi_modal_data=None if images is None or images is trajectory.row.get(INPUTS) else {INPUTS: images},
    )
    return TrajectoryResult((output,), message, oldest_version(turns))


def _kept_ids(tokens: Sequence[int], turns: Sequence[DrawnTurn], response: slice) -> Tensor | None:
    kept_ids = drawn_kept_ids(tokens, turns)
    return None if kept_ids is None else kept_ids[response].clone()  # without the rows of the prompt, which go nowhere


def _first_prompt(trajectory: Trajectory, turns: Sequence[DrawnTurn], longest: int) -> list[int]:
    """Return the prompt that the policy met first: the data set's, or with tools, for example, another."""
    prompt = list(trajectory.sample.prompt_ids)
    if any(turn.prompt_ids[: len(prompt)] == prompt for turn in turns):
        return prompt
    return next((turn.prompt_ids for turn in turns if len(turn.prompt_ids) <= longest), prompt)


def _raise_not_trainable(
    index: int, tokens: Sequence[int], foreign_turns: Sequence[DrawnTurn], sampling: SamplingParams
) -> NoReturn:
    """Raise ConfigError because a token, the last of ``tokens``, has mask 1 and is none to train on.

    Args:
        index: of the token in the response.
        tokens: all up to it.
        foreign_turns: turns whose sampling was not that of training.
        sampling: that of training.
    """
    for turn in foreign_turns:
        if turn.sampling is not None and drawn_log_probs(tokens, [turn])[-1] is not None:
            training = sampling.distribution_params
            differs = {
                name: value for name, value in turn.sampling.distribution_params.items() if value != training[name]
            }
            sampled_with, trained_with = (
                ", ".join(f"{name}={values[name]:g}" for name in differs) for values in (differs, training)
            )
            raise ConfigError(
                f"token {index} of the response has mask 1, and the policy drew it with {sampled_with}, while training "
                f"computes its probability with {trained_with}. Give generate the sampling_params of run() unchanged, "
                "and set actor_rollout_ref.rollout.temperature, top_p, top_k and min_p for all turns; or give the turn "
                "mask 0, so that it is not trained on."
            )
    raise ConfigError(
        f"token {index} of the response has mask 1, but the policy did not draw it after the tokens before it. Keep "
        "the drawn ids as they came (never decode and encode them again), and give mask 0 to every other token."
    )


def _check_additions(output: AgentLoopOutput, row: JsonMapping) -> None:
    """Check what an agent loop adds to the batch.

    Raises:
        ConfigError: a further value has the name of a column of the batch, or cannot be sent to another process.
    """
    if reserved := sorted(set(output.extra_fields) & {*COLUMNS, *row}):
        raise ConfigError(f"extra_fields may not hold {', '.join(reserved)}: the batch has it. Choose another name.")
    try:
        pickle.dumps((output.extra_fields, output.conversation))
    except Exception as error:  # users' objects raise anything
        raise ConfigError(
            f"extra_fields or conversation cannot be sent to another process ({type(error).__name__}: {error}). Give "
            "plain values."
        ) from error


def _check_scores(outputs: Sequence[AgentLoopOutput]) -> None:
    """Check the scores that an agent loop gives to its trajectory.

    Raises:
        ConfigError: a score is no number, or two sequences have different ones.
    """
    scores = [output.reward_score for output in outputs if output.reward_score is not None]
    if invalid := [score for score in scores if not math.isfinite(score)]:
        raise ConfigError(f"reward_score={invalid[0]} must be a finite number, or None for the reward function.")
    if len(set(scores)) > 1:
        raise ConfigError(
            f"the sequences of one trajectory have different values of reward_score: {sorted(set(scores))}. It is the "
            "score of the whole trajectory: give all the same, or only one of them a score."
        )


def _check_drawn_once(outputs: Sequence[AgentLoopOutput], turns: Sequence[DrawnTurn]) -> None:
    """Check that no turn of the policy is trained on in two sequences.

    Raises:
        ConfigError: more sequences have mask 1 on a turn than there are turns of these tokens.
    """
    if len(outputs) == 1:
        return
    kinds = Counter((tuple(turn.prompt_ids), tuple(turn.token_ids)) for turn in turns)
    for (prompt, token_ids), times in kinds.items():
        span = slice(len(prompt), len(prompt) + len(token_ids))
        trained = 0
        for output in outputs:
            written = (*output.prompt_ids, *output.response_ids)
            mask = [0] * len(output.prompt_ids) + output.response_mask
            trained += any(mask[span]) and written[span] == token_ids and written[: len(prompt)] == prompt
        if trained > times:
            raise ConfigError(
                f"{trained} sequences have mask 1 on the same turn of the policy, which drew it {times} times. Where a "
                "sequence repeats a turn of another one, give it mask 0."
            )


def _too_long(limit_s: float) -> str:
    return f"it took longer than trajectory_timeout_s={limit_s:g} s"
