"""The process group of a worker, and the CPU cores near its GPU, from :mod:`verl.compat.toolkit.processes`."""

from verl.compat.toolkit.processes import destroy_global_process_group as destroy_global_process_group
from verl.compat.toolkit.processes import initialize_global_process_group as initialize_global_process_group
from verl.compat.toolkit.processes import initialize_global_process_group_ray as initialize_global_process_group_ray
from verl.compat.toolkit.processes import set_numa_affinity as set_numa_affinity
