"""What kits are compared with: the chat template's own rendering of the messages that a kit holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.agents.endpoint.conftest import TOKENIZER, Trajectory

CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'
LONG = {"prompt_length": 30_000, "response_length": 30_000}
"""Room for prompts of kits, with a token for each few letters."""


def calculates(prompt: str) -> str:
    """Call the tool, then say its result."""
    last = prompt.rsplit("<|im_start|>user\n", 1)[1]
    return "It is 42." if "<tool_response>" in last else f"Let me see.\n{CALL}"


@pytest.fixture
def calculator(serve) -> Trajectory:
    return serve(calculates, **LONG)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, *calls: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """A turn of the policy; each call is an id, a name and arguments."""
    made = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in calls
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": made} if made else {})


def result(id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def recorded(trajectory: Trajectory) -> list[str]:
    """The text of each sequence from the first message of the user on."""
    found = []
    for output in trajectory.recorder.outputs():
        text = TOKENIZER.decode(output.prompt_ids + output.response_ids)
        found.append(text[text.index("<|im_start|>user\n") :])
    return found


def believed(messages: list[dict[str, Any]]) -> str:
    """What the chat template writes for the messages of a kit, from the first message of the user on."""
    taken = json.loads(json.dumps(messages))
    text = TOKENIZER.apply_chat_template(taken, tokenize=False)
    return text[text.index("<|im_start|>user\n") :].rstrip("\n")
