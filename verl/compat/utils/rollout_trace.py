"""Public address of the decorator of traced calls."""

from verl.base.doors import old_names
from verl.toolkit.calls import rollout_trace_op as rollout_trace_op

__getattr__ = old_names(__name__)
