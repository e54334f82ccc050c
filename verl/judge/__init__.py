"""Generative reward models ("judges") that the run itself serves to its reward functions."""
