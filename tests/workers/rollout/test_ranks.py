"""Ranks that share an engine: which of them generates, which rows each gets, whose weights and GPUs it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.workers.support import run_ranks
from verl.errors import ConfigError, RolloutError
from verl.single_controller.local import LocalWorkerGroup
from verl.testing.models import tiny_model_dir
from verl.testing.rollout_conformance import PROMPTS, greedy, prompt_batch
from verl.workers.config import ActorRolloutRefConfig, FSDPActorConfig, FSDPEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.rollout.base import RolloutOutput, RolloutRegistry, RolloutRequest
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.ranks import EnginePlacement, engine_group
from verl.workers.rollout.request_queue import Answer, RequestQueue


@RolloutRegistry.register("trtllm")  # a name that the configuration takes, and of which verl has no engine
class PairedRollout(HFRollout):
    """One engine for every two ranks: the first generates, the other takes part in gathering the weights."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ranks_per_engine = 2
        _, self.leads = engine_group(2, "two ranks for an engine")

    def generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        if not self.leads:
            raise RolloutError("this rank does not lead")
        return super().generate(requests)


def policy(path: str, engine: Literal["hf", "trtllm"]) -> dict[str, Any]:
    """Arguments of a worker that trains and generates."""
    config = ActorRolloutRefConfig(
        model=HFModelConfig(path=path),
        actor=FSDPActorConfig(
            fsdp_config=FSDPEngineConfig(dtype="fp32"),
            use_remove_padding=False,
            ppo_mini_batch_size=4,
            ppo_micro_batch_size_per_gpu=4,
        ),
        rollout=RolloutConfig(name=engine, prompt_length=8, response_length=12, dtype="fp32"),
    )
    return {"config": config, "role": "actor_rollout", "device_name": "cpu"}


class RequestsOfOneEngine:
    """Three requests; a rank that opens them takes them from every other."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.answers: dict[int, Answer] = {}

    @contextmanager
    def open_queue(self, engine_index: int, weight_version: int) -> Iterator[RequestQueue]:
        """Yield a queue that is closed with the last answer."""
        self.opened.append(engine_index)
        queue = RequestQueue(self._take)
        self._close = queue.close
        for i, prompt in enumerate(PROMPTS[:3]):
            queue.put(i, greedy(prompt))
        yield queue

    def _take(self, number: int, answer: Answer) -> None:
        assert isinstance(answer, RolloutOutput)
        self.answers[number] = answer
        if len(self.answers) == 3:
            self._close()


def check_the_worker(rank: int, folder: Path, path: str) -> None:
    """Both ranks get the same rows, and those of the first are collected."""
    worker = ActorRolloutRefWorker(**policy(path, "trtllm"))
    worker.init_model()
    found = worker.generate_sequences(prompt_batch(PROMPTS[:5]))
    assert (worker.query_dispatch_info("actor"), worker.query_collect_info("actor")) == (rank, True)
    assert (worker.query_dispatch_info("rollout"), worker.query_collect_info("rollout")) == (0, rank == 0)
    requests = RequestsOfOneEngine()
    worker.serve(requests)
    assert (requests.opened, sorted(requests.answers)) == (([0], [0, 1, 2]) if rank == 0 else ([], []))
    if rank == 0:
        torch.save(found, folder / "found.pt")
    else:
        assert len(found) == 0


def check_the_placement(rank: int) -> None:
    assert engine_group(1, "size=1") == (rank, True)
    assert engine_group(2, "size=2") == (rank, rank == 0)
    with pytest.raises(ConfigError, match=r"size=3 does not divide the 2 rank\(s\) of this run"):
        engine_group(3, "size=3")
    cpu = torch.device("cpu")
    assert EnginePlacement.from_rank(rank, 2, cpu) == EnginePlacement(None, node_rank=0, nodes=1, leads_node=rank == 0)
    with pytest.MonkeyPatch.context() as patch:
        # Each rank sees two GPUs by their ids and uses the second, as where a scheduler deals GPUs out.
        patch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-{rank}a, GPU-{rank}b")
        assert EnginePlacement.from_rank(rank, 2, torch.device("cuda", 1)).devices == "GPU-0b,GPU-1b"
        assert EnginePlacement.from_rank(rank, 1, torch.device("cuda")).devices == f"GPU-{rank}a"
        patch.delenv("CUDA_VISIBLE_DEVICES")
        assert EnginePlacement.from_rank(rank, 2, torch.device("cuda", rank)).devices == "0,1"
        patch.setenv("RAY_RAYLET_PID", str(rank))  # two nodes of a cluster, which have a GPU each
        assert EnginePlacement.from_rank(rank, 2, torch.device("cuda")) == EnginePlacement(
            "0", rank, 2, leads_node=True
        )
        assert EnginePlacement.from_rank(rank, 1, cpu) == EnginePlacement(None)
        of_ranks = "ABB"

        def gathered(values: list[Any], value: object) -> None:
            values[:] = [(f"{machine} boot", "0") for machine in of_ranks]

        patch.setattr("torch.distributed.all_gather_object", gathered)
        with pytest.raises(
            ConfigError, match=r"not have as many of them each \(rank by rank: A, B, B\)\. Use a tensor"
        ):
            EnginePlacement.from_rank(0, 3, cpu)
        of_ranks = "ABAB"
        with pytest.raises(ConfigError, match=r"rank by rank: A, B, A, B"):
            EnginePlacement.from_rank(0, 4, cpu)


def on_each_rank(rank: int, world_size: int, folder: Path, path: str) -> None:
    check_the_placement(rank)
    check_the_worker(rank, folder, path)


def test_two_ranks_with_one_engine_give_what_one_rank_gives(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path / "model")
    run_ranks(on_each_rank, 2, tmp_path, path)
    found = torch.load(tmp_path / "found.pt", weights_only=False)
    alone = LocalWorkerGroup(ray_cls_with_init=LocalWorkerGroup.describe(ActorRolloutRefWorker, **policy(path, "hf")))
    alone.init_model()
    expected = alone.generate_sequences(prompt_batch(PROMPTS[:5]))
    assert set(found.batch.keys()) == set(expected.batch.keys())
    assert torch.equal(found.batch["responses"], expected.batch["responses"])
    assert found.batch["response_mask"].sum() > 20
    torch.testing.assert_close(
        found.batch["rollout_log_probs"], expected.batch["rollout_log_probs"], atol=1e-5, rtol=1e-5
    )


def test_one_rank_leads_itself_and_cannot_share() -> None:
    assert engine_group(1, "tensor_model_parallel_size=1") == (0, True)
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size=2 does not divide the 1 rank\(s\) of this run"):
        engine_group(2, "tensor_model_parallel_size=2")
