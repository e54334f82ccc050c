"""Memory and time of a run before it starts: arithmetic from a model's ``config.json`` and verl's configuration.

shapes.py     sizes of a decoder's parts
hardware.py   published figures of GPUs, and a cluster of them
memory.py     bytes of one model on one rank
timing.py     seconds of generation and of passes
plan.py       stages of a step: what lies in memory in each, and how long it takes
advice.py     what to change where a stage does not fit
suggest.py    the fastest layouts that fit

Nothing here imports PyTorch, so that the command answers at once. ``python -m benchmarks.plan_accuracy`` compares it
with real engines.
"""
