"""Public path of the base classes for custom samplers, :mod:`verl.utils.dataset.sampler`."""

from verl.utils.dataset.sampler import AbstractCurriculumSampler as AbstractCurriculumSampler
from verl.utils.dataset.sampler import AbstractSampler as AbstractSampler
