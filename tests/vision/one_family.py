"""Parameters of tests of whole conversations and runs, whose families differ in prompts, passes and rollouts alone."""

import pytest

from verl.vision.families import FAMILIES

ONE_FAMILY = [pytest.param(family, marks=[] if family == "qwen3_vl" else pytest.mark.slow) for family in FAMILIES]
"""Qwen3-VL, and the others in the slow suite."""
