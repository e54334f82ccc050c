"""Teachers that are a rollout engine or an endpoint: they score the policy's tokens, and know none of their own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from verl.algorithms.distillation import distillation_loss_info
from verl.base.import_utils import prepare_process
from verl.config import (
    DistillationConfig,
    DistillationTeacherModelConfig,
    HFModelConfig,
    local_copies,
)
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.protocol.shared import SharedTensors
from verl.schema import require
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.device import ensure_process_group, get_device
from verl.utils.model import hf_config_of, torch_dtype
from verl.utils.model_facts.time_limits import time_limits
from verl.utils.tokenizer import tokenizer_of
from verl.vision.families import VisionConfig
from verl.workers.engine.model.headed import pretrained_weights
from verl.workers.rollout.base import BaseRollout, get_rollout_class
from verl.workers.rollout.scoring import ScoreRequest, TokenScores
from verl.workers.teacher.alignment import TextAlignment, spans_of_tokens
from verl.workers.teacher.endpoint import EndpointTeacher
from verl.workers.teacher.tokenizers import teacher_model

COLUMNS = ("input_ids", "attention_mask", "responses", "response_mask")


class EngineTeacher:
    """A teacher that is a rollout engine with frozen weights.

    Args:
        teacher: model and engine.
        student: the policy's model.
        tokenizer: whose tokens the teacher reads: the policy's, or its own if these are aligned by text.
        top_k: how many most likely tokens the divergence reads.
        device: where the engine computes.
        stays_awake: keep the engine's memory between calls.
        has_own_tokens: whether ``tokenizer`` is another one than the policy's.
    """

    def __init__(
        self,
        teacher: DistillationTeacherModelConfig,
        student: HFModelConfig,
        tokenizer: PreTrainedTokenizerBase,
        top_k: int,
        device: torch.device,
        stays_awake: bool,
        has_own_tokens: bool = False,
    ) -> None:
        config = teacher.inference.rollout(top_k, stays_awake)
        model = teacher_model(teacher.model_path, student)
        if has_own_tokens and teacher.inference.max_model_len is None:
            # The lengths of prompt and response are in the policy's tokens; the teacher may have more for a text.
            room = 2 * (config.prompt_length + config.response_length) + 1
            max_positions = getattr(hf_config_of(model).get_text_config(), "max_position_embeddings", room)
            config = replace(config, max_model_len=min(room, max_positions))
        if config.tensor_model_parallel_size > 1:
            ensure_process_group(device, time_limits(model.path).collective_s)  # ranks of an engine exchange values
        # Ids that this tokenizer lacks have no share of the teacher's distribution.
        self.rollout: BaseRollout = get_rollout_class(config.name)(config, model, tokenizer, device)
        self._weights = functools.partial(pretrained_weights, model, torch_dtype(config.dtype))
        self.vision = VisionConfig.from_config(hf_config_of(model))

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenScores]:
        """Wake the engine and compute the log-probs of given tokens. Collective over the ranks of the group."""
        with self.rollout.awake(self._weights, version=0) as rollout:
            return rollout.score(requests if rollout.leads else [])


class TeacherEngineWorker(Worker):
    """Worker with teachers that are engines, all divided among as many ranks, or endpoints.

    Args:
        config: teachers, and the loss, which says what is computed.
        student: the policy's model.
        device_name: ``"cuda"``, ``"cpu"``, or None to use a GPU if there is one.
    """

    def __init__(
        self,
        config: DistillationConfig,
        student: HFModelConfig,
        device_name: str | None = None,
    ) -> None:
        super().__init__()
        prepare_process()
        transformers.utils.logging.disable_progress_bar()  # Ray forwards output to the driver's log
        self.config = config
        self.student = local_copies(student)
        self.device_name = device_name
        self.configured = {name: local_copies(teacher) for name, teacher in config.teachers.items()}
        info = distillation_loss_info(config.distillation_loss.loss_mode)
        self.top_k = config.distillation_loss.topk or 0 if info.reads == "topk" else 0
        self.teachers: dict[str, EngineTeacher | EndpointTeacher] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the engines, and connect to the endpoints."""
        is_alone = self.config.ranks > 0 and len(self.configured) == 1
        device = get_device(self.device_name)
        ranks_per_engine, leads = 1, True
        student, alignments = self.student, TextAlignment.for_teachers(self.config, self.student)
        self.alignments = alignments
        policy_tokenizer = tokenizer_of(student)
        for name, teacher in self.configured.items():
            if not teacher.inference.is_engine:
                continue
            aligned = name in alignments
            read = alignments[name].teacher if aligned else policy_tokenizer
            engine = EngineTeacher(teacher, student, read, self.top_k, device, is_alone, has_own_tokens=aligned)
            ranks_per_engine, leads = engine.rollout.ranks_per_engine, engine.rollout.leads
            self.teachers[name] = engine
        self._register_dispatch_collect_info("teacher", dp_rank=self.rank // ranks_per_engine, is_collect=leads)
        for name, teacher in self.configured.items():
            if name not in self.teachers and leads:
                setting = f"distillation.teacher_models.{name}"
                self.teachers[name] = EndpointTeacher(setting, teacher, policy_tokenizer, self.top_k)
        self.leads = leads

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="teacher"))
    def compute_teacher_log_prob(self, data: DataProto, teacher: str = "") -> DataProto:
        """Compute the log-probs of the policy's tokens under a teacher.

        Args:
            data: rows with ``input_ids``, ``attention_mask``, ``responses`` and ``response_mask``; with
                ``multi_modal_inputs`` where there are images.
            teacher: its name among ``distillation.teacher_models``; may be left out where there is one.

        Returns:
            ``teacher_logprobs``, (bsz, response_length) float32, 0 where ``response_mask`` is; for divergences of the
            most likely tokens also ``teacher_topk_ids``, (bsz, response_length, topk) int32, and
            ``teacher_topk_logprobs``, float32; with ``distillation.alignment=text`` the columns of
            :meth:`verl.workers.teacher.alignment.AlignedRows.columns`.

        Raises:
            ConfigError: there is no teacher of that name.
            RolloutError: a row cannot be scored.
        """
        name = teacher or next(iter(self.configured))
        if name not in self.configured or (not teacher and len(self.configured) > 1):
            raise ConfigError(
                f"teacher='{teacher}': this worker has the teachers {', '.join(self.configured)}. Name one of them."
            )
        temperature = self.configured[name].inference.temperature or 1.0  # 0 is greedy
        if not self.leads:
            if isinstance(shared := self.teachers.get(name), EngineTeacher):
                shared.score([])
            return DataProto()
        scorer = self.teachers[name]
        vision = scorer.vision if isinstance(scorer, EngineTeacher) else None
        aligned = self.alignments[name].rows(data) if name in self.alignments else None
        rows = data if aligned is None else aligned.rows
        requests = requests_of(rows, self.top_k, temperature, vision)
        scores = scorer.score([request for request in requests if request is not None])
        columns = columns_of(rows, requests, scores, self.top_k)
        if aligned is not None:
            return aligned.columns(columns)
        return columns | spans_of_tokens(data.batch["response_mask"]) if self.config.aligns_text else columns


def requests_of(
    data: DataProto, top_k: int, temperature: float, vision: VisionConfig | None = None
) -> list[ScoreRequest | None]:
    """Make one request per row, of its tokens up to the last one of the policy; None for rows without such a token."""
    require(data, COLUMNS, "compute_teacher_log_prob")
    columns = data.batch
    width = columns["responses"].shape[1]
    images = data.non_tensor_batch.get("multi_modal_inputs", [None] * len(data))
    requests: list[ScoreRequest | None] = []
    for ids, has_token, is_trained, inputs in zip(
        columns["input_ids"], columns["attention_mask"].bool(), columns["response_mask"].bool(), images, strict=True
    ):
        if not bool(is_trained.any()):
            requests.append(None)
            continue
        first, last = int(is_trained.nonzero()[0]), int(is_trained.nonzero()[-1])
        end = len(ids) - width + last + 1
        tokens = ids[:end][has_token[:end]]
        shared = inputs or None
        if shared is not None and not isinstance(shared, SharedTensors):
            shared = SharedTensors(shared)
        text_places: tuple[int, ...] = ()
        if vision is not None:  # the policy may draw the id of an image, also where there is none
            is_drawn = torch.zeros_like(has_token)
            is_drawn[-width:] = is_trained
            is_drawn = is_drawn[:end][has_token[:end]]
            text_places = tuple((is_drawn & vision.marked(tokens)).nonzero().flatten().tolist())
        requests.append(
            ScoreRequest(tokens.tolist(), len(tokens) - (last - first + 1), top_k, temperature, shared, text_places)
        )
    return requests


def columns_of(
    data: DataProto, requests: Sequence[ScoreRequest | None], scores: Sequence[TokenScores], top_k: int
) -> DataProto:
    """Put scores at the places of their tokens; those that the policy did not draw stay 0."""
    is_trained = data.batch["response_mask"].bool()
    log_probs = torch.zeros(is_trained.shape)
    top_ids = torch.zeros((*is_trained.shape, top_k), dtype=torch.int32)
    top_log_probs = torch.zeros((*is_trained.shape, top_k))
    scored = iter(scores)
    for row, request in enumerate(requests):
        if request is None:
            continue
        row_scores = next(scored)
        places = is_trained[row].nonzero().flatten().cpu()
        at = places - places[0]
        log_probs[row, places] = row_scores.log_probs[at]
        top_ids[row, places] = row_scores.top_ids[at]
        top_log_probs[row, places] = row_scores.top_log_probs[at]
    columns = {"teacher_logprobs": log_probs}
    if top_k:
        columns |= {"teacher_topk_ids": top_ids, "teacher_topk_logprobs": top_log_probs}
    return DataProto.from_dict(tensors=columns)
