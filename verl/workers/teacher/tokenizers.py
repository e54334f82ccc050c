"""Whether a teacher reads the policy's tokens: the same id must be the same token to both."""

from __future__ import annotations

import logging

from transformers import PreTrainedTokenizerBase

from verl.config import DistillationConfig, HFModelConfig, local_copies
from verl.errors import ConfigError
from verl.utils.model import check_tokenizer_fits, hf_config_of
from verl.utils.tokenizer import hf_tokenizer

logger = logging.getLogger(__name__)


def check_teacher_tokenizers(distillation: DistillationConfig, student: HFModelConfig) -> None:
    """Check the tokenizer of each teacher that has files on this machine or the hub; no model is loaded.

    Endpoints are asked for their tokens when they are first connected to.

    Raises:
        ConfigError: a teacher has another tokenizer than the policy, or an embedding with fewer tokens.
    """
    student = local_copies(student)
    of_policy = hf_tokenizer(student.tokenizer_path or student.path, trust_remote_code=student.trust_remote_code)
    for name, teacher in distillation.teachers.items():
        if teacher.inference.name == "openai":
            continue
        model = teacher_model(local_copies(teacher).model_path, student)
        of_teacher = hf_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        check_same_tokenizer(of_teacher, of_policy, f"distillation.teacher_models.{name}.model_path={model.path}")
        check_tokenizer_fits(of_policy, hf_config_of(model), warns=False)


def teacher_model(path: str | None, student: HFModelConfig) -> HFModelConfig:
    """Return the model section of a teacher; what loads code is as for the policy."""
    assert path is not None, "the configuration was not checked: a teacher has no model_path"
    return HFModelConfig(path=path, trust_remote_code=student.trust_remote_code, external_lib=student.external_lib)


def check_same_tokenizer(teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, setting: str) -> None:
    """Check that each token of the policy has the same id in the teacher's vocabulary.

    Ids above the policy's vocabulary do not matter: padding of the teacher's embedding, or tokens that only the teacher
    knows, which the policy never draws.

    Args:
        teacher: its tokenizer.
        policy: its tokenizer.
        setting: names the teacher in messages.

    Raises:
        ConfigError: the first id that differs.
    """
    of_policy = {token_id: token for token, token_id in policy.get_vocab().items()}
    of_teacher = {token_id: token for token, token_id in teacher.get_vocab().items()}
    differing = [token_id for token_id, token in of_policy.items() if of_teacher.get(token_id) != token]
    if differing:
        first = min(differing)
        known = f"{of_teacher[first]!r} to the teacher" if first in of_teacher else "no token of the teacher"
        raise ConfigError(
            f"{setting} has another tokenizer than the policy: token {first} is {of_policy[first]!r} to the policy and "
            f"{known} ({len(differing)} of {len(of_policy)} tokens differ). A teacher scores the policy's tokens, so "
            "both need one vocabulary. Take a teacher of the policy's model family."
        )
    last = max(of_policy)
    if additional := sorted(token for token_id, token in of_teacher.items() if token_id > last):
        logger.warning(
            "%s knows %d tokens that the policy lacks, such as %r. They have no share of its distribution.",
            setting,
            len(additional),
            additional[0],
        )
