from verl.utils.dataset.sampler import AbstractCurriculumSampler as AbstractCurriculumSampler
from verl.utils.dataset.sampler import AbstractSampler as AbstractSampler
