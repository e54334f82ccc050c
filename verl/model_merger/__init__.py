"""From a sharded checkpoint to a folder that Transformers loads: ``python -m verl.model_merger``.

merge   write the folder, read it back, and compare
test    compare a checkpoint with a model folder
"""

from verl.model_merger.fsdp import compare, merge

__all__ = ["compare", "merge"]
