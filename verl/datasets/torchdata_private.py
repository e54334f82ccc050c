"""Access to undocumented parts of torchdata's and PyTorch's data loaders.

Each function has a test that fails when a version changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLER = ("_index_sampler_state", "_sampler_iter_state", "_sampler_iter_yielded")
"""Keys of the sampler's state, in both layouts of a loader's state."""
COPIED = (*SAMPLER, "_IterableDataset_len_called", "_shared_seed")


def reading_processes(state: Mapping[str, Any]) -> int:
    """Number of worker processes of the ``StatefulDataLoader`` that gave ``state``; 0 if the driver read the rows."""
    return state["_snapshot"]["_main_snapshot"]["_num_workers"] if "_snapshot" in state else 0


def has_dataset_state(state: Mapping[str, Any]) -> bool:
    """Return whether ``state`` holds the ``state_dict()`` of a data set."""
    if "_snapshot" not in state:
        return state.get("dataset_state") is not None
    return any(reader["dataset_state"] is not None for reader in state["_snapshot"]["_worker_snapshots"].values())


def for_other_processes(state: Mapping[str, Any], loader: StatefulDataLoader) -> dict[str, object]:
    """Convert a loader's state for ``loader``, which has another number of worker processes.

    The position is the sampler's state and the number of batches read. torchdata stores them in one layout without
    worker processes and in another with them, and does not load one as the other.
    """
    num_workers = loader.num_workers
    if "_snapshot" in state:
        position, batches_read = state["_snapshot"]["_main_snapshot"], state["_snapshot"]["_snapshot_step"]
    else:
        position, batches_read = state, state.get("_num_yielded")
    seed = position.get("_base_seed")  # seeds the worker processes; absent if the driver read
    position = {name: position[name] for name in COPIED}
    # Not finished, even after a complete pass: it then ends at once, and the sampler begins its next epoch,
    # in either layout.
    if num_workers == 0:
        return position | {
            "_num_yielded": batches_read,
            "fetcher_state": None,
            "dataset_state": None,
            "_iterator_finished": False,
        }
    if seed is None:
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
    return {
        "_snapshot": {
            "_main_snapshot": position | {"_num_workers": num_workers, "_base_seed": seed},
            "_worker_snapshots": {},
            "_snapshot_step": batches_read,
            "_last_yielded_worker_id": num_workers - 1,
        },
        "_steps_since_snapshot": 0,
        "_iterator_finished": False,
    }


def is_handler_of_torch(handler: object) -> bool:
    """Return whether a signal handler is the one that PyTorch installs with its first multi-process loader."""
    return getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling"
