"""The agent loop of programs that know nothing of verl: they call an endpoint as they would call a vendor."""

from __future__ import annotations

import asyncio
import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from verl.agents.chat_template import ChatTemplate
from verl.agents.images import INPUTS
from verl.agents.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, TrajectoryError
from verl.agents.parsers import get_tool_parser
from verl.base.import_utils import user_code
from verl.base.redact import redacted
from verl.base.requirements import install_command
from verl.base.types import JsonMapping, JsonObject
from verl.config import PPOConfig
from verl.datasets.chat import Message, as_messages
from verl.datasets.template_probes import with_arguments
from verl.errors import ConfigError, VerlError
from verl.plugins.endpoint.programs import (
    LONGEST_ANSWER,
    CommandProgram,
    FunctionProgram,
    Program,
    ProgramTask,
    load_program,
)
from verl.plugins.endpoint.recorder import RecorderSettings, TrajectoryRecorder
from verl.utils.model import eos_token_ids
from verl.vision.data_urls import url_of
from verl.vision.messages import has_video_parts, with_images
from verl.vision.prompts import ImagePrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.plugins.endpoint.server import TrajectoryEndpoint

NAME = "program_agent"
ENTRY = "the entry of program_agent in agent_loop_config_path"
REMEDY = f"Leave it out of the request, or add its name to `ignore` in {ENTRY}; it is then disregarded."


@dataclass(frozen=True)
class ProgramAgentParts:
    """Objects that the trajectories of one process share."""

    endpoint: TrajectoryEndpoint
    settings: RecorderSettings


class ProgramAgentLoop(AgentLoopBase):
    """Run an agent program, and train on what it let the policy write.

    Args:
        *args: see :class:`AgentLoopBase`.
        program: a function of a ``ProgramTask``: ``file.py:name`` or ``package.module.name``.
        command: in place of ``program``, a command: a text or a list of words.
        ignore: parameters of requests that are disregarded where they cannot be kept, such as ``temperature``; without
            it such a request is refused.
        **kwargs: see :class:`AgentLoopBase`.
    """

    shared: ProgramAgentParts

    def __init__(
        self,
        *args: Any,
        program: str | None = None,
        command: str | Sequence[str] | None = None,
        ignore: Sequence[str] = (),
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._program = program_of(program, command)
        self._ignored = tuple(ignore)

    @classmethod
    def check_arguments(cls, arguments: Mapping[str, object]) -> None:
        """See :meth:`AgentLoopBase.check_arguments`."""
        _server()
        names = ("program", "command", "ignore")
        if unknown := sorted(set(arguments) - set(names)):
            raise ConfigError(f"{ENTRY} has {', '.join(unknown)}. Known: {', '.join(names)}.")
        program_of(arguments.get("program"), arguments.get("command"))
        ignore = arguments.get("ignore", [])
        if not (isinstance(ignore, list) and all(isinstance(name, str) for name in ignore)):
            raise ConfigError(f"{ENTRY}: ignore={ignore!r} must be a list of names of parameters, as [temperature].")

    @classmethod
    def prepare(cls, config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> ProgramAgentParts:
        """See :meth:`AgentLoopBase.prepare`."""
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        turns = rollout.multi_turn
        template = ChatTemplate(
            tokenizer,
            sanity_check=turns.tokenization_sanity_check_mode,
            template_kwargs=config.data.apply_chat_template_kwargs,
            end_token_ids=(*eos_token_ids(model.path, tokenizer), *rollout.stop_token_ids),
        )
        settings = RecorderSettings(
            template=template,
            parser=get_tool_parser(turns.format, tokenizer),
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            max_turns=turns.max_assistant_turns,
            remedy=REMEDY,
        )
        return ProgramAgentParts(_server()(), settings)

    @classmethod
    def discard(cls, shared: ProgramAgentParts) -> None:
        """See :meth:`AgentLoopBase.discard`."""
        shared.endpoint.close()

    async def run(self, sampling_params: JsonObject, **kwargs: object) -> list[AgentLoopOutput]:
        """See :meth:`AgentLoopBase.run`."""
        settings = replace(self.shared.settings, ignored=self._ignored)
        maker = ImagePrompts.from_processor(self.processor)
        messages, images = await asyncio.to_thread(_prompt, kwargs, maker)
        row = {name: value for name, value in kwargs.items() if name != INPUTS}
        recorder = TrajectoryRecorder(self.server_manager, settings, maker)
        with self.shared.endpoint.access(recorder) as access:
            task = ProgramTask(
                messages=messages,
                row=row | ({"raw_prompt": messages, "images": images} if images else {}),
                images=images,
                base_url=access.base_url,
                anthropic_base_url=access.root,
                api_key=access.api_key,
            )
            failure, returned = None, None
            try:
                with user_code("the agent program failed"):
                    returned = await self._program(task)
            except VerlError as error:
                failure = redacted(str(error), [access.api_key])
        if failure is not None and recorder.status == "done":
            raise TrajectoryError(failure, "agent_error")
        outputs = recorder.outputs()
        if not outputs:
            raise TrajectoryError(failure or "the agent program did not ask the policy.", "agent_error")
        answer, reward = _result(returned)
        common = {"agent_answer": answer, "ignored_parameters": dict(recorder.ignored)}
        metrics = AgentLoopMetrics(generate_sequences=self.server_manager.seconds)
        first = outputs[0].model_copy(update={"metrics": metrics})
        return [
            output.model_copy(
                update={
                    "status": recorder.status,
                    "reward_score": reward,
                    "extra_fields": output.extra_fields | common,
                }
            )
            for output in (first, *outputs[1:])
        ]


def _prompt(row: JsonMapping, maker: ImagePrompts | None) -> tuple[list[Message], list[str]]:
    """The messages of a row as clients of OpenAI's protocol send them, its images as ``data:`` URLs, and these."""
    read = as_messages(list(row["raw_prompt"]), "the prompt", with_images=maker is not None)
    messages = [with_arguments(message, as_text=True) for message in read]
    if any(has_video_parts(message["content"]) for message in messages):
        raise ConfigError(
            "the row has a video, and programs are sent texts and images alone. Take rows with videos out of the data, "
            "or give them another loop (single_turn_agent, tool_agent)."
        )
    images = [] if maker is None else [url_of(image) for image in maker.pictures(row.get(INPUTS) or {})]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    return with_images(messages, parts), images


def program_of(program: object, command: Any) -> Program:
    """Return the program of a loop's entry.

    Raises:
        ConfigError: it names none, or two, or one that does not exist.
    """
    if (program is None) == (command is None):
        raise ConfigError(f"{ENTRY} must name `program` (file.py:name or package.module.name) or else `command`.")
    if program is not None:
        if not isinstance(program, str):
            raise ConfigError(f"{ENTRY}: program={program!r} must be a text: file.py:name or package.module.name.")
        return FunctionProgram(load_program(program, "program"))
    words = shlex.split(command) if isinstance(command, str) else list(command)
    if not words or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{ENTRY}: command={command!r} must be a text or a list of texts.")
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{ENTRY}: command={command!r}: there is no program {words[0]} here (see PATH).")
    return CommandProgram(words)


def _server() -> type[TrajectoryEndpoint]:
    try:
        from verl.plugins.endpoint.server import TrajectoryEndpoint
    except ModuleNotFoundError as error:
        raise ConfigError(f"{NAME} needs the package {error.name}: {install_command('agents')}.") from error
    return TrajectoryEndpoint


def _result(returned: object) -> tuple[str | None, float | None]:
    """The answer or the reward of what a program returned.

    Raises:
        ConfigError: it is neither, or the answer is too long.
    """
    if isinstance(returned, str) and len(returned) > LONGEST_ANSWER:
        raise ConfigError(
            f"the agent program returned an answer of {len(returned):,} characters. At most {LONGEST_ANSWER:,} are "
            "taken: return what the reward function reads, and write files for the rest."
        )
    if returned is None or isinstance(returned, str):
        return returned, None
    if isinstance(returned, Real) and math.isfinite(returned):
        return None, float(returned)
    raise ConfigError(
        f"the agent program returned {returned!r:.100}. It returns the answer (a text), the reward (a finite number), "
        "or None: then the reward function reads what the policy wrote."
    )
