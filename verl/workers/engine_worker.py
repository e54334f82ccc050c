"""The base class of workers that hold engines."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
import transformers
from torch import Tensor

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
)
from verl.errors import CheckpointError, ConfigError
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import memory_metrics
from verl.utils.flops_counter import Arithmetic
from verl.utils.model_facts.time_limits import time_limits
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.non_finite import NonFinite
from verl.workers.profiling import RecordingPlan, process_recording


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
            process_recording.start(plan, self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_recording(self, role: str) -> None:
        """End the profile of a role; the last role of a process writes the file."""
        process_recording.stop(role)

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
        meta_info = {"metrics": metrics | memory_metrics(engine.device), "non_finite": list(problems)}
        return DataProto(
            meta_info=meta_info if expert_counts is None else meta_info | {"expert_counts": expert_counts.tolist()}
        )

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
        """Return a problem for each of the ``files`` below ``folder`` whose content differs from what was written.

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
