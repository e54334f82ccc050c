"""Sizes of a run that follow from its configuration, and the table that shows them at the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.config import GenerationConfig, PPOConfig, ServeConfig, SupervisedConfig
from verl.config.machine import gpus_of_nodes, has_driver

if TYPE_CHECKING:
    from rich.table import Table

NO_GPU = "cpu (no GPU on this machine, or in the Ray cluster of the run)"
UNUSABLE_GPU = "cpu (PyTorch cannot use the GPU of this machine: verl doctor)"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a reinforcement-learning run."""

    nodes: int
    ranks_per_node: int
    rollout_nodes: int
    """Nodes of the pool of rollout engines; 0 where they run on the ranks that train."""
    rollout_ranks_per_node: int
    device: str
    prompts_per_step: int
    responses_per_prompt: int
    mini_batches_per_step: int
    """Optimizer steps of one pass over a step's batch."""
    passes_per_step: int
    """Passes over a step's batch (``ppo_epochs``)."""
    mini_batch_per_rank: int
    """Responses of one mini-batch on one rank."""
    micro_batch: str
    """Description of what one forward and backward pass of a rank holds, in responses or tokens."""
    max_tokens_per_step: int
    """Upper bound: prompts and responses of full length."""
    steps_per_epoch: int | None
    """None while the size of the data is unknown."""
    total_steps: int
    """0 while the size of the data is unknown."""

    @property
    def ranks(self) -> int:
        """Processes that train, over all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def responses_per_step(self) -> int:
        """Responses that one step trains on, over all ranks."""
        return self.prompts_per_step * self.responses_per_prompt

    @property
    def optimizer_steps_per_step(self) -> int:
        """Updates of the policy in one step."""
        return self.mini_batches_per_step * self.passes_per_step

    @property
    def optimizer_steps(self) -> int:
        """Updates of the policy in the whole run."""
        return self.optimizer_steps_per_step * self.total_steps

    def rows(self) -> list[tuple[str, str]]:
        """Return name and value of each line of the table."""
        unknown = "known once the data is read"
        rollout_layout = f"rollout.nnodes={self.rollout_nodes}, n_gpus_per_node={self.rollout_ranks_per_node}"
        rollout_ranks = [("rollout ranks", f"{self.rollout_nodes * self.rollout_ranks_per_node:,} ({rollout_layout})")]
        total = f"{self.total_steps:,}" if self.total_steps else unknown
        updates = f"{self.optimizer_steps_per_step:,} per step"
        return [
            ("device", self.device),
            ("ranks", f"{self.ranks:,} (nnodes={self.nodes}, n_gpus_per_node={self.ranks_per_node})"),
            *(rollout_ranks if self.rollout_nodes else []),
            ("prompts per step", f"{self.prompts_per_step:,}"),
            ("responses per step", f"{self.responses_per_step:,} ({self.responses_per_prompt} per prompt)"),
            ("mini-batches per step", f"{self.mini_batches_per_step:,}"),
            ("mini-batch per rank", f"{self.mini_batch_per_rank:,} responses"),
            ("micro-batch per rank", self.micro_batch),
            ("tokens per step, at most", f"{self.max_tokens_per_step:,}"),
            ("steps per epoch", unknown if self.steps_per_epoch is None else f"{self.steps_per_epoch:,}"),
            ("steps", total),
            ("optimizer steps", f"{self.optimizer_steps:,} ({updates})" if self.total_steps else updates),
        ]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows())


def derived_sizes(config: PPOConfig, dataset_len: int | None = None) -> Sizes:
    """Compute the sizes of a run; ``dataset_len`` counts training prompts, and an incomplete last batch is dropped."""
    actor, data, trainer = config.actor_rollout_ref.actor, config.data, config.trainer
    rollout = config.actor_rollout_ref.rollout
    ranks, n = trainer.ranks, rollout.n
    steps_per_epoch = None if dataset_len is None else dataset_len // (data.gen_batch_size or data.train_batch_size)
    total = trainer.total_training_steps or (steps_per_epoch or 0) * trainer.total_epochs
    shared_by, sharing_tokens = actor.shared_by, actor.ulysses_sequence_parallel_size
    micro_batch = f"{actor.ppo_micro_batch_size_per_gpu} responses"
    if actor.use_dynamic_bsz:
        micro_batch = f"up to {actor.ppo_max_token_len_per_gpu * sharing_tokens:,} tokens"
    if shared_by > 1:
        micro_batch += f", shared by {shared_by} ranks"
    return Sizes(
        nodes=trainer.nnodes,
        ranks_per_node=trainer.n_gpus_per_node,
        rollout_nodes=rollout.nnodes,
        rollout_ranks_per_node=rollout.n_gpus_per_node,
        device=described_device(config),
        prompts_per_step=data.train_batch_size,
        responses_per_prompt=n,
        mini_batches_per_step=data.train_batch_size // actor.ppo_mini_batch_size,
        passes_per_step=actor.ppo_epochs,
        mini_batch_per_rank=actor.ppo_mini_batch_size * n // max(1, ranks // shared_by),
        micro_batch=micro_batch,
        max_tokens_per_step=data.train_batch_size * n * (data.max_prompt_length + data.max_response_length),
        steps_per_epoch=steps_per_epoch,
        total_steps=total,
    )


def sizes_table(sizes: Sizes) -> Table:
    """Render the sizes as a table for a terminal; ``str(sizes)`` is the plain-text form."""
    from rich.table import Table

    table = Table(title="This run", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in sizes.rows():
        table.add_row(name, value)
    return table


def resolve_device(
    config: PPOConfig | SupervisedConfig | GenerationConfig | ServeConfig, cuda_available: bool | None = None
) -> str:
    """Return the device of a run: "cuda" if ``trainer.device=cuda`` and its nodes have GPUs, else "cpu".

    Args:
        config: a configuration with a ``trainer`` section.
        cuda_available: whether the ranks have CUDA devices; None asks the Ray cluster, else this machine.
    """
    if config.trainer.device == "cpu":
        return "cpu"
    if cuda_available is None:
        cuda_available = bool(gpus_of_nodes(config.trainer, config.ray_kwargs.ray_init))
    return "cuda" if cuda_available else "cpu"


def described_device(config: PPOConfig | SupervisedConfig) -> str:
    """Name the device, with the reason where it differs from ``trainer.device``."""
    device = resolve_device(config)
    if device == config.trainer.device:
        return device
    return UNUSABLE_GPU if has_driver() else NO_GPU
