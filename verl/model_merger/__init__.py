"""Convert a sharded checkpoint to a Transformers model folder: ``python -m verl.model_merger``.

merge   write the folder, read it back, and compare
test    compare a checkpoint with a model folder
"""

from typing import TYPE_CHECKING

from verl.base.lazy import on_first_use
from verl.supervision.interruption import on_import

if TYPE_CHECKING:
    from verl.model_merger.fsdp import compare as compare
    from verl.model_merger.fsdp import merge as merge

on_import(__name__)

# `--help` answers at once: what needs torch and transformers is imported where it is used.
__getattr__ = on_first_use(__name__, dict.fromkeys(["compare", "merge"], "verl.model_merger.fsdp"))
