"""Public address of the configuration of distillation (``verl.config.distillation``)."""

from verl.config import DistillationConfig as DistillationConfig
from verl.config import DistillationLossConfig as DistillationLossConfig
from verl.config import DistillationTeacherModelConfig as DistillationTeacherModelConfig
