from verl.toolkit.calls import rollout_trace_op as rollout_trace_op
