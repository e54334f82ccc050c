"""Functions on dicts, and a time limit for calls."""

from verl.base.doors import old_names
from verl.protocol import list_of_dict_to_dict_of_list as list_of_dict_to_dict_of_list
from verl.protocol import union_numpy_dict as union_numpy_dict
from verl.toolkit.calls import timeout_limit as timeout_limit
from verl.toolkit.dicts import NestedNamespace as NestedNamespace
from verl.toolkit.dicts import append_to_dict as append_to_dict
from verl.toolkit.dicts import convert_to_regular_types as convert_to_regular_types
from verl.toolkit.dicts import rename_dict as rename_dict
from verl.toolkit.dicts import union_two_dict as union_two_dict
from verl.toolkit.processes import temp_env_var as temp_env_var

__getattr__ = old_names(__name__)
