"""TensorDicts with non-tensor values, from :mod:`verl.protocol.columns` and :mod:`verl.compat.toolkit.tensordicts`."""

from verl.compat.toolkit.tensordicts import assert_tensordict_eq as assert_tensordict_eq
from verl.compat.toolkit.tensordicts import assign_non_tensor as assign_non_tensor
from verl.compat.toolkit.tensordicts import assign_non_tensor_data as assign_non_tensor_data
from verl.compat.toolkit.tensordicts import assign_non_tensor_stack as assign_non_tensor_stack
from verl.compat.toolkit.tensordicts import chunk_tensordict as chunk_tensordict
from verl.compat.toolkit.tensordicts import concat_nested_tensors as concat_nested_tensors
from verl.compat.toolkit.tensordicts import concat_tensordict as concat_tensordict
from verl.compat.toolkit.tensordicts import contiguous as contiguous
from verl.compat.toolkit.tensordicts import get as get
from verl.compat.toolkit.tensordicts import get_keys as get_keys
from verl.compat.toolkit.tensordicts import get_non_tensor_data as get_non_tensor_data
from verl.compat.toolkit.tensordicts import get_tensordict as get_tensordict
from verl.compat.toolkit.tensordicts import index_select_tensor_dict as index_select_tensor_dict
from verl.compat.toolkit.tensordicts import list_of_dict_to_tensordict as list_of_dict_to_tensordict
from verl.compat.toolkit.tensordicts import make_iterator as make_iterator
from verl.compat.toolkit.tensordicts import nested_tensor_from_tensor_list as nested_tensor_from_tensor_list
from verl.compat.toolkit.tensordicts import pad_to_divisor as pad_to_divisor
from verl.compat.toolkit.tensordicts import pop as pop
from verl.compat.toolkit.tensordicts import pop_keys as pop_keys
from verl.compat.toolkit.tensordicts import unpad as unpad
from verl.compat.toolkit.tensordicts import unwrap_non_tensor_data as unwrap_non_tensor_data
from verl.protocol.columns import union_tensor_dict as union_tensor_dict
