"""Tool calls that cannot be read: what they take from the score, on which turn, and how they are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.agents.script import Script
from tests.agents.test_tool_agent_prompts import CALL, TOOL
from tests.support.tiny_run import make_tiny_run, overrides
from verl.agents.loop import AgentLoopOutput
from verl.agents.policy import SampleId
from verl.agents.worker import AgentLoopWorker, Trajectory
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.request import SamplingParams

BAD = '<tool_call>\n{"name": "double"\n</tool_call>'
TURNS = "actor_rollout_ref__rollout__multi_turn__"
CUT_AT_MARK = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('!')[-1] + '<eos>' if m.role == 'assistant' else m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def said(folder: Path, texts: Sequence[str], template: str = "", **settings: Any) -> tuple[AgentLoopOutput, ...]:
    """The sequences of a conversation in which the policy says ``texts`` and each bad call costs 0.25."""
    paths = make_tiny_run(folder)
    (folder / "tools.py").write_text(TOOL)
    tokenizer = hf_tokenizer(paths["model"])
    tokenizer.chat_template = template or tokenizer.chat_template
    settings = {
        "data__max_response_length": 600,
        f"{TURNS}enable": "true",
        f"{TURNS}function_tool_path": folder / "tools.py",
        f"{TURNS}max_parallel_calls": 4,
        f"{TURNS}malformed_call_penalty": 0.25,
        **settings,
    }
    config = load_config(compose(overrides(paths, folder, **settings)))
    script = Script(tokenizer)
    script.begin(list(texts))
    trajectory = Trajectory(
        agent_name="tool_agent",
        sample=SampleId(step=1, uid="1-0", sample_index=0, prompt_ids=(5, 6)),
        sampling=SamplingParams(seed=1, max_tokens=600),
        row={"raw_prompt": [{"role": "user", "content": "?"}]},
    )
    return asyncio.run(AgentLoopWorker(config, tokenizer, None, script).run(trajectory)).outputs


def test_each_bad_call_takes_from_the_score_on_its_turn(tmp_path: Path):
    [output] = said(tmp_path, [CALL + BAD + BAD, CALL, BAD, "42"])
    assert output.extra_fields["turn_rewards"] == [-0.5, 0.0, -0.25, 0.0]
    assert output.extra_fields["tool_rewards"] == [0.0, -0.25, -0.25, 0.0, -0.25]
    assert output.extra_fields["tool_failures"] == {"malformed_call": 3}
    assert output.extra_fields["tool_call_counts"] == 2
    assert output.extra_fields["turn_scores"] is None  # the reward function still scores the row


def test_a_bad_call_of_the_last_turn_counts_and_one_cut_off_by_the_limit_of_tokens_does_not(tmp_path: Path):
    [output] = said(tmp_path, [CALL, BAD], **{f"{TURNS}max_assistant_turns": 2})
    assert (output.status, output.extra_fields["turn_rewards"]) == ("turns_used_up", [0.0, -0.25])
    assert output.extra_fields["tool_failures"] == {"malformed_call": 1}
    [output] = said(tmp_path, [BAD + "and so on" * 30], data__max_response_length=60)
    assert (output.status, output.extra_fields["turn_rewards"]) == ("context_full", None)
    assert output.extra_fields["tool_failures"] == {}


def test_without_bad_calls_or_a_penalty_nothing_is_added(tmp_path: Path):
    [output] = said(tmp_path, [CALL, "42"])
    assert output.extra_fields["turn_rewards"] is None
    [output] = said(tmp_path, [BAD, "42"], **{f"{TURNS}malformed_call_penalty": 0})
    assert output.extra_fields["turn_rewards"] is None
    assert output.extra_fields["tool_rewards"] == [None]


def test_sequences_that_share_the_score_share_what_is_taken_from_it(tmp_path: Path):
    """The template drops what stands before a mark from history, which begins another sequence."""
    texts = ["a" + BAD, "hm! " + BAD, "42"]
    outputs = said(tmp_path, texts, CUT_AT_MARK, **{f"{TURNS}use_inference_chat_template": "true"})
    # The first two turns are one sequence. The penalty stands where the score does, on the last turn of each.
    assert [output.extra_fields["turn_rewards"] for output in outputs] == [[0.0, -0.5], [-0.5]]


def test_a_result_leaves_room_for_a_turn(tmp_path: Path):
    """A result that is cut to what is left of the response leaves one token to the policy."""
    call = CALL.replace("21", "5" * 60)
    [whole] = said(tmp_path, [call, "42"])
    start, stop = whole.response_mask.index(0), whole.response_mask.index(0) + whole.response_mask.count(0)
    for most in (stop - 20, stop):
        [output] = said(tmp_path, [call, "42"], data__max_response_length=most)
        assert len(output.response_ids) == most
        assert output.response_mask[start:] == [0] * (most - start - 1) + [1]
        assert output.status == "context_full"  # "42" was cut
