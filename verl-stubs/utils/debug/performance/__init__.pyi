from verl.compat.toolkit.memory import GPUMemoryLogger as GPUMemoryLogger
from verl.compat.toolkit.memory import log_gpu_memory_usage as log_gpu_memory_usage
from verl.compat.toolkit.timing import gather_timing as gather_timing
from verl.compat.toolkit.timing import marked_timer as marked_timer
from verl.compat.toolkit.timing import reduce_timing as reduce_timing
from verl.utils.metric import simple_timer as simple_timer
