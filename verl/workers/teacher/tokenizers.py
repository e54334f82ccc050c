"""Whether a teacher reads the policy's tokens, the same id being the same token to both; else text is compared."""

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
    of_policy = tokenizer_of(student)
    for name, teacher in distillation.teachers.items():
        if teacher.inference.name == "openai":
            loss = distillation.distillation_loss
            top_k = loss.topk or 0 if distillation_loss_info(loss.loss_mode).reads == "topk" else 0
            EndpointTeacher(f"distillation.teacher_models.{name}", teacher, of_policy, top_k)
            continue
        model = teacher_model(local_copies(teacher).model_path, student)
        of_teacher = hf_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        setting = f"distillation.teacher_models.{name}.model_path={model.path}"
        if distillation.aligns_text and _differing(of_teacher, of_policy):
            check_tokenizer_fits(of_teacher, hf_config_of(model), warns=False)
            continue
        remedy = ", or set distillation.alignment=text, which compares spans of text"
        check_same_tokenizer(of_teacher, of_policy, setting, remedy)
        check_tokenizer_fits(of_policy, hf_config_of(model), warns=False)


def tokenizers_by_text(distillation: DistillationConfig, student: HFModelConfig) -> dict[str, PreTrainedTokenizerBase]:
    """Return the tokenizers, by name, of the teachers whose tokens are aligned with the policy's by text.

    Of an endpoint the tokenizer is not known: it must be the policy's.
    """
    if not distillation.aligns_text:
        return {}
    of_policy = tokenizer_of(student)
    made = {}
    for name, teacher in distillation.teachers.items():
        if teacher.inference.name != "openai":
            model = teacher_model(local_copies(teacher).model_path, student)
            of_teacher = hf_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
            if _differing(of_teacher, of_policy):
                made[name] = of_teacher
    return made


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
    of_policy, of_teacher = _by_id(policy), _by_id(teacher)
    if differing := _differing(teacher, policy):
        first = min(differing)
        known = f"{of_teacher[first]!r} to the teacher" if first in of_teacher else "no token of the teacher"
        raise ConfigError(
            f"{setting} has another tokenizer than the policy: token {first} is {of_policy[first]!r} to the policy and "
            f"{known} ({len(differing)} of {len(of_policy)} tokens differ). A teacher scores the policy's tokens, so "
            f"both need one vocabulary. Take a teacher of the policy's model family{remedy}."
        )
    last = max(of_policy)
    if additional := sorted(token for token_id, token in of_teacher.items() if token_id > last):
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
    of_teacher = _by_id(teacher)
    return [token_id for token_id, token in _by_id(policy).items() if of_teacher.get(token_id) != token]
