"""Location of non-finite values in an update: the column, the sample and the token, or the parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.workers.engine.loss import LossMetrics, PartialSum

Kind = Literal["input", "output", "term", "gradient"]

NAMED_PARAMETERS = 3
"""Maximum number of parameters named in a report of non-finite gradients."""

_WHAT = {
    "input": "column '{}' of the batch",
    "output": "the model's {}",
    "term": "the term '{}' of the loss",
    "gradient": "the gradient of {}",
}


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """A column, output, loss term or parameter that held NaN or an infinity in a mini-batch of one rank."""

    kind: Kind
    name: str
    value: str
    """The first such value: ``nan``, ``inf`` or ``-inf``."""
    rank: int
    row: int | None = None
    """The sample of the first such value; None for parameters, loss terms and filler passes."""
    token: int | None = None
    """The response token of the first such value; None if it belongs to no token."""
    count: int = 1
    """Number of values that were not finite."""
    size: int = 1
    """Number of values checked."""

    def __str__(self) -> str:
        where = "" if self.row is None else f" in sample {self.row}"
        where += "" if self.token is None else f", response token {self.token}"
        share = f" ({self.count} of {self.size} values are not finite)" if self.size > 1 else ""
        return f"{_WHAT[self.kind].format(self.name)} is {self.value}{where}{share}"


def in_batch_order(problems: Sequence[NonFinite], order: Sequence[int], world_size: int) -> list[NonFinite]:
    """Convert row numbers within a rank to row numbers of the batch that was distributed over ranks in ``order``."""
    share = len(order) // world_size
    return [
        problem if problem.row is None else replace(problem, row=order[problem.rank * share + problem.row])
        for problem in problems
    ]


@dataclass
class LossWatch:
    """Recorded passes of one mini-batch on this rank, to be searched for non-finite values.

    They are checked once at the end, because each check waits for the GPU. What is kept is one number for each response
    token and output, no activations.
    """

    rank: int
    _passes: list[tuple[Sequence[int], DataProto, dict[str, Tensor], Tensor, dict[str, Tensor]]] = field(
        default_factory=list
    )

    def add(
        self, rows: Sequence[int], data: DataProto, outputs: Mapping[str, Tensor], loss: Tensor, metrics: LossMetrics
    ) -> None:
        """Record one pass; ``rows`` are its rows in the mini-batch."""
        columns = {name: values.detach() for name, values in outputs.items()}
        # A term that still had its graph would keep the activations of the pass.
        terms = {
            name: torch.as_tensor(term.value if isinstance(term, PartialSum) else term).detach()
            for name, term in metrics.items()
        }
        self._passes.append((rows, data, columns, loss.detach(), terms))

    def problems(self) -> list[NonFinite]:
        """Locate the non-finite values of the first pass with a non-finite loss.

        They are in its input columns, else in its outputs; and in terms of the loss. Empty if all losses are finite.
        """
        if not self._passes or bool(torch.stack([loss for *_, loss, _ in self._passes]).isfinite().all()):
            return []
        rows, data, outputs, loss, terms = next(record for record in self._passes if not bool(record[3].isfinite()))
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
    """The first parameters whose gradient is not finite, from names and gradients of this rank's part of them."""
    findings: list[NonFinite] = []
    for name, gradient in parameters:
        if gradient is None or len(findings) == NAMED_PARAMETERS:
            continue
        bad = ~gradient.isfinite()
        if count := int(bad.sum()):
            value = _text(gradient[bad][:1])
            findings.append(
                NonFinite(kind="gradient", name=name, value=value, rank=rank, count=count, size=gradient.numel())
            )
    return findings


def _text(values: Tensor) -> str:
    """The first of ``values`` that is not finite."""
    return str(values[~values.isfinite()][0].item())
