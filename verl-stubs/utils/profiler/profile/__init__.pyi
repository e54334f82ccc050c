from verl.toolkit.profiler import DistProfiler as DistProfiler
from verl.toolkit.profiler import DistProfilerExtension as DistProfilerExtension
from verl.toolkit.profiler import ProfilerConfig as ProfilerConfig
