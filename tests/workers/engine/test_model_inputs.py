"""Batch columns to model inputs, on a batch small enough to check by eye."""

import pytest
import torch
from torch.testing import assert_close

from verl.errors import SchemaError
from verl.protocol import DataProto
from verl.workers.engine.model.inputs import check_token_ids, prepare_inputs

CPU = torch.device("cpu")


def batch(attention, response_mask=None):
    mask = torch.tensor(attention)
    ids = torch.arange(1, mask.numel() + 1).view_as(mask) * mask
    chosen = mask[:, 3:] if response_mask is None else torch.tensor(response_mask)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, 3:],
            "response_mask": chosen,
        }
    )


# prompt length 3, response length 2; ids are counted from 1
TWO_ROWS = [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]


def test_packed_by_hand():
    inputs = prepare_inputs(batch(TWO_ROWS), packed=True, device=CPU)
    assert inputs.input_ids.tolist() == [[2, 3, 4, 8, 9, 10]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert inputs.attention_mask is None
    assert inputs.packing.lengths == (3, 3)
    assert inputs.packing.cu_seqlens.tolist() == [0, 3, 6]
    # token 4 is predicted at place 1 (token 3); 9 and 10 at places 3 and 4 (tokens 8 and 9)
    assert inputs.take.tolist() == [1, 3, 4]
    assert inputs.targets.tolist() == [4, 9, 10]
    assert inputs.scatter(torch.tensor([0.1, 0.2, 0.3])).tolist() == [
        [pytest.approx(0.1), 0.0],
        [pytest.approx(0.2), pytest.approx(0.3)],
    ]


def test_padded_by_hand():
    inputs = prepare_inputs(batch(TWO_ROWS), packed=False, device=CPU)
    # each sequence begins its row
    assert inputs.input_ids.tolist() == [[2, 3, 4], [8, 9, 10]]
    assert inputs.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert inputs.packing is None
    assert inputs.input_ids.flatten()[inputs.take].tolist() == [3, 8, 9]
    assert inputs.targets.tolist() == [4, 9, 10]
    inputs = prepare_inputs(batch([[0, 1, 1, 1, 0], [0, 0, 1, 1, 0]]), packed=False, device=CPU)
    assert inputs.input_ids.tolist() == [[2, 3, 4], [8, 9, 0]]
    assert inputs.attention_mask.tolist() == [[True, True, True], [True, True, False]]
    assert inputs.input_ids.flatten()[inputs.take].tolist() == [3, 8]


@pytest.mark.parametrize("packed", [True, False])
def test_read_at_the_token_itself(packed):
    inputs = prepare_inputs(batch(TWO_ROWS, [[1, 0], [0, 1]]), packed, CPU, at_token=True)
    assert inputs.input_ids.flatten()[inputs.take].tolist() == [4, 10] == inputs.targets.tolist()


@pytest.mark.parametrize("packed", [True, False])
def test_masked_tokens_are_read_by_the_model_and_not_scored(packed):
    inputs = prepare_inputs(batch(TWO_ROWS, [[1, 0], [0, 1]]), packed, CPU)
    assert 9 in inputs.input_ids.flatten().tolist()
    assert inputs.targets.tolist() == [4, 10]
    assert inputs.rows.tolist() == [0, 1]
    assert inputs.columns.tolist() == [0, 1]


@pytest.mark.parametrize("packed", [True, False])
def test_all_responses_empty(packed):
    inputs = prepare_inputs(batch([[0, 1, 1, 0, 0], [1, 1, 1, 0, 0]]), packed, CPU)
    assert inputs.take.shape == (0,)
    assert_close(inputs.scatter(torch.zeros(0)), torch.zeros(2, 2))


@pytest.mark.parametrize(
    "attention, response_mask, problem",
    [
        ([[1, 0, 1, 1, 0]], None, "padding between its tokens"),
        ([[0, 1, 1, 0, 1]], None, "padding between its tokens"),
        ([[0, 1, 1, 1, 0]], [[1, 1]], "where attention_mask is 0"),
        ([[0, 0, 0, 1, 1]], None, "without a prompt"),
        ([[0, 0, 0, 0, 0]], None, "no token at all"),
    ],
)
def test_what_packing_would_read_otherwise_is_refused(attention, response_mask, problem):
    whole = batch([[0, 1, 1, 1, 0], *attention], None if response_mask is None else [[1, 0], *response_mask])
    with pytest.raises(SchemaError, match=f"row 1 of the batch .*{problem}"):
        prepare_inputs(whole, packed=True, device=CPU)


def test_a_token_without_a_row_in_the_embedding_is_named():
    check_token_ids(batch(TWO_ROWS), vocab_size=11)  # the largest id is 10
    with pytest.raises(SchemaError, match=r"row 1 of the batch has the token id 10, .* embedding has 10 rows"):
        check_token_ids(batch(TWO_ROWS), vocab_size=10)
