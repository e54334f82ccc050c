"""Micro-batches that do not fit in memory, with the error that PyTorch's own allocator raises.

On one rank without FSDP the micro-batch is split in two and the mini-batch computed again. With several ranks the
others wait in a collective that cannot be cancelled, so all workers restart from the last step with the new limit.
The gradient is the same, because the denominators of a loss are those of the whole mini-batch, and the size that
fitted applies for the rest of the run. A single sequence that does not fit stops the run. An error of the optimizer's
own step, whose moments are allocated in the first one, is not split.
"""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.workers.support import LAYOUTS, WHOLE, make_engine, ragged_batch, weights_of
from verl.errors import PassTooLargeError, ResourceError
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir
from verl.workers.config import ActorConfig
from verl.workers.engine import FSDPEngine, FunctionLoss, MicroBatchConfig
from verl.workers.engine.passes import cut, is_out_of_memory
from verl.workers.losses import OwnForwardLoss, PolicyLoss, TokenRecord, sft_loss

HUGE = 2**50
"""Bytes that no machine has."""


class Memory:
    """Room for so many tokens in a pass: more ask for what is not there, in the forward or late in the backward."""

    def __init__(self, engine: FSDPEngine, tokens: int, backward: bool = False) -> None:
        self.tokens, self.passes = tokens, []
        self._backward, self._is_too_large = backward, False
        engine.model.register_forward_hook(self._after_forward)
        # The last gradient of a backward: those of all layers are there when it fails.
        engine.model.hf.get_input_embeddings().weight.register_post_accumulate_grad_hook(self._after_backward)

    def _after_forward(self, module, args, outputs):
        inputs = args[0]
        tokens = inputs.input_ids.numel() if inputs.attention_mask is None else int(inputs.attention_mask.sum())
        self.passes.append(tokens)
        self._is_too_large = tokens > self.tokens
        if not self._backward:
            self._ask()

    def _after_backward(self, weight):
        self._ask()

    def _ask(self):
        if self._is_too_large:
            torch.empty(HUGE, dtype=torch.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


def gradients(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in engine.model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layout", ["whole", "three", "by tokens"])
def test_smaller_passes_give_the_same_gradient_and_are_remembered(path, layout, backward):
    batch = ragged_batch()
    longest = int(batch.batch["attention_mask"].sum(-1).max())
    engine, free = make_engine(path), make_engine(path)
    with engine.train_mode(), free.train_mode():
        expected = free.forward_backward_batch(batch, sft_loss, LAYOUTS[layout])
        memory = Memory(engine, longest, backward)
        metrics = engine.forward_backward_batch(batch, sft_loss, LAYOUTS[layout])
        assert metrics == pytest.approx(expected, rel=1e-5)
        for name, gradient in gradients(free).items():
            assert_close(gradients(engine)[name], gradient, atol=1e-6, rtol=1e-4)
        assert engine.pass_sizes.cuts > 0
        assert engine.pass_sizes.limits["train"] <= longest
        # The next batch is computed in passes that fit from the first.
        memory.passes.clear()
        engine.train_batch(batch, sft_loss, LAYOUTS[layout])
        assert max(memory.passes) <= longest
        assert sum(memory.passes) == int(batch.batch["attention_mask"].sum())


def test_passes_without_gradients_have_a_limit_of_their_own(path):
    batch, engine = ragged_batch(), make_engine(path)
    expected = engine.infer_batch(batch, {"log_probs", "entropy"}, WHOLE)
    Memory(engine, tokens=20)
    found = engine.infer_batch(batch, {"log_probs", "entropy"}, WHOLE)
    for name, values in expected.items():
        assert_close(found[name], values, atol=1e-5, rtol=1e-5)
    assert engine.pass_sizes.limits.keys() == {"infer"}


def test_log_probs_of_the_updates_own_pass_are_those_of_the_pass_that_fitted(path):
    batch, found = ragged_batch(), []
    for tokens in (10_000, 16):
        engine = make_engine(path)
        record = TokenRecord(len(batch))
        loss = OwnForwardLoss(PolicyLoss(ActorConfig(entropy_coeff=0.0)), record)
        Memory(engine, tokens, backward=True)
        with engine.train_mode():
            engine.train_batch(record.numbered(batch), loss, WHOLE)
        found.append(record.columns(batch.batch["response_mask"].shape[1], missing=0.0).batch["old_log_probs"])
    assert_close(*found, atol=1e-5, rtol=1e-5)
    assert found[0].abs().sum() > 0


def test_pairs_are_not_parted(path):
    def pairs(outputs, data, totals):
        assert data.batch["row"].tolist() == sorted(data.batch["row"].tolist())
        assert len(data) % 2 == 0
        return sft_loss(outputs, data, totals)

    batch = ragged_batch() | DataProto.from_dict(tensors={"row": torch.arange(8)})
    engine = make_engine(path)
    Memory(engine, tokens=26)
    with engine.train_mode():
        engine.train_batch(batch, FunctionLoss(pairs, rows_per_unit=2), WHOLE)
    assert engine.pass_sizes.cuts > 0


def test_one_sequence_that_does_not_fit_says_what_helps(path):
    engine = make_engine(path)
    Memory(engine, tokens=9)
    with engine.train_mode(), pytest.raises(ResourceError) as error:
        engine.train_batch(ragged_batch(), sft_loss, LAYOUTS["one by one"])
    text = str(error.value)
    assert "1 sequence(s) or pairs" in text
    assert "can't allocate memory" in text
    assert "enable_gradient_checkpointing" in text


def test_it_can_be_forbidden(path):
    engine = make_engine(path)
    engine.pass_sizes.may_cut = False
    Memory(engine, tokens=16)
    with engine.train_mode(), pytest.raises(ResourceError, match=r"split_on_out_of_memory=false.*micro_batch_size"):
        engine.train_batch(ragged_batch(), sft_loss, WHOLE)


def test_where_others_wait_all_must_start_again_and_know_the_limit(path):
    engine = make_engine(path, dtype="bfloat16")  # under FSDP, which cannot be stopped half-way
    Memory(engine, tokens=30)
    lengths = ragged_batch().batch["attention_mask"].sum(-1).tolist()
    with engine.train_mode(), pytest.raises(PassTooLargeError, match="Other ranks wait") as error:
        engine.train_batch(ragged_batch(), sft_loss, WHOLE)
    halves = [max(sum(lengths[:n]), sum(lengths[n:])) for n in range(1, 8)]
    assert (error.value.kind, error.value.limit) == ("train", min(halves))
    travelled = pickle.loads(pickle.dumps(error.value))
    assert (str(travelled), travelled.kind, travelled.limit) == (str(error.value), "train", min(halves))
    fresh = make_engine(path, dtype="bfloat16")
    memory = Memory(fresh, tokens=min(halves))
    fresh.pass_sizes.limits = {travelled.kind: travelled.limit}
    with fresh.train_mode():
        assert fresh.train_batch(ragged_batch(), sft_loss, WHOLE)["skipped_steps"] == 0
    assert len(memory.passes) > 1


def test_other_errors_are_not_taken_for_it(path):
    def broken(outputs, data, totals):
        raise RuntimeError("the loss is wrong")

    engine, before = make_engine(path), weights_of(make_engine(path))
    with engine.train_mode(), pytest.raises(RuntimeError, match="the loss is wrong"):
        engine.train_batch(ragged_batch(), FunctionLoss(broken), MicroBatchConfig())
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ResourceError("out of memory"))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 30))
def test_cut_keeps_units_their_order_and_the_limit(lengths, limit):
    parts = cut([list(range(len(lengths)))], lengths, limit)
    assert [unit for part in parts for unit in part] == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or sum(lengths[unit] for unit in part) <= limit
