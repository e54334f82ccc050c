"""Light workers: they compute on small batches, without a model and without torch.distributed."""

from __future__ import annotations

import os
import time

import torch

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)


def batch_of(values: list[float], **kwargs) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor(values)}, **kwargs)


def deal_reversed(group, *args):
    """Element r of the reversed list to rank r."""
    return tuple(list(reversed(arg)) for arg in args), {}


def sum_outputs(group, outputs):
    return sum(outputs)


def second_to_first(group, outputs):
    return list(reversed(outputs))


# Known in every process that imports this module, as a user's own module would do it.
register_dispatch_mode("DEAL_REVERSED", deal_reversed, second_to_first)


class Echo(Worker):
    """Says what reached it: every method mixes its rank into the output."""

    def __init__(self, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, x):
        return (self.rank, x)

    @register(execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self, x):
        return (self.rank, x)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, x, *, y=0):
        return (self.rank, x, y)

    @register()
    def all_to_all(self, x, *, y):
        return 100 * self.rank + 10 * x + y

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, x):
        return (self.rank, x)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def proto(self, batch, factor=1):
        """x · factor, and who computed the row."""
        return DataProto.from_dict(
            {"y": batch.batch["x"] * factor, "rank": torch.full((len(batch),), self.rank)},
            {"seen": [len(batch)] * len(batch)},
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def tensordict(self, batch):
        from tensordict import TensorDict  # takes a second of each process that loads it

        return TensorDict({"y": batch["x"] + self.rank}, batch_size=batch.batch_size)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric(self, batch):
        return batch.batch["x"].sum().item()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def metrics_without_rows(self, batch):
        return DataProto(meta_info={"metrics": {"loss": 0.5}, "constant": batch.meta_info.get("step")})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def returns(self, batch, what):
        return {"42": 42, "a dict": {"x": 1}, "None": None, "None on rank 0": None if self.rank == 0 else batch}[what]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def own_meta_info(self, batch):
        metrics = {"loss": self.rank + 0.5, "grads": [self.rank, 7]}
        return DataProto(meta_info={"metrics": metrics, "temperature": 1.0, "host": f"node{self.rank}"})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def own_meta_info_later(self, batch):
        return DataProto(meta_info={"metrics": {"loss": self.rank + 0.5}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def proto_later(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] + 10 * (self.rank + 1)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def later(self, x):
        return (self.rank, x)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    def kind(self, batch):
        shown = batch.get() if isinstance(batch, DataProtoFuture) else batch
        return DataProto.from_dict({"x": shown.batch["x"]}, {"kind": [type(batch).__name__] * len(shown)})

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self):
        return self.rank

    @register(dispatch_mode={"dispatch_fn": deal_reversed, "collect_fn": sum_outputs})
    def custom(self, x):
        return x * 10**self.rank

    @register(dispatch_mode=Dispatch["DEAL_REVERSED"])
    def reversed(self, x):
        return (self.rank, x)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def boom(self, rank, until=None):
        """Raises at once on ``rank``, on the others when there is a file ``until``."""
        if self.rank != rank:
            while until and not os.path.exists(until):
                time.sleep(0.01)
            raise RuntimeError("connection closed by peer")
        raise ValueError(f"bad row on rank {rank}")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self, rank):
        if self.rank == rank:
            os._exit(3)
        time.sleep(60)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def about(self):
        names = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
        known = {name: os.environ.get(name) for name in names}
        return {
            **known,
            "pid": os.getpid(),
            "master": self.get_master_addr_port(),
            "offset": self.offset,
            "world_size": self.world_size,
            "rank": self.rank,
            "threads": torch.get_num_threads(),
        }

    def sleep(self, seconds):
        time.sleep(seconds)

    def not_registered(self, x):
        return self.offset + x


class Doubler(Worker):
    """A second kind of worker, which asks the first."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] * 2})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, func, batch):
        return func(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self):
        return os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offset_of_echo(self):
        return self.get_fused_worker_by_name("echo").offset


class Meshed(Worker):
    """Four ranks as dp=2 × tp=2 (mesh "train"), and as dp=4 (mesh "wide"); rank 2·dp + 1 collects in "train"."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, dp_of_rank, collects):
        self._register_dispatch_collect_info("train", dp_of_rank[self.rank], collects[self.rank])
        self._register_dispatch_collect_info("wide", self.rank, True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def train(self, batch, bias=0):
        rows = len(batch)
        return DataProto.from_dict(
            {"x": batch.batch["x"] + bias, "rank": torch.full((rows,), self.rank)},
            {"rows": [rows] * rows},
            meta_info={"seen": batch.meta_info.get("seen", 0)},
        )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False)
    def train_later(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] * 2, "rank": torch.full((len(batch),), self.rank)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="wide"))
    def wide(self, batch):
        return DataProto.from_dict({"x": batch.batch["x"] * 100, "rank": torch.full((len(batch),), self.rank)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def update(self, batch):
        return DataProto(meta_info={"metrics": {"loss": 1.5}})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="nowhere"))
    def on_unknown_mesh(self, batch):
        return batch


class Broken(Worker):
    """Cannot be made."""

    def __init__(self) -> None:
        super().__init__()
        raise FileNotFoundError("no model in /nowhere")


class Columns(Worker):
    """Makes large columns, and computes on those that it gets."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, rows: DataProto) -> DataProto:
        start, width = rows.batch["number"], 40_000  # 8 rows of int64 are 2.6 MB
        ids = start[:, None] * 1000 + torch.arange(width) % 7
        halves = (ids[:, : width // 2] % 128).to(torch.bfloat16)
        flags = start % 2 == 0
        return DataProto.from_dict({"ids": ids, "halves": halves, "flags": flags, "nothing": torch.empty(len(rows), 0)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make_and_keep(self, rows: int):
        import ray

        return ray.put(self.make(DataProto.from_dict({"number": torch.arange(rows)})))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def look(self, batch: DataProto) -> DataProto:
        sums = {
            f"{key}_sum": column.flatten(1).double().sum(-1) for key, column in batch.batch.items() if column.ndim > 1
        }
        firsts = {"first": batch.batch["ids"][:, 0], "flags": batch.batch["flags"]}
        return DataProto.from_dict(sums | firsts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self) -> None:
        os._exit(1)
