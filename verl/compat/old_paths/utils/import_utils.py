"""Import by path or name, and find out what is installed."""

from verl.base.doors import old_names
from verl.toolkit.calls import deprecated as deprecated
from verl.toolkit.imports import import_external_libs as import_external_libs
from verl.toolkit.imports import is_megatron_core_available as is_megatron_core_available
from verl.toolkit.imports import is_nvtx_available as is_nvtx_available
from verl.toolkit.imports import is_sglang_available as is_sglang_available
from verl.toolkit.imports import is_trl_available as is_trl_available
from verl.toolkit.imports import is_vllm_available as is_vllm_available
from verl.toolkit.imports import load_class_from_fqn as load_class_from_fqn
from verl.toolkit.imports import load_extern_module as load_extern_module
from verl.toolkit.imports import load_extern_object as load_extern_object
from verl.toolkit.imports import load_extern_type as load_extern_type

__getattr__ = old_names(__name__)
