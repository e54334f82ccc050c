"""Public address of the decorator of traced calls."""

from verl.base.doors import absent_names
from verl.toolkit.calls import rollout_trace_op as rollout_trace_op

__getattr__ = absent_names(__name__)
