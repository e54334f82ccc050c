"""Trajectories that go on over rounds of the engines: submitted at any time, with the tokens that each draws alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny_run import make_tiny_run, overrides
from verl.agents.manager import AgentLoopManager, check_failures
from verl.errors import RolloutError
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.engine import FSDPEngine
from verl.workers.fsdp_workers import ActorRolloutRefWorker

LOOP = """
import asyncio, os, pathlib
from verl.agents.loop import AgentLoopBase, AgentLoopOutput

FOLDER = pathlib.Path(__file__).parent

class Twice(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt, few = row["raw_prompt_ids"], {**sampling_params, "max_tokens": 3, "ignore_eos": True}
        first = (await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=few)).token_ids
        with open(FOLDER / row["does"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        while row["does"].startswith("waits") and not (FOLDER / "go").exists():
            await asyncio.sleep(0.01)
        if row["does"] == "fails":
            raise ValueError("no")
        second = (await self.server_manager.generate("a", prompt_ids=prompt + first, sampling_params=few)).token_ids
        ids = first + second
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=[1] * len(ids))
"""
N = 2


class ChangedPolicy(ActorRolloutRefWorker):
    """A policy whose weights a test changes, as an update does."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, version: int) -> None:
        assert isinstance(self.engine, FSDPEngine)
        with torch.no_grad():
            for parameter in self.engine.model.hf.parameters():
                parameter.mul_(-1.5)
        self.engine.weight_version = version


ENOUGH_S = 120.0


class Run:
    """A manager, and the ranks of a policy whose weights a test replaces."""

    def __init__(self, folder: Path, controller: str, **agent: object) -> None:
        self.folder = folder
        (folder / "loop.py").write_text(LOOP)
        (folder / "loops.yaml").write_text(f"- {{name: twice, _target_: Twice, path: {folder}/loop.py}}\n")
        key = "actor_rollout_ref__rollout__agent__"
        of_agents = {"agent_loop_config_path": folder / "loops.yaml", "num_workers": 2, "hang_timeout_s": 10} | agent
        settings = {f"{key}{name}": value for name, value in of_agents.items()} | {
            "actor_rollout_ref__rollout__name": "native",
            "trainer__controller": controller,
        }
        config = load_config(compose(overrides(make_tiny_run(folder), folder, **settings)))
        self.agent = config.actor_rollout_ref.rollout.agent
        self._pool = None
        arguments: dict[str, Any] = {"config": config.actor_rollout_ref, "role": "actor_rollout", "device_name": "cpu"}
        if controller == "local":
            self.group: Any = LocalWorkerGroup(ray_cls_with_init=LocalWorkerGroup.describe(ChangedPolicy, **arguments))
        else:
            from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

            self._pool = RayResourcePool([1], use_gpu=False)
            described = RayWorkerGroup.describe(ChangedPolicy, **arguments)
            self.group = RayWorkerGroup(self._pool, described, device_name="cpu")
        self.group.init_model()
        self.manager = AgentLoopManager(config, self.group, hf_tokenizer(config.actor_rollout_ref.model.path))

    def submit(self, uid: str, does: str) -> Future[DataProto]:
        return self.manager.submit(rows((uid, does)))

    def serve(self, *futures: Future[DataProto]) -> None:
        """Serve until these futures are done."""
        end = time.monotonic() + ENOUGH_S
        self.manager.serve_until(self.group, lambda: all(future.done() for future in futures) or time.monotonic() > end)
        assert all(future.done() for future in futures)

    def reaches(self, **wanted: int) -> None:
        """Wait for this progress."""
        end = time.monotonic() + ENOUGH_S
        while time.monotonic() < end:
            now = self.manager.progress()
            if {name: getattr(now, name) for name in wanted} == wanted:
                return
            time.sleep(0.02)
        raise AssertionError(f"{now}, not {wanted}")

    def turns(self, does: str) -> list[int]:
        """The processes of the first turns of trajectories."""
        path = self.folder / does
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def close(self) -> None:
        self.manager.shutdown()
        self.group.shutdown()
        if self._pool is not None:
            self._pool.release()


def rows(*groups: tuple[str, str], name: str | None = "twice") -> DataProto:
    """N rows of each group, whose prompts follow from the uid."""
    count = len(groups) * N
    ids = torch.tensor([[5 + len(uid), 9, 10 + int(uid)] for uid, _ in groups for _ in range(N)])
    columns: dict[str, list[Any]] = {
        "uid": [uid for uid, _ in groups for _ in range(N)],
        "does": [does for _, does in groups for _ in range(N)],
        "raw_prompt": [[{"role": "user", "content": "?"}]] * count,
    }
    if name is not None:
        columns["agent_name"] = [name] * count
    objects = {key: np.fromiter(values, dtype=object, count=count) for key, values in columns.items()}
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={**objects, "sample_index": np.array(list(range(N)) * len(groups))},
        meta_info={"global_steps": 3, "validate": False},
    )


def tokens(*batches: DataProto) -> list[list[int]]:
    return [row for batch in batches for row in batch.batch["responses"].tolist()]


@contextmanager
def run_of(folder: Path, controller: str, agent: str = "twice", **settings: object) -> Iterator[Run]:
    run = Run(folder, controller, default_agent_loop=agent, **settings)
    try:
        yield run
    finally:
        run.close()


CONTROLLERS = ["local", pytest.param("ray", marks=pytest.mark.slow)]


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_groups_go_on_with_the_next_weights_and_draw_what_they_draw_together(
    controller: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if controller == "ray":
        request.getfixturevalue("ray_cluster")
    with run_of(tmp_path, controller) as run:
        alone = run.manager.generate_sequences(rows(("1", "a"), ("2", "a"), ("3", "a"), ("4", "a")))
        futures = [run.submit("1", "b"), run.submit("2", "waits"), run.submit("3", "waits"), run.submit("4", "waits")]
        run.serve(futures[0])
        run.manager.serve_until(run.group, lambda: len(run.turns("waits")) == 3 * N)
        assert [future.done() for future in futures] == [True, False, False, False]
        run.reaches(running=3 * N, in_tools=3 * N, waiting_requests=0)
        run.manager.cancel(futures[3:])
        (tmp_path / "go").touch()  # tools end while the engines sleep, and their requests wait
        run.reaches(running=2 * N, in_tools=0, waiting_requests=2 * N)
        # A batch in between, as validation is: those under way are served beside it.
        between = run.manager.generate_sequences(rows(("1", "c")))
        assert tokens(between) == tokens(alone)[:N]
        run.serve(*futures[1:3])
        batches = [future.result(0) for future in futures[:3]]
        assert tokens(*batches) == tokens(alone)[: 3 * N]
        assert [uid.split("/")[0] for batch in batches for uid in batch.non_tensor_batch["trajectory_id"]] == [
            uid for uid in "123" for _ in range(N)
        ]
        with pytest.raises(CancelledError):
            futures[3].result(0)
        assert len(run.turns("waits")) == 3 * N  # none was begun twice
        (tmp_path / "go").unlink()
        late = run.submit("2", "waits_again")
        run.manager.serve_until(run.group, lambda: len(run.turns("waits_again")) == N)
        run.group.change(5)
        (tmp_path / "go").touch()
        run.serve(late)
        assert [row[:3] for row in tokens(late.result())] == [row[:3] for row in tokens(alone)[N : 2 * N]]
        assert [row[3:] for row in tokens(late.result())] != [row[3:] for row in tokens(alone)[N : 2 * N]]
        assert late.result().batch["weight_versions"][:, :6].tolist() == [[0, 0, 0, 5, 5, 5]] * N
        failing = run.submit("1", "fails")
        run.serve(failing)
        assert failing.result().non_tensor_batch["trajectory_status"].tolist() == ["agent_error"] * N
        with pytest.raises(RolloutError, match=r"(?s)^2 of 2 trajectories failed:.  2 x agent_error: .*ValueError: no"):
            check_failures(failing.result(), run.agent)
        (tmp_path / "go").unlink()
        left = run.submit("1", "waits_to_the_end")
        run.manager.serve_until(run.group, lambda: len(run.turns("waits_to_the_end")) == N)
    with pytest.raises(CancelledError):
        left.result(10)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_processes_that_are_lost_in_a_round_and_between_two_are_replaced(
    number: signal.Signals, tmp_path: Path, ray_cluster: None
) -> None:
    with run_of(tmp_path, "ray") as run:
        groups = [(str(uid), "waits") for uid in range(1, 5)]
        alone = run.manager.generate_sequences(rows(*((uid, "a") for uid, _ in groups)))
        futures = [run.submit(*group) for group in groups]
        run.manager.serve_until(run.group, lambda: len(run.turns("waits")) == 4 * N)
        first = run.turns("waits")
        assert len(set(first)) == 2
        os.kill(first[0], number)  # while the engines sleep
        lost = first.count(first[0])
        # What it ran is begun again, and waits for an engine.
        run.reaches(running=4 * N - lost, placeless=lost)
        assert run.turns("waits") == first
        run.manager.serve_until(run.group, lambda: len(run.turns("waits")) == 4 * N + lost)
        survivor = next(pid for pid in first if pid != first[0])
        others = first.count(survivor)

        def is_enough() -> bool:
            if not hit:
                hit.append(survivor)
                os.kill(survivor, number)  # while they serve
            return len(run.turns("waits")) == 4 * N + lost + others

        hit: list[int] = []
        run.manager.serve_until(run.group, is_enough)
        (tmp_path / "go").touch()
        run.serve(*futures)
        batches = [future.result() for future in futures]
        assert tokens(*batches) == tokens(alone)
        assert {status for batch in batches for status in batch.non_tensor_batch["trajectory_status"]} == {"done"}
        assert len(run.turns("waits")) == 4 * N + lost + others  # nothing else was begun again


def test_time_in_which_a_request_waits_for_sleeping_engines_is_not_counted(tmp_path: Path) -> None:
    with run_of(tmp_path, "local", trajectory_timeout_s=3) as run:
        waits = run.submit("1", "a")
        works = run.submit("2", "waits")
        run.manager.serve_until(run.group, lambda: len(run.turns("waits")) == N)
        late = run.submit("3", "a")
        time.sleep(3.5)
        run.serve(waits, works, late)
        statuses = [future.result().non_tensor_batch["trajectory_status"].tolist() for future in (waits, works, late)]
        assert statuses == [["done"] * N, ["timeout"] * N, ["done"] * N]


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_single_turns_have_the_columns_of_the_ranks(
    controller: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if controller == "ray":
        request.getfixturevalue("ray_cluster")
    groups = [("1", ""), ("2", ""), ("3", "")]
    with run_of(tmp_path, controller, "single_turn_agent") as run:
        of_ranks = [run.group.generate_sequences(rows(group, name=None)) for group in groups]
        futures = [run.manager.submit(rows(group, name=None)) for group in groups]
        run.serve(*futures)
        for ranks, future in zip(of_ranks, futures, strict=True):
            batch = future.result()
            assert batch.meta_info == ranks.meta_info
            assert set(batch.batch.keys()) == set(ranks.batch.keys())
            assert batch.non_tensor_batch.keys() == ranks.non_tensor_batch.keys()
            for name, values in batch.non_tensor_batch.items():
                assert values.dtype == ranks.non_tensor_batch[name].dtype
                assert values.tolist() == ranks.non_tensor_batch[name].tolist()
            width = ranks.batch["prompts"].shape[1]
            for name in batch.batch.keys():
                mine, theirs = batch.batch[name], ranks.batch[name]
                if name == "prompts":  # those of the data set are padded as here
                    mine = mine[:, -width:]
                elif mine.shape != theirs.shape:
                    mine = mine[:, -theirs.shape[1] :]
                assert mine.dtype == theirs.dtype
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
