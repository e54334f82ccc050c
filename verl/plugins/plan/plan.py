"""The stages of one training step: what lies in a rank's memory in each, and how long it takes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from verl.config import (
    DistillationTeacherModelConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PPOConfig,
    TrainedModelConfig,
)
from verl.config.megatron import McoreEngineConfig
from verl.config.pipeline_layout import layers_of_chunks
from verl.config.rollout import GRAPH_SIZES, MAX_GRAPHS, SERVER_ENGINES
from verl.errors import ConfigError
from verl.plugins.plan import constants
from verl.plugins.plan.engines import EngineLayout
from verl.plugins.plan.generation import EngineWork, generation_seconds, scoring_seconds
from verl.plugins.plan.hardware import Cluster
from verl.plugins.plan.lengths import Lengths, filled_share
from verl.plugins.plan.memory import BYTES, ModelMemory, RankLayout
from verl.plugins.plan.passes import Rows
from verl.plugins.plan.shapes import ModelShape
from verl.plugins.plan.teachers import PlannedTeachers, output_bytes
from verl.plugins.plan.timing import Work, moving_seconds, pass_seconds
from verl.utils.model_facts.prediction_heads import head_count

_ENGINE_RESERVE = 2e9
"""Bytes that vLLM and SGLang need for activations and graphs beside weights and keys. An assumption."""

_GRAPH_BYTES = 8e6
"""Bytes of one of the native engine's CUDA graphs beside its logits. An assumption."""

_SNAPSHOT_BYTES_PER_S = 2e9
"""Bytes that a rank copies per second from its device into Ray's object store. An assumption."""
_SNAPSHOT_SHARE = 0.02
"""As :data:`verl.trainer.recovery.SNAPSHOT_SHARE`."""


@dataclass(frozen=True)
class OtherModels:
    """Models of a run besides the policy."""

    critic: bool
    reference: bool


@dataclass(frozen=True)
class Stage:
    """One stage of a step."""

    name: str
    parts: Mapping[str, float]
    """Part → bytes on one rank at the stage's highest point."""
    seconds: float
    micro_batch_key: str = ""
    """Key of the micro-batch size of its passes."""
    micro_batch: int | None = None
    """Sequences, or with dynamic batches tokens, of a pass on one rank; None is not set."""
    largest: int | None = None
    """The largest that fits, at most the rows or tokens that a rank has; 0 if none does.

    Sequences of an update divide those of a mini-batch on one rank, as a run wants them.
    """
    operation_seconds: float = 0.0
    """Seconds of its operations, before the factor by which whole runs take longer than these."""

    @property
    def bytes(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Held:
    """A model on the ranks of the run, and what of it leaves the device while it is idle."""

    name: str
    memory: ModelMemory
    keeps_weights: bool
    keeps_optimizer: bool

    @property
    def idle_bytes(self) -> float:
        """Bytes on the device while other models work."""
        weights = self.memory.weights if self.keeps_weights else 0.0
        return weights + (self.memory.optimizer if self.keeps_optimizer else 0.0)


@dataclass(frozen=True)
class Plan:
    """Memory and time of a step.

    Args:
        config: checked for types and bounds; files need not exist.
        cluster: where it is to run.
        needs: models besides the policy.
        shapes: path → shape of a model, to be filled: each config.json is read once.
        prompt: tokens of a prompt; None is the longest.
        response: tokens of a response; None is the longest.
    """

    config: PPOConfig
    cluster: Cluster
    needs: OtherModels
    shapes: dict[str, ModelShape] = field(default_factory=dict, compare=False)
    prompt: int | None = None
    response: int | None = None

    # ---- sizes

    @property
    def ranks(self) -> int:
        """Ranks that train."""
        return self.cluster.gpus

    @property
    def has_rollout_pool(self) -> bool:
        """Return whether rollout engines have ranks of their own, besides those that train."""
        return not self.config.actor_rollout_ref.hybrid_engine

    @property
    def rollout_ranks(self) -> int:
        """Ranks that sample."""
        return self.config.actor_rollout_ref.rollout.ranks if self.has_rollout_pool else self.ranks

    @property
    def gpus(self) -> int:
        """GPUs of the run, in all pools."""
        return self.ranks + (self.rollout_ranks if self.has_rollout_pool else 0) + self.teachers.ranks

    @property
    def teachers(self) -> PlannedTeachers:
        """Teachers besides the policy, or the policy as its own."""
        return PlannedTeachers(self.config.distillation)

    def rollout_rows(self, shared_by: int) -> int:
        """Rows of a step on each group of ranks that share a rollout engine."""
        total = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        return max(1, total * shared_by // self.rollout_ranks)

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row, which memory must hold."""
        data = self.config.data
        return data.max_prompt_length + data.max_response_length

    def rows(self, shared_by: int) -> int:
        """Rows of a step on each group of ranks that share them."""
        total = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        return max(1, total * shared_by // self.ranks)

    def mini_batch_rows(self, model: str) -> int:
        """Rows of a mini-batch of the actor or the critic on each group of ranks that share them."""
        roles = self.config.actor_rollout_ref
        section = self.config.critic if model == "critic" else roles.actor
        groups = self.ranks // self.models[model].memory.layout.ranks_per_model
        return section.ppo_mini_batch_size * roles.rollout.n // groups

    def siblings(self, model: str) -> int:
        """Rows whose prompt a pass of the model computes once, if they are in it together."""
        roles = self.config.actor_rollout_ref
        section = self.config.critic if model == "critic" else roles.actor
        return roles.rollout.n if section.use_prefix_grouper else 1

    def work(self, shared_by: int) -> Work:
        """Rows of a step, with their expected lengths."""
        data = self.config.data
        return Work(
            self.rows(shared_by), self.prompt or data.max_prompt_length, self.response or data.max_response_length
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of prompts and responses of one step over all ranks."""
        rows = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        work = self.work(1)
        return rows * (work.prompt + work.response)

    # ---- models

    def _shape(self, path: str, overrides: Mapping[str, object]) -> ModelShape:
        if path not in self.shapes:
            self.shapes[path] = ModelShape.read(path, overrides)
        return self.shapes[path]

    @cached_property
    def models(self) -> dict[str, Held]:
        """Models on the ranks, by name."""
        roles = self.config.actor_rollout_ref
        model = roles.model
        shape = self._shape(model.hf_config_path or model.path, model.override_config)
        held = {"actor": self._held("actor", shape, model, roles.actor.placement, roles.actor.optim, None)}
        if self.needs.reference and not model.has_adapters:
            held["reference"] = self._held("reference", shape, model, roles.ref.placement, None, None)
        if self.needs.critic:
            critic = self.config.critic
            value_shape = self._shape(critic.model.path, critic.model.override_config)
            held["critic"] = self._held("critic", value_shape, critic.model, critic.placement, critic.optim, 1)
        return held if self.teachers.ranks else held | self.passing_teachers

    @cached_property
    def passing_teachers(self) -> dict[str, Held]:
        """Teachers that are forward passes of the training engine, by the names of their stages."""
        teachers, roles = self.teachers, self.config.actor_rollout_ref
        held: dict[str, Held] = {}
        for name, teacher in teachers.separate.items() if teachers.are_forward_passes else ():
            placement = roles.ref.placement
            placement = replace(placement, param_offload=placement.param_offload or teachers.offloads(teacher))
            stage, shape = f"teacher {name}", self._teacher_shape(teacher)
            held[stage] = self._held(stage, shape, roles.model, placement, None, None, teachers.ranks)
        return held

    def _teacher_shape(self, teacher: DistillationTeacherModelConfig) -> ModelShape:
        assert teacher.model_path is not None, "the configuration was not checked: a teacher has no model_path"
        return self._shape(teacher.model_path, {})

    def _held(
        self,
        name: str,
        shape: ModelShape,
        model: TrainedModelConfig,
        placement: FSDPEngineConfig | McoreEngineConfig,
        optim: FSDPOptimizerConfig | None,
        outputs: int | None,
        ranks: int = 0,
    ) -> Held:
        """Return a model; ``optim`` is None if it is not trained."""
        adapters = _adapter_parameters(shape, model) if optim else 0
        sequence = 1 if isinstance(placement, McoreEngineConfig) else placement.ulysses_sequence_parallel_size
        if shape.heads % sequence:
            raise ConfigError(
                f"{name}: fsdp_config.ulysses_sequence_parallel_size={sequence} does not divide the model's "
                f"{shape.heads} attention heads. Use a divisor of them."
            )
        actor = self.config.actor_rollout_ref.actor
        checkpoints = model.enable_gradient_checkpointing
        layout = layout_of(placement, ranks or self.ranks, adapters > 0, shape.layers)
        if (
            isinstance(placement, McoreEngineConfig)
            and "recompute_granularity" in placement.override_transformer_config
        ):
            checkpoints = _computes_layer_by_layer(placement.override_transformer_config, shape, layout)
        trains_heads = optim is not None and isinstance(model, HFModelConfig) and model.mtp.is_trained
        heads = head_count(shape.fields) if trains_heads else 0
        head_parameters = heads * sum(shape.parameters_of_head)
        memory = ModelMemory(
            shape=shape,
            layout=layout,
            trained=(adapters or shape.parameters(outputs) + head_parameters) if optim else 0,
            checkpoints=checkpoints,
            outputs=outputs,
            with_entropy=actor.entropy_coeff != 0 or actor.calculate_entropy or actor.entropy_target is not None,
            adapters=adapters,
            is_muon=optim is not None and optim.is_muon,
            adam_bytes=sum(
                2 if optim and optim[name] == "bf16" else 4 for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
            ),
            offload_fraction=optim.offload_fraction if optim else 0.0,
            heads=heads,
        )
        return Held(name, memory, not placement.param_offload, not placement.optimizer_offload)

    # ---- stages

    @cached_property
    def stages(self) -> list[Stage]:
        """All stages of a step, in their order."""
        roles = self.config.actor_rollout_ref
        actor, rollout = roles.actor, roles.rollout
        section = "actor_rollout_ref"
        stages = [self._rollout()]
        size = rollout.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
        if self._recomputes:
            stages.append(
                self._pass(
                    "old log-probs",
                    "actor",
                    False,
                    f"{section}.rollout.log_prob",
                    rollout.log_prob_max_token_len_per_gpu if rollout.log_prob_use_dynamic_bsz else None,
                    size,
                )
            )
        if self.needs.reference:
            ref = roles.ref
            stages.append(
                self._pass(
                    "reference log-probs",
                    "reference" if "reference" in self.models else "actor",  # with its adapters off
                    False,
                    f"{section}.ref.log_prob",
                    ref.log_prob_max_token_len_per_gpu if ref.log_prob_use_dynamic_bsz else None,
                    ref.log_prob_micro_batch_size_per_gpu or size,
                )
            )
        stages += self._teacher_stages(size)
        if "critic" in self.models:
            critic = self.config.critic
            dynamic = critic.forward_max_token_len_per_gpu if critic.use_dynamic_bsz else None
            forward = critic.forward_micro_batch_size_per_gpu or critic.ppo_micro_batch_size_per_gpu
            stages.append(self._pass("values", "critic", False, "critic.forward", dynamic, forward))
            dynamic = critic.ppo_max_token_len_per_gpu if critic.use_dynamic_bsz else None
            size = critic.ppo_micro_batch_size_per_gpu
            stages.append(self._pass("critic update", "critic", True, "critic.ppo", dynamic, size, critic.ppo_epochs))
        dynamic = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
        size = actor.ppo_micro_batch_size_per_gpu
        more = {"output matrices of teachers": self._output_matrices} if self.teachers.read_whole_vocabulary else {}
        stages.append(
            self._pass("actor update", "actor", True, f"{section}.actor.ppo", dynamic, size, actor.ppo_epochs, more)
        )
        return stages

    @property
    def _recomputes(self) -> bool:
        actor, data = self.config.actor_rollout_ref.actor, self.config.data
        if (correction := self.config.algorithm.rollout_correction).bypass_mode or correction.interpolates:
            return False
        one_update = actor.ppo_mini_batch_size >= data.train_batch_size and actor.ppo_epochs == 1
        return actor.recompute_old_log_probs == "always" or not one_update

    def _idle(self, except_for: str) -> dict[str, float]:
        idle = {name: held.idle_bytes for name, held in self.models.items() if name != except_for and held.idle_bytes}
        if average := self.teachers.average(self.models["actor"].memory):
            idle["weights of the teacher"] = average
        if not self.teachers.ranks:
            idle |= self._awake_engines(except_for)
        return idle

    @property
    def _engine_leaves(self) -> float:
        """Bytes that the rollout engine keeps while models are trained."""
        rollout = self.config.actor_rollout_ref.rollout
        return 0.0 if rollout.free_cache_engine or self.has_rollout_pool else sum(self._engine(0.0)[0].values())

    def _pass(
        self,
        name: str,
        model: str,
        trains: bool,
        key: str,
        tokens: int | None,
        sequences: int | None,
        epochs: int = 1,
        more: Mapping[str, float] | None = None,
        *,
        pool: Mapping[str, Held] | None = None,
        work: Work | None = None,
        longest: Rows | None = None,
    ) -> Stage:
        """Return the stage of passes of a model.

        Args:
            name: of the stage.
            model: its name among the models of the ranks.
            trains: whether the passes have gradients.
            key: of its sizes, without their endings.
            tokens: of a pass on one rank.
            sequences: of a pass on one rank, where ``tokens`` is None.
            epochs: how often all rows are computed.
            more: further parts → bytes.
            pool: the models of the ranks, if they are not those that train.
            work: rows of a group of ranks, if not all of the step.
            longest: the longest rows, if not those of the data.
        """
        held = (pool or self.models)[model]
        memory, lay = held.memory, held.memory.layout
        if pool is None:
            base = self._idle(model)
        else:
            base = {
                other: other_model.idle_bytes
                for other, other_model in pool.items()
                if other != model and other_model.idle_bytes
            }
        base |= {f"{model} weights": memory.weights} | dict(more or {})
        if trains:
            base |= {f"{model} gradients": memory.gradients, f"{model} optimizer": memory.optimizer}
        elif held.keeps_optimizer and memory.optimizer:
            base |= {f"{model} optimizer": memory.optimizer}
        if self._engine_leaves and pool is None:
            base["rollout engine"] = self._engine_leaves
        data, work = self.config.data, work or self.work(lay.ranks_per_model)
        longest = longest or Rows(data.max_prompt_length, data.max_response_length, self.siblings(model))
        expected = Rows(work.prompt, work.response, longest.group)
        count = tokens if tokens is not None else sequences
        rows = min(work.rows, self.mini_batch_rows(model)) if trains else work.rows
        most = rows if tokens is None else int(longest.for_rows(work.rows).computed) // lay.sequence

        def parts(size: int) -> dict[str, float]:
            # A micro-batch of tokens counts those of one rank, and Ulysses multiplies it.
            pass_tokens = longest.for_rows(size) if tokens is None else longest.within(size * lay.sequence)
            return base | dict(memory.training_pass(pass_tokens) if trains else memory.inference_pass(pass_tokens))

        def bytes_of(size: int) -> float:
            return sum(parts(size).values())

        least = 1 if tokens is None else max(1, (longest.prompt + longest.response) // lay.sequence)
        if tokens is not None:
            sizes: Sequence[int] = range(least, max(least, most) + 1)
        elif trains:
            # Each size is checked: one that cuts groups may take more than a larger one that does not.
            sizes = _divisors(max(1, self.mini_batch_rows(model)), most)
            sizes = [size for size in sizes if bytes_of(size) <= self.cluster.usable_bytes]
        else:
            group = longest.group
            sizes = [*_divisors(group, min(most, group - 1)), *range(group, most + 1, group)]
        fitting = bisect_right(sizes, self.cluster.usable_bytes, key=bytes_of)
        largest = sizes[fitting - 1] if fitting else 0
        shown = count or max(least, largest)
        if tokens is None:
            prompts = expected.prompts_per_row(min(shown, rows))
            size = shown * (work.prompt * prompts + work.response)
        else:
            budget = max(shown * lay.sequence, longest.prompt + longest.response)
            prompts = expected.prompts_per_row_within(budget)
            lengths = Lengths(work.response, max(work.response, longest.response))
            size = budget * filled_share(lengths, work.prompt * prompts, budget)
        # No fewer than the rank's own part of the rows has.
        work = replace(work, prompts_per_row=max(prompts, expected.prompts_per_row(rows)))
        updates = math.ceil(work.rows / rows) if trains else 1
        operations = epochs * pass_seconds(memory, self.cluster, work, size, trains, updates)
        ranks = self.ranks if pool is None else self.teachers.ranks
        factor = constants.PASS_FACTOR if ranks > 1 and self.cluster.mfu is None else 1.0
        moved = (0.0 if held.keeps_weights else memory.weights) + (memory.optimizer if trains else 0.0) * (
            not held.keeps_optimizer
        )
        seconds = operations * factor + moving_seconds(moved, self.cluster)
        full = f"{key}_max_token_len_per_gpu" if tokens is not None else f"{key}_micro_batch_size_per_gpu"
        return Stage(name, parts(min(shown, max(least, most))), seconds, full, count, largest, operations)

    # ---- teachers

    def _teacher_stages(self, size: int | None) -> list[Stage]:
        """Stages in which teachers score the rows; ``size`` is that of passes where none is set."""
        if self.config.distillation.is_self_distillation:
            return [self._own_teacher(size)]
        teachers, ref = self.teachers, self.config.actor_rollout_ref.ref
        stages: list[Stage] = []
        for name, held in self.passing_teachers.items():
            stages.append(
                self._pass(
                    name,
                    name,
                    False,
                    "actor_rollout_ref.ref.log_prob",
                    ref.log_prob_max_token_len_per_gpu if ref.log_prob_use_dynamic_bsz else None,
                    ref.log_prob_micro_batch_size_per_gpu or size,
                    pool=self.passing_teachers if teachers.ranks else None,
                    work=self._scored(held.memory.layout.ranks_per_model),
                )
            )
        for name, teacher in self._teacher_engines.items():
            engine, shape = teacher.inference, self._teacher_shape(teacher)
            ranks = engine.tensor_model_parallel_size
            work = self._scored(ranks)
            beside = self._awake_engines(f"teacher {name}") if teachers.ranks else self._idle(f"teacher {name}")
            if self._engine_leaves and not teachers.ranks:
                beside["rollout engine"] = self._engine_leaves
            parts = beside | self._engine_parts(teacher)
            layout, length = EngineLayout(tensor=ranks, size=BYTES[engine.dtype]), work.prompt + work.response
            seconds = scoring_seconds(shape, self.cluster, work.rows, length, work.response, layout)
            at_once = min(work.rows, engine.max_num_seqs)
            stages.append(Stage(f"teacher {name}", parts, seconds, "rows at once", at_once, at_once, seconds))
        return stages

    def _own_teacher(self, size: int | None) -> Stage:
        """The passes of a policy that teaches itself, under longer prompts, which responses do not share."""
        self_distillation, data = self.config.distillation.self_distillation, self.config.data
        rollout, memory = self.config.actor_rollout_ref.rollout, self.models["actor"].memory
        work = self.work(memory.layout.ranks_per_model)
        context = max(0, self_distillation.teacher_prompt_length - data.max_prompt_length)
        # Its own weights are kept while the model has those of the teacher.
        policy_copy = memory.trained * memory.layout.stored_bytes / memory.layout.shards
        return self._pass(
            "teacher",
            "actor",
            False,
            "actor_rollout_ref.rollout.log_prob",
            rollout.log_prob_max_token_len_per_gpu if rollout.log_prob_use_dynamic_bsz else None,
            size,
            more={"weights of the policy": policy_copy} if self.teachers.average(memory) else {},
            work=replace(work, prompt=min(self_distillation.teacher_prompt_length, work.prompt + context)),
            longest=Rows(self_distillation.teacher_prompt_length, data.max_response_length),
        )

    def _scored(self, shared_by: int) -> Work:
        """Rows that one teacher scores on each group of ranks that share them, if all teachers have equally many."""
        work = self.work(shared_by)
        rows = work.rows * self.ranks * self.teachers.share / (self.teachers.ranks or self.ranks)
        return replace(work, rows=max(1, math.ceil(rows)))

    @property
    def _output_matrices(self) -> float:
        held = self.passing_teachers.values() or [self.models["actor"]]
        return sum(output_bytes(teacher.memory) for teacher in held)

    @property
    def _teacher_engines(self) -> Mapping[str, DistillationTeacherModelConfig]:
        return {} if self.teachers.are_forward_passes else self.teachers.separate

    def _engine_parts(self, teacher: DistillationTeacherModelConfig) -> dict[str, float]:
        """Part → bytes of a teacher that is an engine, on one rank."""
        engine = teacher.inference
        layout = EngineLayout(tensor=engine.tensor_model_parallel_size, size=BYTES[engine.dtype])
        weights = layout.weights(self._teacher_shape(teacher))
        room = self.cluster.memory_gb * 1e9 * engine.gpu_memory_utilization - weights - _ENGINE_RESERVE
        return {"engine weights": weights, "engine reserve": _ENGINE_RESERVE, "KV cache": max(0.0, room)}

    def _awake_engines(self, except_for: str) -> dict[str, float]:
        """Teachers that are engines and keep their memory while others work."""
        engines = {f"teacher {name}": engine for name, engine in self._teacher_engines.items()}
        return {
            name: sum(self._engine_parts(engine).values())
            for name, engine in engines.items()
            if name != except_for and not self.teachers.offloads(engine)
        }

    # ---- the rollout

    @property
    def engine_layout(self) -> EngineLayout:
        """Return the division of a model among the ranks of a rollout engine."""
        return EngineLayout.from_rollout(self.config.actor_rollout_ref.rollout)

    def _engine(self, resident: float) -> tuple[dict[str, float], int]:
        """Return part → bytes of the rollout engine on one rank, and how many rows each of its copies runs at once."""
        rollout, actor, layout = self.config.actor_rollout_ref.rollout, self.models["actor"].memory, self.engine_layout
        shape, weights = actor.shape, layout.weights(actor.shape)
        row = layout.row(shape, self.row_tokens)
        rows = min(self.rollout_rows(layout.ranks // layout.copies), rollout.max_num_seqs)
        if rollout.name in SERVER_ENGINES:
            memory = self.cluster.memory_gb * 1e9 * rollout.gpu_memory_utilization
            room = memory - weights - _ENGINE_RESERVE
            parts = {"engine weights": weights, "engine reserve": _ENGINE_RESERVE, "KV cache": max(0.0, room)}
            # Rows take pages as they grow, so that there is room for rows of the mean length; a longest one must fit.
            expected = self.work(1)
            tokens = expected.prompt + Lengths(expected.response, self.config.data.max_response_length).mean_at_work
            return parts, 0 if room < row else min(rows, int(room / layout.row(shape, 1) / tokens))
        is_shared = not actor.layout.is_gathered and not actor.adapters and actor.layout.stored_bytes == layout.size
        if is_shared and layout.ranks == 1 and not layout.is_quantised and not self.has_rollout_pool:
            weights = 0.0  # the trainer's own
        free = self.cluster.usable_bytes - resident - weights
        allowed = max(0.0, free) * rollout.gpu_memory_utilization
        at_once = min(rows, int(allowed // row))
        parts = {"engine weights": weights, "KV cache": max(1, at_once) * row}
        sizes = GRAPH_SIZES if rollout.cudagraph_capture_sizes is None else rollout.cudagraph_capture_sizes
        if rollout.name == "native" and sizes and not rollout.enforce_eager and not shape.experts:
            # Logits twice: in the buffer of all graphs, and where the head computes them.
            logits = 2 * min(max(1, at_once), max(sizes)) * shape.vocabulary * layout.size
            parts["CUDA graphs"] = logits + MAX_GRAPHS * _GRAPH_BYTES
        return parts, at_once

    def _rollout(self) -> Stage:
        resident = {} if self.has_rollout_pool else self._idle("")
        parts, at_once = self._engine(sum(resident.values()))
        layout, memory = self.engine_layout, self.models["actor"].memory
        data, rollout, expected = self.config.data, self.config.actor_rollout_ref.rollout, self.work(1)
        work = EngineWork(
            rows=self.rollout_rows(layout.ranks // layout.copies),
            rows_at_once=max(1, at_once),
            prompt=expected.prompt,
            lengths=Lengths(expected.response, data.max_response_length),
            rows_of_all=data.train_batch_size * rollout.n,
        )
        operations = generation_seconds(memory.shape, self.cluster, work, layout)
        seconds = operations * constants.ROLLOUT_FACTOR + self._seconds_beside_operations
        return Stage("rollout", resident | parts, seconds, "rows at once", work.rows, at_once, operations)

    @property
    def _seconds_beside_operations(self) -> float:
        """Seconds in which engines get new weights, fall asleep and wake up, and the driver scores and sorts rows."""
        rollout, held = self.config.actor_rollout_ref.rollout, self.models["actor"]
        seconds = self._transfer_seconds + constants.RESPONSE_S * self.config.data.train_batch_size * rollout.n
        if not held.keeps_weights:  # they come back to the device to be handed over
            seconds += moving_seconds(held.memory.weights, self.cluster)
        if rollout.name in SERVER_ENGINES:
            seconds += constants.TENSOR_S * held.memory.shape.tensors
            seconds += constants.SLEEP_S if rollout.free_cache_engine and not self.has_rollout_pool else 0.0
        return seconds

    @property
    def _transfer_seconds(self) -> float:
        """Seconds in which every rank receives all weights, of which its engine keeps its part."""
        memory, layout = self.models["actor"].memory, self.engine_layout
        lay = memory.layout
        sharing = max(lay.shards * lay.tensor, lay.tensor * lay.pipeline, lay.expert_ranks * lay.pipeline)
        ranks = self.gpus if self.has_rollout_pool else sharing
        if ranks == 1:
            return 0.0
        sent = memory.shape.parameters() * layout.size * (ranks - 1) / ranks
        reached = constants.GATHER_OF_WEIGHTS_USE / self.cluster.link_use
        return sent / self.cluster.gather_bytes_per_s(ranks) / reached

    # ---- the whole

    @property
    def seconds(self) -> float:
        """Seconds of a step; those of sampling and training, or of the longer one if both work at once."""
        sampling, training = self.stages[0].seconds, sum(stage.seconds for stage in self.stages[1:])
        return max(sampling, training) if self.overlaps else sampling + training

    @property
    def seconds_range(self) -> tuple[float, float]:
        """Seconds between which a step probably is: 10 to 90 % of published runs were."""
        low, high = constants.STEP_RANGE
        return self.seconds * low, self.seconds * high

    @property
    def overlaps(self) -> bool:
        """Return whether a pool of rollout engines samples while others train."""
        return self.has_rollout_pool and self.config.trainer.async_.lag > 0

    @property
    def snapshot_bytes(self) -> float:
        """Bytes of a copy of the training state in the host's memory: of trained weights and their optimizer state."""
        held = [model.memory for model in self.models.values() if model.memory.trained]
        return self.ranks * sum(memory.state for memory in held)

    @property
    def snapshot_steps(self) -> int:
        """Steps between two copies: :class:`~verl.trainer.recovery.SnapshotSchedule` lets them take 2 % of the time."""
        snapshot_freq = self.config.trainer.recovery.snapshot_freq
        if snapshot_freq is not None:
            return snapshot_freq
        seconds = self.snapshot_bytes / self.ranks / _SNAPSHOT_BYTES_PER_S
        return math.ceil(seconds / _SNAPSHOT_SHARE / self.seconds)

    @property
    def excess(self) -> float:
        """Bytes by which the worst stage is too large; at most 0 if all fit."""
        worst = max(stage.bytes for stage in self.stages) - self.cluster.usable_bytes
        no_row = self.stages[0].largest == 0
        return max(worst, 1.0) if no_row else worst


def _computes_layer_by_layer(recompute: Mapping[str, Any], shape: ModelShape, layout: RankLayout) -> bool:
    """Say whether every layer is computed again, one at a time, which is how :class:`ModelMemory` counts."""
    if recompute["recompute_granularity"] != "full":
        return False
    layers = recompute["recompute_num_layers"]
    if recompute["recompute_method"] == "uniform":
        return layers == 1
    return layers >= shape.layers / layout.pipeline / layout.pieces


def layout_of(
    placement: FSDPEngineConfig | McoreEngineConfig, ranks: int, has_adapters: bool, layers: int
) -> RankLayout:
    """Return how ``ranks`` ranks share a model of ``layers`` layers.

    Raises:
        ConfigError: its sizes do not divide the ranks.
    """
    if isinstance(placement, McoreEngineConfig):
        tensor, pipeline = placement.tensor_model_parallel_size, placement.pipeline_model_parallel_size
        if ranks % (tensor * pipeline * placement.context_parallel_size):
            raise ConfigError(
                f"megatron.tensor_model_parallel_size={tensor}, pipeline_model_parallel_size={pipeline} and "
                f"context_parallel_size={placement.context_parallel_size}: their product does not divide the {ranks} "
                "GPUs of the plan."
            )
        size, virtual = BYTES[placement.dtype], placement.virtual_pipeline_model_parallel_size
        pieces = layers_of_chunks(placement.override_transformer_config, pipeline, virtual, layers)
        return RankLayout(
            sequence=placement.context_parallel_size,
            tensor=tensor,
            divides_norms=placement.sequence_parallel,
            pipeline=pipeline,
            pieces=placement.model_chunks,
            piece_layers=() if pieces is None or len(set(pieces)) == 1 else tuple(pieces),
            expert=placement.expert_model_parallel_size,
            expert_tensor=placement.expert_tensor_parallel_size,
            replicas=ranks // tensor // pipeline,
            divides_optimizer=placement.use_distributed_optimizer,
            stored_bytes=size,
            compute_bytes=size,
            is_gathered=False,
            is_megatron=True,
        )
    sequence, tensor = placement.ulysses_sequence_parallel_size, placement.tensor_parallel_size
    groups = ranks // tensor
    shards = groups if not 0 < placement.fsdp_size < groups else placement.fsdp_size
    if ranks % sequence or ranks % tensor or groups % shards:
        raise ConfigError(
            f"fsdp_config.ulysses_sequence_parallel_size={sequence}, tensor_parallel_size={tensor} and "
            f"fsdp_size={placement.fsdp_size} must divide the {ranks} GPUs of the plan."
        )
    precision = placement.mixed_precision
    compute = BYTES[precision.param_dtype if precision else placement.dtype]
    stored = BYTES[placement.model_dtype]
    return RankLayout(
        shards=shards,
        tensor=tensor,
        divides_norms=False,
        replicas=groups // shards,
        sequence=sequence,
        stored_bytes=stored,
        compute_bytes=compute,
        is_gathered=shards > 1 or stored != compute or placement.offload_policy or has_adapters,
        reshards=placement.reshard_after_forward,
        is_on_host=placement.offload_policy,
    )


def _divisors(value: int, most: int) -> list[int]:
    """Return the divisors of a number up to ``most``, in their order."""
    return [size for size in range(1, min(value, most) + 1) if value % size == 0]


def _adapter_parameters(shape: ModelShape, model: TrainedModelConfig) -> int:
    if not model.has_adapters:
        return 0
    if model.lora_rank <= 0:
        raise ConfigError("lora_adapter_path: a plan does not read adapters. Set lora_rank to theirs instead.")
    names = model.target_modules
    if isinstance(names, str):
        if names != "all-linear":
            raise ConfigError(
                f"target_modules={names}: a plan does not read regular expressions. Use all-linear, or a list of names "
                "such as [q_proj,v_proj]."
            )
        names = None
    parameters = shape.adapter_parameters(model.lora_rank, names, model.lora.target_parameters)
    if not parameters:
        layers = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in shape.linear_sizes))
        raise ConfigError(
            f"target_modules={model.target_modules}: no linear layer that can have an adapter has such a name. Layers "
            f"are {layers}; Megatron's names are for lora.target_modules, beside lora.rank."
        )
    return parameters
