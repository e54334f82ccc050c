"""Public path of :mod:`verl.utils.metric`."""

from verl.utils.metric import AggregationType as AggregationType
from verl.utils.metric import Metric as Metric
from verl.utils.metric import reduce_metrics as reduce_metrics
