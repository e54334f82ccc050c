"""Folders of checkpoints."""
