"""Bases for samplers of your own: the public path of :mod:`verl.utils.dataset.sampler`."""

from verl.utils.dataset.sampler import AbstractCurriculumSampler, AbstractSampler

__all__ = ["AbstractCurriculumSampler", "AbstractSampler"]
