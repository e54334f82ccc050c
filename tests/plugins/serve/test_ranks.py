"""The service on two ranks: the results of one, and errors in place of waiting when a rank dies."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import ray as ray_module
import torch

from tests.plugins.serve.support import ServiceHere, config_of, start_group
from tests.plugins.serve.test_service import DATA, saved, train
from verl.config import RayConfig
from verl.errors import ProcessLostError
from verl.plugins.serve.service import ROLE
from verl.plugins.serve.worker import AdapterWorker
from verl.testing.models import tiny_model_dir
from verl.trainer.worker_groups import WorkerGroups


@pytest.mark.slow
def test_two_ranks_train_as_one_and_a_death_is_an_error(tmp_path: Path):
    from verl.single_controller import ray

    config = config_of(tiny_model_dir(tmp_path / "model"), tmp_path / "one")
    alone = ServiceHere(config, start_group(config))
    two = replace(config, server=replace(config.server, state_dir=str(tmp_path / "two")))
    with ray.ray_session(RayConfig(), 1):
        pools = ray.ResourcePoolManager({"global_pool": [2]}, {ROLE: "global_pool"}, "cpu")
        workers = WorkerGroups(
            worker_classes={ROLE: AdapterWorker}, pools=pools, group_class=ray.WorkerGroup, device_name="cpu"
        )
        group = workers.start({ROLE: {"config": two}})[ROLE]
        shared = ServiceHere(two, group)
        results = []
        for service in (alone, shared):
            models = [service.model(0), service.model(1, rank=3, seed=2)]
            for seq in (1, 3):
                for model, data in zip(models, (DATA[:3], DATA), strict=True):
                    service.start_pass(model, seq, data)
                service.compute()
                for model in models:
                    service.result(service.step(model, seq + 1))
            results.append([saved(service, model, 5, "end") for model in models])
        for one, other in zip(*results, strict=True):
            assert one.keys() == other.keys()
            for name in one:
                torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-5)
        # What two ranks saved one loads, and moves on from.
        path = f"tinker://{models[0]}/weights/end"
        body = {"session_id": shared.session, "model_seq_id": 5, "path": path, "optimizer": True}
        loaded = shared.result(shared.post("load_weights", **body))["model_id"]
        again = saved(shared, loaded, 1, "again")
        assert all(torch.equal(again[name], results[1][0][name]) for name in again)

        os.kill(ray_module.get(group.workers[1].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        lost = shared.start_pass(loaded, 2, DATA)
        with pytest.raises(ProcessLostError):
            shared.compute()
        shared.board.lose("a rank died")
        assert "died" in shared.result(lost)["error"]
        assert shared.post("optim_step", 410, model_id=loaded, seq_id=3, adam_params={})["error"] == "a rank died"
        workers.end()
        shared.computing.group = workers.start({ROLE: {"config": two}})[ROLE]
        went_on = shared.result(shared.post("load_weights", **body | {"model_seq_id": 6}))["model_id"]
        train(shared, went_on, DATA, 1)
        workers.end()
