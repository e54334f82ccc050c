"""Worker groups as a ``fit`` of a user calls them: with whole batches, in the order of the data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from verl.trainer.ppo.stages import call_by_row

if TYPE_CHECKING:
    from verl.single_controller.base.worker_group import WorkerGroup

BY_ROW = frozenset({"compute_log_prob", "compute_ref_log_prob", "compute_values"})
"""Methods whose result has one row for each row of the batch that they get."""


class OrderedGroup:
    """A worker group whose calls take a batch in the order of the data and return new columns in that order.

    Every call balances the rows over the ranks for itself, and fills up what does not divide. A method that workers
    register with ``blocking=False`` returns a ``DataProtoFuture``. Methods that are not about a batch are the group's
    own.

    Args:
        group: the worker group.
        balance: give ranks about equal numbers of tokens (``trainer.balance_batch``).
        shares_prompts: keep rows with the same prompt on one rank (``use_prefix_grouper``).
        calls: methods that need more than the order of rows; they take the place of the group's.
    """

    def __init__(
        self,
        group: WorkerGroup,
        balance: bool,
        calls: Mapping[str, Callable[..., object]] | None = None,
        shares_prompts: bool = False,
    ) -> None:
        self.group = group
        self._balance = balance
        self._shares_prompts = shares_prompts
        self._calls = dict(calls or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_calls" not in self.__dict__:  # copy and pickle look before the fields are set
            raise AttributeError(name)
        if name in self._calls:
            return self._calls[name]
        method = getattr(self.group, name)
        if name not in BY_ROW:
            return method
        balance, shares = self._balance, self._shares_prompts
        return functools.partial(call_by_row, self.group, name, balance=balance, shares_prompts=shares)
