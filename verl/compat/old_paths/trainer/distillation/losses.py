"""Public address of the losses of distillation (``verl.algorithms.distillation``)."""

from verl.algorithms.distillation import DistillationLossSettings as DistillationLossSettings
from verl.algorithms.distillation import register_distillation_loss as register_distillation_loss
from verl.compat.toolkit.config import is_distillation_enabled as is_distillation_enabled
from verl.compat.toolkit.distillation import compute_distillation_loss_range as compute_distillation_loss_range
from verl.compat.toolkit.distillation import (
    compute_distillation_loss_reverse_kl_estimator as compute_distillation_loss_reverse_kl_estimator,
)
from verl.compat.toolkit.distillation import compute_forward_kl_topk as compute_forward_kl_topk
from verl.compat.toolkit.distillation import get_distillation_loss_fn as get_distillation_loss_fn
from verl.compat.toolkit.distillation import get_distillation_loss_settings as get_distillation_loss_settings
