"""Checkpoints: save and restore the state of a run on disk, complete for every saved step."""
