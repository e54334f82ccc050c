"""Import by path or name, and find out what is installed."""

from verl.compat.toolkit.calls import deprecated as deprecated
from verl.compat.toolkit.imports import import_external_libs as import_external_libs
from verl.compat.toolkit.imports import is_megatron_core_available as is_megatron_core_available
from verl.compat.toolkit.imports import is_nvtx_available as is_nvtx_available
from verl.compat.toolkit.imports import is_sglang_available as is_sglang_available
from verl.compat.toolkit.imports import is_trl_available as is_trl_available
from verl.compat.toolkit.imports import is_vllm_available as is_vllm_available
from verl.compat.toolkit.imports import load_class_from_fqn as load_class_from_fqn
from verl.compat.toolkit.imports import load_extern_module as load_extern_module
from verl.compat.toolkit.imports import load_extern_object as load_extern_object
from verl.compat.toolkit.imports import load_extern_type as load_extern_type
