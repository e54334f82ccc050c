"""What every package may import: environment variables, paths, secrets in texts, registries, code that users name."""
