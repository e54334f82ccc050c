"""Traces of calls, from :mod:`verl.compat.toolkit.traces`."""

from verl.compat.import_hooks import old_names
from verl.compat.toolkit.traces import RolloutTraceConfig as RolloutTraceConfig
from verl.compat.toolkit.traces import rollout_trace_attr as rollout_trace_attr
from verl.compat.toolkit.traces import rollout_trace_op as rollout_trace_op

__getattr__ = old_names(__name__)
