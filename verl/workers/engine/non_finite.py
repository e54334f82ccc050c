"""What was not finite in an update, and where: the column, the sample and the token, or the parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.workers.engine.base import Metrics

Kind = Literal["input", "output", "term", "gradient"]

NAMED_PARAMETERS = 3
"""Parameters that are named where more have a gradient that is not finite."""

_WHAT = {
    "input": "column '{}' of the batch",
    "output": "the model's {}",
    "term": "the term '{}' of the loss",
    "gradient": "the gradient of {}",
}


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """One column, output, term of the loss or parameter that held NaN or an infinity in a mini-batch of one rank."""

    kind: Kind
    name: str
    value: str
    """The first such value: ``nan``, ``inf`` or ``-inf``."""
    rank: int
    row: int | None = None
    """The sample of the first such value; None where there is no such thing."""
    token: int | None = None
    """Its response token, where there is one."""
    count: int = 1
    """How many values were not finite."""
    size: int = 1
    """Of how many."""

    def __str__(self) -> str:
        place = "" if self.row is None else f" in sample {self.row}"
        place += "" if self.token is None else f", response token {self.token}"
        share = f" ({self.count} of {self.size} values are not finite)" if self.size > 1 else ""
        return f"{_WHAT[self.kind].format(self.name)} is {self.value}{place}{share}"


def in_batch_order(problems: Sequence[NonFinite], order: Sequence[int], world_size: int) -> list[NonFinite]:
    """Problems by rows of their rank, as problems by rows of the batch that was dealt out to ranks in ``order``."""
    share = len(order) // world_size
    return [one if one.row is None else replace(one, row=order[one.rank * share + one.row]) for one in problems]


@dataclass
class LossWatch:
    """The passes of one mini-batch on this rank; looked at together, so that a GPU is not waited for at each of them.

    Holds one number for each response token and output, no activations.
    """

    rank: int
    _passes: list[tuple[Sequence[int], DataProto, dict[str, Tensor], Tensor, dict[str, Tensor]]] = field(
        default_factory=list
    )

    def add(
        self, rows: Sequence[int], data: DataProto, outputs: Mapping[str, Tensor], loss: Tensor, metrics: Metrics
    ) -> None:
        """Take in one pass: its rows in the mini-batch, its columns, and what came of them."""
        kept = {name: values.detach() for name, values in outputs.items()}
        # A term that still had its graph would keep the activations of the pass.
        terms = {name: torch.as_tensor(getattr(term, "value", term)).detach() for name, term in metrics.items()}
        self._passes.append((rows, data, kept, loss.detach(), terms))

    def found(self) -> list[NonFinite]:
        """What is not finite, if a loss is not: of the first such pass the columns, else the outputs, and the terms."""
        if not self._passes or bool(torch.stack([loss for *_, loss, _ in self._passes]).isfinite().all()):
            return []
        rows, data, outputs, loss, terms = next(one for one in self._passes if not bool(one[3].isfinite()))
        assert data.batch is not None
        mask = data.batch["response_mask"]
        inputs = {name: values for name, values in sorted(data.batch.items()) if values.is_floating_point()}
        columns = list(self._in_columns("input", inputs, mask, rows))
        columns = columns or list(self._in_columns("output", outputs, mask, rows))
        bad = {name: value for name, value in terms.items() if not bool(value.isfinite().all())}
        return columns + [
            NonFinite(kind="term", name=name, value=_text(value.reshape(-1)), rank=self.rank)
            for name, value in (bad or {"loss": loss}).items()
        ]

    def _in_columns(
        self, kind: Kind, columns: Mapping[str, Tensor], mask: Tensor, rows: Sequence[int]
    ) -> Iterator[NonFinite]:
        for name, values in columns.items():
            valid = mask.bool().to(values.device)
            if values.shape != valid.shape:  # one value for each sample
                values, valid = values.reshape(len(values), -1), valid.any(-1, keepdim=True)
            bad = (valid & ~values.isfinite()).nonzero()
            if len(bad):
                row, token = bad[0].tolist()
                yield NonFinite(
                    kind=kind,
                    name=name,
                    value=_text(values[row, token].reshape(1)),
                    rank=self.rank,
                    row=rows[row] if rows else None,
                    token=token if values.shape == mask.shape else None,
                    count=len(bad),
                    size=int(valid.expand_as(values).sum()),
                )


def in_gradients(parameters: Iterable[tuple[str, Tensor | None]], rank: int) -> list[NonFinite]:
    """The first parameters whose gradient is not finite on this rank.

    Args:
        parameters: names and gradients, this rank's part of them.
        rank: of this process.
    """
    found: list[NonFinite] = []
    for name, gradient in parameters:
        if gradient is None or len(found) == NAMED_PARAMETERS:
            continue
        bad = ~gradient.isfinite()
        if count := int(bad.sum()):
            value = _text(gradient[bad][:1])
            found.append(
                NonFinite(kind="gradient", name=name, value=value, rank=rank, count=count, size=gradient.numel())
            )
    return found


def _text(values: Tensor) -> str:
    """The first of ``values`` that is not finite."""
    return str(values[~values.isfinite()][0].item())
