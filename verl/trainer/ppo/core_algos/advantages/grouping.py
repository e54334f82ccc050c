"""Siblings: which rows answer the same prompt, and statistics over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from verl.utils.torch_functional import zero_masked

GroupIds = np.ndarray | Tensor | Sequence
"""(bsz,) one id per sample; equal ids are siblings, responses to one prompt."""


def group_numbers(index: GroupIds, device: torch.device | None = None) -> Tensor:
    """Group ids of any hashable kind as 0, 1, 2, ... in order of appearance; (bsz,) int64."""
    seen: dict = {}
    ids = index if isinstance(index, Sequence) else index.tolist()
    return torch.tensor([seen.setdefault(group, len(seen)) for group in ids], dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Groups:
    """Rows by group. Only members count; what stands in the other rows is never read.

    All statistics are computed in float64 and handed to each row of the group: a row that is no
    member sees those of its group without it.
    """

    number: Tensor
    """(n,) which group the row belongs to, from 0."""
    is_member: Tensor
    """(n,) whether the row counts."""
    groups: int
    """How many groups there are."""

    @classmethod
    def of(cls, index: GroupIds, response_mask: Tensor) -> Groups:
        """Siblings by their ids. A response without a single token of the policy is no member.

        Such a row is a sample that was rejected or that failed. Its reward says nothing about the
        policy, so that counting it as 0 would move the baseline of its siblings.

        Args:
            index: (bsz,) group ids.
            response_mask: (bsz, response_length).
        """
        number = group_numbers(index, response_mask.device)
        return cls(number, response_mask.bool().any(-1), int(number.max()) + 1 if len(number) else 0)

    @cached_property
    def size(self) -> Tensor:
        """Members of the row's group; (n,) float64."""
        return self.total(torch.ones_like(self.number))

    @property
    def is_alone(self) -> Tensor:
        """(n,) whether the row's group has one member, which then has nothing to be compared with."""
        return self.size <= 1

    def sums(self, x: Tensor) -> Tensor:
        """Σ over the members, by group: (groups, ...) from x, (n, ...)."""
        member = self.is_member.view(-1, *[1] * (x.dim() - 1))
        found = torch.zeros(self.groups, *x.shape[1:], dtype=torch.float64, device=x.device)
        return found.index_add_(0, self.number, zero_masked(x, member).double())

    def total(self, x: Tensor) -> Tensor:
        """Σ over the members of the row's group; x is (n, ...)."""
        return self.sums(x)[self.number]

    def largest(self, x: Tensor) -> Tensor:
        """The largest among the members of the row's group, -inf in a group without any; x is (n,)."""
        found = torch.full((self.groups,), -torch.inf, dtype=torch.float64, device=x.device)
        kept = x.double().masked_fill(~self.is_member, -torch.inf)
        return found.scatter_reduce_(0, self.number, kept, "amax")[self.number]

    def mean(self, x: Tensor) -> Tensor:
        """Mean over the members; 0 in a group without any. x is (n,)."""
        return self.total(x) / self.size.clamp(min=1)

    def std(self, x: Tensor) -> Tensor:
        """Unbiased standard deviation over the members; 0 for a group of one, and exactly 0 for equal float32s.

        Args:
            x: (n,).
        """
        return (self.total((x - self.mean(x)) ** 2) / (self.size - 1).clamp(min=1)).sqrt()
