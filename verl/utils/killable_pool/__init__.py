"""Foreign code under a budget of time and memory: processes that can be killed and replaced.

pool = KillablePool(function, num_workers=4, budget=Budget(timeout_s=5, memory_mb=512))
outcomes = pool.map([{"text": "a"}, {"text": "b"}])   # in order; each ok, or with the reason why not
"""

from verl.utils.killable_pool.child import plain
from verl.utils.killable_pool.limits import RateLimit
from verl.utils.killable_pool.outcome import STATUSES, Budget, Outcome, Status
from verl.utils.killable_pool.pool import KillablePool
from verl.utils.killable_pool.shipment import is_async, unwrapped

__all__ = ["STATUSES", "Budget", "KillablePool", "Outcome", "RateLimit", "Status", "is_async", "plain", "unwrapped"]
