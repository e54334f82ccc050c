"""Routers of mixtures of experts: record of their choices in a forward pass, and replay of earlier choices.

Transformers' routers return (router logits, weights, chosen experts), (tokens, experts) and twice (tokens, experts per
token). A choice that travels is a tensor (..., layers, experts per token), of uint8 where the model has at most 255
experts and else of int16; the largest number of its format stands where no choice is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from verl.errors import ConfigError

ROUTING = "routed_experts"
"""Column of the choices, and name of the output of an engine that records them."""


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of ``model`` that are routers, in the order of its layers."""
    return [module for module in model.modules() if type(module).__name__.endswith("Router")]


def choice_dtype(experts: int) -> torch.dtype:
    """Return the format of choices among so many experts."""
    return torch.uint8 if experts <= torch.iinfo(torch.uint8).max else torch.int16


def unknown(dtype: torch.dtype) -> int:
    """Return the number that stands for an unknown choice."""
    return torch.iinfo(dtype).max


class Choices:
    """Router outputs of one forward pass.

    Args:
        real: (rows, length) or (tokens,), 0 on padding, which is left out; None without padding.
    """

    def __init__(self, real: Tensor | None) -> None:
        self._returned: dict[int, tuple[Tensor, Tensor]] = {}
        self._real = None if real is None else real.flatten().bool()

    def add(self, router: int, logits: Tensor, expert_ids: Tensor) -> None:
        """Record a router's logits (tokens, experts) and choice (tokens, experts per token), padding included."""
        # No operation here: gradient checkpointing would compute it again.
        self._returned[router] = logits, expert_ids

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the index, the logits and the choice of each router, without padding."""
        for router, (logits, expert_ids) in sorted(self._returned.items()):
            if self._real is None:
                yield router, logits, expert_ids
            else:
                yield router, logits[self._real], expert_ids[self._real]

    @property
    def per_token(self) -> int:
        """Experts per token; 0 if no router returned its choice."""
        return next((expert_ids.shape[-1] for _, expert_ids in self._returned.values()), 0)

    def stacked(self, model: nn.Module) -> Tensor:
        """Return the choices, (tokens, layers, experts per token), in the format in which they travel.

        Raises:
            ConfigError: the routers of ``model`` do not return what they choose, or it has none.
        """
        if not self._returned:
            raise ConfigError(
                f"{type(model).__name__} has no routers that return their choice, so router replay has nothing to "
                "repeat. Set actor.router_replay.mode=disabled."
            )
        dtype = choice_dtype(next(iter(self._returned.values()))[0].shape[-1])
        return torch.stack([expert_ids for _, _, expert_ids in self], dim=1).to(dtype)


class Routers:
    """Routers of a model: records and replays their choices.

    Args:
        model: its routers get hooks; it may have none, or some that do not return their choice.
    """

    def __init__(self, model: nn.Module) -> None:
        self._watched: Choices | None = None
        self._replayed: Tensor | None = None
        self._is_checked = False
        self._routers = routers_of(model)
        for index, router in enumerate(self._routers):
            router.register_forward_hook(self._hook(index))
            router.forward = self._forward(index, router.forward)

    def __len__(self) -> int:
        """Return the number of routers."""
        return len(self._routers)

    @property
    def are_watched(self) -> bool:
        """True while the results of routers are recorded."""
        return self._watched is not None

    def _hook(self, index: int) -> Callable[[nn.Module, object, object], None]:
        """Return a forward hook that records what router ``index`` chose."""

        def keep(router: nn.Module, inputs: object, output: Any) -> None:
            if self._watched is not None and (expert_ids := _choice(output)) is not None:
                self._watched.add(index, output[0], expert_ids)

        return keep

    def _forward(self, index: int, original: Callable[..., object]) -> Callable[..., object]:
        def forward(*args: object, **kwargs: object) -> object:
            if self._replayed is None:
                return original(*args, **kwargs)
            replayed_ids = self._replayed[:, index]
            with _ReplayedTopK(replayed_ids, _experts(self._routers[index])):
                output = original(*args, **kwargs)
            if not self._is_checked:
                self._check(self._routers[index], _choice(output), replayed_ids)
            return output

        return forward

    def _check(self, router: nn.Module, actual: Tensor | None, replayed_ids: Tensor) -> None:
        is_known = replayed_ids != unknown(replayed_ids.dtype)
        if (
            actual is None
            or actual.shape != replayed_ids.shape
            or not torch.equal(actual[is_known], replayed_ids[is_known].to(actual.dtype))
        ):
            raise ConfigError(
                f"{type(router).__name__} does not choose its experts by torch.topk over all of them, so that their "
                "choice cannot be replayed. Set actor.router_replay.mode=disabled."
            )
        self._is_checked = True

    @contextmanager
    def watched(self, real: Tensor | None) -> Iterator[Choices]:
        """Record what routers return inside; ``real``, (rows, length), is 0 on padding, None without padding."""
        # Not in the backward pass: gradient checkpointing runs routers again there.
        self._watched = choices = Choices(real)
        try:
            yield choices
        finally:
            self._watched = None

    @contextmanager
    def replayed(self, choices: Tensor | None) -> Iterator[None]:
        """Make routers choose ``choices`` inside; the backward pass of gradient checkpointing must be inside too.

        Args:
            choices: (tokens, routers, experts per token), in the order of the tokens of the pass, padding included;
                None leaves the choice to the routers.

        Weights of the experts follow from the router's probabilities of the given experts, so its gradient flows.

        Raises:
            ConfigError: the model has another number of routers.
        """
        if choices is not None and choices.shape[1] != len(self):
            raise ConfigError(
                f"the column routed_experts has the choices of {choices.shape[1]} layers, and the model has "
                f"{len(self)} routers: it was recorded with another model."
            )
        self._replayed = choices
        try:
            yield
        finally:
            self._replayed = None


def _choice(output: object) -> Tensor | None:
    """Return the chosen experts in what a router returned, if it says them."""
    expert_ids = output[-1] if isinstance(output, tuple) else None
    return expert_ids if isinstance(expert_ids, Tensor) and not expert_ids.is_floating_point() else None


def _experts(router: nn.Module) -> int:
    return int(getattr(router, "num_experts", 0) or router.get_parameter("weight").shape[0])


class _ReplayedTopK(TorchFunctionMode):
    """Context in which ``torch.topk`` over experts takes the given ones where they are known."""

    def __init__(self, replayed_ids: Tensor, experts: int) -> None:
        super().__init__()
        self._replayed_ids, self._experts = replayed_ids, experts

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, (_, indices) = args[0], result
        # Routers that choose among groups of experts first call it with other shapes.
        if scores.shape != (len(self._replayed_ids), self._experts) or indices.shape != self._replayed_ids.shape:
            return result
        is_known = self._replayed_ids != unknown(self._replayed_ids.dtype)
        expert_ids = torch.where(is_known, self._replayed_ids.to(indices.dtype), indices)
        return torch.return_types.topk((scores.gather(-1, expert_ids), expert_ids))
