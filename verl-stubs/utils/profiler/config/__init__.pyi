from verl.config.profiler import TorchProfilerToolConfig as TorchProfilerToolConfig
from verl.toolkit.profiler import NsightToolConfig as NsightToolConfig
from verl.toolkit.profiler import ProfilerConfig as ProfilerConfig
from verl.toolkit.profiler import TorchMemoryToolConfig as TorchMemoryToolConfig
