"""On Ray the pixels of a prompt lie in the object store once, and calls carry references to them."""

from __future__ import annotations

import numpy as np
import torch

from verl.protocol import DataProto
from verl.protocol.shared import SharedTensors, bytes_held
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

BYTES = 2**20


class Looker(Worker):
    """Says what it sees of images."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def look(self, data: DataProto) -> DataProto:
        rows = data.non_tensor_batch["multi_modal_inputs"]
        sums = [float(row["pixel_values"].sum()) if len(row) else 0.0 for row in rows]
        held = bytes_held(rows)[0]
        in_store = [all(not array.flags.writeable for array in row.arrays().values()) for row in rows if len(row)]
        return DataProto.from_dict(
            tensors={"sums": torch.tensor(sums)},
            non_tensors={"held": np.array([held] * len(rows)), "in_store": np.array([all(in_store)] * len(rows))},
        )


def test_rows_share_what_lies_in_the_store(ray_cluster):
    images = [SharedTensors({"pixel_values": torch.full((BYTES // 4,), float(n))}) for n in (1, 2)]
    images.append(SharedTensors({}))  # a row of text
    rows = np.array([images[n // 4] for n in range(12)], dtype=object)
    batch = DataProto.from_dict(tensors={"x": torch.zeros(12, 1)}, non_tensors={"multi_modal_inputs": rows})
    pool = RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(pool, RayWorkerGroup.describe(Looker), device_name="cpu")
    try:
        found = group.look(batch)
        again = group.look(batch)
    finally:
        group.shutdown()
        pool.release()
    expected = [BYTES / 4] * 4 + [BYTES / 2] * 4 + [0.0] * 4
    assert found.batch["sums"].tolist() == again.batch["sums"].tolist() == expected
    # Rank 0 has rows 0 to 5, of two images; rank 1 the rest, of one: each image once, not once for each row.
    assert found.non_tensor_batch["held"].tolist() == [2 * BYTES] * 6 + [BYTES] * 6
    assert found.non_tensor_batch["in_store"].all()
    assert bytes_held(rows) == (2 * BYTES, 8 * BYTES)
    assert not images[0].arrays()["pixel_values"].flags.writeable  # the driver reads the store's memory too
