"""Prompts of the tool agent that are too long with the descriptions of its tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.agents.script import Script
from tests.support.tiny_run import make_tiny_run, overrides
from verl.agents.policy import SampleId
from verl.agents.worker import AgentLoopWorker, Trajectory, TrajectoryResult
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.request import SamplingParams

TOOL = """
from verl.tools.function_tool import function_tool

@function_tool
def double(number: int) -> str:
    '''Double a number.

    Args:
        number: the number.
    '''
    return str(2 * number)
"""
CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 21}}\n</tool_call>'


def answer(folder: Path, prompt: str, truncation: str, **columns: Any) -> tuple[TrajectoryResult, Script, Any]:
    """Answer by a call and a text, with room for prompts of 40 tokens."""
    paths = make_tiny_run(folder)
    (folder / "tools.py").write_text(TOOL)
    tokenizer = hf_tokenizer(paths["model"])
    tokenizer.chat_template = (
        "{% if enable_thinking is defined %}{{ enable_thinking }}.{% endif %}"
        "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}{% endfor %}"
        + str(tokenizer.chat_template)
    )
    settings = {
        "data__max_prompt_length": 40,
        "data__max_response_length": 200,
        "data__truncation": truncation,
        "actor_rollout_ref__rollout__multi_turn__enable": "true",
        "actor_rollout_ref__rollout__multi_turn__function_tool_path": folder / "tools.py",
    }
    config = load_config(compose(overrides(paths, folder, **settings)))
    script = Script(tokenizer)
    script.begin([CALL, "42"])
    worker = AgentLoopWorker(config, tokenizer, None, script)
    trajectory = Trajectory(
        agent_name="tool_agent",
        sample=SampleId(step=1, uid="1-0", sample_index=0, prompt_ids=(5, 6)),
        sampling=SamplingParams(seed=1, max_tokens=200),
        row={"raw_prompt": [{"role": "user", "content": prompt}], **columns},
    )
    return asyncio.run(worker.run(trajectory)), script, tokenizer


@pytest.mark.parametrize("truncation", ["error", "left", "right", "middle"])
def test_a_prompt_that_is_too_long_with_its_tools_is_cut_as_the_data_are(tmp_path: Path, truncation: str):
    # "double: Double a number.", "<user>", the prompt and "<assistant>" are 24 + 1 + 50 + 1 tokens.
    result, script, tokenizer = answer(tmp_path, "0123456789" * 5, truncation)
    if truncation == "error":
        assert result.status == "agent_error"
        assert result.message.startswith(
            "the prompt with the descriptions of the tools has 76 tokens, more than data.max"
        )
        assert script.prompts == []
        return
    whole = "double: Double a number.<user>" + "0123456789" * 5 + "<assistant>"
    tokens = tokenizer(whole, add_special_tokens=False)["input_ids"]
    kept = {"left": tokens[-40:], "right": tokens[:40], "middle": tokens[:20] + tokens[-20:]}[truncation]
    [output] = result.outputs
    assert (result.status, output.prompt_ids) == ("done", kept)
    assert tokenizer.decode(output.response_ids) == f"{CALL}<eos>tool: 42\n<assistant>42<eos>"
    assert [prompt[:40] for prompt in script.prompts] == [kept, kept]
    assert output.extra_fields["rendering_differences"] == {}


def test_a_prompt_that_fits_is_whole(tmp_path: Path):
    result, _, tokenizer = answer(tmp_path, "0" * 14, "error")
    assert result.status == "done"
    assert tokenizer.decode(result.outputs[0].prompt_ids) == "double: Double a number.<user>00000000000000<assistant>"
    assert len(result.outputs[0].prompt_ids) == 40


@pytest.mark.parametrize("thinking", [True, False])
def test_the_switch_for_thinking_of_a_row_reaches_the_template(tmp_path: Path, thinking: bool):
    result, _, tokenizer = answer(tmp_path, "0", "error", enable_thinking=thinking)
    [output] = result.outputs
    assert tokenizer.decode(output.prompt_ids) == f"{thinking}.double: Double a number.<user>0<assistant>"
