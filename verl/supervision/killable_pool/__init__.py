"""Call untrusted functions in worker processes that are killed and replaced when a call exceeds its time or memory.

pool = KillablePool(function, num_workers=4, budget=Budget(timeout_s=5, memory_mb=512))
results = pool.map([{"text": "a"}, {"text": "b"}])   # in order; each with a status, and a value or a message
"""

from verl.supervision.killable_pool.calls import STATUSES, Budget, CallResult, RateLimit, Status
from verl.supervision.killable_pool.child import plain
from verl.supervision.killable_pool.pool import KillablePool
from verl.supervision.killable_pool.shipment import is_async, unwrapped

__all__ = ["STATUSES", "Budget", "CallResult", "KillablePool", "RateLimit", "Status", "is_async", "plain", "unwrapped"]
