"""Keys of distillation: teachers have names of the user's own, and all keys below them are checked."""

import pytest

from tests.trainer.config.support import Run, only
from verl.config import DistillationConfig
from verl.trainer.config.load import load_config

MATH = "distillation.teacher_models.math"


def test_a_teacher_under_a_name_of_the_users_has_the_defaults_of_the_declared_one(run: Run):
    config = run.load({f"{MATH}.key": "math", "actor_rollout_ref.rollout.temperature": 0.7})
    teacher = config.distillation.teacher_models["math"]
    assert (teacher.key, teacher.model_path) == ("math", None)
    assert (teacher.inference.name, teacher.inference.temperature) == ("native", 0.7)
    assert teacher.inference == config.distillation.teacher_models["teacher_model"].inference
    assert load_config(config.to_dict()) == config


@pytest.mark.parametrize(
    "key, value, said",
    [
        (f"{MATH}.inference.gpu_memory_utilisation", 0.3, f"did you mean {MATH}.inference.gpu_memory_utilization?"),
        (f"{MATH}.inference.gpu_memory_utilization", 3, "a number > 0 and <= 1"),
        (f"{MATH}.inference.name", "trtllm", "this engine is not in this version"),
        (f"{MATH}.inference", 3, "this is a section"),
    ],
)
def test_keys_below_it_are_checked(run: Run, key: str, value: object, said: str):
    report = only(run.refusal({key: value}, explicit=[key]))
    assert key in report
    assert said in report


def test_the_declared_teacher_counts_only_if_it_has_a_model():
    keyed = {"math": {"key": "math", "model_path": "a"}}
    assert list(DistillationConfig(teacher_models=keyed).teachers) == ["math"]
    assert list(DistillationConfig(teacher_models={**keyed, "teacher_model": {}}).teachers) == ["math"]
    both = {**keyed, "teacher_model": {"model_path": "b"}}
    assert list(DistillationConfig(teacher_models=both).teachers) == ["math", "teacher_model"]
    assert list(DistillationConfig().teachers) == ["teacher_model"]
