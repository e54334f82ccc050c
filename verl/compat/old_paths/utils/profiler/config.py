"""Settings of a profiler, from :mod:`verl.compat.toolkit.profiler`."""

from verl.compat.import_hooks import old_names
from verl.compat.toolkit.profiler import NsightToolConfig as NsightToolConfig
from verl.compat.toolkit.profiler import ProfilerConfig as ProfilerConfig
from verl.compat.toolkit.profiler import TorchMemoryToolConfig as TorchMemoryToolConfig
from verl.config.profiler import TorchProfilerToolConfig as TorchProfilerToolConfig

__getattr__ = old_names(__name__)
