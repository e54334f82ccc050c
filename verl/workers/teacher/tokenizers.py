"""Comparison of a teacher's tokenizer with the policy's: one vocabulary is needed, or an alignment by text."""

from __future__ import annotations

import logging

from transformers import PreTrainedTokenizerBase

from verl.algorithms.distillation import distillation_loss_info
from verl.config import DistillationConfig, HFModelConfig, local_copies
from verl.errors import ConfigError
from verl.utils.model import check_tokenizer_fits, hf_config_of
from verl.utils.tokenizer import hf_tokenizer, tokenizer_of
from verl.workers.teacher.endpoint import EndpointTeacher

logger = logging.getLogger(__name__)


def check_teacher_tokenizers(distillation: DistillationConfig, student: HFModelConfig) -> None:
    """Check the tokenizer of each teacher, by its files or by asking its endpoint; no model is loaded.

    Raises:
        ConfigError: a teacher has another tokenizer than the policy and these are not aligned by text
            (``distillation.alignment``), or an embedding with fewer tokens, or an endpoint does not give what the
            divergence reads.
    """
    student = local_copies(student)
    policy_tokenizer = tokenizer_of(student)
    for name, teacher in distillation.teachers.items():
        if teacher.inference.name == "openai":
            loss = distillation.distillation_loss
            top_k = loss.topk or 0 if distillation_loss_info(loss.loss_mode).reads == "topk" else 0
            EndpointTeacher(f"distillation.teacher_models.{name}", teacher, policy_tokenizer, top_k)
            continue
        model = teacher_model(local_copies(teacher).model_path, student)
        teacher_tokenizer = hf_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        setting = f"distillation.teacher_models.{name}.model_path={model.path}"
        if distillation.aligns_text and _differing(teacher_tokenizer, policy_tokenizer):
            check_tokenizer_fits(teacher_tokenizer, hf_config_of(model), warns=False)
            continue
        remedy = ", or set distillation.alignment=text, which compares spans of text"
        check_same_tokenizer(teacher_tokenizer, policy_tokenizer, setting, remedy)
        check_tokenizer_fits(policy_tokenizer, hf_config_of(model), warns=False)


def tokenizers_by_text(distillation: DistillationConfig, student: HFModelConfig) -> dict[str, PreTrainedTokenizerBase]:
    """Return the tokenizers, by name, of the teachers whose tokens are aligned with the policy's by text.

    Of an endpoint the tokenizer is not known: it must be the policy's.
    """
    if not distillation.aligns_text:
        return {}
    policy_tokenizer = tokenizer_of(student)
    tokenizers = {}
    for name, teacher in distillation.teachers.items():
        if teacher.inference.name != "openai":
            model = teacher_model(local_copies(teacher).model_path, student)
            teacher_tokenizer = hf_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
            if _differing(teacher_tokenizer, policy_tokenizer):
                tokenizers[name] = teacher_tokenizer
    return tokenizers


def teacher_model(path: str | None, student: HFModelConfig) -> HFModelConfig:
    """Return the model section of a teacher; what loads code is as for the policy."""
    assert path is not None, "the configuration was not checked: a teacher has no model_path"
    return HFModelConfig(path=path, trust_remote_code=student.trust_remote_code, external_lib=student.external_lib)


def check_same_tokenizer(
    teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, setting: str, remedy: str = ""
) -> None:
    """Check that each token of the policy has the same id in the teacher's vocabulary.

    Ids above the policy's vocabulary do not matter: padding of the teacher's embedding, or tokens that only the teacher
    knows, which the policy never draws.

    Args:
        teacher: its tokenizer.
        policy: its tokenizer.
        setting: names the teacher in messages.
        remedy: what else can be done, for the message.

    Raises:
        ConfigError: the first id that differs.
    """
    policy_tokens, teacher_tokens = _by_id(policy), _by_id(teacher)
    if differing := _differing(teacher, policy):
        first = min(differing)
        teacher_text = (
            f"{teacher_tokens[first]!r} to the teacher" if first in teacher_tokens else "no token of the teacher"
        )
        raise ConfigError(
            f"{setting} has another tokenizer than the policy: token {first} is {policy_tokens[first]!r} to the policy "
            f"and {teacher_text} ({len(differing)} of {len(policy_tokens)} tokens differ). A teacher scores the "
            f"policy's tokens, so both need one vocabulary. Take a teacher of the policy's model family{remedy}."
        )
    last = max(policy_tokens)
    if additional := sorted(token for token_id, token in teacher_tokens.items() if token_id > last):
        logger.warning(
            "%s knows %d tokens that the policy lacks, such as %r. They have no share of its distribution.",
            setting,
            len(additional),
            additional[0],
        )


def _by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _differing(teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> list[int]:
    """Return the policy's ids that are another token, or none, to the teacher."""
    teacher_tokens = _by_id(teacher)
    return [token_id for token_id, token in _by_id(policy).items() if teacher_tokens.get(token_id) != token]
