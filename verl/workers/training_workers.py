"""The base class of workers that hold engines, and the workers of supervised, reward-model and preference training."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist
import transformers
from torch import Tensor

from verl.algorithms.distillation import evaluate_distillation_loss
from verl.base.import_utils import prepare_process
from verl.checkpoint.files import FileEntry
from verl.checkpoint.ranks import RankState, SaveReport, Writing, on_all_ranks, save_together
from verl.checkpoint.states import State, from_arrays, to_arrays
from verl.checkpoint.steps import wrong_contents
from verl.config import (
    CheckpointConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    local_copies,
)
from verl.errors import CheckpointError, ConfigError
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.device import memory_metrics
from verl.utils.flops_counter import Arithmetic
from verl.utils.model import hf_config_of
from verl.utils.model_facts.time_limits import time_limits
from verl.workers.engine import BaseEngine, EngineRegistry, LossFunction, MicroBatchConfig
from verl.workers.engine.loss import LossCallable, as_loss_function
from verl.workers.engine.non_finite import NonFinite
from verl.workers.losses import DirectPreferenceLoss, DistilledSFTLoss, RewardModelLoss, sft_loss
from verl.workers.profiling import OF_PROCESS, RecordingPlan
from verl.workers.teacher.forward import full_divergence, teacher_columns

if TYPE_CHECKING:
    from verl.config import DPOConfig, RMConfig, SFTConfig, SupervisedConfig


class EngineWorker(Worker):
    """Base class of workers that hold engines: makes them, and saves and restores the trained one.

    Args:
        checkpoint: contents of checkpoints.
        device_name: ``"cuda"``, ``"cpu"``, or None to use a GPU if there is one.
        timeout_s: seconds after which an unfinished collective is an error; None takes what the first model needs.
    """

    def __init__(
        self,
        checkpoint: CheckpointConfig,
        device_name: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        prepare_process()
        # Ray forwards output to the driver, whose log would get a progress bar from each rank.
        transformers.utils.logging.disable_progress_bar()
        self.engine: BaseEngine | None = None
        self.engines: list[BaseEngine] = []
        """All engines of this worker, the trained one and frozen ones."""
        self.checkpoint = checkpoint
        self.device_name = device_name
        self.timeout_s = timeout_s
        self._saved: list[str] = []
        self._writing: Writing | None = None

    def make_engine(
        self,
        model_type: str,
        strategy: str,
        model: HFModelConfig,
        placement: FSDPEngineConfig | McoreEngineConfig,
        optimizer: FSDPOptimizerConfig | None = None,
        frozen: Sequence[str] = (),
    ) -> BaseEngine:
        """Make an engine and load its model; without an optimizer all of it is frozen, else the parts ``frozen``."""
        engine = EngineRegistry.new(
            model_type,
            strategy,
            model_config=model,
            engine_config=dataclasses.replace(placement, forward_only=optimizer is None),
            optimizer_config=optimizer,
            device_name=self.device_name,
            timeout_s=time_limits(model.path).collective_s if self.timeout_s is None else self.timeout_s,
            **({"frozen": frozen} if frozen else {}),
        )
        engine.initialize()
        self.engines.append(engine)
        return engine

    def join_mesh(self, name: str, engine: BaseEngine) -> None:
        """Register the part of a batch that this rank receives on mesh ``name``: that of its data-parallel rank."""
        collects = engine.is_mp_src_rank_with_outputs()
        self._register_dispatch_collect_info(name, dp_rank=engine.get_data_parallel_rank(), is_collect=collects)

    @property
    def trained(self) -> BaseEngine:
        """The engine that is trained.

        Raises:
            ConfigError: this worker trains none, or ``init_model`` was not called.
        """
        if self.engine is None:
            raise ConfigError(
                f"this {type(self).__name__} has no model to train. Call init_model first; a worker whose role is "
                "only 'rollout' or 'ref' trains none."
            )
        return self.engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def arithmetic(self) -> Arithmetic:
        """Work per pass of the trained model and peak of this rank; see :meth:`BaseEngine.arithmetic`."""
        return self.trained.arithmetic()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def limit_passes(self, may_cut: bool, limits: dict[str, int]) -> None:
        """Limit the size of passes of all engines; see :class:`verl.workers.engine.passes.PassSizes`."""
        for engine in self.engines:
            engine.pass_sizes.may_cut = may_cut
            engine.pass_sizes.limits = dict(limits)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_recording(self, plan: RecordingPlan) -> None:
        """Begin to profile this process, if its rank is one of the plan's; see :class:`ProcessRecording`."""
        if plan.ranks is None or self.rank in plan.ranks:
            OF_PROCESS.start(plan, self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_recording(self, role: str) -> None:
        """End the profile of a role; the last role of a process writes the file."""
        OF_PROCESS.stop(role)

    # ---- what is saved: subclasses with more state than the trained engine override these three

    def training_state(
        self, global_step: int = 0, contents: Sequence[str] = ("model", "optimizer", "extra"), copied: bool = True
    ) -> RankState:
        """Return this rank's part of a checkpoint; see :meth:`BaseEngine.state`. Collective."""
        return self.trained.state(global_step, contents, copied)

    def load_training_state(self, folder: Path) -> None:
        """Restore the contents of a checkpoint folder. Collective."""
        self.trained.load_checkpoint(str(folder), self.checkpoint.load_contents)

    def restore_training_state(self, states: Mapping[str, State]) -> None:
        """Restore the states of :meth:`training_state`, bit for bit."""
        self.trained.load_state(states)

    def weights_replaced(self) -> None:
        """React to weights that ``load_checkpoint`` or ``restore`` replaced; subclasses with copies override it."""

    def report(
        self,
        metrics: dict[str, float],
        problems: Sequence[NonFinite],
        engine: BaseEngine,
        expert_counts: Tensor | None = None,
    ) -> DataProto:
        """Make a batch without rows, with ``metrics``, memory in use and ``non_finite`` in ``meta_info``. Collective.

        ``expert_counts``, (layers, experts), are nested lists there.

        The metric ``recovery/micro_batch_splits`` counts how often passes of this worker were made smaller since its
        start; it is absent while that is 0.
        """
        if cuts := sum(engine.pass_sizes.cuts for engine in self.engines):
            metrics = metrics | {"recovery/micro_batch_splits": float(cuts)}
        made = {"metrics": metrics | memory_metrics(engine.device), "non_finite": list(problems)}
        return DataProto(meta_info=made if expert_counts is None else made | {"expert_counts": expert_counts.tolist()})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save the trained model atomically.

        Args:
            local_path: folder of the checkpoint.
            hdfs_path: must be None; remote copies are not supported.
            global_step: stored with the state.
            max_ckpt_to_keep: number of folders written by this worker to keep, the newest; None or 0 keeps all.

        Raises:
            CheckpointError: it could not be written; what was at ``local_path`` before is untouched.
        """
        _refuse_hdfs(hdfs_path)
        with self.trained.eval_mode():
            state = self.training_state(global_step, self.checkpoint.save_contents, copied=False)
            save_together(Path(local_path), state.write)
        self._saved = [*(path for path in self._saved if path != local_path), local_path]
        if max_ckpt_to_keep is not None and max_ckpt_to_keep > 0:
            for path in self._saved[:-max_ckpt_to_keep]:
                _remove(path)
            self._saved = self._saved[-max_ckpt_to_keep:]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore the trained model from a checkpoint folder.

        Args:
            local_path: folder of the checkpoint.
            hdfs_path: must be None.
            del_local_after_load: delete the folder after every rank has read it.

        Raises:
            CheckpointError: a file is missing, damaged or of another model.
        """
        _refuse_hdfs(hdfs_path)
        with self.trained.train_mode():
            self.load_training_state(Path(local_path).expanduser())
        self.weights_replaced()
        if del_local_after_load:
            _remove(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, folder: str, global_step: int) -> None:
        """Write this rank's part of a checkpoint into ``folder``; the caller commits the folder afterwards.

        With ``checkpoint.async_save`` this call only copies the state, which is written while later calls run.
        """
        background = self.checkpoint.async_save
        with self.trained.eval_mode():
            state = self.training_state(global_step, self.checkpoint.save_contents, copied=background)
        self._writing = Writing(state.write, Path(folder), background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_report(self, wait: bool = False) -> SaveReport | None:
        """Return the result of :meth:`begin_save`; None if it is still writing and ``wait`` is False.

        Raises:
            CheckpointError: ``begin_save`` was not called.
        """
        if self._writing is None:
            raise CheckpointError("no checkpoint is being written by this worker: call begin_save first.")
        return self._writing.report(wait)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def check_files(self, folder: str, files: dict[str, FileEntry]) -> list[str]:
        """Return problems of those ``files`` below ``folder`` whose content is not what was written.

        Each rank receives its own share of ``files``.
        """
        return wrong_contents(Path(folder), files)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshot(self, global_step: int = 0) -> dict[str, object]:
        """Copy the whole training state of this rank.

        On Ray, ``group.execute_all_async("snapshot")`` leaves it in the object store, where it outlives the workers.

        Returns:
            file name to state as in a checkpoint on disk, with arrays in place of tensors.
        """
        return to_arrays(self.training_state(global_step).states)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshot_bytes(self) -> int:
        """Return the size of a :meth:`snapshot` of this rank once the optimizer has made a step."""
        return self.trained.state_bytes()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def documents(self) -> dict[str, bytes]:
        """Return the files of a checkpoint that describe the model, by path; they do not change during a run.

        Other ranks than 0 return none.
        """
        state = self.trained.state(contents=[])
        with tempfile.TemporaryDirectory() as folder:
            state.write(Path(folder))
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def restore(self, snapshot: dict[str, object]) -> None:
        """Restore a :meth:`snapshot` of this rank, bit for bit.

        ``group.restore(references)`` takes the references from ``group.execute_all_async("snapshot")``, one per rank.

        Raises:
            CheckpointError: it is of another rank, another number of ranks, or another model.
        """
        with self.trained.train_mode():
            self.restore_training_state(from_arrays(snapshot))
        self.weights_replaced()


def _refuse_hdfs(hdfs_path: str | None) -> None:
    if hdfs_path is not None:
        raise CheckpointError(
            f"hdfs_path={hdfs_path}: copying checkpoints to a remote file system is not in this version. Pass None, "
            "and let default_local_dir lie on a mounted one."
        )


def _remove(path: str) -> None:
    """Remove a folder after all ranks are done with it. Collective."""
    # The first block is a barrier: a rank may still read the folder.
    with on_all_ranks(f"remove {path}"):
        pass
    with on_all_ranks(f"remove {path}"):
        if dist.get_rank() == 0 and Path(path).expanduser().is_dir():
            shutil.rmtree(Path(path).expanduser())


class TrainingWorker(EngineWorker):
    """Worker that trains one model on given batches; by default a language model with the supervised loss.

    See :class:`EngineWorker` for ``device_name``.
    """

    model_type = "language_model"
    outputs: ClassVar[set[str]] = {"log_probs"}
    """What :meth:`infer_batch` computes."""

    def __init__(self, config: SupervisedConfig, device_name: str | None = None) -> None:
        super().__init__(config.checkpoint, device_name)
        self.config = config = local_copies(config, without=["data"])
        self.loss_fn: LossFunction = self.make_loss()
        self.micro = MicroBatchConfig(
            micro_batch_size_per_gpu=config.data.micro_batch_size_per_gpu,
            use_dynamic_bsz=config.data.use_dynamic_bsz,
            max_token_len_per_gpu=config.data.max_token_len_per_gpu,
        )

    def make_loss(self) -> LossFunction:
        """Make the loss that is minimised."""
        return sft_loss

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and make its optimizer."""
        config = self.config
        self.engine = self.make_engine(
            self.model_type, config.engine.strategy, config.model, config.placement, config.optim
        )
        self.join_mesh("train", self.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Load the model and make its optimizer, also again: what was trained since is dropped."""
        self.engines.clear()
        self.engine = None
        self.init_model()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: LossFunction | LossCallable) -> None:
        """Replace the loss; of a plain function see :func:`verl.workers.engine.loss.as_loss_function`."""
        self.loss_fn = as_loss_function(loss_fn)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def train_batch(self, data: DataProto) -> DataProto:
        """Make one optimizer step.

        Returns:
            ``meta_info["metrics"]`` with loss, grad_norm, skipped_steps, lr and memory, and
            ``meta_info["non_finite"]`` with the reasons if the step was skipped, whose row numbers are per rank.
        """
        with self.trained.train_mode():
            metrics = self.trained.train_batch(data, self.loss_fn, self.micro)
            metrics["lr"] = self.trained.lr_scheduler_step()
        return self.report(metrics, self.trained.non_finite, self.trained, self.trained.expert_counts)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def infer_batch(self, data: DataProto) -> DataProto:
        """Compute ``log_probs``, (bsz, response_length); of a reward model ``scores`` at the tokens of the response."""
        with self.trained.eval_mode():
            return DataProto.from_dict(tensors=self.trained.infer_batch(data, self.outputs, self.micro))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move weights and optimizer state to ``"cpu"`` or to the engine's device; gradients go with the weights."""
        self.trained.to(device, model, optimizer)


class DistillingWorker(TrainingWorker):
    """Worker that trains a language model to agree with a frozen teacher at the tokens of the data.

    Arguments as for :class:`TrainingWorker`.
    """

    config: SFTConfig

    def make_loss(self) -> LossFunction:
        """Make the divergence from the teacher, with the supervised loss beside it if that has a weight."""
        self.distilled = DistilledSFTLoss(self.config.distillation)
        return self.distilled

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and the teacher."""
        super().init_model()
        config = self.config
        self.teacher = self.make_engine(
            "language_model", config.engine.strategy, config.teacher_model, config.teacher_engine
        )
        self.teacher.top_ids_below = hf_config_of(config.model).get_text_config().vocab_size
        if self.distilled.info.reads == "full":
            self.trained.divergence = full_divergence(config.distillation.distillation_loss, [(self.teacher, 1.0)])

    def _with_teacher(self, data: DataProto) -> DataProto:
        loss = self.config.distillation.distillation_loss
        return data | teacher_columns(self.teacher, data, self.distilled.info.reads, self.micro, topk=loss.topk)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def train_batch(self, data: DataProto) -> DataProto:
        """Make one optimizer step; see :meth:`TrainingWorker.train_batch`."""
        return super().train_batch(self._with_teacher(data))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def infer_batch(self, data: DataProto) -> DataProto:
        """Compute ``log_probs`` and ``divergence``, (bsz, response_length)."""
        loss, data = self.distilled, self._with_teacher(data)
        settings = loss.config.distillation_loss
        with self.trained.eval_mode():
            outputs = self.trained.infer_batch(data, set(loss.outputs), self.micro, topk=settings.topk or 0)
        divergence, _ = evaluate_distillation_loss(loss.info, outputs, dict(data.batch.items()), settings)
        return DataProto.from_dict(tensors={"log_probs": outputs["log_probs"], "divergence": divergence})


class RewardModelTrainingWorker(TrainingWorker):
    """Worker that trains a reward model on preference pairs; arguments as for :class:`TrainingWorker`."""

    model_type = "reward_model"
    outputs: ClassVar[set[str]] = {"scores"}
    config: RMConfig

    def make_loss(self) -> LossFunction:
        """Make the Bradley-Terry loss."""
        return RewardModelLoss(self.config.loss)


class DirectPreferenceWorker(TrainingWorker):
    """Worker that trains a policy on preference pairs, with a frozen reference unless the loss needs none.

    Arguments as for :class:`TrainingWorker`.
    """

    config: DPOConfig

    def make_loss(self) -> LossFunction:
        """Make the DPO loss, or the variant of it that ``loss`` configures."""
        return DirectPreferenceLoss(self.config.loss)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy and, if the loss needs one that is not the policy without its adapters, the reference."""
        super().init_model()
        config = self.config
        self.reference: BaseEngine | None = None
        if not config.loss.reference_free and not config.reference_is_policy:
            self.reference = self.make_engine(
                "language_model", config.engine.strategy, config.reference_model, config.reference_engine
            )

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Compute ``ref_log_prob`` under the reference, (bsz, response_length)."""
        is_policy = self.reference is None and self.config.reference_is_policy
        reference = self.trained if is_policy else self.reference
        if reference is None or self.config.loss.reference_free:
            raise ConfigError("reference_free=true: there is no reference whose log-probs could be computed.")
        with reference.eval_mode(), reference.disable_adapter() if is_policy else nullcontext():
            outputs = reference.infer_batch(batch, {"log_probs"}, self.micro)
        return DataProto.from_dict(tensors={"ref_log_prob": outputs["log_probs"]})
