"""Agent loops on rows with images: the batch of the engine alone, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch.testing import assert_close

from tests.vision.agent_batches import VisionAgents
from tests.vision.one_family import ONE_FAMILY
from verl.errors import DataError
from verl.protocol import replace_columns
from verl.vision.families import TEXT_PLACES


@pytest.mark.parametrize("name", ["native", "hf"])
@pytest.mark.parametrize("family", ONE_FAMILY)
def test_one_turn_gives_the_columns_of_the_engine_alone(family, name, tmp_path):
    agents = VisionAgents(tmp_path, family, name)
    prompts = agents.prompts()
    alone, looped = agents.group.generate_sequences(prompts), agents.answer(prompts)
    assert set(alone.batch.keys()) <= set(looped.batch.keys())
    for column, values in alone.batch.items():
        if column == "rollout_log_probs":
            assert_close(looped.batch[column], values, atol=1e-5, rtol=0)
        else:
            assert torch.equal(looped.batch[column], values), column
    assert looped.batch["position_ids"].shape[1] == 4
    assert looped.non_tensor_batch["finish_reason"].tolist() == alone.non_tensor_batch["finish_reason"].tolist()
    given = prompts.non_tensor_batch["multi_modal_inputs"]
    assert all(found is row for found, row in zip(looped.non_tensor_batch["multi_modal_inputs"], given, strict=True))
    drawn = looped.batch["response_mask"].bool()
    atol = 1e-5 if name == "native" else 2e-5
    assert_close(looped.batch["rollout_log_probs"][drawn], agents.trainers_log_probs(looped)[drawn], atol=atol, rtol=0)


LOOPS = """
from verl.agents.images import as_inputs, together
from verl.agents.loop import AgentLoopBase, AgentLoopOutput
from tests.support.vision_models import picture
from verl.vision.prompts import ImagePrompts

class Shows(AgentLoopBase):
    # Two turns; before the second the policy is shown a picture.
    gives = None

    async def run(self, sampling_params, **kwargs):
        prompt, of_row = kwargs["raw_prompt_ids"], kwargs["multi_modal_inputs"]
        params = {**sampling_params, "max_tokens": 5}
        first = await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=params, image_data=of_row)
        parts = [{"type": "image", "image": picture("green")}, {"type": "text", "text": "?"}]
        part = {"role": "user", "content": parts}
        new = (await self.process_vision_info([part]))["images"]
        between = await self.apply_chat_template([part], images=new)
        so_far, every = [*prompt, *first.token_ids, *between], self.all_images(of_row, new)
        drawn = await self.server_manager.generate("a", prompt_ids=so_far, sampling_params=params, image_data=every)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[*first.token_ids, *between, *drawn.token_ids],
            response_mask=[1] * len(first.token_ids) + [0] * len(between) + [1] * len(drawn.token_ids),
            multi_modal_data=self.gives,
            num_turns=4,
        )

    def all_images(self, of_row, new):
        return together([of_row, as_inputs(new, ImagePrompts.from_processor(self.processor), "-")])

class Repeats(AgentLoopBase):
    # Two turns. The first, a long one, is trained on in one sequence, and context of the second in another.
    is_fork = False

    async def run(self, sampling_params, **kwargs):
        prompt, shown = kwargs["raw_prompt_ids"], {"image_data": kwargs["multi_modal_inputs"]}
        params = {**sampling_params, "max_tokens": 30, "ignore_eos": True}
        first = await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=params, **shown)
        so_far = [*prompt, *first.token_ids, 5, 6]
        params = {**params, "max_tokens": 4}
        second = await self.server_manager.generate("a", prompt_ids=so_far, sampling_params=params, **shown)
        of_first = AgentLoopOutput(
            prompt_ids=prompt, response_ids=first.token_ids, response_mask=[1] * len(first.token_ids)
        )
        split = len(so_far) if self.is_fork else len(prompt)
        response = [*so_far, *second.token_ids][split:]
        mask = [0] * (len(so_far) - split) + [1] * len(second.token_ids)
        of_second = AgentLoopOutput(prompt_ids=so_far[:split], response_ids=response, response_mask=mask)
        return [of_first, of_second]

class Forks(Repeats):
    is_fork = True

class Forgets(Shows):
    def all_images(self, of_row, new):
        return of_row

class Lies(Shows):
    gives = {"images": [picture("red"), picture("blue"), picture("white")]}

class Blind(Shows):
    takes_images = False

class Hears(Shows):
    gives = {"audios": [1]}

class Damaged(Shows):
    def all_images(self, of_row, new):
        return [b"no picture"]
"""


@pytest.fixture
def loops(tmp_path):
    (tmp_path / "loops.py").write_text(LOOPS)
    names = ("Shows", "Repeats", "Forks", "Forgets", "Lies", "Hears", "Damaged", "Blind")
    entries = [f"- {{name: {name.lower()}, _target_: {name}, path: {tmp_path}/loops.py}}\n" for name in names]
    (tmp_path / "loops.yaml").write_text("".join(entries))
    return {"actor_rollout_ref__rollout__agent__agent_loop_config_path": tmp_path / "loops.yaml"}


def test_a_picture_of_a_later_turn_reaches_the_trainer(loops, tmp_path):
    agents = VisionAgents(tmp_path, **loops)
    prompts = agents.prompts(agent_name=["shows"] * 4)
    found = agents.answer(prompts)
    assert found.non_tensor_batch["trajectory_message"].tolist() == [""] * 8
    rows = zip(*(b.non_tensor_batch["multi_modal_inputs"] for b in (found, prompts)), strict=True)
    for row, given in rows:
        patches = len(given["pixel_values"]) if len(given) else 0
        assert row["image_grid_thw"].tolist() == [*(given["image_grid_thw"].tolist() if patches else []), [1, 4, 4]]
        assert len(row["pixel_values"]) == patches + 16
        if patches:
            assert torch.equal(row["pixel_values"][:patches], given["pixel_values"])
    drawn = found.batch["response_mask"].bool()
    assert_close(found.batch["rollout_log_probs"][drawn], agents.trainers_log_probs(found)[drawn], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["repeats", "forks"])
def test_a_drawn_image_token_is_text_in_later_sequences_too(name, loops, tmp_path):
    agents = VisionAgents(tmp_path, shape={"initializer_range": 1e-3}, **loops)  # all tokens are about as likely
    found = agents.answer(agents.prompts(agent_name=[name] * 4))
    assert found.non_tensor_batch["trajectory_message"].tolist() == [""] * 16
    drawn, later = found.batch["response_mask"].bool(), found.batch["response_mask"].clone()
    inputs = found.non_tensor_batch["multi_modal_inputs"]
    of_images = [int(row["image_grid_thw"].prod(-1).sum()) // 4 if "image_grid_thw" in row else 0 for row in inputs]
    texts = (found.batch["input_ids"] == 106).sum(-1) - torch.tensor(of_images)
    assert int((texts > 0).sum()) >= 4  # drawn in a first turn, which is in both sequences of its trajectory
    told = [len(row[TEXT_PLACES]) if TEXT_PLACES in row else 0 for row in inputs]
    assert sum(told[::2]) == 0
    assert (sum(told[1::2]) > 0) == (name == "forks")
    log_probs = agents.trainers_log_probs(found)
    assert_close(found.batch["rollout_log_probs"][drawn], log_probs[drawn], atol=1e-5, rtol=0)
    later[:, :3] = 0
    left_out = replace_columns(found, type(found).from_dict(tensors={"response_mask": later}))
    kept = later.bool()
    assert_close(agents.trainers_log_probs(left_out)[kept], log_probs[kept], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("forgets", "image tokens, and image_data makes"),
        ("lies", "its 3 images make 12|other images than the policy was shown"),
        ("hears", "multi_modal_data has audios, which is not read"),
    ],
)
def test_wrong_images_of_a_loop_fail_its_trajectory(name, said, loops, tmp_path):
    agents = VisionAgents(tmp_path, **loops)
    found = agents.answer(agents.prompts(agent_name=[name] * 4, n=1))
    assert set(found.non_tensor_batch["trajectory_status"]) == {"agent_error"}
    for message in found.non_tensor_batch["trajectory_message"]:
        assert re.search(said, message)
    # What was drawn until then is whole, with its images, though it is not trained on.
    assert agents.trainers_log_probs(found).isfinite().all()


def test_rows_with_images_need_a_loop_that_takes_them(loops, tmp_path):
    agents = VisionAgents(tmp_path, **loops)
    with pytest.raises(DataError, match="agent loop 'blind' takes none"):
        agents.answer(agents.prompts(agent_name=["blind"] * 4))
