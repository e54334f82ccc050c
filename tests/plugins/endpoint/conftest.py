"""A policy with a script behind the endpoint, and what was recorded of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.chat_templates import chat_tokenizer
from tests.support.scripted_policy import ScriptedEngine, scripted_policy
from verl.agents.chat_template import ChatTemplate
from verl.agents.loop import AgentLoopOutput
from verl.agents.parsers import get_tool_parser
from verl.agents.policy import AsyncLLMServerManager
from verl.plugins.endpoint.recorder import RecorderSettings, TrajectoryRecorder
from verl.plugins.endpoint.server import Access, TrajectoryEndpoint

TOKENIZER = chat_tokenizer("chatml")
TEMPLATE = ChatTemplate(TOKENIZER)


@dataclass
class Trajectory:
    """One that runs."""

    access: Access
    recorder: TrajectoryRecorder
    policy: AsyncLLMServerManager
    engine: ScriptedEngine

    def texts(self) -> list[tuple[str, list[str]]]:
        """Of each sequence the text that is not trained on before the first drawn turn, and each drawn turn."""
        return [shown(output) for output in self.recorder.outputs()]


def shown(output: AgentLoopOutput) -> tuple[str, list[str]]:
    turns: list[list[int]] = []
    before = list(output.prompt_ids)
    last = 0
    for token, mask in zip(output.response_ids, output.response_mask, strict=True):
        if mask and not last:
            turns.append([])
        if mask:
            turns[-1].append(token)
        elif not turns:
            before.append(token)
        last = mask
    return TOKENIZER.decode(before), [TOKENIZER.decode(turn) for turn in turns]


@pytest.fixture(scope="session")
def endpoint():
    server = TrajectoryEndpoint()
    yield server
    server.close()


@pytest.fixture
def serve(endpoint):
    """Open a trajectory whose policy follows a script."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def begin(script: Callable[[str], str | None], **settings: Any) -> Trajectory:
            ours = {name: settings.pop(name) for name in ("ignored", "max_turns") if name in settings}
            family, parser = settings.pop("family", "chatml"), settings.pop("format", "hermes")
            tokenizer, template = TOKENIZER, TEMPLATE
            if family != "chatml":
                tokenizer = chat_tokenizer(family)
                template = ChatTemplate(tokenizer)
            engine = ScriptedEngine(tokenizer, script)
            policy = scripted_policy(engine, **settings)
            lengths = {"prompt_length": policy._config.prompt_length, "response_length": policy._config.response_length}
            recorder = TrajectoryRecorder(
                policy,
                RecorderSettings(template=template, parser=get_tool_parser(parser, tokenizer), **lengths, **ours),
            )
            return Trajectory(stack.enter_context(endpoint.access(recorder)), recorder, policy, engine)

        yield begin
