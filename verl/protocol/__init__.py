"""What travels between the stages and the processes of a run: ``DataProto`` and its tools.

- ``data_proto.py``: DataProto: named columns with one row per sample; select, union, chunk, concat, ...
- ``columns.py``: the arithmetic of columns: equality, union, index checks
- ``tensordicts.py``: TensorDicts, made and taken apart
- ``rows.py``: rows to a batch, batches with other columns, batches whose rows are grouped
- ``padding.py``: rows added so that a batch divides over ranks, and their removal
- ``future.py``: DataProtoFuture: a batch that other processes are still computing
- ``received.py``: columns that have just arrived, read where they lie until they are asked for
- ``wire.py``: columns as flat buffers, for pickle and for collectives
- ``files.py``: columns in a file that cannot run code
- ``copies.py``: a value for someone in the same process, who may write to it
- ``gather.py``: the batch of all ranks, on each of them
"""

from verl.protocol.columns import list_of_dict_to_dict_of_list, union_numpy_dict
from verl.protocol.copies import private_copy
from verl.protocol.data_proto import DataProto, DataProtoItem
from verl.protocol.future import DataProtoFuture
from verl.protocol.gather import all_gather_data_proto
from verl.protocol.padding import DataProtoConfig, pad_dataproto_to_divisor, unpad_dataproto
from verl.protocol.rows import collate_fn, fold_batch_dim, replace_columns, unfold_batch_dim
from verl.protocol.tensordicts import union_tensor_dict
from verl.protocol.wire import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "private_copy",
    "replace_columns",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
