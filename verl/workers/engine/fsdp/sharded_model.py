"""The model of an FSDP2 engine as a rank holds it: set-up, memory, ranks, checkpoints."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from verl.backends import backend_for
from verl.backends.base import Backend
from verl.checkpoint.ranks import RankState
from verl.checkpoint.shards import TrainingState, write_world_size
from verl.checkpoint.states import seed_everything
from verl.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.config.megatron import ranks_per_copy
from verl.errors import ConfigError
from verl.utils.device import ensure_process_group, get_device
from verl.utils.flops_counter import Arithmetic, FlopsCounter, device_peak_flops
from verl.utils.model import hf_config_of, torch_dtype
from verl.utils.sharded_tensor import full_tensor, local_rows
from verl.utils.transformers_private import experts_of
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.fsdp.experts import balance_coefficient
from verl.workers.engine.fsdp.host_memory import HostMemory
from verl.workers.engine.fsdp.packing_check import PackingCheck
from verl.workers.engine.fsdp.sharding import (
    InitialWeights,
    allocate_weights,
    divided,
    drop_weights,
    fill,
    make_mesh,
    make_rows_mesh,
    mixed_precision,
    needs_sharding,
    new_weights,
    shard_model,
)
from verl.workers.engine.fsdp.tensor_parallel import check_division, divide_layers
from verl.workers.engine.loss_scale import LossScale
from verl.workers.engine.model.adapters import (
    ADAPTER_FOLDER,
    adapter_layers,
    base_of,
    check_same_scale,
    linear_adapters,
    magnitudes_of,
    merged,
    require_linear,
    targets_of,
    without_adapters,
    write_adapters,
)
from verl.workers.engine.model.export import (
    WeightFiles,
    copy_companions,
    untrained_heads,
    weights_on_first_rank,
    write_in_turn,
    write_model_folder,
)
from verl.workers.engine.model.headed import (
    HeadedModel,
    ModelType,
    build_model,
    check_sequence_sharing,
    enable_gradient_checkpointing,
    folder_weights,
    own_state,
    trained_parameters,
)
from verl.workers.engine.muon import hidden_matrices
from verl.workers.engine.optimizer import build_optimizer, build_scheduler, state_bytes
from verl.workers.routers import Routers

if TYPE_CHECKING:
    from verl.checkpoint.states import State

logger = logging.getLogger(__name__)


class ShardedModel(BaseEngine):
    """A model under FSDP2, as this rank holds it, with its optimizer; the engine computes with it.

    Args:
        model_config: model folder and settings of the model.
        engine_config: with ``forward_only`` the model is frozen and needs no ``optimizer_config``.
        device_name: ``"cuda"``, ``"cpu"``, or None to use a GPU if there is one.
        timeout_s: seconds after which an unfinished collective is an error.
        frozen: parts of module names, such as ``visual``, whose weights are not trained.
    """

    model_type: ModelType = "language_model"

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: FSDPOptimizerConfig | None = None,
        device_name: str | None = None,
        timeout_s: float = 600,
        frozen: Sequence[str] = (),
    ) -> None:
        self.frozen = frozen
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.device = get_device(device_name)
        ensure_process_group(self.device, timeout_s)
        tensor = engine_config.tensor_parallel_size
        # The layers of other backends compute with whole matrices.
        self.backend = backend_for(self.device, model_config.use_liger) if tensor == 1 else Backend(self.device)
        mesh = make_mesh(self.device, engine_config.fsdp_size, tensor)
        self.mesh, self.tensor_mesh = (mesh, None) if tensor == 1 else divided(mesh)
        self.rows_mesh = make_rows_mesh(self.device, engine_config.ulysses_sequence_parallel_size, tensor)
        self.model: HeadedModel
        self.optimizer: Optimizer | None = None
        self.scheduler: LambdaLR | None = None
        self._host_memory = HostMemory(is_pinned=self.device.type == "cuda")
        self.is_packed = False
        self.balance_weight = 0.0
        self._contexts = 0

    # ---- set-up -------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Build and shard the model, and make the optimizer; see :class:`BaseEngine`."""
        config = self.engine_config
        if config.full_determinism:
            # cuBLAS reads it when it first multiplies, and is not deterministic without it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        # Tensor-parallel ranks drop out the same activations between layers.
        seed_everything(config.seed + dist.get_rank() // config.tensor_parallel_size)
        dtype = torch_dtype(config.model_dtype)
        hf_config = hf_config_of(self.model_config)
        if self.tensor_mesh is not None:
            check_division(hf_config, self.tensor_mesh.size())
            self._check_beside_division()
        if self.sequence_ranks > 1:
            check_sequence_sharing(hf_config, self.sequence_ranks)
        if not config.forward_only:
            self.balance_weight = balance_coefficient(hf_config, self.model_config.override_config)
        self.model = model = self.build(dtype).eval()
        if model.unused_dropout:
            rates = ", ".join(f"{name}={rate}" for name, rate in model.unused_dropout.items())
            logger.info("dropout is off in training; model.override_config turns it on: %s", rates)
        self.routers = Routers(model)
        if len(self.routers):
            logger.info("the experts of %s are computed by %s", type(model.hf).__name__, experts_of(model.hf.config))
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.compute_dtype = mixed_precision(config).param_dtype or dtype
        self.backend.install(model, self._units, self.mesh.get_group("shard"))
        check = PackingCheck(model, self.device, self.compute_dtype, self.sequence_group)
        fast_layers = functools.partial(self.backend.use_fast_layers, self.compute_dtype)
        self.is_packed = check.settle(self.model_config.use_remove_padding, fast_layers)
        self._modules = list(model.modules())
        self._reshard()  # otherwise the optimizer would receive the gathered copies
        if not config.forward_only:
            if self.optimizer_config is None:
                raise ConfigError("a model that is trained needs optimizer_config; or set forward_only=true.")
            for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
                if self.optimizer_config[name] != "fp32":
                    raise ConfigError(
                        f"optim.{name}={self.optimizer_config[name]}: moments have the precision of the stored weights "
                        "under FSDP. Leave it at fp32, or use strategy=megatron."
                    )
            matrices = hidden_matrices(model, model.head).values()
            self.optimizer = build_optimizer(trained_parameters(model).values(), self.optimizer_config, matrices)
            self.scheduler = build_scheduler(self.optimizer, self.optimizer_config)
            if self.compute_dtype == torch.float16:
                self.loss_scale = LossScale()
        self._offload()

    def _check_beside_division(self) -> None:
        """Check that nothing is asked for that does not go with matrices divided over ranks."""
        config, model = self.engine_config, self.model_config
        refused = {
            "ulysses_sequence_parallel_size": config.ulysses_sequence_parallel_size > 1,
            "model.use_liger": bool(model.use_liger),
            "model.enable_activation_offload": model.enable_activation_offload and not config.forward_only,
            "optim.optimizer=Muon": self.optimizer_config is not None and self.optimizer_config.is_muon,
        }
        if conflicts := [key for key, is_set in refused.items() if is_set]:
            raise ConfigError(
                f"fsdp_config.tensor_parallel_size={config.tensor_parallel_size} does not go with "
                f"{', '.join(conflicts)}. Use tensor_parallel_size=1, or leave the other out."
            )

    def build(self, dtype: torch.dtype) -> HeadedModel:
        """Build the model, sharded over the ranks; no rank ever holds all of it. Collective."""
        config = self.engine_config
        is_trained = not config.forward_only
        build = functools.partial(
            build_model, self.model_type, self.model_config, seed=config.seed, backbone_class=self.backbone_class()
        )
        is_divided, source = self.mesh.size() > 1 or self.tensor_mesh is not None, None
        is_first = dist.get_rank() == 0
        model = build(
            dtype, with_weights=not is_divided, with_adapters=is_first, is_trained=is_trained, frozen=self.frozen
        )
        if is_divided:
            if is_first:
                open_folder = functools.partial(folder_weights, self.model_type, self.model_config, model.hf.config)
                is_new = self.has_adapters and self.model_config.lora_adapter_path is None
                magnitudes = magnitudes_of(adapter_layers(model)) if is_new else {}
                source = InitialWeights(open_folder, new_weights(model), magnitudes)
            drop_weights(model)
        if self.model_config.enable_gradient_checkpointing and not config.forward_only:
            enable_gradient_checkpointing(model)
        self.adapters = adapter_layers(model) if self.has_adapters else {}
        if self.tensor_mesh is not None:
            divide_layers(model, self.tensor_mesh, self.adapters)
        # Adapters are stored in fp32 whatever the model is stored in, and FSDP casts both for the passes.
        if is_divided or needs_sharding(config, self.mesh) or (self.adapters and dtype is not torch.float32):
            shard_model(model, config, self.mesh)
            if is_divided:
                allocate_weights(model, torch.device("cpu") if config.offload_policy else self.device)
                fill(model, source, self.device)
        else:
            model.to(self.device)
        return model

    def backbone_class(self) -> type[PreTrainedModel] | None:
        """Return another implementation of the model's backbone than Transformers' own; None for that."""
        return None

    # ---- modes and memory ---------------------------------------------------------------------

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Keep weights and optimizer on the device, and layers in training mode, inside the context."""
        with self._awake(optimizer=True):
            self._set_training(True)
            try:
                yield
            finally:
                self._set_training(False)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Keep weights on the device, and layers in inference mode, inside the context."""
        with self._awake(optimizer=False):
            yield

    def _set_training(self, mode: bool) -> None:
        """Do what ``self.model.train(mode)`` does, in a fiftieth of the time: an update waits for it twice."""
        for module in self._modules:
            if type(module).train is torch.nn.Module.train:
                vars(module)["training"] = mode  # nn.Module's __setattr__ looks through parameters and buffers
            else:
                module.train(mode)

    @property
    def has_adapters(self) -> bool:
        """True if LoRA adapters are trained instead of the model's weights."""
        return self.model_config.has_adapters and not self.engine_config.forward_only

    def disable_adapter(self) -> AbstractContextManager[None]:
        """See :meth:`BaseEngine.disable_adapter`."""
        return without_adapters(self.adapters.values()) if self.has_adapters else super().disable_adapter()

    @contextmanager
    def _awake(self, optimizer: bool) -> Iterator[None]:
        self.to(self.device.type, model=True, optimizer=optimizer)
        self._contexts += 1
        outer = get_ulysses_sequence_parallel_group()
        set_ulysses_sequence_parallel_group(self.sequence_group)
        try:
            yield
        finally:
            set_ulysses_sequence_parallel_group(outer)
            self._contexts -= 1
            self._reshard()
            if self._contexts == 0:
                self._offload()

    def _offload(self) -> None:
        config = self.engine_config
        self.to("cpu", model=config.param_offload, optimizer=config.optimizer_offload)

    def _reshard(self) -> None:
        """Free gathered parameters."""
        # FSDP leaves some units gathered after a forward pass without a backward pass.
        for unit in self._units:
            unit.reshard()

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move weights and optimizer state; no-op on a CPU and with FSDP's own offload (``offload_policy``)."""
        if self.device.type == "cpu" or self.engine_config.offload_policy:
            return
        moves_model = model and next(self.model.parameters()).device.type != device
        moved = self.optimizer if optimizer else None
        if device == "cpu":
            if moves_model:
                self._host_memory.move_model(self.model)
            has_moved = moved is not None and self._host_memory.move_states(moved)
            if moves_model or has_moved:
                torch.cuda.empty_cache()
            return
        if moves_model:
            self.model.to(self.device, non_blocking=True)
        for state in moved.state.values() if moved is not None else ():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = value.to(self.device, non_blocking=True)

    # ---- weights and ranks --------------------------------------------------------------------

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`BaseEngine.get_per_tensor_param`."""
        self._reshard()
        weights = self._whole_weights()
        return merged(weights, targets_of(self.adapters)) if self.has_adapters else weights

    def _whole_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Iterate over whole weights, then over buffers of model folders, such as biases of routers. Collective."""
        yield from self.backend.whole_weights(dtype)
        yield from self._saved_buffers()

    def _saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        saved = self.model.state_dict().keys()
        return ((name, buffer) for name, buffer in self.model.named_buffers() if name in saved)

    def trained_weights(self) -> Mapping[str, Tensor]:
        """See :meth:`BaseEngine.trained_weights`."""
        self._reshard()
        return trained_parameters(self.model)

    def weights_for_rollout(self, dtype: torch.dtype, divided: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`BaseEngine.weights_for_rollout`. Adapters are merged into weights as they are stored."""
        if self.has_adapters:
            return self.get_per_tensor_param()
        self._reshard()
        return chain(self.model.named_parameters(), self._saved_buffers()) if divided else self._whole_weights(dtype)

    def adapted_weights(self) -> AdaptedWeights:
        """See :meth:`BaseEngine.adapted_weights`."""
        if not self.has_adapters:
            return super().adapted_weights()
        require_linear(self.adapters)
        scales = {name: target.scale for name, target in targets_of(self.adapters).items()}
        return AdaptedWeights(self._base_weights, self._adapter_weights, scales)

    def _base_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._reshard()
        return base_of(self._whole_weights())

    def _adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        return linear_adapters(self._whole_adapters())

    def _whole_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the trained parameters one after the other. Collective: every rank iterates to the end."""
        self._reshard()
        return ((name, full_tensor(weight, self.device)) for name, weight in trained_parameters(self.model).items())

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """Ranks that share the sequences of this one; None if it has whole sequences."""
        if self.rows_mesh is None or self.sequence_ranks == 1:
            return None
        return self.rows_mesh.get_group("group")

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.engine_config.ulysses_sequence_parallel_size

    def get_data_parallel_size(self) -> int:
        """Return the number of groups of ranks with the same rows; without such groups the number of ranks."""
        return dist.get_world_size() // ranks_per_copy(self.engine_config)

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank's group."""
        return dist.get_rank() // ranks_per_copy(self.engine_config)

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the ranks with the same place in their group, which together have all rows once."""
        return dist.group.WORLD if self.rows_mesh is None else self.rows_mesh.get_group("dp")

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this rank is the first of those with its rows."""
        return dist.get_rank() % ranks_per_copy(self.engine_config) == 0

    def arithmetic(self) -> Arithmetic:
        """See :meth:`BaseEngine.arithmetic`. A CPU's peak is measured at the first call, which takes about 0.1 s."""
        counter = FlopsCounter.from_config(
            self.model.hf.config, self.model.head.out_features, is_frozen=self.has_adapters
        )
        return Arithmetic(counter, device_peak_flops(self.device, self.compute_dtype))

    # ---- checkpoints --------------------------------------------------------------------------

    def _training_state(self) -> TrainingState:
        trained = trained_parameters(self.model)
        tensors = trained if self.has_adapters else own_state(self.model)
        return TrainingState(tensors, trained, self.optimizer, self.scheduler)

    def state(
        self, global_step: int = 0, contents: Sequence[str] = ("model", "optimizer", "extra"), copied: bool = True
    ) -> RankState:
        """Collect this rank's part of a checkpoint; see :mod:`verl.checkpoint.shards`."""
        numbers = {"weight_version": self.weight_version, "global_step": global_step}
        if self.loss_scale is not None:
            numbers |= self.loss_scale.numbers()
        states = self._training_state().states(contents, numbers, copied)
        has_weights = "hf_model" in contents
        is_policy = self.model.head_name == "lm_head"
        heads = untrained_heads(self.model_config.path, self.model.hf.config) if has_weights and is_policy else ()
        export = None
        if has_weights and copied:
            export = WeightFiles.collect(self.get_per_tensor_param(), self.model, stored=heads)
        adapters = None
        if self.has_adapters and "model" in contents:
            adapters = weights_on_first_rank(self._whole_adapters())

        def describe(folder: Path) -> None:
            if export is not None:
                export.write(folder / "huggingface")
            if dist.get_rank():
                return
            write_world_size(folder)
            write_model_folder(self.model_config, self.model, has_weights, folder / "huggingface")
            if adapters is not None:
                write_adapters(self.model.hf, self.model.head_name, adapters, folder / ADAPTER_FOLDER)
                copy_companions(folder / "huggingface", folder / ADAPTER_FOLDER)

        def write_weights(folder: Path) -> None:
            with self._awake(optimizer=False):
                write_in_turn(self.get_per_tensor_param(), self.model, folder / "huggingface", stored=heads)

        return RankState(states, describe, write_weights if has_weights and not copied else None)

    def state_bytes(self) -> int:
        """See :meth:`BaseEngine.state_bytes`."""
        state = self._training_state()
        weights = sum(local_rows(tensor)[0].nbytes for tensor in state.tensors.values())
        return weights + (0 if self.optimizer is None else state_bytes(self.optimizer))

    def load_state(self, states: Mapping[str, State]) -> None:
        """Restore what :meth:`state` returned; see :class:`BaseEngine`."""
        self._take(self._training_state().restore(states))

    def load_checkpoint(self, local_path: str, contents: Sequence[str] = ("model", "optimizer", "extra")) -> None:
        """Restore from a checkpoint folder; see :class:`BaseEngine`."""
        folder = Path(local_path).expanduser()
        if self.has_adapters and "model" in contents:
            check_same_scale(self.model.hf, folder / ADAPTER_FOLDER)
        self._take(self._training_state().load(folder, contents))

    def _take(self, numbers: Mapping[str, int]) -> None:
        """Restore the counters of a checkpoint, which has none without ``extra``."""
        self.weight_version = int(numbers.get("weight_version", self.weight_version))
        if self.loss_scale is not None and numbers:
            self.loss_scale = LossScale.from_checkpoint(numbers)
