"""Public address of the losses of distillation (``verl.algorithms.distillation``)."""

from verl.algorithms.distillation import DistillationLossSettings as DistillationLossSettings
from verl.algorithms.distillation import register_distillation_loss as register_distillation_loss
from verl.compat.toolkit.config import is_distillation_enabled as is_distillation_enabled
from verl.compat.toolkit.distillation import get_distillation_loss_fn as get_distillation_loss_fn
from verl.compat.toolkit.distillation import get_distillation_loss_settings as get_distillation_loss_settings
