"""State of the engines of a session, for callers that wait for them and for error messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from verl.workers.rollout.request import NO_WEIGHTS

SHOWN_ENGINES = 8
"""Engines listed in a status message, longest-silent first."""


@dataclass(frozen=True)
class EngineLoad:
    """The requests of one engine."""

    running: int = 0
    """Requests that it runs."""
    waiting: int = 0
    """Requests that wait for room in it."""
    silent_s: float | None = None
    """Seconds since it answered, or got its first request; None if it has none."""
    is_lost: bool = False


@dataclass(frozen=True)
class SessionState:
    """Load of a session's engines at one moment."""

    weight_version: int
    """Version of their weights, or of those that they had when they were awake last; -1 before the first time."""
    held: int
    """Requests that no engine has: the session is paused, or none has room."""
    paused_s: float | None
    """For how many seconds it has been paused; None if it is not."""
    engines: tuple[EngineLoad, ...]
    """Each engine that is awake."""


def joined(states: Iterable[SessionState]) -> SessionState:
    """Return the state of a session from those of its routers, which share the engines; at least one."""
    router_states = list(states)
    paused = [state.paused_s for state in router_states if state.paused_s is not None]
    loads = itertools.zip_longest(*(state.engines for state in router_states), fillvalue=EngineLoad())
    return SessionState(
        max(state.weight_version for state in router_states),
        sum(state.held for state in router_states),
        max(paused, default=None),
        tuple(_joined_load(engine_loads) for engine_loads in loads),
    )


def _joined_load(loads: Iterable[EngineLoad]) -> EngineLoad:
    router_loads = list(loads)
    silences = [load.silent_s for load in router_loads if load.silent_s is not None]
    return EngineLoad(
        sum(load.running for load in router_loads),
        sum(load.waiting for load in router_loads),
        min(silences, default=None),  # the router that heard it last
        any(load.is_lost for load in router_loads),
    )


def described(state: SessionState) -> str:
    """Return a state as text.

    >>> described(SessionState(7, 12, 41.2, (EngineLoad(),)))
    'engines paused for 41 s with weights of version 7; 12 requests held'
    >>> described(SessionState(7, 0, None, (EngineLoad(), EngineLoad(3, 2, 5.0))))
    'engines awake with weights of version 7; engine 1: 3 requests running, 2 waiting, last answer 5 s ago'
    """
    weights = "no weights yet" if state.weight_version == NO_WEIGHTS else f"weights of version {state.weight_version}"
    if state.paused_s is not None:
        parts = [f"engines paused for {state.paused_s:.0f} s with {weights}"]
    elif state.engines:
        parts = [f"engines awake with {weights}"]
    else:
        parts = [f"no engine is awake, the last had {weights}"]
    if state.held:
        parts.append(f"{state.held} requests held")
    busy = [(engine, load) for engine, load in enumerate(state.engines) if load.running or load.waiting or load.is_lost]
    busy.sort(key=lambda pair: -(pair[1].silent_s or 0.0))
    for engine, load in busy[:SHOWN_ENGINES]:
        answer = "" if load.silent_s is None else f", last answer {load.silent_s:.0f} s ago"
        work = f"{load.running} requests running, {load.waiting} waiting{answer}"
        parts.append(f"engine {engine}: {'lost' if load.is_lost else work}")
    if len(busy) > SHOWN_ENGINES:
        parts.append(f"and {len(busy) - SHOWN_ENGINES} more engines at work")
    return "; ".join(parts)
