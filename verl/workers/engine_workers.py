"""A worker around one engine: what every worker shares, and those that fit a model to data that is already there."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import transformers

from verl.errors import CheckpointError, ConfigError
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.checkpoint import on_all_ranks
from verl.utils.checkpoint.arrays import from_arrays, to_arrays
from verl.utils.checkpoint.files import FileEntry
from verl.utils.checkpoint.steps import wrong_contents
from verl.utils.checkpoint.writing import SaveReport, Writing
from verl.utils.device import memory_metrics
from verl.utils.flops_counter import Arithmetic
from verl.utils.import_utils import prepare_process
from verl.workers.config import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import BaseEngine, EngineRegistry, LossFn, MicroBatchConfig
from verl.workers.engine.non_finite import NonFinite
from verl.workers.losses import sft_loss
from verl.workers.preference_losses import DirectPreferenceLoss, RewardModelLoss

if TYPE_CHECKING:
    from verl.trainer.config import SFTConfig
    from verl.trainer.config.preference import DPOConfig, RMConfig


class EngineWorker(Worker):
    """Makes engines, and saves and restores the one that is trained.

    Args:
        checkpoint: what a checkpoint holds.
        device_name: ``"cuda"``, ``"cpu"``, or None for what there is.
        timeout_s: seconds after which a collective that does not finish is an error.
    """

    def __init__(self, checkpoint: CheckpointConfig, device_name: str | None = None, timeout_s: float = 600) -> None:
        super().__init__()
        prepare_process()
        # A bar per rank, through Ray, is noise in the driver's log.
        transformers.utils.logging.disable_progress_bar()
        self.engine: BaseEngine | None = None
        self.engines: list[BaseEngine] = []
        """All that this worker has made."""
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
        placement: FSDPEngineConfig,
        optimizer: FSDPOptimizerConfig | None = None,
    ) -> BaseEngine:
        """An engine with its model loaded; without an optimizer it is frozen."""
        engine = EngineRegistry.new(
            model_type,
            strategy,
            model_config=model,
            engine_config=dataclasses.replace(placement, forward_only=optimizer is None),
            optimizer_config=optimizer,
            device_name=self.device_name,
            timeout_s=self.timeout_s,
        )
        engine.initialize()
        self.engines.append(engine)
        return engine

    def join_mesh(self, name: str, engine: BaseEngine) -> None:
        """Say which part of a batch this rank computes on mesh ``name``."""
        self._register_dispatch_collect_info(name, dp_rank=engine.get_data_parallel_rank(), is_collect=True)

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
        """Of the trained model on this rank; see :class:`verl.workers.engine.base.BaseEngine`."""
        return self.trained.arithmetic()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def limit_passes(self, may_cut: bool, limits: dict[str, int]) -> None:
        """Say how large the passes of all engines may be; see :class:`verl.workers.engine.pass_sizes.PassSizes`."""
        for engine in self.engines:
            engine.pass_sizes.may_cut = may_cut
            engine.pass_sizes.limits = dict(limits)

    def weights_replaced(self) -> None:
        """Called after ``load_checkpoint``; for whoever holds copies of the weights."""

    def report(self, metrics: dict[str, float], problems: Sequence[NonFinite], engine: BaseEngine) -> DataProto:
        """``metrics`` and the memory in use, and what was not finite, as a batch without rows.

        ``recovery/micro_batch_splits`` is there once passes of this worker were made smaller: how often so far.
        """
        if cuts := sum(engine.pass_sizes.cuts for engine in self.engines):
            metrics = metrics | {"recovery/micro_batch_splits": float(cuts)}
        return DataProto(meta_info={"metrics": metrics | memory_metrics(engine.device), "non_finite": list(problems)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write the trained model, whole or not at all.

        Args:
            local_path: folder of the checkpoint.
            hdfs_path: must be None; a second copy elsewhere is not made.
            global_step: kept beside the state.
            max_ckpt_to_keep: of the folders that this worker wrote, the number to keep; None keeps all.

        Raises:
            CheckpointError: it could not be written; what was at ``local_path`` before is untouched.
        """
        _refuse_hdfs(hdfs_path)
        with self.trained.eval_mode():
            self.trained.save_checkpoint(local_path, global_step, self.checkpoint.save_contents)
        self._saved = [*(path for path in self._saved if path != local_path), local_path]
        if max_ckpt_to_keep is not None and max_ckpt_to_keep > 0:
            for path in self._saved[:-max_ckpt_to_keep]:
                _remove(path)
            self._saved = self._saved[-max_ckpt_to_keep:]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Read the trained model back.

        Args:
            local_path: folder of the checkpoint.
            hdfs_path: must be None.
            del_local_after_load: remove the folder once every rank has read it.

        Raises:
            CheckpointError: a file is missing, damaged or of another model.
        """
        _refuse_hdfs(hdfs_path)
        with self.trained.train_mode():
            self.trained.load_checkpoint(local_path, self.checkpoint.load_contents)
        self.weights_replaced()
        if del_local_after_load:
            _remove(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin_save(self, folder: str, global_step: int) -> None:
        """Write this rank's part of a checkpoint into ``folder``, which counts when whoever asked has committed it.

        With ``checkpoint.async_save`` the state is copied here and written while the next calls run.
        """
        background = self.checkpoint.async_save
        with self.trained.eval_mode():
            state = self.trained.state(global_step, self.checkpoint.save_contents, copied=background)
        self._writing = Writing(state.write, Path(folder), background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_report(self, wait: bool = False) -> SaveReport | None:
        """How :meth:`begin_save` went; None while it is being written, unless ``wait``.

        Raises:
            CheckpointError: nothing was begun.
        """
        if self._writing is None:
            raise CheckpointError("no checkpoint is being written by this worker: call begin_save first.")
        return self._writing.report(wait)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def check_files(self, folder: str, files: dict[str, FileEntry]) -> list[str]:
        """What of ``files`` below ``folder`` does not hold what was written; each rank reads its share."""
        return wrong_contents(Path(folder), files)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def snapshot(self, global_step: int = 0) -> dict[str, Any]:
        """The whole training state of this rank, in own copies that later updates do not change.

        On Ray, ``group.execute_all_async("snapshot")`` leaves it in the object store, where it outlives the workers.

        Returns:
            file name to state, as a checkpoint on disk has them, with arrays in the place of tensors.
        """
        return to_arrays(self.trained.state(global_step).states)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def documents(self) -> dict[str, bytes]:
        """On rank 0 the files of a checkpoint that tell of the model, by path; they are the same in every step."""
        state = self.trained.state(contents=[])
        with tempfile.TemporaryDirectory() as folder:
            state.write(Path(folder))
            found = [path for path in Path(folder).rglob("*") if path.is_file()]
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def restore(self, snapshot: dict[str, Any]) -> None:
        """Put a :meth:`snapshot` of this rank back, bit for bit.

        ``group.restore(references)`` takes what ``group.execute_all_async("snapshot")`` gave, one for each rank.

        Raises:
            CheckpointError: it is of another rank, another number of ranks, or another model.
        """
        with self.trained.train_mode():
            self.trained.load_state(from_arrays(snapshot))
        self.weights_replaced()


def _refuse_hdfs(hdfs_path: str | None) -> None:
    if hdfs_path is not None:
        raise CheckpointError(
            f"hdfs_path={hdfs_path}: copying checkpoints to a remote file system is not in this version. Pass None, "
            "and let trainer.default_local_dir lie on a mounted one."
        )


def _remove(path: str) -> None:
    """Remove a folder that all ranks are done with. Collective."""
    with on_all_ranks(f"remove {path}"):
        pass
    with on_all_ranks(f"remove {path}"):
        if dist.get_rank() == 0 and Path(path).expanduser().is_dir():
            shutil.rmtree(Path(path).expanduser())


class TrainingWorker(EngineWorker):
    """One model and its optimizer, fitted to batches by a loss; here a language model and the supervised loss.

    Args:
        config: the run's configuration.
        device_name: ``"cuda"``, ``"cpu"``, or None for what there is.
    """

    model_type = "language_model"

    def __init__(self, config: SFTConfig | RMConfig | DPOConfig, device_name: str | None = None) -> None:
        super().__init__(config.checkpoint, device_name)
        self.config = config
        self.loss_fn: LossFn = self.make_loss()
        self.micro = MicroBatchConfig(
            micro_batch_size_per_gpu=config.data.micro_batch_size_per_gpu,
            use_dynamic_bsz=config.data.use_dynamic_bsz,
            max_token_len_per_gpu=config.data.max_token_len_per_gpu,
        )

    def make_loss(self) -> LossFn:
        """What is minimised."""
        return sft_loss

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model and make the optimizer."""
        config = self.config
        self.engine = self.make_engine(
            self.model_type, config.engine.strategy, config.model, config.engine, config.optim
        )
        self.join_mesh("train", self.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss_fn: LossFn) -> None:
        """Minimise ``loss_fn`` instead."""
        self.loss_fn = loss_fn

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def train_batch(self, batch: DataProto) -> DataProto:
        """One optimizer step; ``meta_info["metrics"]``: loss, grad_norm, skipped_steps, lr and memory.

        ``meta_info["non_finite"]`` says why the step was left out, if it was; rows are those of the rank.
        """
        with self.trained.train_mode():
            metrics = self.trained.train_batch(batch, self.loss_fn, self.micro)
            metrics["lr"] = self.trained.lr_scheduler_step()
        return self.report(metrics, self.trained.non_finite, self.trained)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """log_probs, (bsz, response_length)."""
        with self.trained.eval_mode():
            return DataProto.from_dict(tensors=self.trained.infer_batch(batch, {"log_probs"}, self.micro))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move weights and optimizer state to ``"cpu"`` or to the engine's device."""
        self.trained.to(device, model, optimizer)


class RewardModelTrainingWorker(TrainingWorker):
    """A reward model and its optimizer, fitted to pairs.

    Args:
        config: the run's configuration.
        device_name: ``"cuda"``, ``"cpu"``, or None for what there is.
    """

    model_type = "reward_model"
    config: RMConfig

    def make_loss(self) -> LossFn:
        """Bradley-Terry."""
        return RewardModelLoss(self.config.loss)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def compute_scores(self, batch: DataProto) -> DataProto:
        """scores, (bsz, response_length): the model's output at the tokens with ``response_mask`` 1."""
        with self.trained.eval_mode():
            return DataProto.from_dict(tensors=self.trained.infer_batch(batch, {"scores"}, self.micro))


class DirectPreferenceWorker(TrainingWorker):
    """A policy and its optimizer, fitted to pairs, and the frozen reference that it is compared with.

    Args:
        config: the run's configuration.
        device_name: ``"cuda"``, ``"cpu"``, or None for what there is.
    """

    config: DPOConfig

    def make_loss(self) -> LossFn:
        """DPO or its kin."""
        return DirectPreferenceLoss(self.config.loss)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy, and the reference if the loss has one."""
        super().init_model()
        config = self.config
        self.reference: BaseEngine | None = None
        if not config.loss.reference_free:
            model = dataclasses.replace(config.model, path=config.ref.path or config.model.path)
            placement = dataclasses.replace(config.engine, param_offload=config.ref.param_offload)
            self.reference = self.make_engine("language_model", config.engine.strategy, model, placement)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """ref_log_prob under the reference, (bsz, response_length)."""
        if self.reference is None:
            raise ConfigError("loss.reference_free=true: there is no reference whose log-probs could be computed.")
        with self.reference.eval_mode():
            found = self.reference.infer_batch(batch, {"log_probs"}, self.micro)
        return DataProto.from_dict(tensors={"ref_log_prob": found["log_probs"]})
