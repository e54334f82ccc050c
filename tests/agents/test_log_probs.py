"""Log-probs of conversations with tools, as the engine drew them, are the trainer's: over all turns and sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.agents.one_engine import OneEngine, prompts
from tests.support.chat_templates import FAMILIES
from verl.agents.parsers import FunctionCall, ToolParser
from verl.agents.turns import DrawnTurn, drawn_kept_ids, drawn_routing, drawn_weight_versions, oldest_version
from verl.base.registry import scoped_registrations
from verl.environments.base import Environment

TOOL = """
from verl.tools.function_tool import function_tool

@function_tool
def double(number: int) -> str:
    '''Double a number.

    Args:
        number: the number.
    '''
    return f"{2 * number} <|im_end|> é"
"""


class Echo(Environment):
    """Says the last characters of an action again, three times."""

    def reset(self, **row: Any) -> str:
        self.left = row["rounds"]
        return "Begin."

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return f"<|im_end|>{action[-3:]} é", 0.5, self.left == 0, False, {}


class ThinksAndCalls(ToolParser):
    """What was drawn is a thought, which some templates leave out of later turns, and a call."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        return f"<think>{len(responses_ids)}</think>So", [FunctionCall(name="double", arguments='{"number": 21}')]


def three_turns(folder, template, rewrites, names=("a", "b"), **changes):
    """An engine, and the batch of conversations of three turns that it answered."""
    (folder / "tools.py").write_text(TOOL)
    turns = "actor_rollout_ref__rollout__multi_turn__"
    with scoped_registrations():
        ToolParser.register("thinks_and_calls")(ThinksAndCalls)
        engine = OneEngine(
            folder,
            template,
            data__max_prompt_length=400,
            data__max_response_length=600,
            actor_rollout_ref__rollout__name="native",
            actor_rollout_ref__rollout__stop_token_ids=list(range(5, 360, 8)),
            **{
                f"{turns}enable": "true",
                f"{turns}format": "thinks_and_calls",
                f"{turns}function_tool_path": folder / "tools.py",
                f"{turns}max_assistant_turns": 3,
                f"{turns}use_inference_chat_template": str(rewrites).lower(),
            },
            **changes,
        )
        batch = engine.answer(prompts(list(names)), "null", default_agent_loop="tool_agent")
    more = batch.non_tensor_batch
    assert set(more["trajectory_status"]) == {"turns_used_up"}, more["trajectory_message"]
    # A template that leaves thoughts out writes the beginning of each later turn anew, so each turn is a sequence.
    assert len(batch) == len(names) * (3 if rewrites else 1)
    mask = batch.batch["response_mask"].bool()
    turns_drawn = (mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]).sum(-1)
    assert turns_drawn.tolist() == [1 if rewrites else 3] * len(batch)
    return engine, batch


@pytest.mark.parametrize(
    "family, rewrites",
    [*((family, False) for family in FAMILIES), ("chatml_thinking", True)],
)
def test_log_probs_of_three_turns(tmp_path, family, rewrites):
    rollout, is_cut = "actor_rollout_ref__rollout__", family == "chatml_thinking"
    cut = {f"{rollout}top_p": 0.7, f"{rollout}keep_sampling_mask": "true", f"{rollout}keep_sampling_mask_limit": 30}
    engine, batch = three_turns(tmp_path, family, rewrites, **(cut if is_cut else {}))
    columns = batch.batch
    mask, log_probs = columns["response_mask"].bool(), columns["rollout_log_probs"]
    assert_close(log_probs[mask], engine.trainers_log_probs(batch)[mask], atol=1e-5, rtol=0)
    assert ("kept_ids" in columns.keys()) == is_cut
    if is_cut:  # the log-probs are those over the tokens that sampling kept for each drawn one
        kept = columns["kept_ids"]
        assert kept.shape[-1] == 30
        assert torch.equal((kept == columns["responses"].unsqueeze(-1)).any(-1), mask)
        assert (kept[~mask] == -1).all()
        whole = engine.trainers_log_probs(batch.select([name for name in columns.keys() if name != "kept_ids"]))
        assert (log_probs - whole)[mask].max() > 0.3


def test_kept_tokens_are_those_of_turns_that_a_sequence_has():
    first = DrawnTurn([1, 2], [3, 4], [0.0, 0.0], 0, kept_ids=torch.tensor([[3, 7], [4, -1]], dtype=torch.int32))
    second = DrawnTurn([1, 2, 3, 4, 5], [6], [0.0], 0, kept_ids=torch.tensor([[0, 6, 8]], dtype=torch.int32))
    other = DrawnTurn([1, 9], [3], [0.0], 0, kept_ids=torch.tensor([[3, 5]], dtype=torch.int32))
    whole = drawn_kept_ids([1, 2, 3, 4, 5, 6], [other, first, second])
    none = [-1, -1, -1]
    assert whole.tolist() == [none, none, [3, 7, -1], [4, -1, -1], none, [0, 6, 8]]
    assert drawn_kept_ids([1, 2, 3], [DrawnTurn([1, 2], [3], [0.0], 0)]) is None


def test_log_probs_of_an_episode(tmp_path):
    entry = {"name": "echo", "class_name": f"{__name__}.Echo"}
    (tmp_path / "environments.yaml").write_text(yaml.safe_dump({"environment": [entry]}))
    engine = OneEngine(
        tmp_path,
        "chatml",
        data__max_prompt_length=200,
        data__max_response_length=400,
        actor_rollout_ref__rollout__name="native",
        actor_rollout_ref__rollout__stop_token_ids=list(range(5, 360, 8)),
        actor_rollout_ref__rollout__multi_turn__environment_config_path=tmp_path / "environments.yaml",
    )
    rows = prompts(["a", "b"])
    rows.non_tensor_batch["environment_kwargs"] = np.array([{"rounds": rounds} for rounds in (1, 3)], dtype=object)
    batch = engine.answer(rows, "null", default_agent_loop="environment_agent")
    mask = batch.batch["response_mask"].bool()
    turns_drawn = (mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]).sum(-1)
    assert turns_drawn.tolist() == [1, 3], batch.non_tensor_batch["trajectory_message"]
    assert_close(batch.batch["rollout_log_probs"][mask], engine.trainers_log_probs(batch)[mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("rewrites", [False, True])
def test_experts_of_three_turns_are_those_of_one_pass(tmp_path, rewrites):
    """Each token of a sequence but the last has the experts that Transformers chooses for it, whichever turn tells."""
    replay = {
        "actor_rollout_ref__actor__router_replay__mode": "R3",
        "actor_rollout_ref__rollout__enable_rollout_routing_replay": "true",
    }
    # One prompt alone: of a prompt that is known from another conversation the engine tells no experts.
    engine, batch = three_turns(tmp_path, "chatml_thinking", rewrites, ["a"], family="qwen3_moe", **replay)
    model = AutoModelForCausalLM.from_pretrained(engine.paths["model"])
    columns = batch.batch
    for ids, seen, found in zip(
        columns["input_ids"], columns["attention_mask"].bool(), columns["routed_experts"], strict=True
    ):
        with torch.no_grad():
            logits = model(ids[seen][None], output_router_logits=True).router_logits
        expected = torch.stack([layer.topk(2).indices for layer in logits], dim=1)  # (tokens, layers, 2)
        assert torch.equal(found[seen][:-1].sort(-1).values.long(), expected[:-1].sort(-1).values)
        assert bool((found[seen][-1] == 255).all())
        assert bool((found[~seen] == 255).all())


def test_experts_come_from_turns_that_begin_like_the_sequence():
    unknown = 255

    def routing(*experts):
        return torch.tensor(experts, dtype=torch.uint8).view(-1, 1, 1)

    first = DrawnTurn([1, 2], [3, 4], [0.0, 0.0], 0, routed_experts=routing(0, 1, 2, unknown))
    # Its first token was kept from another request; it computed token 4, and 2 and 3 once more.
    second = DrawnTurn([1, 2, 3, 4, 5], [6], [0.0], 0, routed_experts=routing(unknown, 7, 7, 3, 4, unknown))
    whole = drawn_routing([1, 2, 3, 4, 5, 6], [first, second])
    assert whole.flatten().tolist() == [0, 1, 2, 3, 4, unknown]
    # A history that was written anew after two tokens, and a turn of another conversation.
    other = DrawnTurn([9], [9], [0.0], 0, routed_experts=routing(5, unknown))
    assert drawn_routing([1, 2, 8], [first, other]).flatten().tolist() == [0, 1, unknown]
    assert drawn_routing([1, 2], [DrawnTurn([1], [2], [0.0], 0)]) is None


def test_each_token_has_the_version_of_the_weights_that_drew_it():
    first = DrawnTurn([1, 2], [3, 4, 5], [0.0] * 3, 6, weight_versions=[6, 6, 7])
    second = DrawnTurn([1, 2, 3, 4, 5, 8], [9], [0.0], 7)
    assert drawn_weight_versions([1, 2, 3, 4, 5, 8, 9, 10], [first, second]) == [-1, -1, 6, 6, 7, -1, 7, -1]
    assert drawn_weight_versions([1, 2, 3, 4], [first, second]) == [-1, -1, 6, 6]  # cut
    assert (oldest_version([first, second]), oldest_version([])) == (6, -1)
