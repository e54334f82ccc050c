"""Public address of functions in :mod:`verl.scorers.parts`."""

from verl.scorers.parts import weighted_sum as weighted_sum
