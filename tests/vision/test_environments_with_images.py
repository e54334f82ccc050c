"""Environments and simulated users that show pictures, on rows with images and without."""

from __future__ import annotations

import json
import re
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.support.vision_models import picture_rows
from tests.vision.agent_batches import P, VisionAgents
from tests.vision.one_family import ONE_FAMILY
from tests.vision.test_native_serving_with_images import plain_logits
from tests.vision.test_programs_with_images import ROWS
from verl.environments.base import ImageObservation
from verl.errors import ConfigError
from verl.plugins.gymnasium.environment import GymnasiumEnvironment
from verl.protocol import DataProto

IMAGE = 106
OTHERS = """
from verl.environments.base import Environment, ImageObservation
from verl.interactions.base import BaseInteraction
from tests.support.vision_models import film, picture, png

def part(image):
    return {"type": "image", "image": image}

class Shows(Environment):
    # A picture at first, two in a message, then one with a text; the fourth action is the last.
    def reset(self, *, seed, messages, **kwargs):
        self.turns = 0
        return ImageObservation(images=[picture("green", size=(16, 24))], text="go") if kwargs else "go"

    def step(self, action):
        self.turns += 1
        two = [part(picture("red")), {"type": "text", "text": "or"}, part(png(picture("blue", size=(24, 16))))]
        said = [
            [{"role": "user", "content": two}],
            ImageObservation(images=[picture("white", size=(16, 24))], text="y" * 30),
            ImageObservation(images=[], text="z"),
            ImageObservation(images=3),
        ][self.turns - 1]
        return said, 0.25, self.turns == 4, False, {}

FILM = {"type": "video", "video": film(["red", "blue", "green", "white"]), "fps": 8.0}

class Films(Environment):
    def reset(self, *, seed, messages, **kwargs):
        self.turns = 0
        return [{"role": "user", "content": [FILM, {"type": "text", "text": "go"}]}]

    def step(self, action):
        self.turns += 1
        said = [part(picture("red")), {"type": "text", "text": "y" * 30}, FILM]
        return [{"role": "user", "content": said}], 0.25, self.turns == 2, False, {}

class Bad(Environment):
    def reset(self, *, seed, messages, first=False, **kwargs):
        return self.config["answer"] if first else "go"

    def step(self, action):
        return self.config["answer"], 0.0, False, False, {}

class Odd(Environment):
    def reset(self, *, seed, messages, **kwargs):
        return messages * 2

    def step(self, action):
        return ImageObservation(images=5, text=None), 0.0, False, False, {}

class Points(BaseInteraction):
    async def generate_response(self, instance_id, messages, answer=None, **kwargs):
        said = [part(picture("red")), {"type": "text", "text": "and"}, part(picture("blue", size=(24, 16)))]
        said = [FILM, *said] if answer == "film" else said
        answer = None if answer == "film" else answer
        count = sum(message["role"] == "assistant" for message in messages)
        return count > 2, answer or (said if count == 1 else "so"), 0.5, {}
"""


@pytest.fixture
def others(tmp_path):
    """Settings of a run with an environment, and with a user."""

    def make(kind: str = "Shows", answer: Any = None) -> dict[str, Any]:
        (tmp_path / "others.py").write_text(OTHERS)
        shows = {"name": "own", "class_name": f"{tmp_path}/others.py:{kind}", "config": {"answer": answer}}
        shows["max_observation_tokens"] = 9
        (tmp_path / "environments.yaml").write_text(json.dumps({"environment": [shows]}))
        user = {"name": "points", "class_name": f"{tmp_path}/others.py:Points", "config": {}}
        (tmp_path / "users.yaml").write_text(json.dumps({"interaction": [user]}))
        multi_turn = "actor_rollout_ref__rollout__multi_turn__"
        return {
            "data__max_response_length": 160,
            f"{multi_turn}environment_config_path": tmp_path / "environments.yaml",
            f"{multi_turn}interaction_config_path": tmp_path / "users.yaml",
            "actor_rollout_ref__rollout__stop_token_ids": f"[{','.join(map(str, range(4, 40)))}]",
        }

    return make


def between(found: DataProto, row: int, agents: VisionAgents) -> list[str]:
    """What others wrote after each turn of the policy, an image as the number of its tokens."""
    pieces, last = [], 1
    columns = (found.batch[name][row].tolist() for name in ("responses", "response_mask"))
    for token, drawn in zip(*columns, strict=True):
        if not drawn and last:
            pieces.append([])
        if not drawn and token:
            pieces[-1].append(token)
        last = drawn
    texts = [agents.tokenizer.decode(ids).removeprefix("<eos>").replace("<|vision_start|>", "[") for ids in pieces]
    pads = [re.sub(r"<\|(image|video)_pad\|>", ".", text.replace("<|vision_end|>", "]")) for text in texts]
    return [text for text in pads if text]


def check_log_probs(agents: VisionAgents, found: DataProto) -> None:
    """Those of engine, trainer and one plain pass agree, and the images are those of the tokens."""
    columns, model = found.batch, AutoModelForImageTextToText.from_pretrained(agents.path)
    drawn, log_probs = columns["response_mask"].bool(), agents.trainers_log_probs(found)
    assert_close(columns["rollout_log_probs"][drawn], log_probs[drawn], atol=1e-5, rtol=0)
    for row in range(len(found)):
        seen = columns["attention_mask"][row].bool()
        ids = columns["input_ids"][row][seen][None]
        mask = torch.cat([torch.zeros(P, dtype=torch.bool), drawn[row]])[seen]
        is_image = (ids == IMAGE) & ~mask
        images = found.non_tensor_batch["multi_modal_inputs"][row]
        assert int(is_image.sum()) == sum(int(grid.prod()) // 4 for grid in images["image_grid_thw"])
        logits = plain_logits(model, ids, is_image, images)
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None]).squeeze(1)[mask[1:]]
        assert_close(log_probs[row][drawn[row]], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_pictures_of_environments(family, others, tmp_path):
    agents = VisionAgents(tmp_path, family, **others())
    rows = picture_rows(4, text_every=2)  # with and without an image of their own, and of the environment's reset
    for row, first in zip(rows, (None, None, True, True), strict=True):
        row["extra_info"]["environment_kwargs"] = {"first": first}
    prompts = agents.prompts(rows, n=1, agent_name=["environment_agent"] * 4)
    found = agents.answer(prompts)
    more = found.non_tensor_batch
    assert more["trajectory_message"].tolist() == [""] * 4
    assert more["trajectory_status"].tolist() == ["done"] * 4
    begins = [
        agents.tokenizer.decode(ids[mask.bool()]).replace("<|image_pad|>", ".")
        for ids, mask in zip(found.batch["prompts"], found.batch["attention_mask"][:, :P], strict=True)
    ]
    shown = ["<|vision_start|>" + "." * count + "<|vision_end|>" for count in (4, 8, 6)]
    assert begins == [
        f"<user>{shown[0]}color?\n\ngo<assistant>",
        "<user>say green\n\ngo<assistant>",
        f"<user>{shown[1]}color?\n\n{shown[2]}go<assistant>",
        f"<user>say white\n\n{shown[2]}go<assistant>",
    ]
    after = ["<user>[....]or[......]<assistant>", "<user>[......]yyyy", "<user>z<assistant>"]
    for row in range(4):
        for said, begin in zip(between(found, row, agents), after, strict=True):
            assert said.startswith(begin)
        own = [[[1, 4, 4]], [], [[1, 8, 4], [1, 6, 4]], [[1, 6, 4]]][row]
        grids = more["multi_modal_inputs"][row]["image_grid_thw"].tolist()
        assert grids == [*own, [1, 4, 4], [1, 4, 6], [1, 6, 4]]
        assert more["turn_scores"][row] == [0.25] * 4
        assert {"type": "image"} in more["trajectory_conversation"][row][2]["content"]
    # The row's own pixels stand first, bit by bit.
    for row in (0, 2):
        given = prompts.non_tensor_batch["multi_modal_inputs"][row]["pixel_values"]
        assert torch.equal(more["multi_modal_inputs"][row]["pixel_values"][: len(given)], given)
    check_log_probs(agents, found)


@pytest.mark.parametrize(
    ("kind", "answer", "said"),
    [
        ("Bad", [{"role": "user", "content": [{"type": "image"}]}], "returned an image part that holds no image"),
        (
            "Bad",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}],
            "is a remote address",
        ),
        ("Odd", None, "reset returned 2 image part(s) that hold no image, and the row has 1"),
    ],
)
def test_bad_pictures_of_environments(kind, answer, said, others, tmp_path):
    agents = VisionAgents(tmp_path, **others(kind, answer))
    prompts = agents.prompts(picture_rows(1), n=1, agent_name=["environment_agent"])
    more = agents.answer(prompts).non_tensor_batch
    assert more["trajectory_status"].tolist() == ["environment_error"]
    assert said in more["trajectory_message"][0]


def test_pictures_of_simulated_users(others, tmp_path):
    agents = VisionAgents(tmp_path, **others())
    rows = picture_rows(3, text_every=2)
    for row, answer in zip(rows, (None, None, [{"type": "image", "image": b"-"}]), strict=True):
        row["extra_info"]["interaction_kwargs"] = {"name": "points", "answer": answer}
    prompts = agents.prompts(rows, n=1, agent_name=["tool_agent"] * 3)
    found = agents.answer(prompts)
    more = found.non_tensor_batch
    assert more["trajectory_status"].tolist() == ["done", "done", "environment_error"]
    assert "generate_response, image 0: the image of 1 bytes cannot be read" in more["trajectory_message"][2]
    for row in range(2):
        assert between(found, row, agents) == ["<user>[....]and[......]<assistant>", "<user>so<assistant>"]
        own = [[1, 4, 4]] * (row == 0)
        assert more["multi_modal_inputs"][row]["image_grid_thw"].tolist() == [*own, [1, 4, 4], [1, 4, 6]]
    check_log_probs(agents, found[:2])


@pytest.mark.slow
def test_films_of_environments_and_simulated_users(others, tmp_path):
    agents = VisionAgents(tmp_path, "qwen3_vl", **others("Films") | {"data__max_prompt_length": 2 * P})
    rows = picture_rows(2)
    rows[1]["extra_info"]["interaction_kwargs"] = {"name": "points", "answer": "film"}
    found = agents.answer(agents.prompts(rows, n=1, agent_name=["environment_agent", "tool_agent"]))
    more = found.non_tensor_batch
    assert more["trajectory_message"].tolist() == [""] * 2
    assert more["trajectory_status"].tolist() == ["done"] * 2
    # Texts have at most nine tokens; the times of the film, which are longer, are whole.
    of_film = "<0.1 seconds>[....]<0.3 seconds>[....]"
    [observed] = between(found, 0, agents)
    assert observed.startswith("<user>[....]yyyy")
    assert observed.endswith(f"{of_film}<assistant>")
    assert "y" * 10 not in observed
    assert between(found, 1, agents)[0] == f"<user>{of_film}[....]and[......]<assistant>"
    grids = [inputs["image_grid_thw"].tolist() for inputs in more["multi_modal_inputs"]]
    assert grids == [[[1, 4, 4]] * 5, [[1, 4, 6], *[[1, 4, 4]] * 3, [1, 4, 6]]]
    drawn = found.batch["response_mask"].bool()
    log_probs = agents.trainers_log_probs(found)[drawn]
    assert_close(found.batch["rollout_log_probs"][drawn], log_probs, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_environments_and_programs_give_the_same_numbers_on_ray(ray_cluster, others, tmp_path):
    (tmp_path / "rows.py").write_text(ROWS)
    entry = f"- {{name: talks, _target_: program_agent, program: {tmp_path}/rows.py:answer}}\n"
    (tmp_path / "loops.yaml").write_text(entry)
    settings = others() | {
        "actor_rollout_ref__rollout__agent__agent_loop_config_path": tmp_path / "loops.yaml",
        "actor_rollout_ref__rollout__agent__num_workers": 2,
    }
    found = {}
    for controller in ("local", "ray"):
        agents = VisionAgents(tmp_path / controller, trainer__controller=controller, **settings)
        try:
            names = ["environment_agent", "talks"] * 2
            found[controller] = agents.answer(agents.prompts(picture_rows(4, text_every=4), n=1, agent_name=names))
        finally:
            agents.close()
    local, on_ray = found["local"], found["ray"]
    assert on_ray.non_tensor_batch["trajectory_message"].tolist() == [""] * 4
    for name in ("input_ids", "response_mask", "position_ids"):
        assert torch.equal(on_ray.batch[name], local.batch[name])
    assert_close(on_ray.batch["rollout_log_probs"], local.batch["rollout_log_probs"], atol=1e-5, rtol=0)
    for given, row in zip(*(one.non_tensor_batch["multi_modal_inputs"] for one in (local, on_ray)), strict=True):
        assert set(given) == set(row)
        assert all(torch.equal(row[name], given[name]) for name in given)


class Painted(gymnasium.Env):
    """Draws itself: the action is how red it is."""

    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self.red = render_mode, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        return 0, {}

    def step(self, action: int):
        self.red = action
        return action, 1.0, False, False, {}

    def render(self):
        return np.full((8, 12, 3), (255 * self.red, 0, 0), dtype=np.uint8)


class Unpainted(Painted):
    """Says that it can draw itself."""

    def render(self):
        return [1]


def test_pictures_of_gymnasium():
    gymnasium.register("verl/Painted-v0", entry_point=Painted, disable_env_checker=True)
    config = {"env_id": "verl/Painted-v0", "kwargs": {"render_mode": "rgb_array"}, "actions": ["off", "on"]}
    GymnasiumEnvironment.check(config)
    gymnasium.register("verl/Unpainted-v0", entry_point=Unpainted, disable_env_checker=True)
    with pytest.raises(ConfigError, match="verl/Unpainted-v0 draws no picture"):
        GymnasiumEnvironment.check(config | {"env_id": "verl/Unpainted-v0"})
    environment = GymnasiumEnvironment(config)
    first = environment.reset(seed=1, messages=[])
    said, reward, *_ = environment.step("turn it on")
    assert isinstance(first, ImageObservation)
    assert isinstance(said, ImageObservation)
    assert [(one.images[0].size, one.images[0].getpixel((0, 0)), one.text) for one in (first, said)] == [
        ((12, 8), (0, 0, 0), ""),
        ((12, 8), (255, 0, 0), ""),
    ]
    assert reward == 1.0
