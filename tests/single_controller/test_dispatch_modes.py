"""Every dispatch mode, on one rank in this process and on two ranks of Ray: the same test for both."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch
from tensordict import TensorDict

from tests.single_controller.workers import batch_of, deal_reversed
from verl.errors import ConfigError, SchemaError, WorkerError
from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)


def by_world(group, one, two):
    """What is expected of one rank, and of two."""
    return {1: one, 2: two}[group.world_size]


def test_rank_zero(echo):
    assert echo.rank_zero("a") == (0, "a")
    assert echo.on_rank_zero([1, 2]) == (0, [1, 2])


def test_one_to_all(echo):
    # Also a list of as many elements as ranks goes whole to every rank.
    assert echo.one_to_all([5, 6], y=1) == by_world(echo, [(0, [5, 6], 1)], [(0, [5, 6], 1), (1, [5, 6], 1)])


def test_all_to_all_deals_element_r_to_rank_r(echo):
    n = echo.world_size
    assert echo.all_to_all([3, 4][:n], y=[1, 2][:n]) == by_world(echo, [31], [31, 142])


def test_dp_compute_deals_element_r_to_rank_r(echo):
    n = echo.world_size
    assert echo.dp_compute(["a", "b"][:n]) == by_world(echo, [(0, "a")], [(0, "a"), (1, "b")])


@pytest.mark.parametrize("value", ["ab", 3, [1, 2, 3]])
def test_values_that_cannot_be_dealt_are_refused(echo, value):
    with pytest.raises(WorkerError, match=f"must be a list of {echo.world_size} elements"):
        echo.dp_compute(value)


def test_proto_cuts_batches_and_replicates_the_rest(echo):
    out = echo.proto(batch_of([1.0, 2.0, 3.0, 4.0]), factor=10)
    assert out.batch["y"].tolist() == [10.0, 20.0, 30.0, 40.0]
    assert out.batch["rank"].tolist() == by_world(echo, [0, 0, 0, 0], [0, 0, 1, 1])
    assert out.non_tensor_batch["seen"].tolist() == by_world(echo, [4, 4, 4, 4], [2, 2, 2, 2])


def test_proto_pads_five_rows_over_two_ranks_and_cuts_the_output(echo):
    out = echo.proto(batch_of([1.0, 2.0, 3.0, 4.0, 5.0], auto_padding=True), factor=2)
    assert out.batch["y"].tolist() == [2.0, 4.0, 6.0, 8.0, 10.0]
    # rank 1 computed rows 3 4 and, once more, 0
    assert out.batch["rank"].tolist() == by_world(echo, [0] * 5, [0, 0, 0, 1, 1])
    assert out.non_tensor_batch["seen"].tolist() == by_world(echo, [5] * 5, [3] * 5)


def test_proto_pads_fewer_rows_than_ranks(echo):
    out = echo.proto(batch_of([4.0], auto_padding=True))
    assert out.batch["y"].tolist() == [4.0]
    assert out.batch["rank"].tolist() == [0]


def test_proto_of_tensordicts(echo):
    out = echo.tensordict(TensorDict({"x": torch.tensor([1.0, 2.0])}, batch_size=[2]))
    assert isinstance(out, TensorDict)
    assert out["y"].tolist() == by_world(echo, [1.0, 2.0], [1.0, 3.0])


def test_proto_of_a_batch_without_rows(echo):
    out = echo.metrics_without_rows(DataProto(meta_info={"step": 3}))
    assert (len(out), out.meta_info) == (0, {"metrics": {"loss": 0.5}, "constant": 3})


@pytest.mark.parametrize(
    ("args", "what"),
    [
        ([torch.ones(4)], "argument 0 is a bare Tensor: it could be meant for every rank, or be cut"),
        ([{"x": torch.ones(4)}], "argument 0 is a dict: it could be meant"),
        ([{"x": 1}], "argument 0 is a dict: it could be meant"),
        ([[1.0, 2.0]], "argument 0 is a list: it could be meant"),
        ([batch_of([1.0, 2.0]), [torch.ones(2)]], "argument 1 is a list: it could be meant"),
        ([batch_of([1.0, 2.0])[0:0]], "argument 0 is a batch without rows"),
        ([TensorDict({"x": torch.ones(0)}, batch_size=[0])], "argument 0 is a batch without rows"),
    ],
    ids=["tensor", "dict of tensors", "dict", "list", "list beside a batch", "no rows", "TensorDict without rows"],
)
@pytest.mark.parametrize("method", ["proto", "metric"])
def test_what_is_no_batch_is_refused_at_the_call(echo, method, args, what):
    with pytest.raises(SchemaError, match=f"^{method}: {what}"):
        getattr(echo, method)(*args)


def test_settings_beside_a_batch_go_to_every_rank(echo):
    assert echo.returns(batch_of([1.0, 2.0]), what="None") is None
    part = batch_of([1.0, 2.0])
    doubled = echo.execute_with_func_generator(lambda worker, part, names: part, part, ["a"])
    assert doubled.batch["x"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("what", "kinds"), [("42", "int"), ("a dict", "dict"), ("None on rank 0", "DataProto and NoneType")]
)
def test_a_result_that_is_no_batch_is_refused(echo, what, kinds):
    if what == "None on rank 0" and echo.world_size == 1:
        assert echo.returns(batch_of([1.0]), what) is None
        return
    with pytest.raises(SchemaError, match=f"^returns returned {kinds}; its dispatch mode joins .*ONE_TO_ALL"):
        echo.returns(batch_of([1.0, 2.0]), what)


def test_meta_info_that_differs_between_ranks(echo, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = echo.own_meta_info(batch_of([1.0, 2.0]))
    metrics = by_world(echo, {"loss": 0.5, "grads": [0, 7]}, {"loss": [0.5, 1.5], "grads": [0, 7, 1, 7]})
    assert out.meta_info == {"metrics": metrics, "temperature": 1.0, "host": "node0"}
    said = [
        text for text in caplog.messages if "meta_info['host'] from own_meta_info; the first rank's is kept" in text
    ]
    assert len(said) == echo.world_size - 1
    later = echo.own_meta_info_later(batch_of([1.0, 2.0])).get()
    assert later.meta_info == {"metrics": by_world(echo, {"loss": 0.5}, {"loss": [0.5, 1.5]})}


def test_metric_is_a_list(echo):
    assert echo.metric(batch_of([1.0, 2.0, 3.0, 4.0])) == by_world(echo, [10.0], [3.0, 7.0])


def test_proto_with_func(pair):
    doubler = pair.spawn(["doubler"])["doubler"]
    out = doubler.apply(
        lambda part: DataProto.from_dict({"sum": part.batch["x"].cumsum(0)}), batch_of([1.0, 2.0, 3.0, 4.0])
    )
    assert out.batch["sum"].tolist() == by_world(pair, [1.0, 3.0, 6.0, 10.0], [1.0, 3.0, 3.0, 7.0])
    with pytest.raises(WorkerError, match="expects a function"):
        doubler.apply(batch_of([1.0, 2.0]))


def test_functions_of_the_driver_run_on_workers(echo):
    assert echo.execute_func_rank_zero(lambda a, b: a - b, 5, b=3) == 2
    out = echo.execute_with_func_generator(
        lambda worker, part: DataProto.from_dict({"x": part.batch["x"] + worker.rank}), batch_of([1.0, 2.0])
    )
    assert out.batch["x"].tolist() == by_world(echo, [1.0, 2.0], [1.0, 3.0])


def test_direct_rollout_method_is_refused_on_the_group(echo):
    with pytest.raises(WorkerError, match="not called through its worker group"):
        echo.direct()


def test_custom_pair_of_functions(echo):
    # reversed: rank 0 gets 4 and rank 1 gets 3; 4·1 + 3·10
    assert echo.custom([3, 4][: echo.world_size]) == by_world(echo, 3, 34)


def test_mode_of_the_workers_module(echo):
    out = echo.reversed(["a", "b"][: echo.world_size])
    assert out == by_world(echo, [(0, "a")], [(1, "a"), (0, "b")])


def test_not_waiting_gives_a_future_or_pending_outputs(echo):
    future = echo.proto_later(batch_of([1.0, 2.0]))
    assert isinstance(future, DataProtoFuture)
    assert future.get().batch["x"].tolist() == by_world(echo, [11.0, 12.0], [11.0, 22.0])
    assert echo.wait_for(echo.later("a")) == by_world(echo, [(0, "a")], [(0, "a"), (1, "a")])


def test_futures_are_dealt_like_batches(echo):
    future = echo.proto_later(batch_of([1.0, 2.0]))  # 11 12 or 11 22
    out = echo.proto(future, factor=2)
    assert out.batch["y"].tolist() == by_world(echo, [22.0, 24.0], [22.0, 44.0])
    assert out.batch["rank"].tolist() == by_world(echo, [0, 0], [0, 1])
    whole = echo.one_to_all(future)
    assert whole[-1][1].batch["x"].tolist() == by_world(echo, [11.0, 12.0], [11.0, 22.0])


def test_a_method_may_take_futures_unresolved(echo):
    out = echo.kind(echo.proto_later(batch_of([1.0, 2.0])))
    assert out.non_tensor_batch["kind"].tolist() == ["DataProtoFuture"] * 2
    assert out.batch["x"].tolist() == by_world(echo, [11.0, 12.0], [11.0, 22.0])


def test_execute_reaches_any_method_of_any_rank(echo):
    n = echo.world_size
    assert echo.execute_all_sync("not_registered", 1) == [8] * n
    assert echo.wait_for(echo.execute_all("not_registered", x=2)) == [9] * n
    assert echo.execute_rank_zero_sync("not_registered", 3) == 10


def test_unknown_methods_are_named_with_the_nearest(echo):
    with pytest.raises(AttributeError, match=r"'one_to_al'.*Did you mean 'one_to_all'"):
        echo.one_to_al(3)
    with pytest.raises(AttributeError, match="not_registered"):
        echo.not_registered(3)


def test_a_mode_is_itself_after_pickling_and_made_where_it_is_unknown():
    mode = Dispatch.register("TRAVELLER")
    assert pickle.loads(pickle.dumps(mode)) is mode
    wire = pickle.dumps(mode).replace(b"TRAVELLER", b"TRAVELLES")
    assert pickle.loads(wire) is Dispatch["TRAVELLES"]


def test_modes_of_users():
    mode = register_dispatch_mode("REVERSED", deal_reversed, lambda group, outputs: outputs[-1])
    assert mode is Dispatch.REVERSED is Dispatch["REVERSED"]
    assert mode in Dispatch
    with pytest.raises(ConfigError, match="exists already"):
        register_dispatch_mode("reversed", deal_reversed, deal_reversed)
    named = Dispatch.register("ONLY_NAMED")
    assert Dispatch.register("only_named") is named
    with pytest.raises(ConfigError, match="Did you mean 'ONE_TO_ALL'"):
        Dispatch["ONE_TO_AL"]
    with pytest.raises(ConfigError, match="is no dispatch mode"):
        update_dispatch_mode("REVERSED", deal_reversed, deal_reversed)


def test_registration_refuses_what_cannot_work():
    with pytest.raises(ConfigError, match="'dispatch_fn' and 'collect_fn'"):
        register(dispatch_mode={"dispatch_fn": deal_reversed})
    with pytest.raises(ConfigError, match="must be a function"):
        register(dispatch_mode={"dispatch_fn": deal_reversed, "collect_fn": "concat"})
    with pytest.raises(ConfigError, match=r"execute_mode.*Execute.ALL"):
        register(execute_mode="ALL")
    with pytest.raises(ConfigError, match=r"DP_COMPUTE_PROTO.*rank 0"):
        register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)

    async def method(self): ...

    with pytest.raises(ConfigError, match="coroutine"):
        register()(method)
