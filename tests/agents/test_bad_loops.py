"""Agent loops that fail in all ways, beside good ones: each costs its own trajectory, and nobody else's numbers."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.agents.one_engine import OneEngine
from verl.errors import RolloutError
from verl.protocol import DataProto

LOOPS = """
import asyncio, os, sys, threading, time
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class Loop(AgentLoopBase):
    async def run(self, sampling_params, **row):
        self.prompt = row["raw_prompt_ids"]
        return await getattr(self, row["agent_does"])(sampling_params)

    async def draw(self, params, **changes):
        return await self.server_manager.generate("a", prompt_ids=self.prompt, sampling_params={**params, **changes})

    def output(self, ids, mask=None, **more):
        return AgentLoopOutput(
            prompt_ids=self.prompt, response_ids=ids, response_mask=[1] * len(ids) if mask is None else mask, **more)

    async def good(self, params):
        return self.output((await self.draw(params)).token_ids)

    async def in_parallel(self, params):
        first, second = await asyncio.gather(self.draw(params), self.draw(params))
        assert first.token_ids != second.token_ids  # each call draws anew
        return self.output(first.token_ids)

    async def too_long(self, params):
        ids = (await self.draw(params)).token_ids
        return self.output(ids + [5] * 40, [1] * len(ids) + [0] * 40)

    async def empty(self, params):
        return self.output([])

    async def raises(self, params):
        raise ValueError("no idea")

    async def exits(self, params):
        sys.exit(3)

    async def exits_in_task(self, params):
        async def leave():
            sys.exit(3)
        await asyncio.gather(leave(), asyncio.sleep(60))

    async def cancels_itself(self, params):
        raise asyncio.CancelledError

    async def returns_text(self, params):
        return "42"

    async def changed(self, params):
        output = self.output((await self.draw(params)).token_ids)
        output.response_mask.append(1)
        return output

    async def not_drawn(self, params):
        return self.output([5, 6, 7])

    async def no_token(self, params):
        return self.output([10**7], [0])

    async def bad_score(self, params):
        return self.output((await self.draw(params)).token_ids, reward_score=float("nan"))

    async def takes_column(self, params):
        return self.output((await self.draw(params)).token_ids, extra_fields={"uid": "mine"})

    async def not_sent(self, params):
        return self.output((await self.draw(params)).token_ids, extra_fields={"lock": threading.Lock()})

    async def several(self, params):
        first = self.output((await self.draw(params)).token_ids)
        helped = self.output([], agent="helper")
        self.prompt = self.prompt[1:]
        second = self.output((await self.draw(params, max_tokens=2)).token_ids)
        self.prompt = self.prompt[1:]
        asked = self.output((await self.draw(params, max_tokens=3)).token_ids, agent="helper", status="turns_used_up")
        return [first, helped, asked, second]

    async def no_sequence(self, params):
        return []

    async def text_in_list(self, params):
        return [self.output((await self.draw(params)).token_ids), "42"]

    async def drawn_in_two(self, params):
        output = self.output((await self.draw(params)).token_ids)
        return [output, output.model_copy(update={"agent": "helper"})]

    async def repeated_with_mask_0(self, params):
        ids = (await self.draw(params)).token_ids
        return [self.output(ids), self.output(ids, [0] * len(ids))]

    async def two_scores(self, params):
        first = self.output((await self.draw(params)).token_ids, reward_score=1.0)
        second = self.output((await self.draw(params)).token_ids, reward_score=0.5)
        return [first, second]

    async def text_as_tokens(self, params):
        self.prompt = ["make", "7"]
        await self.draw(params)

    async def wrong_stop(self, params):
        await self.draw(params, stop=[5])

    async def half_a_token(self, params):
        await self.draw(params, max_tokens=2.5)

    async def colder(self, params):
        return self.output((await self.draw(params, temperature=0.5)).token_ids)

    async def truncated(self, params):
        return self.output((await self.draw(params, top_p=0.9, top_k=5)).token_ids)

    async def colder_and_raises(self, params):
        await self.draw(params, temperature=0.5)
        raise ValueError("after a turn")

    async def summary_is_colder(self, params):
        summary = await self.draw(params, temperature=0.5)
        self.prompt = [*self.prompt[:8], *summary.token_ids]
        return self.output((await self.draw(params, top_k=0, top_p=1)).token_ids)  # the same probabilities

    async def never_ends(self, params):
        await self.draw(params)
        await asyncio.Event().wait()

    async def blocks(self, params):
        time.sleep(10**6)

    async def will_not_be_cancelled(self, params):
        drawn = await self.draw(params)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return self.output(drawn.token_ids)

    async def goes_on(self, params):
        async def forever():
            while True:
                await self.draw(params)
        asyncio.create_task(forever())
        return await self.good(params)

    async def leaves_a_thread(self, params):
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 8)
        return await self.good(params)
"""
ENDS = {
    "good": "done",
    "in_parallel": "done",
    "too_long": "context_full",
    "empty": "done",
    "goes_on": "done",
    "leaves_a_thread": "done",
    "repeated_with_mask_0": "done",
    "summary_is_colder": "done",
    **dict.fromkeys(("never_ends", "blocks", "will_not_be_cancelled"), "timeout"),
    **dict.fromkeys(
        ("raises", "exits", "exits_in_task", "cancels_itself", "returns_text", "changed", "not_drawn", "no_token"),
        "agent_error",
    ),
    **dict.fromkeys(
        ("bad_score", "takes_column", "not_sent", "text_as_tokens", "wrong_stop", "half_a_token"), "agent_error"
    ),
    **dict.fromkeys(("colder", "truncated", "colder_and_raises"), "agent_error"),
    **dict.fromkeys(("no_sequence", "text_in_list", "drawn_in_two", "two_scores"), "agent_error"),
}
"""What a loop does, and the status of its trajectory."""
SAYS = {
    "raises": "ValueError: no idea",
    "exits": "SystemExit: 3",
    "exits_in_task": "SystemExit: 3",
    "cancels_itself": "CancelledError",
    "returns_text": "run() returned str",
    "changed": "these need one value per token",
    "not_drawn": "token 0 of the response has mask 1",
    "no_token": "token 10000000 is none of the",
    "bad_score": "must be a finite number",
    "takes_column": "may not hold uid",
    "not_sent": "cannot be sent to another process",
    "no_sequence": "run() returned an empty list",
    "text_in_list": "run() returned str",
    "drawn_in_two": "2 sequences have mask 1 on the same turn of the policy, which drew it 1 times",
    "two_scores": "different values of reward_score: [0.5, 1.0]",
    "text_as_tokens": "TypeError",
    "wrong_stop": "stop has 5, which is no str",
    "half_a_token": "max_tokens has 2.5, which is no int",
    "colder": "drew it with temperature=0.5, while training computes its probability with temperature=1. Give",
    "truncated": "drew it with top_p=0.9, top_k=5, while training computes its probability with top_p=1, top_k=-1. ",
    "colder_and_raises": "after a turn",
    "never_ends": "took longer than trajectory_timeout_s=2 s",
    "blocks": "did not end when it was cancelled",
    "will_not_be_cancelled": "took longer than trajectory_timeout_s=2 s",
}
"""Part of the message of each failure."""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Answer prompts by loops that do what is asked of them, on one engine."""
    engine = OneEngine(tmp_path_factory.mktemp("run"))
    code, loops = engine.folder / "loops.py", engine.folder / "loops.yaml"
    code.write_text(LOOPS)
    loops.write_text(f"- {{name: mine, _target_: Loop, path: {code}}}\n")

    def answer(does: list[str], meta: dict[str, Any] | None = None, **settings: Any) -> DataProto:
        return engine.answer(prompts(does, **(meta or {})), loops, **settings)

    return answer


def prompts(does: list[str], **meta: Any) -> DataProto:
    """A row for each; what stands behind a # only makes another prompt of it."""
    ids = torch.full((len(does), 32), 9)
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={
            "uid": np.array([f"1-{what}" for what in does], dtype=object),
            "sample_index": np.zeros(len(does), dtype=int),
            "agent_does": np.array([what.partition("#")[0] for what in does], dtype=object),
        },
        meta_info={"global_steps": 1, "validate": False, **meta},
    )


def test_what_is_not_trained_on_is_sampled_as_one_likes(answers):
    for meta in ({"validate": True}, {"do_sample": False}):
        batch = answers(["colder", "truncated"], meta)
        assert batch.non_tensor_batch["trajectory_status"].tolist() == ["done", "done"]
        assert batch.batch["response_mask"].sum(-1).tolist() == [8, 8]


def test_each_bad_loop_costs_its_own_trajectory(answers):
    does = [what for name in ENDS for what in (name, "good")]
    batch = answers(does, trajectory_timeout_s=2)
    columns = batch.non_tensor_batch
    assert dict(zip(does, columns["trajectory_status"], strict=True)) == ENDS
    messages = dict(zip(does, columns["trajectory_message"], strict=True))
    assert {name: part in messages[name] for name, part in SAYS.items()} == dict.fromkeys(SAYS, True), messages
    assert {messages[name] for name in ENDS if ENDS[name] == "done"} == {""}
    alone = answers(["good"])
    good = [row for row, what in enumerate(does) if what == "good"]
    for name in ("responses", "rollout_log_probs", "response_mask"):
        expected = alone.batch[name].expand(len(good), -1)
        torch.testing.assert_close(batch.batch[name][good], expected, rtol=0, atol=1e-5)
    drawn = batch.batch["response_mask"].sum(-1).tolist()
    assert drawn[does.index("never_ends")] == 8  # what it drew can be scored 0
    assert drawn[does.index("too_long")] == 8
    assert drawn[does.index("raises")] == drawn[does.index("empty")] == drawn[does.index("colder_and_raises")] == 0


def test_sequences_of_a_trajectory_are_rows_in_their_order(answers):
    batch = answers(["good", "several", "good"])
    columns = batch.non_tensor_batch
    # The helper's sequence without a token of the policy is left out.
    assert columns["trajectory_id"].tolist() == ["1-good/0", *["1-several/0"] * 3, "1-good/0"]
    assert columns["agent"].tolist() == ["main", "main", "helper", "main", "main"]
    assert columns["trajectory_status"].tolist() == ["done", *["turns_used_up"] * 3, "done"]
    assert batch.batch["response_mask"].sum(-1).tolist()[2:4] == [3, 2]
    prompts = batch.batch["attention_mask"][:, :32].sum(-1).tolist()
    assert prompts == [32, 32, 30, 31, 32]


def test_a_batch_that_fails_as_a_whole_ends_the_run_with_one_screen(answers):
    with pytest.raises(RolloutError, match=r"24 of 24 trajectories failed:\n  24 x agent_error") as raised:
        answers([f"raises#{row}" for row in range(24)], max_failure_rate=0.5)
    assert len(str(raised.value).splitlines()) < 10
    assert "rollout.agent.max_failure_rate=0.5" in str(raised.value)


def test_nothing_of_agent_loops_is_left_after_the_manager_ends(answers):
    known = set(threading.enumerate())
    answers(["good", "raises", "in_parallel"])
    deadline = time.monotonic() + 10
    names = ("agent loops", "trajectory 1/1-good", "trajectory 1/1-raises", "trajectory 1/1-in_parallel")
    while left := [one.name for one in set(threading.enumerate()) - known if one.name.startswith(names)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
