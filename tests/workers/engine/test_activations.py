"""Activations on the CPU until the backward pass: the same update, and weights that stay where they are."""

import pytest
import torch

from tests.workers.support import LAYOUTS, make_engine, ragged_batch, weights_of
from verl.testing.models import tiny_model_dir
from verl.workers.engine.fsdp.activations import activations_on_cpu
from verl.workers.losses import sft_loss


@pytest.fixture
def copied(monkeypatch):
    """Tensors of which a copy on the CPU was asked for; here they are there already."""
    found, to = [], torch.Tensor.to

    def watched(tensor, *arguments, **keywords):
        if arguments == ("cpu",):
            found.append(tensor)
        return to(tensor, *arguments, **keywords)

    monkeypatch.setattr(torch.Tensor, "to", watched)
    return found


def test_what_a_backward_pass_needs_is_copied_but_weights(copied):
    weight, x = torch.nn.Parameter(torch.ones(3, 2)), torch.tensor([[1.0, 2.0]], requires_grad=True)
    with activations_on_cpu():
        y = (x @ weight.T).exp()
    assert [tuple(tensor.shape) for tensor in copied] == [(1, 2), (1, 3)]  # x, and exp(x Wᵀ)
    y.sum().backward()
    assert torch.equal(weight.grad, torch.tensor([1.0, 2.0]).repeat(3, 1) * torch.tensor(3.0).exp())


@pytest.mark.parametrize("checkpointing", [True, False])
def test_an_update_has_the_same_bits(checkpointing, tmp_path, copied):
    path, after, counts = tiny_model_dir(tmp_path / "model"), [], []
    for offloaded in (False, True):
        settings = {"enable_gradient_checkpointing": checkpointing, "enable_activation_offload": offloaded}
        engine = make_engine(path, **settings)
        with engine.train_mode():
            copied.clear()
            engine.train_batch(ragged_batch(), sft_loss, LAYOUTS["three"])
            counts.append(sum(tensor.requires_grad for tensor in copied))
        after.append(weights_of(engine))
    assert all(torch.equal(after[1][name], weight) for name, weight in after[0].items())
    assert counts[0] == 0
    assert counts[1] > 0
