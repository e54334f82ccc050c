"""Constants of plans from measurements and publications; docs/internals/planning.md has links and commands.

Published figures of GPUs are in :mod:`verl.plugins.plan.hardware`.
"""

# ---- parts of peaks

PRODUCT_USE = 0.8
"""Part of the peak FLOP/s in large matrix products: published for H100 (80 %), B200 (78 %) and A100 (86 %)."""
ATTENTION_USE = 0.26
"""Part of the peak FLOP/s in attention, forward and backward: measured on an H200 for PyTorch's flash kernel."""
BANDWIDTH_USE = 0.85
"""Part of the memory bandwidth: measured on an H200 in attention of 256 new tokens, and in gates of an MLP."""
LINK_USE = 0.8
"""Part of the bandwidth between GPUs, of a node or not, that collectives of passes reach. An assumption."""
GATHER_OF_WEIGHTS_USE = 0.27
"""The same where weights are gathered one after the other for an engine: published for DeepSeek-V3 on H100, 12.2 s,
where the links would take 3.3 s."""
NETWORK_BYTES_PER_S = 50e9
"""Bandwidth between nodes for each GPU: 400 Gbit/s. An assumption."""

# ---- host memory

PINNED_USE = 0.86
"""Part of the bandwidth to pinned memory of the host: published for an H100, 55 of 64 GB/s."""
TO_FRESH_MEMORY_BYTES_PER_S = 2.2e9
"""From a GPU to memory of the host that was just allocated and is not pinned: published are 1.8 GB/s for an H100 and
2.8 GB/s for an H200."""
FROM_PAGEABLE_BYTES_PER_S = 16e9
"""From such memory to a GPU: published for an H100."""
OPTIMIZER_ON_HOST_BYTES_PER_S = 40e9
"""Bandwidth of the host's memory for each GPU, when an optimizer computes there. An assumption."""

# ---- operations of decoding

KERNEL_S = 2e-6
"""Seconds of a small operation in a recorded pass: measured on an H200 for norms and gates of 64 tokens."""
PRODUCT_S = 7e-6
"""Seconds of a small matrix product besides reading its weights: measured in recorded passes of 113 products."""
DECODING_STEP_S = 1.2e-3
"""Seconds of the host between two decoding steps: published for vLLM, 2.73 ms for each token of a model of 1.2 billion
parameters whose operations take 1.5 ms."""
DECODING_ROW_S = 12.7e-6
"""Seconds in which the host prepares a row of a decoding step: reported for vLLM 0.27. With the seconds of a step 256
rows take 4.5 ms, where vLLM's developers measured 5 to 6 ms."""

# ---- operations of passes

LAUNCH_S = 19e-6
"""Seconds in which the host starts an operation of a pass that is not recorded: measured on an H200's host."""
FSDP_LAUNCH = 39 / 19
"""Under FSDP the host takes as many times as long to start an operation: measured."""
LAUNCHES_OF_LAYER = {"fsdp": (90, 104), "megatron": (60, 80)}
"""Operations of the forward pass of a layer without experts and of one with them; a backward pass has twice as many.
7,604 were measured of 28 layers under FSDP; the others are counted by benchmarks.plan_launches."""
LAUNCHES_OF_EXPERT = 6
"""Further ones of each expert of a rank under Megatron, whose experts compute one after the other: counted."""
LOGIT_BYTES = (69, 208)
"""Bytes that a pass reads and writes for each logit: without and with gradients. The second is measured: 0.153 s for
16,384 tokens of 151,936 words on an H200, less the products; the first is a third of it."""

# ---- a step besides its operations

TENSOR_S = 0.5e-3
"""Seconds in which an engine of its own takes over one tensor of the weights: 9.7 s are published for the 18,867 of
Qwen3-30B-A3B, 18.4 s for the 36,850 of Qwen3-235B-A22B (both with their gathering), and 35 s for DeepSeek-V3."""
SLEEP_S = 2.0
"""Seconds in which an engine of its own falls asleep and wakes up: 1.3 to 1.6 s and 0.3 s in published logs of vLLM."""
RESPONSE_S = 1.5e-3
"""Seconds of the driver for each response, with a reward by a rule: published are 2 to 4 s for 2,048, in four runs."""

# ---- what is estimated from whole runs: python -m benchmarks.plan_published --factors

ROLLOUT_FACTOR = 1.44
"""Seconds of a rollout over those of its operations: mean of four published runs (1.36 to 1.55)."""
PASS_FACTOR = 1.36
"""Seconds of passes of several ranks over those of their operations: mean of log-probs and updates of the same runs
(1.01 to 1.70). Ranks wait for those with more tokens or experts, and for the network."""
STEP_RANGE = (0.86, 1.45)
"""10 and 90 % quantiles of published over planned seconds of 22 steps, planned without the run of their own model."""
