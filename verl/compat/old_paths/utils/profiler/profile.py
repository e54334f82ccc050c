"""A profiler of one rank, from :mod:`verl.toolkit.profiler`."""

from verl.base.doors import old_names
from verl.toolkit.profiler import DistProfiler as DistProfiler
from verl.toolkit.profiler import DistProfilerExtension as DistProfilerExtension
from verl.toolkit.profiler import ProfilerConfig as ProfilerConfig

__getattr__ = old_names(__name__)
