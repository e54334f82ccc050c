"""The declared columns, and what a stage says when one is missing or malformed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from docs.generate.columns import PAGE, page
from verl.errors import SchemaError
from verl.protocol import DataProto
from verl.schema import COLUMNS, check_columns, require

WELL_KNOWN = {
    "prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids", "rollout_log_probs",
    "weight_versions",
    "rm_scores", "old_log_probs", "ref_log_prob", "entropys", "values", "token_level_scores", "token_level_rewards",
    "advantages", "returns", "reward_baselines", "rollout_is_weights", "sum_pi_squared", "routed_experts",
    "teacher_logprobs", "dummy_tensor", "uid", "raw_prompt", "data_source", "reward_model", "extra_info", "index",
    "tools_kwargs", "interaction_kwargs", "agent_name", "__num_turns__", "multi_modal_inputs", "tool_extra_fields",
}  # fmt: skip


def generated() -> DataProto:
    """Two rows, prompts of 3 tokens, responses of 2."""
    return DataProto.from_dict(
        {
            "prompts": torch.zeros(2, 3).long(),
            "responses": torch.zeros(2, 2).long(),
            "response_mask": torch.ones(2, 2).long(),
            "input_ids": torch.zeros(2, 5).long(),
            "position_ids": torch.zeros(2, 4, 5).long(),
            "rollout_log_probs": torch.zeros(2, 2),
            "reward_baselines": torch.zeros(2),
            "dummy_tensor": torch.zeros(2, 1, dtype=torch.uint8),
            "mine": torch.zeros(2, 7, dtype=torch.float16),
        },
        {"uid": ["a", "b"], "index": np.array([0, 1])},
    )


def replaced(**columns: torch.Tensor | np.ndarray) -> DataProto:
    data = generated()
    for key, value in columns.items():
        if isinstance(value, torch.Tensor):
            data.batch[key] = value
        else:
            data.non_tensor_batch[key] = value
    return data


def test_every_known_column_is_declared():
    assert COLUMNS.keys() >= WELL_KNOWN
    for name, column in COLUMNS.items():
        assert column.name == name
        assert column.meaning
        assert column.producer
        assert column.dims[0] == "bsz"
        assert column.is_tensor == (column.dtype != "object")
        formats = column.dtype.split(" or ") if column.is_tensor else []
        assert all(isinstance(getattr(torch, one), torch.dtype) for one in formats)


def test_require_names_the_column_those_there_are_and_the_maker():
    require(generated(), ["prompts", "uid"], "reward")
    require({"a": 1}, ["a"], "reward")
    with pytest.raises(SchemaError) as error:
        require(generated().select(["responses"]), ("responses", "values"), "advantage estimator 'gae'")
    assert str(error.value) == (
        "advantage estimator 'gae' needs column 'values', which the batch lacks (has: index, responses, uid). "
        "'values' is made by critic.compute_values."
    )
    with pytest.raises(SchemaError) as error:
        require({"values": 1}, ("value", "returns"), "my stage")
    assert str(error.value) == (
        "my stage needs columns 'value', 'returns', which the batch lacks (has: values). verl does not make 'value': "
        "a data set or a stage of yours must. Did you mean 'values'? 'returns' is made by advantages."
    )
    with pytest.raises(SchemaError, match="has: nothing"):
        require(DataProto(), ["uid"], "reward")


def test_columns_as_declared_pass():
    check_columns(generated())
    check_columns(generated()[:0])
    check_columns(DataProto())
    # before generation a sequence is the prompt alone
    check_columns({"input_ids": torch.zeros(2, 3).long(), "attention_mask": torch.zeros(2, 3).long()})
    check_columns(replaced(position_ids=torch.zeros(2, 5).long()))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"responses": torch.zeros(2, 2)}, "'responses' has dtype float32, it should be int64"),
        ({"response_mask": torch.ones(2, 2).bool()}, "'response_mask' has dtype bool, it should be int64"),
        ({"rollout_log_probs": torch.zeros(2, 2).bfloat16()}, "dtype bfloat16, it should be float32"),
        ({"prompts": torch.zeros(2).long()}, r"'prompts' should be \(bsz, prompt_length\), got shape \(2,\)"),
        ({"values": torch.zeros(2, 2, 1)}, r"'values' should be \(bsz, response_length\), got shape \(2, 2, 1\)"),
        ({"position_ids": torch.zeros(2).long()}, r"\(bsz, ..., sequence_length\), got shape \(2,\)"),
        ({"values": torch.zeros(2, 3)}, "response_length=3, but 'responses' has response_length=2"),
        ({"position_ids": torch.zeros(2, 4, 6).long()}, "sequence_length=6, but 'input_ids' has sequence_length=5"),
        (
            {"input_ids": torch.zeros(2, 6).long(), "position_ids": torch.zeros(2, 6).long()},
            r"'input_ids' has length 6, but prompts and responses together have 3 \+ 2",
        ),
        ({"values": np.zeros((2, 2))}, "'values' is a ndarray; it should be a tensor, in batch"),
        ({"uid": torch.zeros(2)}, "'uid' is a Tensor; it should be an array, in non_tensor_batch"),
    ],
)
def test_columns_that_differ_from_their_declaration(columns: dict, message: str):
    data = replaced(**columns)
    if "uid" in columns:
        data.non_tensor_batch.pop("uid")
    with pytest.raises(SchemaError, match=message):
        check_columns(data)


def test_the_documentation_shows_the_table():
    assert PAGE.read_text() == page(), "run `python -m docs.generate.columns`"
    assert "| `values` | float32 | (bsz, response_length) | value of the state before the token |" in page()
