"""Hydra's groups of output folder and logging as verl sets them; Hydra reads YAML files from packages only."""
