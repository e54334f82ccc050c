"""Settings of a profiler, from :mod:`verl.toolkit.profiler`."""

from verl.base.doors import old_names
from verl.config.profiler import TorchProfilerToolConfig as TorchProfilerToolConfig
from verl.toolkit.profiler import NsightToolConfig as NsightToolConfig
from verl.toolkit.profiler import ProfilerConfig as ProfilerConfig
from verl.toolkit.profiler import TorchMemoryToolConfig as TorchMemoryToolConfig

__getattr__ = old_names(__name__)
