"""State of a rollout engine, for monitoring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """State of one rank's engine at a moment; None where an engine does not report a value."""

    weight_version: int
    """Version of the weights that it holds; -1 for none, as while it sleeps."""
    requests_running: float | None = None
    """Responses that are being drawn."""
    requests_waiting: float | None = None
    """Requests that it has taken and that wait for room."""
    memory_use: float | None = None
    """Share of the memory for keys and values that running requests take, 0 to 1."""
    memory_tokens: float | None = None
    """Tokens of running requests whose keys and values are in memory; a prompt that responses share counts once."""
    prefix_cache_tokens: float | None = None
    """Tokens of earlier texts whose keys and values are kept."""
    prompt_tokens: float | None = None
    """Prompt tokens of all requests since the engine was made; ``native`` counts prompts of equal requests that wait
    together once."""
    prefix_hit_tokens: float | None = None
    """Prompt tokens whose keys and values were found instead of computed."""
    response_tokens: float | None = None
    """Response tokens drawn since the engine was made."""
    proposed_tokens: float | None = None
    """Tokens that heads of multi-token prediction have proposed since the engine was made."""
    accepted_tokens: float | None = None
    """Proposed tokens that became part of responses."""
    preemptions: float | None = None
    """Number of preemptions of requests for lack of memory since the engine was made."""


REQUEST_FIELDS = ("requests_running", "requests_waiting", "memory_use", "memory_tokens")
"""Fields that are 0 in an engine without requests."""


def fields_of(samples: Iterable[tuple[str, float]], names: Mapping[str, str]) -> dict[str, float]:
    """Return fields of :class:`EngineState` from an engine's own metrics; what it does not tell is left out.

    Args:
        samples: names and values; those of the same name, such as of several processes, are added up.
        names: field → the engine's name for it.
    """
    values: dict[str, float] = {}
    for name, value in samples:
        values[name] = values.get(name, 0.0) + value
    return {field: values[name] for field, name in names.items() if name in values}


def samples_of(text: str, names: Iterable[str]) -> list[tuple[str, float]]:
    """Return the samples with one of the names in Prometheus's text format, with the library ``prometheus_client``."""
    from prometheus_client.parser import text_string_to_metric_families  # the extra `prometheus`

    prefixes = tuple(names)  # most lines are of histograms, and would take long to parse
    lines = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(prefixes))
    return [
        (sample.name, sample.value) for family in text_string_to_metric_families(lines) for sample in family.samples
    ]
