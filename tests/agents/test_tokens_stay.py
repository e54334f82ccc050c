"""Tokens of conversations on Ray stay with the processes that held them; what a lost process had is made again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_run import make_tiny_run, overrides
from verl.agents.columns import SequenceColumns
from verl.agents.policy import SampleId
from verl.agents.worker import Trajectory
from verl.protocol import DataProto
from verl.protocol.rows import fill_column
from verl.protocol.stored import StoredColumn
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.request import RolloutOutput, SamplingParams
from verl.workers.rollout.request_queue import EngineRequests
from verl.workers.routers import unknown

LOOP = """
import os, pathlib, signal, time
from verl.agents.loop import AgentLoopBase, AgentLoopOutput

FOLDER = pathlib.Path(__file__).parent

class Twice(AgentLoopBase):
    async def run(self, sampling_params, **row):
        name, prompt = row["name"], row["raw_prompt_ids"]
        with open(FOLDER / f"begun_{name}", "a") as file:
            file.write("x")
        first = await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=sampling_params)
        if row["kills"] == "always" or (row["kills"] == "once" and is_first(name)):
            os.kill(os.getpid(), signal.SIGKILL)
        so_far = prompt + first.token_ids + [7, 7]
        second = await self.server_manager.generate("a", prompt_ids=so_far, sampling_params=sampling_params)
        response = first.token_ids + [7, 7] + second.token_ids
        (FOLDER / f"ended_{name}").touch()
        return AgentLoopOutput(prompt_ids=prompt, response_ids=response, response_mask=[1, 1, 1, 0, 0, 1, 1, 1])

def is_first(name):
    if len((FOLDER / f"begun_{name}").read_text()) > 1:
        return False
    while not (FOLDER / "ended_0").exists():  # another conversation of this process
        time.sleep(0.01)
    time.sleep(1)  # the driver knows of it meanwhile
    return True
"""
PROMPTS = [[5, 6], [8, 9, 10], [11, 12, 13, 14], [20, 21, 22, 23, 24]]
LENGTH = 4000
"""Of a response, padded: the rows of a process are large enough for Ray's object store."""


class ThreeTokens(Worker):
    """A rank whose engine answers with three tokens that follow from the length of the prompt."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self._register_dispatch_collect_info("rollout", self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def serve(self, requests: EngineRequests) -> None:
        with requests.open_queue(self.rank, 3) as queue:
            while taken := queue.take(wait=True):
                for number, request in taken:
                    length = len(request.prompt_ids)
                    tokens, log_probs = [30 + length, 40, 50], [-length / 8, -0.5, -0.25]
                    queue.answer(number, RolloutOutput(tokens, log_probs, "stop", 3))


def response_to(prompt: list[int]) -> tuple[list[int], list[float]]:
    first, second = len(prompt), len(prompt) + 3 + 2
    tokens = [30 + first, 40, 50, 7, 7, 30 + second, 40, 50]
    return tokens, [-first / 8, -0.5, -0.25, 0.0, 0.0, -second / 8, -0.5, -0.25]


@pytest.fixture
def agents(tmp_path: Path, ray_cluster: None) -> Iterator[Any]:
    """Run conversations in two processes: ``kills`` says of each whether it kills its process."""
    from verl.agents.ray import RayAgents
    from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text(f"- {{name: mine, _target_: Twice, path: {tmp_path}/loop.py}}\n")
    agent = "actor_rollout_ref__rollout__agent__"
    settings = {
        "data__max_response_length": LENGTH,
        f"{agent}agent_loop_config_path": tmp_path / "loops.yaml",
        f"{agent}default_agent_loop": "mine",
        f"{agent}num_workers": 2,
        "trainer__controller": "ray",
    }
    paths = make_tiny_run(tmp_path)
    config = load_config(compose(overrides(paths, tmp_path, **settings)))
    columns = SequenceColumns(config.actor_rollout_ref.rollout, hf_tokenizer(paths["model"]), None)
    made = RayAgents(config, columns)
    pool = RayResourcePool([1], use_gpu=False)
    group = RayWorkerGroup(pool, RayWorkerGroup.describe(ThreeTokens), device_name="cpu")
    group.init_model()

    def run(**kills: str) -> tuple[list[Any], DataProto, list[int]]:
        for file in (*tmp_path.glob("begun_*"), *tmp_path.glob("ended_*")):
            file.unlink()
        trajectories = [
            Trajectory(
                agent_name="mine",
                sample=SampleId(step=1, uid=str(number), sample_index=0, prompt_ids=tuple(prompt)),
                sampling=SamplingParams(max_tokens=3, seed=0),
                row={"raw_prompt_ids": prompt, "name": number, "kills": kills.get(f"of_{number}", "")},
            )
            for number, prompt in enumerate(PROMPTS)
        ]
        future = made.thread.submit(made.run(trajectories))
        made.serve_until(group, future.done)
        results, batch = future.result()
        return results, batch, [len((tmp_path / f"begun_{number}").read_text()) for number in range(len(PROMPTS))]

    yield run
    made.shutdown()
    group.shutdown()
    pool.release()


def assert_rows(batch: DataProto, failed: tuple[int, ...] = ()) -> None:
    """Each row is that of its own prompt."""
    assert len(batch) == len(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        tokens, log_probs = ([], []) if row in failed else response_to(prompt)
        mask = [0 if token == 7 else 1 for token in tokens]
        left, right = [0] * (32 - len(prompt)), [0] * (LENGTH - len(tokens))
        there = left + [1] * len(prompt + tokens) + right
        expected = {
            "prompts": left + prompt,
            "responses": tokens + right,
            "input_ids": left + prompt + tokens + right,
            "attention_mask": there,
            "position_ids": [max(sum(there[: place + 1]) - 1, 0) for place in range(40)],
            "response_mask": mask + right,
            "rollout_log_probs": log_probs + right,
            "weight_versions": [3 if drawn else -1 for drawn in mask] + [-1] * len(right),
        }
        assert set(batch.batch.keys()) == set(expected)
        for name, values in expected.items():
            found = batch.batch[name][row]
            assert torch.equal(found[: len(values)], torch.tensor(values, dtype=found.dtype)), (row, name)


def test_parts_without_a_turn_get_the_column_of_experts_that_others_have():
    known, none = (DataProto.from_dict({"ids": torch.full((rows, 1), rows)}) for rows in (1, 2))
    known |= DataProto.from_dict({"experts": torch.ones(1, 3, 2, dtype=torch.uint8)})
    parts = fill_column([none, known], "experts", unknown)
    assert parts[1] is known
    found = DataProto.concat(parts).batch["experts"]
    assert found.dtype == torch.uint8
    assert found.tolist() == [[[255, 255]] * 3] * 2 + [[[1, 1]] * 3]
    assert "experts" not in DataProto.concat(fill_column([none, none], "experts", unknown)).batch.keys()


def test_tokens_stay_where_they_were_drawn_and_are_drawn_again_after_their_process_died(agents):
    results, batch, begun = agents(of_2="once")
    assert [result.status for result in results] == ["done"] * 4
    assert [result.weight_version for result in results] == [3] * 4
    told = [output for result in results for output in result.outputs]
    assert all(not (out.prompt_ids or out.response_ids or out.response_mask or out.response_logprobs) for out in told)
    columns = batch._tensor_columns.peek().values()
    assert all(isinstance(column, StoredColumn) and not column.was_read for column in columns)
    assert_rows(batch)
    # Conversation 0 had ended in the process that number 2 killed; 1 and 3 were in the other one.
    assert begun == [2, 1, 2, 1]
    # The next rollout in the same processes: number 3 ends its process whenever it runs, and harms no other.
    results, batch, begun = agents(of_3="always")
    assert [result.status for result in results] == ["done", "done", "done", "agent_error"]
    assert results[3].message == "its process died or hung each of the 3 times that it was begun"
    assert_rows(batch, failed=(3,))
    assert (begun[0], begun[2], begun[3]) == (1, 1, 3)
