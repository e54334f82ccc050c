"""Base of every package: environment variables, paths, secrets in texts, registries, code that users name."""
