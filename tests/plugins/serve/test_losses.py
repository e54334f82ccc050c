"""The losses of the service, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from verl.plugins.serve.losses import NAMES, token_losses
from verl.protocol import DataProto

P = math.log(0.5), math.log(0.25)
Q = math.log(0.25), math.log(0.5)  # r = 2 and 1/2


@pytest.mark.parametrize(
    "name, settings, advantages, losses, slopes",
    [
        # -w log p; slope -w
        ("cross_entropy", (), (3, -2), (-3 * P[0], 2 * P[1]), (-3, 2)),
        # -r A; slope -r A
        ("importance_sampling", (), (3, -2), (-6, 1), (-6, 1)),
        # min(2·3, 1.2·3) = 3.6, of the clipped: no slope; min(0.5·-2, 0.8·-2) = -1.6
        ("ppo", (0.8, 1.2), (3, -2), (-3.6, 1.6), (0, 0)),
        # min(2·-3, 1.2·-3) = -6; min(0.5·2, 0.8·2) = 1, of those that are not clipped
        ("ppo", (0.8, 1.2), (-3, 2), (6, -1), (6, -1)),
        # clip(2, 0.8, 3) = 2: min(6, 6); clip(0.5, 0.1, 3) = 0.5
        ("ppo", (0.1, 3), (3, -2), (-6, 1), (-6, 1)),
        # -clip(r) log p A: slope -clip(r) A, clipped or not
        ("cispo", (0.8, 1.2), (3, -2), (-3.6 * P[0], 1.6 * P[1]), (-3.6, 1.6)),
        ("cispo", (0.1, 3), (3, -2), (-6 * P[0], P[1]), (-6, 1)),
        # -(log p A - β/2 (log r)²); slope -(A - β log r)
        (
            "dro",
            (0.5,),
            (3, -2),
            (-3 * P[0] + 0.25 * math.log(2) ** 2, 2 * P[1] + 0.25 * math.log(2) ** 2),
            (-(3 - 0.5 * math.log(2)), -(-2 + 0.5 * math.log(2))),
        ),
    ],
)
def test_losses_and_their_slopes(name, settings, advantages, losses, slopes):
    """Each loss at r = 2 and at r = 1/2; a masked token counts nothing."""
    log_probs = torch.tensor([[*P, -1.0]], requires_grad=True)
    batch = DataProto.from_dict(
        tensors={
            "loss_index": torch.tensor([NAMES.index(name)]),
            "loss_settings": torch.tensor([[*settings, *[0.0] * (2 - len(settings))]]),
            "old_log_probs": torch.tensor([[*Q, 5.0]]),
            "advantages": torch.tensor([[*advantages, 7.0]]),
            "response_mask": torch.tensor([[1, 1, 0]]),
        }
    )
    result = token_losses(log_probs, batch)
    torch.testing.assert_close(result, torch.tensor([[*losses, 0.0]]))
    result.sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[*map(float, slopes), 0.0]]))
