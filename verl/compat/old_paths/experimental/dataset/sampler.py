"""Public path of the base classes for custom samplers, :mod:`verl.datasets.sampler`."""

from verl.datasets.sampler import AbstractCurriculumSampler as AbstractCurriculumSampler
from verl.datasets.sampler import AbstractSampler as AbstractSampler
