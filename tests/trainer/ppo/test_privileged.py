"""Prompts of self-distillation: what the teacher reads, by hand, with a tokenizer of one token per character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from verl.config import DataConfig, SelfDistillationConfig
from verl.datasets.chat import encode, render_prompt
from verl.errors import ConfigError, DataError
from verl.protocol import DataProto
from verl.testing.models import tiny_tokenizer
from verl.trainer.ppo.privileged import PrivilegedPrompts
from verl.workers.teacher.prompts import rows_for_teacher

TOKENIZER = tiny_tokenizer()


def ids_of(content: str, **more) -> list[int]:
    return encode(render_prompt([{"role": "user", "content": content}], TOKENIZER, "here", **more), TOKENIZER)


def scored(questions: Sequence[str | list[int]], answers: list[str], scores: list[float], **columns) -> DataProto:
    """A batch of scored responses to questions, or prompts; equal questions are a group."""
    prompts = [ids_of(question) if isinstance(question, str) else question for question in questions]
    responses = [[*TOKENIZER(answer)["input_ids"], TOKENIZER.eos_token_id] for answer in answers]
    width, length = max(map(len, prompts)), max(map(len, responses))
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids in responses])
    of_prompts = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    padded_responses = torch.tensor([ids + [0] * (length - len(ids)) for ids in responses])
    attention = torch.cat([of_prompts, mask], 1)
    return DataProto.from_dict(
        tensors={
            "prompts": padded, "responses": padded_responses, "response_mask": mask,
            "input_ids": torch.cat([padded, padded_responses], 1), "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "token_level_scores": mask * torch.tensor(scores)[:, None] / mask.sum(-1, keepdim=True),
        },
        non_tensors={
            "uid": list(questions), "raw_prompt": [[{"role": "user", "content": one}] for one in questions],
            **columns,
        },
    )  # fmt: skip


def privileged(template: str, data: dict | None = None, **config) -> PrivilegedPrompts:
    section = SelfDistillationConfig(enabled=True, template=template, **config)
    return PrivilegedPrompts(section, DataConfig(return_raw_chat=True, **(data or {})), TOKENIZER)


def prompts_of(columns: DataProto) -> list[list[int]]:
    pairs = zip(columns.batch["teacher_prompts"], columns.batch["teacher_prompts_mask"].bool(), strict=True)
    return [ids[keep].tolist() for ids, keep in pairs]


def test_the_teacher_reads_the_row_and_the_policys_response():
    batch = scored(["2+2", "10-7"], ["5", "12"], [0, 0], extra_info=[{"answer": "4"}, {"answer": "3"}])
    columns, metrics = privileged("{{ prompt }} hint: {{ extra_info.answer }}").columns(batch)
    expected = [ids_of("2+2 hint: 4"), ids_of("10-7 hint: 3")]
    assert prompts_of(columns) == expected
    assert torch.equal(columns.batch["distillation_mask"], batch.batch["response_mask"])
    assert metrics["distillation/teacher_prompt_length/max"] == len(expected[1])
    rows = rows_for_teacher(batch | columns).batch
    whole = [ids[keep].tolist() for ids, keep in zip(rows["input_ids"], rows["attention_mask"].bool(), strict=True)]
    assert whole == [[*expected[0], *TOKENIZER("5")["input_ids"], 1], [*expected[1], *TOKENIZER("12")["input_ids"], 1]]
    positions = rows["position_ids"][0][rows["attention_mask"][0].bool()]
    assert positions.tolist() == list(range(len(whole[0])))
    assert torch.equal(rows["responses"], batch.batch["responses"])


def test_a_prompt_that_stays_as_it_is_gives_the_very_rows_of_the_policy():
    batch = scored(["2+2", "10-7"], ["5", "12"], [0, 0])
    columns, _ = privileged("{{ prompt }}").columns(batch)
    rows = rows_for_teacher(batch | columns)
    assert all(torch.equal(rows.batch[name], values) for name, values in batch.batch.items())
    assert rows_for_teacher(batch) is batch


def test_best_response_is_another_one_that_is_good_enough():
    # First group: the third response is the best (0.9), for itself the first (0.8). In the second none reaches 0.8.
    batch = scored(["a"] * 3 + ["b"] * 2, ["x", "y", "z", "u", "v"], [0.8, 0.1, 0.9, 0.2, 0.3])
    template = "{% if best_response %}{{ prompt }}|{{ best_response }}|{{ response }}{% endif %}"
    columns, metrics = privileged(template, success_score=0.8).columns(batch)
    assert prompts_of(columns)[:3] == [ids_of("a|z|x"), ids_of("a|z|y"), ids_of("a|x|z")]
    # The rows without context are not learnt from, and their prompt is the policy's.
    assert prompts_of(columns)[3:] == [ids_of("b"), ids_of("b")]
    assert columns.batch["distillation_mask"].any(-1).tolist() == [True, True, True, False, False]
    assert metrics["distillation/rows_without_context"] == pytest.approx(0.4)


def test_built_in_templates_show_what_they_are_for():
    batch = scored(
        ["q"] * 2, ["x", "y"], [1, 0], feedback=["", "wrong sign"],
        extra_info=[{"answer": "SOLUTION"}, {"demonstration": "SHOWN"}], reward_model=[{"ground_truth": "TRUTH"}] * 2,
    )  # fmt: skip

    def texts(name: str) -> list[str]:
        return [TOKENIZER.decode(ids) for ids in prompts_of(privileged(name).columns(batch)[0])]

    reference, demonstration, attempts = map(texts, ("reference", "demonstration", "attempts"))
    assert "SOLUTION" in reference[0]
    assert "TRUTH" in reference[1]
    assert demonstration[0] == TOKENIZER.decode(ids_of("q"))
    assert "SHOWN" in demonstration[1]
    # The failed try reads the good one and its feedback; the only good one has nothing to learn from.
    assert attempts[0] == TOKENIZER.decode(ids_of("q"))
    assert "attempt:\nx\n" in attempts[1]
    assert "failed:\nwrong sign\n" in attempts[1]


def test_control_tokens_in_the_context_stay_text():
    batch = scored(["q"], ["x"], [0], feedback=["<eos>"])
    (ids,) = prompts_of(privileged("{{ prompt }}{{ feedback }}").columns(batch)[0])
    assert TOKENIZER.eos_token_id not in ids[len(ids_of("q")) - 12 :]
    assert "<eos>" in TOKENIZER.decode(ids)


def test_a_long_prompt_is_refused_or_cut():
    batch = scored(["q"], ["x"], [0])
    size = len(ids_of("q" * 9))
    with pytest.raises(
        DataError, match=rf"the teacher's prompt has {size} tokens, more than .*teacher_prompt_length=5"
    ):
        privileged("{{ prompt * 9 }}", teacher_prompt_length=5).columns(batch)
    cut, metrics = privileged("{{ prompt * 9 }}", teacher_prompt_length=5, teacher_prompt_truncation="left").columns(
        batch
    )
    assert prompts_of(cut) == [ids_of("q" * 9)[-5:]]
    assert metrics["distillation/teacher_prompt_length/clip_ratio"] == 1


def test_sequences_that_begin_with_the_prompt_have_the_context_there():
    # Two trajectories to one question: the first of a helper, whose prompt is another, and two sequences of main; the
    # second of which begins with an earlier turn. The second trajectory is one sequence.
    earlier = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "hm"}]

    def later(question: str) -> list[int]:
        turns = [{"role": "user", "content": question}, earlier[1], {"role": "user", "content": "go on"}]
        return encode(render_prompt(turns, TOKENIZER, "here"), TOKENIZER)

    batch = scored(
        ["help", "2+2", later("2+2"), "2+2"], ["a", "b", "4", "four"], [0.5, 0.5, 0.5, 1],
        uid=["u"] * 4, trajectory_id=["t"] * 3 + ["s"], agent=["helper", "main", "main", "main"],
        raw_prompt=[[earlier[0]]] * 4,
    )  # fmt: skip
    template = "{{ prompt }} {{ response }} {{ score }} {{ best_response }}"
    columns, metrics = privileged(template, success_score=0.5).columns(batch)
    # What the templates read are the two trajectories: "4" with 0.5 and "four" with 1.
    assert prompts_of(columns) == [
        ids_of("help"), ids_of("2+2 4 0.5 four"), later("2+2 4 0.5 four"), ids_of("2+2 four 1.0 4"),
    ]  # fmt: skip
    assert columns.batch["distillation_mask"].any(-1).tolist() == [False, True, True, True]
    assert metrics["distillation/rows_without_context"] == 0.25


def test_what_cannot_be_written_is_refused_with_the_row():
    batch = scored(["q"], ["x"], [0], index=[7])
    with pytest.raises(DataError, match=r"index 7 .*'hint' is undefined. It may read prompt, best_response, .*score"):
        privileged("{{ hint }}").columns(batch)
    with pytest.raises(DataError, match=r"index 7 .*template fails: ZeroDivisionError"):
        privileged("{{ score / score }}").columns(batch)
    with pytest.raises(ConfigError, match="template, line 1"):
        privileged("{% if %}")
    changed = batch | DataProto.from_dict(non_tensors={})
    changed.non_tensor_batch["raw_prompt"][0] = [{"role": "user", "content": "another"}]
    with pytest.raises(ConfigError, match="does not begin with its messages in the chat"):
        privileged("{{ prompt }}!").columns(changed)


@pytest.mark.parametrize(
    ("values", "cause"),
    [({}, "needs one template"), ({"template": "reference", "template_path": "x"}, "needs one template"),
     ({"template": "refrence"}, "no built-in template")],
)  # fmt: skip
def test_settings_of_the_template(values, cause):
    (problem,) = SelfDistillationConfig(enabled=True, **values).problems("self_distillation")
    assert cause in problem.cause
