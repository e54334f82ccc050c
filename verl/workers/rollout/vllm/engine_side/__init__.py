"""What runs inside vLLM's own processes. Its environment need not have verl, so nothing here imports it."""
