"""Which tokenizers a teacher may have: the policy's, whatever its embedding is padded to."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.config import DistillationConfig, DistillationTeacherModelConfig, HFModelConfig, TeacherInferenceConfig
from verl.errors import ConfigError
from verl.testing.models import hollow_model_dir, tiny_model_dir, tiny_tokenizer
from verl.workers.teacher.tokenizers import check_same_tokenizer, check_teacher_tokenizers


def check(teacher: str, student: str) -> None:
    models = {"big": DistillationTeacherModelConfig(model_path=teacher, inference=TeacherInferenceConfig(name="hf"))}
    check_teacher_tokenizers(DistillationConfig(enabled=True, teacher_models=models), HFModelConfig(path=student))


def test_a_teacher_with_a_padded_embedding_is_accepted_and_another_tokenizer_is_not(tmp_path: Path) -> None:
    student = tiny_model_dir(tmp_path / "student")
    check(tiny_model_dir(tmp_path / "padded", vocab=128), student)
    other = tiny_model_dir(tmp_path / "other", tokenizer="bpe")
    words = r"teacher_models.big.model_path=.*other has another tokenizer than the policy: token 4 is '0' to the policy"
    with pytest.raises(ConfigError, match=rf"{words} and '!' to the teacher .96 of 104 tokens differ"):
        check(other, student)
    with pytest.raises(ConfigError, match="no tokenizer can be read"):
        check(hollow_model_dir(tmp_path / "hollow"), student)


def test_a_token_that_one_of_them_lacks() -> None:
    """The policy never draws one that only the teacher knows; one that only the policy knows cannot be scored."""
    more = tiny_tokenizer()
    more.add_tokens(["<think>"])
    check_same_tokenizer(more, tiny_tokenizer(), "big")
    with pytest.raises(ConfigError, match=r"104 is '<think>' to the policy and no token of the teacher .1 of 105"):
        check_same_tokenizer(tiny_tokenizer(), more, "big")
