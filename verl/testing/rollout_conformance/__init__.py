"""Conformance checks of rollout engines, written against the contract alone.

Each ``check_*`` function takes an :class:`EngineUnderTest`; ``tests/workers/rollout/test_conformance.py``
runs all of them for every engine that it lists. The oracle is a Transformers model and one full forward pass
per response, without a cache, without padding and without a batch.

An engine that cannot keep a promise says so in a field of its ``EngineUnderTest``, with the reason; the
checks then hold it to the next weaker promise.
"""

from __future__ import annotations

from verl.testing.rollout_conformance import interface, sampling, scores, serving, state
from verl.testing.rollout_conformance.engine_under_test import (
    PROMPTS,
    EngineUnderTest,
    greedy,
    oracle,
    oracle_greedy,
    oracle_log_probs,
    prompt_batch,
    request,
    shape_of,
    tensor_bytes,
    tokens_of,
    weights_of,
)
from verl.testing.rollout_conformance.sampling import mixed_requests
from verl.testing.rollout_conformance.serving import Serving
from verl.testing.rollout_conformance.state import check_ten_thousand_requests_leave_nothing_behind

CHECKS = [
    value
    for module in (sampling, scores, serving, state, interface)
    for name, value in sorted(vars(module).items())
    if name.startswith("check_")
]

__all__ = [
    "CHECKS",
    "PROMPTS",
    "EngineUnderTest",
    "Serving",
    "check_ten_thousand_requests_leave_nothing_behind",
    "greedy",
    "mixed_requests",
    "oracle",
    "oracle_greedy",
    "oracle_log_probs",
    "prompt_batch",
    "request",
    "shape_of",
    "tensor_bytes",
    "tokens_of",
    "weights_of",
]
