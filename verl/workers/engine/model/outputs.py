"""The outputs of a language model at the response tokens, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor

from verl.errors import SchemaError
from verl.protocol import DataProto
from verl.workers.engine.model.divergence import DivergenceStatistics
from verl.workers.engine.model.head import NO_TOP, TokenStatistics, TopTokens

LANGUAGE_OUTPUTS = frozenset({
    "log_probs", "entropy", "sum_pi_squared", "topk_log_probs", "agreement", "top_ids", "top_log_probs", "hidden",
    "divergence", "teacher_entropy",
})  # fmt: skip
"""Outputs of a language model; see :func:`language_outputs`."""


def language_outputs(
    outputs: frozenset[str],
    hidden: Tensor,
    statistics_of: Callable[..., TokenStatistics],
    candidates: Tensor | None,
    top: TopTokens,
    divergence_of: Callable[[], DivergenceStatistics],
) -> dict[str, Tensor]:
    """Compute ``outputs`` of a language model at N tokens, each (N,) fp32 if nothing else is said.

    ``log_probs``, ``entropy``, ``sum_pi_squared``; ``topk_log_probs``, (N, K), of the candidates, and ``agreement``, 1
    where no token is more likely than the first of them; ``top_ids``, (N, top.count) int64, and ``top_log_probs``, the
    most likely tokens; ``hidden``, (N, H). Of a divergence: ``divergence``, ``agreement`` with the teacher's most
    likely token, ``teacher_entropy``.

    Args:
        outputs: names.
        hidden: (N, H) last hidden states that predict the tokens.
        statistics_of: computes log-probs, with the keywords ``with_entropy, with_sum_pi_squared, candidates, top``.
        candidates: (N, K) ids of tokens.
        top: number of the most likely tokens.
        divergence_of: computes the divergence.
    """
    columns: dict[str, Tensor] = {"hidden": hidden} if "hidden" in outputs else {}
    if outputs & {"divergence", "teacher_entropy"}:
        columns |= divergence_of()._asdict()
    if rest := outputs - columns.keys():
        if candidates is None and (unavailable := rest & {"topk_log_probs", "agreement"}):
            raise SchemaError(
                f"the output {', '.join(sorted(unavailable))} needs the column 'teacher_topk_ids', which the batch "
                "lacks."
            )
        statistics = statistics_of(
            with_entropy="entropy" in rest,
            with_sum_pi_squared="sum_pi_squared" in rest,
            candidates=candidates if rest & {"topk_log_probs", "agreement"} else None,
            top=top if rest & {"top_ids", "top_log_probs"} else NO_TOP,
        )
        columns |= {name: values for name, values in statistics._asdict().items() if values is not None}
    # Sorted, as the order of a set differs between processes: ranks that share sequences collect the columns one after
    # the other.
    return {name: columns[name] for name in sorted(outputs)}


def empty_columns(
    shape: Sequence[int],
    outputs: Set[str],
    topk: int,
    hidden_size: int,
    hidden_dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return a column of zeros for each output, (bsz, response_length) float32 or as :func:`language_outputs` says.

    Token ids are int32. ``hidden``, which is large, is in its own format and on the CPU.
    """
    columns: dict[str, Tensor] = {}
    for name in outputs:
        if name == "hidden":
            columns[name] = torch.zeros(*shape, hidden_size, dtype=hidden_dtype)
        elif name in ("top_ids", "top_log_probs", "topk_log_probs"):
            dtype = torch.int32 if name == "top_ids" else torch.float32
            columns[name] = torch.zeros(*shape, topk, dtype=dtype, device=device)
        else:
            columns[name] = torch.zeros(*shape, device=device)
    return columns


def without_hidden(batch: DataProto) -> DataProto:
    """Leave out the teacher's hidden states, which are large, and which only a pass reads."""
    return batch.select([name for name in batch.batch.keys() if name != "teacher_hidden"])
