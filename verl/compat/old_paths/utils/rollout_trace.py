"""Traces of calls, from :mod:`verl.toolkit.traces`."""

from verl.base.doors import old_names
from verl.toolkit.traces import RolloutTraceConfig as RolloutTraceConfig
from verl.toolkit.traces import rollout_trace_attr as rollout_trace_attr
from verl.toolkit.traces import rollout_trace_op as rollout_trace_op

__getattr__ = old_names(__name__)
