"""Types that several packages write in their signatures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

JsonObject = dict[str, Any]
"""A JSON object: a message, a tool's arguments or description, the settings of a tool, the body of a request.

Its values are ``Any`` and not ``object``: type checkers then let a reader index into nested values, as they do with the
result of ``json.loads``.
"""

JsonMapping = Mapping[str, Any]
"""A JSON object that the receiver does not change."""


class Stateful(Protocol):
    """An object whose state a checkpoint holds."""

    def state_dict(self) -> Mapping[str, object]:
        """The state, as plain numbers, strings and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Continue from a state of :meth:`state_dict`."""
        ...


SettingsT = TypeVar("SettingsT")


class AutogradContext(Protocol[SettingsT]):
    """Context in which ``forward`` of a ``torch.autograd.Function`` stores values for its ``backward``."""

    settings: SettingsT
    """Stored values other than tensors."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of :meth:`save_for_backward`."""
        ...

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """True for each argument of ``forward`` whose gradient is needed."""
        ...

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors."""

    def mark_non_differentiable(self, *args: Tensor) -> None:
        """Say of outputs that they have no gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Return whether ``backward`` gets zeros in place of missing gradients."""
