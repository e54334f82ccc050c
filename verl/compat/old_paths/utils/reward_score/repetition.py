"""Public address of functions in :mod:`verl.scorers.parts`."""

from verl.scorers.parts import repetition_penalty as repetition_penalty
