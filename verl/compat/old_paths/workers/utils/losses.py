"""Losses in the public form: (config, model_output, data) → (loss, metrics)."""

from verl.algorithms import agg_loss as agg_loss
from verl.algorithms import compute_value_loss as compute_value_loss
from verl.algorithms import get_policy_loss_fn as get_policy_loss_fn
from verl.algorithms import kl_penalty as kl_penalty
from verl.compat.toolkit.losses import ppo_loss as ppo_loss
from verl.compat.toolkit.names import DatasetPadMode as DatasetPadMode
from verl.compat.toolkit.padding import no_padding_2_padding as no_padding_2_padding
from verl.config import ActorConfig as ActorConfig
from verl.config import CriticConfig as CriticConfig
from verl.utils.metric import AggregationType as AggregationType
from verl.utils.metric import Metric as Metric
from verl.utils.torch_functional import masked_mean as masked_mean
from verl.utils.torch_functional import masked_sum as masked_sum
