"""Groups of responses to one prompt, and statistics over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from verl.errors import SchemaError
from verl.utils.torch_functional import zero_masked

GroupIds = np.ndarray | Tensor | Sequence
"""(bsz,) one id per sample; samples with equal ids are siblings: responses to one prompt."""


def group_numbers(index: GroupIds, device: torch.device | None = None) -> Tensor:
    """Renumber group ids of any hashable type as 0, 1, 2, ... in order of appearance; (bsz,) int64."""
    return torch.tensor(_numbered(index), dtype=torch.int64, device=device)


def _numbered(index: GroupIds) -> list[int]:
    seen: dict = {}
    ids = index if isinstance(index, Sequence) else index.tolist()
    return [seen.setdefault(group, len(seen)) for group in ids]


@dataclass(frozen=True)
class Groups:
    """Rows by group, with statistics over the member rows of each group.

    Statistics are computed in float64 and returned per row. Rows that are not members are ignored, whatever values they
    hold, and receive the statistics of their group's members.
    """

    index: Tensor
    """(n,) the group of each row, from 0."""
    is_member: Tensor
    """(n,) whether the row counts."""
    groups: int
    """Number of groups."""

    @classmethod
    def from_ids(cls, index: GroupIds, response_mask: Tensor) -> Groups:
        """Group rows by their ids, (bsz,). A row without a single token in ``response_mask`` is not a member.

        Such a response was rejected or failed. Its reward says nothing about the policy, and counting it as 0 would
        shift the baseline of its siblings.
        """
        indices = _numbered(index)
        if len(indices) != len(response_mask):
            raise SchemaError(
                f"index has {len(indices)} group ids, and there are {len(response_mask)} rows: give one id for each "
                "row."
            )
        row_groups = torch.tensor(indices, dtype=torch.int64, device=response_mask.device)
        return cls(row_groups, response_mask.bool().any(-1), max(indices, default=-1) + 1)

    @cached_property
    def size(self) -> Tensor:
        """(n,) float64 number of members in the row's group."""
        return self.total(torch.ones_like(self.index))

    @property
    def is_alone(self) -> Tensor:
        """(n,) whether the row's group has at most one member, which then has no baseline."""
        return self.size <= 1

    def sums(self, x: Tensor) -> Tensor:
        """Sum over the members of each group: (groups, ...) from x, (n, ...)."""
        member = self.is_member.view(-1, *[1] * (x.dim() - 1))
        totals = torch.zeros(self.groups, *x.shape[1:], dtype=torch.float64, device=x.device)
        return totals.index_add_(0, self.index, zero_masked(x, member).double())

    def total(self, x: Tensor) -> Tensor:
        """Sum over the members of the row's group; x is (n, ...)."""
        return self.sums(x)[self.index]

    def largest(self, x: Tensor) -> Tensor:
        """Maximum over the members of the row's group, -inf in a group without members; x is (n, ...)."""
        per_row = (-1, *[1] * (x.dim() - 1))
        members = x.double().masked_fill(~self.is_member.view(per_row), -torch.inf)
        maxima = torch.full((self.groups, *x.shape[1:]), -torch.inf, dtype=torch.float64, device=x.device)
        return maxima.scatter_reduce_(0, self.index.view(per_row).expand_as(x), members, "amax")[self.index]

    def mean(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Mean over the members, exactly their value if all are equal; 0 in a group without members.

        Args:
            x: (n,) values.
            weight: (n,) of each value, by default 1.
        """
        weight = torch.ones_like(self.size) if weight is None else weight
        top = torch.where(self.size > 0, self.largest(x), 0.0)
        return top + self.total(weight * (x - top)) / self.total(weight).clamp(min=1)

    def centred(self, x: Tensor, rounding: Tensor, weight: Tensor | None = None) -> Tensor:
        """Subtract the mean of the group's members; 0 where nothing but rounding is left.

        A group of one has no other to compare with and keeps its value.

        Args:
            x: (n,) values.
            rounding: (n,) bound of what rounding may have changed in each; the mean has the mean of these bounds.
            weight: (n,) of each value in the mean, by default 1.

        Returns:
            (n,) float64.
        """
        difference = x.double() - self.mean(x, weight)
        is_rounding = difference.abs() <= rounding + self.mean(rounding, weight)
        return torch.where(self.is_alone, x.double(), difference.masked_fill(is_rounding, 0.0))

    def std(self, x: Tensor) -> Tensor:
        """Unbiased standard deviation over the members, 0 for a group of one, exactly 0 for equal values; x is (n,)."""
        return (self.total((x - self.mean(x)) ** 2) / (self.size - 1).clamp(min=1)).sqrt()


def rewards_of_responses(token_level_rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the rewards of each response in float64, and bound what rounding may have changed in the sum.

        R = Σ_t r_t        rounding = ε Σ_t |r_t|        ε of the dtype of r: 1.2e-7 of float32

    ε is twice what storing a number in that dtype may change of it. A sum within its bound is 0: 0.1 + 0.2 - 0.3.

    Args:
        token_level_rewards: (bsz, response_length) r.
        response_mask: (bsz, response_length) which tokens count.

    Returns:
        R and its bound, (bsz,) float64 each.
    """
    rewards = zero_masked(token_level_rewards, response_mask).double()
    total, rounding = rewards.sum(-1), rounding_unit(token_level_rewards.dtype) * rewards.abs().sum(-1)
    return torch.where(total.abs() > rounding, total, 0.0), rounding


def rounding_unit(dtype: torch.dtype) -> float:
    """The ε of a dtype: the distance from 1 to the next number; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


# ---- for users' estimators ------------------------------------------------------------------------


def as_torch_index(index: object, device: torch.device | str | None = None) -> Tensor:
    """Return group numbers from 0, (n,) int64, for group ids of any kind.

    Integers keep their order (the smallest id is group 0); other ids are numbered in order of appearance.

    Args:
        index: (n,) ids: a tensor, an array, or a list.
        device: of the result; by default that of ``index``, or the CPU.
    """
    device = index.device if device is None and isinstance(index, Tensor) else device
    values = index.detach().cpu().numpy() if isinstance(index, Tensor) else np.asarray(index)
    values = values.reshape(-1)
    if values.dtype.kind in "iub":
        return torch.from_numpy(np.unique(values, return_inverse=True)[1]).to(device or "cpu", torch.int64)
    return group_numbers(values).to(device or "cpu")


@torch.no_grad()
def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, standard deviation (unbiased) and size of each group, (groups,) each, by group number.

    A group of one has mean 0 and standard deviation 1, so that its sample keeps its score; ``eps`` is the least
    variance. An unused number has mean 0, standard deviation 1 and size 0.

    Args:
        scores: (n,)
        gidx: (n,) group numbers from 0, as :func:`as_torch_index` makes them.
        eps: least variance of a group.
        device: of the result; by default that of ``scores``.
    """
    device = scores.device if device is None else device
    scores, gidx = scores.reshape(-1).to(device), gidx.reshape(-1).to(device)
    groups = Groups(gidx, torch.ones_like(gidx, dtype=torch.bool), int(gidx.max()) + 1 if gidx.numel() else 0)
    count = groups.sums(torch.ones_like(scores))
    mean = groups.sums(scores) / count.clamp(min=1)
    variance = groups.sums((scores - mean[gidx]) ** 2) / (count - 1).clamp(min=1)
    std = variance.clamp(min=eps).sqrt()
    several = count > 1
    mean, std = torch.where(several, mean, 0.0), torch.where(several, std, 1.0)
    return mean.to(scores.dtype), std.to(scores.dtype), count.to(scores.dtype)
