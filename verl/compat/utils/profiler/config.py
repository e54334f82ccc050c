"""Settings of a profiler, from :mod:`verl.toolkit.profiler`."""

from verl.base.doors import absent_names
from verl.toolkit.profiler import NsightToolConfig as NsightToolConfig
from verl.toolkit.profiler import ProfilerConfig as ProfilerConfig
from verl.toolkit.profiler import TorchMemoryToolConfig as TorchMemoryToolConfig
from verl.toolkit.profiler import TorchProfilerToolConfig as TorchProfilerToolConfig

__getattr__ = absent_names(__name__)
