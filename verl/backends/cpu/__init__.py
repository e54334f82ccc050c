"""Faster training and rollout on CPUs: compiled kernels, exchange through shared memory, reuse of freed memory."""
