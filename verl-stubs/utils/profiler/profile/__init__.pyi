from verl.compat.toolkit.profiler import DistProfiler as DistProfiler
from verl.compat.toolkit.profiler import DistProfilerExtension as DistProfilerExtension
from verl.compat.toolkit.profiler import ProfilerConfig as ProfilerConfig
