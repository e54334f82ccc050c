"""What tests, benchmarks and generated pages share: tiny runs and vision models, scripted agents, hostile programs."""
