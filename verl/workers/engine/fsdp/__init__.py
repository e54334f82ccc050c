"""The FSDP2 engine.

engine.py          FSDPEngine: modes, passes, optimizer step, weights
model.py           a Transformers backbone and a head that is read at chosen tokens
inputs.py          batch columns to a packed row or a padded rectangle
attention.py       causal attention over packed sequences
head.py            log-probs and entropy from hidden states
packing_check.py   the trial that decides whether a model may run packed
sharding.py        FSDP2 units, precision, gathering
micro_batches.py   passes of equal number on all ranks; metrics of a mini-batch
optimizer.py       optimizer and schedule
checkpoint.py      sharded checkpoints
export.py          the Transformers format
"""

from verl.workers.engine.fsdp.engine import FSDPEngine

__all__ = ["FSDPEngine"]
