from verl.compat.toolkit.memory import aggressive_empty_cache as aggressive_empty_cache
