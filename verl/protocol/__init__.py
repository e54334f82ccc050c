"""``DataProto``, the batch that the stages and processes of a run exchange, and its tools."""

from verl.protocol.columns import list_of_dict_to_dict_of_list, union_numpy_dict, union_tensor_dict
from verl.protocol.data_proto import DataProto, DataProtoConfig, DataProtoItem
from verl.protocol.future import DataProtoFuture, private_copy
from verl.protocol.gather import all_gather_data_proto
from verl.protocol.rows import (
    collate_fn,
    compute_response_mask,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    prompt_lengths,
    replace_columns,
    response_lengths,
    unfold_batch_dim,
    unpad_dataproto,
    with_response_mask,
)
from verl.protocol.transport import (
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
    "compute_response_mask",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "private_copy",
    "prompt_lengths",
    "replace_columns",
    "response_lengths",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
    "with_response_mask",
]
