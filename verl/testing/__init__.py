"""For tests of yours too: tiny models, and the conformance suite of rollout engines."""
