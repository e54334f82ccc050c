"""The policy as its own teacher on rows with images: its prompts are those of the data with the context in the text."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from tests.support.vision_models import (
    DENSE_FAMILIES,
    film_rows,
    picture_rows,
    tiny_vision_model,
    tiny_vision_model_dir,
    write_parquet,
)
from tests.vision.one_family import ONE_FAMILY
from tests.vision.test_run_with_images import paths, settings  # noqa: F401  (a fixture)
from verl.config import DataConfig, SelfDistillationConfig
from verl.datasets.rl_dataset import RLHFDataset, collate_fn
from verl.errors import DataError
from verl.protocol import DataProto
from verl.protocol.shared import SharedTensors
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.privileged import PrivilegedPrompts
from verl.utils import hf_processor, hf_tokenizer
from verl.vision.families import TEXT_PLACES, VisionConfig
from verl.vision.positions import sequence_positions
from verl.workers.teacher.prompts import rows_for_teacher

P, R = 120, 4
RESPONSE = [7, 8, 9, 0]
HINT = " It is red."


class Rows:
    """Scored responses to rows with images, videos and text, and the teacher's prompts of them."""

    def __init__(self, folder, family: str, rows: list[dict]) -> None:
        path = tiny_vision_model_dir(folder / "model", family)
        self.tokenizer, self.processor, self.folder = hf_tokenizer(path), hf_processor(path), folder
        self.vision = VisionConfig.from_config(tiny_vision_model(family).config)
        self.rows, self.data = rows, DataConfig(max_prompt_length=P, return_raw_chat=True)
        self.batch = self.of(rows)

    def of(self, rows: list[dict], response: list[int] = RESPONSE) -> DataProto:
        file = write_parquet(self.folder / "rows.parquet", rows)
        dataset = RLHFDataset(file, self.tokenizer, self.data, self.processor)
        prompts = DataProto.from_single_dict(collate_fn([dataset[i] for i in range(len(dataset))]))
        responses = torch.tensor([response] * len(prompts))
        mask = (responses > 0).long()
        ids, attention = (
            torch.cat(pair, 1)
            for pair in ((prompts.batch["input_ids"], responses), (prompts.batch["attention_mask"], mask))
        )
        inputs = prompts.non_tensor_batch["multi_modal_inputs"].tolist()
        made = {
            "prompts": prompts.batch["input_ids"], "responses": responses, "response_mask": mask, "input_ids": ids,
            "attention_mask": attention, "token_level_scores": mask * 0.5,
            "position_ids": sequence_positions(ids, attention, mask, inputs, self.vision),
        }  # fmt: skip
        columns = prompts.non_tensor_batch | {"uid": prompts.non_tensor_batch["index"]}
        return DataProto.from_dict(tensors=made, non_tensors=columns)

    def of_teacher(self, template: str, batch: DataProto | None = None, **config) -> DataProto:
        batch = self.batch if batch is None else batch
        section = SelfDistillationConfig(enabled=True, template=template, **config)
        columns, _ = PrivilegedPrompts(section, self.data, self.tokenizer, self.processor).columns(batch)
        return rows_for_teacher(batch | columns, self.vision)


def with_hint(rows: list[dict]) -> list[dict]:
    changed = copy.deepcopy(rows)
    for row in changed:
        row["prompt"][-1]["content"] = "First: " + row["prompt"][-1]["content"] + HINT
    return changed


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_the_teacher_sees_the_same_images_between_other_words(family, tmp_path):
    made = Rows(tmp_path, family, film_rows(4))  # a film, text, a picture, a picture and a film
    rows, expected = made.of_teacher("First: {{ prompt }}" + HINT), made.of(with_hint(made.rows))
    for row in range(4):
        tokens, wanted = (batch.batch["attention_mask"][row].bool() for batch in (rows, expected))
        assert torch.equal(rows.batch["input_ids"][row][tokens], expected.batch["input_ids"][row][wanted])
        assert torch.equal(rows.batch["position_ids"][row][:, tokens], expected.batch["position_ids"][row][:, wanted])
        assert (
            rows.non_tensor_batch["multi_modal_inputs"][row] is made.batch.non_tensor_batch["multi_modal_inputs"][row]
        )
    same = made.of_teacher("{{ prompt }}")
    for name in ("input_ids", "position_ids", "attention_mask"):
        width = same.batch[name].shape[-1]
        assert torch.equal(same.batch[name], made.batch.batch[name][..., -width:]), name


def test_a_drawn_token_of_an_image_moves_with_the_context(tmp_path):
    made = Rows(tmp_path, "qwen3_vl", picture_rows(1))
    batch = made.of(made.rows, [7, made.vision.image_token_id, 9, 0])
    inputs = batch.non_tensor_batch["multi_modal_inputs"]
    place = int(batch.batch["attention_mask"][0, :P].sum()) + 1
    inputs[0] = SharedTensors({**inputs[0], TEXT_PLACES: torch.tensor([place])})
    (moved,) = made.of_teacher("{{ prompt }}" + HINT, batch).non_tensor_batch["multi_modal_inputs"]
    assert moved[TEXT_PLACES].tolist() == [place + len(HINT)]  # a token for each character
    assert torch.equal(moved["pixel_values"], inputs[0]["pixel_values"])


def test_images_are_neither_moved_nor_cut(tmp_path):
    made = Rows(tmp_path, "qwen3_vl", picture_rows(1))
    with pytest.raises(DataError, match=r"does not show its text unchanged. Write {{ prompt }}"):
        made.of_teacher("{{ prompt | upper }}")
    with pytest.raises(DataError, match=r"teacher_prompt_truncation=left to .*teacher_prompt_length=9 would cut an im"):
        made.of_teacher("{{ prompt }}" + HINT, teacher_prompt_length=9, teacher_prompt_truncation="left")
    length = int(made.batch.batch["attention_mask"][0, :P].sum())
    cut = made.of_teacher("{{ prompt }}" + HINT, teacher_prompt_length=length, teacher_prompt_truncation="right")
    assert cut.batch["prompts"].shape[1] == length
    inputs = made.batch.non_tensor_batch["multi_modal_inputs"]  # as if the policy had drawn it in an earlier turn
    inputs[0] = SharedTensors({**inputs[0], TEXT_PLACES: torch.tensor([length - 1])})
    with pytest.raises(DataError, match=r"in an earlier turn, whose place .*teacher_prompt_truncation=right would"):
        made.of_teacher("{{ prompt }}" + HINT, teacher_prompt_length=length, teacher_prompt_truncation="right")


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_a_run_with_images(family, paths, tmp_path, monkeypatch):  # noqa: F811
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    paths["model"] = tiny_vision_model_dir(tmp_path / "seeing", family)

    def divergence(template: str, loss_mode: str) -> tuple[float, float]:
        log.unlink(missing_ok=True)
        (tmp_path / "template.jinja").write_text(template)
        changes = {
            "actor_rollout_ref__rollout__name": "native",
            "data__return_raw_chat": "true",
            "distillation__enabled": "true",
            "distillation__self_distillation__enabled": "true",
            "distillation__self_distillation__template_path": tmp_path / "template.jinja",
            "distillation__distillation_loss__loss_mode": loss_mode,
            "distillation__distillation_loss__use_task_rewards": "false",
            "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
            "trainer__total_training_steps": 1,
        }
        run_ppo(settings(paths, tmp_path, **changes))
        (metrics,) = (json.loads(line)["data"] for line in log.read_text().splitlines())
        return metrics["distillation/loss"], metrics["actor/grad_norm"]

    loss, _ = divergence("{{prompt}}", "reverse_kl")
    assert loss == pytest.approx(0, abs=1e-7)
    loss, norm = divergence("{{prompt}} {{reward_model.ground_truth}}", "k2")
    assert loss > 1e-4
    assert norm > 0
