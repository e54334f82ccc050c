"""Agent loops: programs that answer a prompt by one or more turns of the policy.

::

    @register("look_twice")
    class LookTwice(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            prompt = await self.apply_chat_template(kwargs["raw_prompt"])
            first = await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=sampling_params)
            ...
            return AgentLoopOutput(prompt_ids=prompt, response_ids=..., response_mask=..., metrics=AgentLoopMetrics())
"""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel, Field, model_validator

from verl.agents.images import FOR_TEXT, INPUTS, VIDEOS_APART, as_inputs, expanded, token_counts
from verl.agents.policy import AsyncLLMServerManager
from verl.base.import_utils import load_module
from verl.base.plugins import PACKAGE, import_module
from verl.base.registry import Registry
from verl.base.types import JsonMapping, JsonObject
from verl.config.agent import TrajectoryStatus
from verl.datasets.chat import as_messages, encode, render, render_prompt
from verl.errors import ConfigError, DataError, RolloutError
from verl.vision.messages import has_video_parts, without_images
from verl.vision.prompts import ImagePrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

PLACE = "the conversation"


class AgentLoopMetrics(BaseModel):
    """Times and counts of one trajectory."""

    generate_sequences: float = 0.0
    """Seconds in the policy's turns."""
    tool_calls: float = 0.0
    """Seconds in tool calls, or in the environment."""
    compute_score: float = 0.0
    """Seconds in scoring inside the loop."""
    num_preempted: int = -1
    """Preemptions: interruptions of a turn by the engine for want of memory; -1 where it is not counted."""


class AgentLoopOutput(BaseModel):
    """One training sequence of a trajectory."""

    prompt_ids: list[int]
    """Tokens of the first prompt."""
    response_ids: list[int]
    """All tokens after it: the policy's, and those of tools and users between its turns."""
    response_mask: list[int]
    """1 on tokens that the policy drew, 0 on others."""
    response_logprobs: list[float] | None = None
    """log p of the drawn tokens, 0 on others; None takes what the engines returned."""
    routed_experts: Any = None
    """Experts that the engines recorded for its tokens; not read from a loop."""
    kept_ids: Any = None
    """Token ids that truncated sampling kept, as the engines recorded them; not read from a loop."""
    weight_versions: list[int] = []
    """Version of the weights that drew each token, -1 where the policy drew none; not read from a loop."""
    multi_modal_data: JsonObject | None = None
    """``images``: all images whose tokens the sequence has, in their order, as ``generate`` takes them; None takes
    those that the policy was given in its last turn there."""
    reward_score: float | None = None
    """Score of the whole trajectory, if the loop computes it; otherwise the reward function does."""
    agent: str = "main"
    """Name of the agent whose sequence it is. The agents of a trajectory share its reward, and each is compared with
    its own kind in the other responses to the prompt."""
    num_turns: int = 0
    """Messages of the conversation, those of the prompt, tools and users among them."""
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    status: TrajectoryStatus = "done"
    """End of the trajectory."""
    conversation: list[JsonObject] | None = None
    """Messages for the dumps of a run, as an OpenAI client holds them, each with further values such as
    ``seconds``. Without it the dumps show the tokens as text."""
    extra_fields: JsonObject = {}
    """Further values, which become columns of the batch: ``turn_scores`` (a score for each turn of the policy, in the
    place of ``reward_score``), ``turn_rewards`` (added to the score of either), ``tool_rewards``, and your own."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        counts = {"response_ids": len(self.response_ids), "response_mask": len(self.response_mask)}
        if self.response_logprobs is not None:
            counts["response_logprobs"] = len(self.response_logprobs)
        if len(set(counts.values())) > 1:
            raise ValueError(f"these need one value per token of the response: {counts}")
        if not set(self.response_mask) <= {0, 1}:
            raise ValueError(f"response_mask holds {sorted(set(self.response_mask))}, and may hold 0 and 1")
        return self


class TrajectoryError(RolloutError):
    """Ends a trajectory with a status, such as ``environment_error``; the message says why."""

    def __init__(self, message: str, status: TrajectoryStatus) -> None:
        super().__init__(message)
        self.status: TrajectoryStatus = status


@dataclass(frozen=True)
class DictConfigWrap:
    """A configuration as an agent loop gets it: ``trainer_config.config``."""

    config: Any


class AgentLoopBase(ABC):
    """An agent loop. One object answers one prompt; those of users in a thread with an event loop of their own.

    Args:
        trainer_config: the whole configuration, as ``trainer_config.config``: for a class outside of verl as Hydra
            composed it, with keys that the program has added.
        server_manager: the policy.
        tokenizer: the policy's.
        processor: the multi-modal processor, if the model has one.
        dataset_cls: class of the data set; by default that of the configuration.
        dataset_config: the section ``data``, as ``dataset_config.config``.
        data_config: another name of ``dataset_config``.
        **kwargs: further arguments of the loop's entry in ``agent_loop_config_path``.
    """

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: AsyncLLMServerManager,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None = None,
        dataset_cls: type | None = None,
        dataset_config: DictConfigWrap | None = None,
        data_config: DictConfigWrap | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise ConfigError(f"{type(self).__name__} takes no argument {', '.join(sorted(kwargs))}.")
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        if dataset_cls is not None:
            self.dataset_cls = dataset_cls
        self.dataset_config = (dataset_config or data_config or DictConfigWrap(self.config.data)).config
        template: Any = self.dataset_config.apply_chat_template_kwargs or {}
        plain: Any = OmegaConf.to_container(template) if OmegaConf.is_config(template) else template
        self.apply_chat_template_kwargs: JsonObject = dict(plain)

    shared: Any = None
    """Result of :meth:`prepare`; set before ``__init__`` runs."""
    takes_images: ClassVar[bool] = True
    """True if rows with images may ask for this loop."""

    @functools.cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the trajectory, for ``run_in_executor``."""
        return asyncio.get_running_loop()

    @functools.cached_property
    def dataset_cls(self) -> type:
        """The class of the data set."""
        from verl.datasets.build import get_dataset_class  # most loops never ask

        return get_dataset_class(self.dataset_config)

    @property
    def data_config(self) -> Any:
        """The section ``data``."""
        return self.dataset_config

    @functools.cached_property
    def system_prompt(self) -> list[int]:
        """Tokens that the template writes in front of messages that have no system message."""
        return encode(self._system_prompt(), self.tokenizer)

    @classmethod
    def prepare(cls, config: object, tokenizer: PreTrainedTokenizerBase) -> object:
        """Make what all trajectories of a process share; each finds it as ``self.shared``. Called once in a process.

        It is used by several threads at once.
        """
        return None

    @classmethod  # noqa: B027 - most loops have nothing to free
    def discard(cls, shared: object) -> None:
        """Free what :meth:`prepare` has made, such as connections; no trajectory uses it any more."""

    @classmethod  # noqa: B027 - most loops take none
    def check_arguments(cls, arguments: Mapping[str, object]) -> None:
        """Check the further arguments of an entry in ``agent_loop_config_path``, before a model is loaded.

        Raises:
            ConfigError: they cannot be used.
        """

    @abstractmethod
    async def run(self, sampling_params: JsonObject, **kwargs: object) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Answer one prompt.

        Args:
            sampling_params: ``temperature``, ``top_p``, ``top_k`` and ``max_tokens`` of the rollout or of validation,
                for ``server_manager.generate``. Turns to train on are drawn with them: training computes their
                probabilities so. Other calls, and validation, may differ.
            **kwargs: the row of the data set by column, ``raw_prompt`` (messages), ``tools_kwargs``,
                ``interaction_kwargs`` and ``environment_kwargs`` among them, and ``raw_prompt_ids``, its tokens.

        Returns:
            the training sequence; or several, in the order of the trajectory: after its context was rewritten, of
            forks, of other agents. They share the reward. The reward function scores the last sequence of the agent
            ``main``, or the last of all if there is no such agent, with what the agent wrote in earlier ones before
            it. A drawn token has mask 1 in one sequence alone, and mask 0 where another repeats it; sequences without
            mask 1 are left out if there are others.
        """

    async def end_trajectory(self) -> None:  # noqa: B027 - most loops have nothing to free
        """Free what :meth:`run` has taken for its trajectory; called after it, however it ended."""

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        images: Sequence[object] | Mapping[str, object] | None = None,
        videos: Sequence[object] | None = None,
        remove_system_prompt: bool = False,
        audios: Sequence[object] | None = None,
        mm_processor_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Render messages and the header of the policy's turn, and tokenize them.

        Texts of special tokens inside the messages stay texts, see :func:`verl.datasets.chat.render_prompt`.

        Args:
            messages: the conversation, or its newest part.
            tools: schemas of the tools that the policy may call.
            images: those that stand in the messages, in their order, as ``server_manager.generate`` takes them; the
                tokens are repeated as often as each image needs.
            videos: refused: those of the row are in ``images``, its ``multi_modal_inputs``, and others in the
                ``image_data`` of a :class:`verl.agents.conversation.Conversation`.
            remove_system_prompt: leave out the system message that the template writes by itself in front of messages
                without one.
            audios: refused: no model here reads them.
            mm_processor_kwargs: refused: the processor is called with the settings of the data set.
        """
        if videos:
            raise ConfigError(VIDEOS_APART)
        if audios or mm_processor_kwargs:
            raise ConfigError(f"{PLACE}: audios and mm_processor_kwargs are not in this version; leave them out.")
        maker = ImagePrompts.from_processor(self.processor)
        settings: JsonObject = {**self.apply_chat_template_kwargs, **({"tools": list(tools)} if tools else {})}
        text = render_prompt(as_messages(list(messages), PLACE, maker is not None), self.tokenizer, PLACE, **settings)
        if remove_system_prompt:
            text = text.removeprefix(self._system_prompt())
        ids = encode(text, self.tokenizer)
        if maker is None and not images:
            return ids
        inputs = as_inputs(images, maker, PLACE)
        assert maker is not None
        return expanded(ids, token_counts(inputs, maker.config), maker, PLACE)

    def _system_prompt(self) -> str:
        """Text that the template writes in front of a conversation which has no system message."""
        empty, settings = {"role": "user", "content": ""}, self.apply_chat_template_kwargs
        single, doubled = (render([empty] * count, self.tokenizer, PLACE, **settings) for count in (1, 2))
        return single.removesuffix(doubled.removeprefix(single))

    async def process_vision_info(self, messages: Sequence[Mapping[str, object]]) -> JsonObject:
        """Return the images that stand in messages, decoded, as ``images``; nothing if there are none.

        Messages of a row hold the places of its images alone: the images are the row's ``multi_modal_inputs``.

        Raises:
            ConfigError: there are videos; or images, and the policy is a model for text.
            DataError: an image cannot be read, or a message holds its place alone.
        """
        images = without_images([dict(message) for message in messages])[1]
        maker = ImagePrompts.from_processor(self.processor)
        if images and maker is None:
            raise ConfigError(f"{PLACE}: there are images, and {FOR_TEXT}.")
        if None in images:
            raise DataError(
                f"{PLACE}: an image part holds no image. Those of the row are kwargs['{INPUTS}'], which "
                "apply_chat_template and generate take as images."
            )
        if any(has_video_parts(message.get("content")) for message in messages):
            raise ConfigError(VIDEOS_APART)
        return {"images": [maker.read(image, PLACE) for image in images]} if maker is not None and images else {}

    async def process_multi_modal_info(self, messages: Sequence[Mapping[str, object]]) -> JsonObject:
        """Return what :meth:`process_vision_info` does: images are the only media of messages here."""
        return await self.process_vision_info(messages)


# ---- which loop

JUDGE_ADDRESS = "reward_router_address"
"""Argument of ``run``, and of calls of simulated users: where the judge of the run answers, as ``127.0.0.1:PORT``."""
LOOPS_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


@dataclass(frozen=True)
class LoopEntry:
    """An agent loop that rows can name."""

    target: type[AgentLoopBase] | str
    """The class, or its dotted path, or its name in ``file``."""
    file: str | None = None
    """A Python file with the class."""
    arguments: JsonMapping = field(default_factory=dict)

    def load(self) -> type[AgentLoopBase]:
        """Return the class.

        Raises:
            ConfigError: there is no such class, or it is no agent loop.
        """
        if not isinstance(self.target, str):
            return self.target
        module, _, name = self.target.rpartition(".")
        if not (self.file or module):
            if name in AGENT_LOOPS:
                return AGENT_LOOPS.get(name).load()
            raise ConfigError(
                f"{LOOPS_KEY}: _target_={name} names no module. Write module.{name}, give its `path`, or name one of "
                f"the registered loops: {', '.join(sorted(AGENT_LOOPS))}."
            )
        if module.startswith(f"{PACKAGE}."):
            return getattr(import_module(module), name)
        key = f"{LOOPS_KEY}: {'path' if self.file else '_target_'}"
        loop = getattr(load_module(self.file or module, key), name, None)
        if not (isinstance(loop, type) and issubclass(loop, AgentLoopBase)):
            raise ConfigError(f"{LOOPS_KEY}: {self.target} is no class that derives from AgentLoopBase.")
        return loop


Loop = TypeVar("Loop", bound=type[AgentLoopBase])

AGENT_LOOPS: Registry[LoopEntry] = Registry("agent loop", origin=lambda entry: entry.target)
"""Agent loops by the name that rows give in ``agent_name``."""


def register(agent_name: str) -> Callable[[Loop], Loop]:
    """Register the decorated class as the agent loop of rows with this ``agent_name``."""

    def decorator(cls: Loop) -> Loop:
        AGENT_LOOPS.add(agent_name, LoopEntry(cls))
        return cls

    return decorator


def require_judge(config: Any, who: str) -> None:
    """Check that a judge answers while conversations are held.

    Args:
        config: the whole configuration.
        who: the beginning of the error: what asks the judge, with its setting.

    Raises:
        ConfigError: none does.
    """
    if config.judge_answers_agents and config.trainer.nnodes > 1:
        nodes = (
            f"its address is one of the driver's machine, which other machines (trainer.nnodes={config.trainer.nnodes})"
        )
        raise ConfigError(
            f"{who} asks the judge while conversations are held: {nodes} do not reach. Set trainer.nnodes=1."
        )
    if config.judge_answers_agents:
        return
    remedy = "reward_model.enable_resource_pool=true, with reward_model.nnodes and n_gpus_per_node, and controller=ray"
    if config.judge is None:
        judge = "reward_model.enable=true, reward_model.model.path, reward_model.rollout.name"
        has = f"the run has none. Set {judge}, {remedy}"
    else:
        has = f"it shares the policy's processes, which are at work meanwhile. Give it ranks of its own: {remedy}"
    raise ConfigError(f"{who} asks a judge while conversations are held, and {has}.")


def read_agent_loops(path: str) -> dict[str, LoopEntry]:
    """Read ``rollout.agent.agent_loop_config_path``: a list of ``name``, ``_target_`` and further arguments.

    ``_target_`` is the dotted path of a class, or its name in the Python file ``path``, or a registered name.

    Raises:
        ConfigError: the file is no such list.
    """
    try:
        entries = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{LOOPS_KEY}={path} cannot be read: {error}.") from error
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and {"name", "_target_"} <= set(e) for e in entries
    ):
        raise ConfigError(
            f"{LOOPS_KEY}={path} must be a list of entries with 'name' and '_target_' (dotted path of a class)."
        )
    loops = {}
    for entry in entries:
        arguments = dict(entry)
        name, target, file = arguments.pop("name"), arguments.pop("_target_"), arguments.pop("path", None)
        loops[str(name)] = LoopEntry(str(target), file, arguments)
    return loops
