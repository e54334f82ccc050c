"""Parameters of tests of whole conversations and runs, whose families differ in prompts, passes and rollouts alone."""

import pytest

from tests.support.vision_models import DENSE_FAMILIES

ONE_FAMILY = [pytest.param(family, marks=[] if family == "qwen3_vl" else pytest.mark.slow) for family in DENSE_FAMILIES]
"""Qwen3-VL, and the others in the slow suite."""
