from verl.compat.toolkit.traces import RolloutTraceConfig as RolloutTraceConfig
from verl.compat.toolkit.traces import rollout_trace_attr as rollout_trace_attr
from verl.compat.toolkit.traces import rollout_trace_op as rollout_trace_op
