"""What tests and benchmarks share: tiny models and runs, hostile programs, the conformance suite of rollout engines."""
