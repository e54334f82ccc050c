"""What a rollout engine is doing, for monitoring."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """What the engine of one rank does at a moment; None where an engine does not tell."""

    weight_version: int
    """Version of the weights that it holds; -1 for none, as while it sleeps."""
    requests_running: int | None = None
    """Responses that are being drawn."""
    requests_waiting: int | None = None
    """Requests that it has taken and that wait for room."""
    memory_tokens: int | None = None
    """Tokens of running requests whose keys and values are in memory; a prompt that responses share counts once."""
    prefix_cache_tokens: int | None = None
    """Tokens of earlier texts whose keys and values are kept."""
    prompt_tokens: int | None = None
    """Prompt tokens of all requests since the engine was made; prompts of equal requests that wait together count
    once."""
    prefix_hit_tokens: int | None = None
    """Those of them whose keys and values were found instead of computed."""
