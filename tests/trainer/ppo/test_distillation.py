"""The driver's part of distillation: metrics, and which teacher scores a row."""

import json

import numpy as np
import pytest
import torch

from verl.config import DataConfig, DistillationConfig, DistillationTeacherModelConfig
from verl.datasets import RLHFDataset
from verl.errors import DataError
from verl.protocol import DataProto
from verl.testing.models import tiny_tokenizer
from verl.trainer.ppo.distillation import check_teacher_data, distillation_metrics, teacher_index


def test_metrics_by_hand():
    columns = {
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        "old_log_probs": torch.tensor([[-1.0, -2.0, 9.0], [-3.0, 9.0, 9.0]]),
        "teacher_logprobs": torch.tensor([[-2.0, -4.0, 0.0], [-1.0, 0.0, 0.0]]),
    }
    sources = {"data_source": np.array(["math", None], dtype=object)}
    metrics = distillation_metrics(DataProto.from_dict(tensors=columns, non_tensors=sources))
    expected = {"distillation/kl": (1 + 2 - 2) / 3, "distillation/kl/None": -2.0, "distillation/kl/math": 1.5}
    assert metrics == {name: pytest.approx(value) for name, value in expected.items()}
    # Teachers of the whole vocabulary compute in the update, which a step of critic_warmup or rollout_only has not.
    del columns["teacher_logprobs"]
    assert distillation_metrics(DataProto.from_dict(tensors=columns, non_tensors=sources)) == {}


def test_keys_of_teachers_may_be_numbers_in_the_data():
    models = {
        name: DistillationTeacherModelConfig(key=key, model_path=name) for name, key in (("easy", "1"), ("hard", "2"))
    }
    config = DistillationConfig(enabled=True, teacher_key="level", teacher_models=models)

    def index(*levels: object) -> list[int]:
        columns = {"level": np.array(levels, dtype=object)}
        batch = DataProto.from_dict(tensors={"responses": torch.zeros(len(levels), 1)}, non_tensors=columns)
        return teacher_index(batch, config).tolist()

    assert index(2, "1", 1) == [1, 0, 0]
    with pytest.raises(DataError, match=r"row 1 has level=3, and no teacher has this key: easy\.key=1"):
        index(1, 3)


def test_rows_of_agents_need_a_teacher_with_the_policys_tokenizer(tmp_path):
    row = {"prompt": [{"role": "user", "content": "q"}], "data_source": "math"}
    rows = [row, row | {"data_source": "code", "agent_name": "tool_agent"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    dataset = RLHFDataset(str(tmp_path / "train.jsonl"), tiny_tokenizer(), DataConfig(max_prompt_length=8))
    models = {name: DistillationTeacherModelConfig(key=name, model_path=name) for name in ("math", "code")}
    config = DistillationConfig(enabled=True, alignment="text", teacher_models=models)
    check_teacher_data(config, dataset)
    check_teacher_data(config, dataset, {"math"})
    with pytest.raises(DataError, match=r"row 1.*: the agent loop tool_agent answers this row, and its teacher code"):
        check_teacher_data(config, dataset, {"code"})
