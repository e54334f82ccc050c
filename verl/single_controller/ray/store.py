"""Values in Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import ray

from verl.errors import SchemaError


def parallel_put(data_list: Sequence[object], max_workers: int | None = None) -> list[object]:
    """Put values into Ray's object store from several threads, which shortens the time of large ones.

    Args:
        data_list: the values, at least one.
        max_workers: number of threads; by default one for each value, and at most 16.

    Returns:
        their references, in the same order.

    Raises:
        SchemaError: there are no values.
    """
    if not data_list:
        raise SchemaError("parallel_put needs at least one value.")
    with ThreadPoolExecutor(max_workers or min(len(data_list), 16)) as threads:
        return list(threads.map(ray.put, data_list))
