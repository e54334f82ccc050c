"""Workers without a model for benchmarks of the driver: their columns have the shapes and dtypes of real ones."""

from __future__ import annotations

from typing import Any

import torch

from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.roles import Role
from verl.utils.flops_counter import Arithmetic
from verl.workers.rollout.columns import columns_from_outputs
from verl.workers.rollout.request import RolloutOutput
from verl.workers.rollout.request_queue import EngineRequests

VOCABULARY = 100


class StandInWorker(Worker):
    """Policy, rollout and reference of a rank; all answers follow from the rows.

    Args:
        config: ``actor_rollout_ref`` of the run; the lengths of responses are read from it.
    """

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        self.response_length = config.rollout.response_length

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        for mesh in ("actor", "rollout", "ref"):
            self._register_dispatch_collect_info(mesh, self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def arithmetic(self) -> Arithmetic:
        return Arithmetic(None, None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def limit_passes(self, may_cut: bool, limits: dict[str, int]) -> None: ...

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def training_randomness(self) -> dict[str, float]:
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshot(self, global_step: int = 0) -> dict[str, Any]:
        return {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def documents(self) -> dict[str, bytes]:
        return {}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        outputs = []
        for number in prompts.non_tensor_batch["sample_index"]:
            length = self.response_length - (7 * int(number)) % (self.response_length // 2)
            outputs.append(_drawn(length, int(number)))
        return columns_from_outputs(prompts, outputs, self.response_length, 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def serve(self, requests: EngineRequests) -> None:
        with requests.open_queue(self.rank, 0) as queue:
            while taken := queue.take(wait=True):
                for number, request in taken:
                    queue.answer(number, _drawn(request.sampling.max_tokens or 1, number))

    def _like_responses(self, batch: DataProto, *names: str) -> DataProto:
        mask = batch.response_mask
        return DataProto.from_dict(tensors=dict.fromkeys(names, -1.0 * mask))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        data.batch  # noqa: B018  a real worker reads all columns that it gets
        return self._like_responses(data, "old_log_probs", "entropys")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        data.batch  # noqa: B018
        return self._like_responses(data, "ref_log_prob")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: DataProto, entropy_coeff: float | None = None) -> DataProto:
        data.batch  # noqa: B018
        return DataProto(meta_info={"metrics": {"actor/pg_loss": 0.0}, "non_finite": []})  # the same on every rank


def _drawn(length: int, number: int) -> RolloutOutput:
    tokens = torch.arange(length).remainder(VOCABULARY - 10).add(5 + number % 5).tolist()
    return RolloutOutput(tokens, [-1.0 - number / 64] * length, "stop", 0)


class StandInRunner(TaskRunner):
    """Assembles a run of the real driver with :class:`StandInWorker`."""

    def add_actor_rollout_worker(self, config: Any) -> tuple[type, type]:
        super().add_actor_rollout_worker(config)
        self.role_worker_mapping[Role.ActorRollout] = StandInWorker
        return StandInWorker, type(None)

    def add_ref_policy_worker(self, config: Any, ref_policy_cls: type | None = None) -> None:
        super().add_ref_policy_worker(config, ref_policy_cls or StandInWorker)
