"""FSDP2: shard, fill, move and read out a model, from :mod:`verl.compat.toolkit.fsdp`."""

from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as FSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fully_shard

from verl.compat.toolkit.fsdp import apply_fsdp2 as apply_fsdp2
from verl.compat.toolkit.fsdp import fsdp2_clip_grad_norm_ as fsdp2_clip_grad_norm_
from verl.compat.toolkit.fsdp import fsdp2_load_full_state_dict as fsdp2_load_full_state_dict
from verl.compat.toolkit.fsdp import fsdp_version as fsdp_version
from verl.compat.toolkit.fsdp import get_fsdp_full_state_dict as get_fsdp_full_state_dict
from verl.compat.toolkit.fsdp import get_fsdp_wrap_policy as get_fsdp_wrap_policy
from verl.compat.toolkit.fsdp import get_init_weight_context_manager as get_init_weight_context_manager
from verl.compat.toolkit.fsdp import get_shard_placement_fn as get_shard_placement_fn
from verl.compat.toolkit.fsdp import init_fn as init_fn
from verl.compat.toolkit.fsdp import load_fsdp_model_to_gpu as load_fsdp2_model_to_gpu
from verl.compat.toolkit.fsdp import load_fsdp_model_to_gpu as load_fsdp_model_to_gpu
from verl.compat.toolkit.fsdp import load_fsdp_optimizer as load_fsdp_optimizer
from verl.compat.toolkit.fsdp import offload_fsdp_model_to_cpu as offload_fsdp2_model_to_cpu
from verl.compat.toolkit.fsdp import offload_fsdp_model_to_cpu as offload_fsdp_model_to_cpu
from verl.compat.toolkit.fsdp import offload_fsdp_optimizer as offload_fsdp_optimizer
