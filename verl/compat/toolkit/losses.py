"""The loss of the policy in the public form: (config, model_output, data) → (loss, metrics)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tensordict import TensorDict
from torch import Tensor

from verl.compat.toolkit.padding import no_padding_2_padding
from verl.config import ActorConfig
from verl.protocol import DataProto
from verl.workers.engine import BatchTotals, PartialSum
from verl.workers.losses import PolicyLoss

if TYPE_CHECKING:
    import torch.distributed as dist


def ppo_loss(
    config: ActorConfig,
    model_output: Mapping[str, Tensor],
    data: TensorDict,
    dp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, object]]:
    """Compute the loss of :class:`verl.workers.losses.PolicyLoss` for one micro-batch.

    Args:
        config: ``actor_rollout_ref.actor``.
        model_output: ``log_probs``, and ``entropy`` if the loss has a bonus: nested, or (bsz, response_length).
        data: the micro-batch. ``dp_size``, ``batch_num_tokens`` and ``global_batch_size`` of the mini-batch may be
            among its values; without them ``data`` is the mini-batch.
        dp_group: not needed, as ``data`` has the counts over all ranks.

    Returns:
        the loss with the factor ``dp_size``, and metrics.
    """
    dense = {name: value for name, value in data.items() if isinstance(value, Tensor) and not value.is_nested}
    batch = DataProto.from_dict(dense)
    counts = {"dp_size": 1, "batch_num_tokens": int(data["response_mask"].sum()), "global_batch_size": len(batch)}
    totals = BatchTotals(**{name: data[name] if name in data.keys() else count for name, count in counts.items()})
    loss = PolicyLoss(config)
    outputs = {name: no_padding_2_padding(model_output[name], data) for name in sorted(loss.outputs)}
    value, metrics = loss(outputs, batch, totals)
    return value, {name: item.value if isinstance(item, PartialSum) else item for name, item in metrics.items()}
