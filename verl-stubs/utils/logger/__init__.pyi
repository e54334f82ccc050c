from verl.compat.toolkit.metrics import LocalLogger as LocalLogger
from verl.compat.toolkit.metrics import log_with_rank as log_with_rank
