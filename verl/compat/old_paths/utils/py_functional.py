"""Functions on dicts, and a time limit for calls."""

from verl.compat.toolkit.calls import timeout_limit as timeout_limit
from verl.compat.toolkit.dicts import NestedNamespace as NestedNamespace
from verl.compat.toolkit.dicts import append_to_dict as append_to_dict
from verl.compat.toolkit.dicts import convert_to_regular_types as convert_to_regular_types
from verl.compat.toolkit.dicts import rename_dict as rename_dict
from verl.compat.toolkit.dicts import union_two_dict as union_two_dict
from verl.compat.toolkit.processes import temp_env_var as temp_env_var
from verl.protocol import list_of_dict_to_dict_of_list as list_of_dict_to_dict_of_list
from verl.protocol import union_numpy_dict as union_numpy_dict
