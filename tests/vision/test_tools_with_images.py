"""Tools that return pictures: their tokens and inputs, the log-probs of whole conversations, and bad tools."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.support.tiny_run import make_tiny_run, overrides, same
from tests.support.vision_models import (
    film,
    film_rows,
    picture,
    picture_rows,
    png,
    tiny_vision_model_dir,
    write_parquet,
)
from tests.vision.agent_batches import P, VisionAgents
from tests.vision.one_family import ONE_FAMILY
from tests.vision.test_native_serving_with_images import plain_logits
from tests.vision.test_videos import VIDEO, arguments_of
from tests.vision.test_videos import P as FILM_PROMPT
from verl.agents.chat_template import ChatTemplate
from verl.agents.conversation import Conversation
from verl.agents.parsers.base import FunctionCall, ToolParser
from verl.base.registry import scoped_registrations
from verl.errors import ConfigError, DataError
from verl.plugins.view.samples import SamplePlace
from verl.plugins.view.tokens import tokens_of
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.utils import hf_processor, hf_tokenizer
from verl.vision.prompts import ImagePrompts

IMAGE = 106


class EveryTurnLooks(ToolParser):
    """Takes every turn for a call of the tool ``look``, as a random model writes no calls."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        return "-", [FunctionCall(name="look", arguments="{}")]


@pytest.fixture(autouse=True, scope="module")
def parser():
    with scoped_registrations():
        ToolParser.register("every_turn_looks")(EveryTurnLooks)
        yield


TOOL = """
import itertools
from tests.support.vision_models import film, picture
from verl.tools.base_tool import BaseTool, schema
from verl.tools.schemas import ToolResponse

class Look(BaseTool):
    # Shows another picture at each call: one, none, two, one ...
    def get_openai_tool_schema(self):
        return schema("look", "Look.", [])

    async def create(self, instance_id=None, **kwargs):
        self.calls = getattr(self, "calls", {})
        name, response = await super().create(instance_id)
        self.calls[name] = itertools.count()
        return name, response

    async def execute(self, instance_id, parameters, **kwargs):
        number = next(self.calls[instance_id])
        shown = [[picture("red")], [], [picture("blue", size=(24, 16)), picture("white", size=(16, 24))]][number % 3]
        return ToolResponse(text=f"see {number}", image=shown), 0.5, {}

class Films(Look):
    # A film, one of another size, a picture with two films, nothing.
    async def execute(self, instance_id, parameters, **kwargs):
        number = next(self.calls[instance_id])
        films = [{"video": film(["red", "blue", "white"])}, {"path": film(["green"] * 4, (24, 16))}]
        films = [one | {"fps": 8.0} for one in films]
        video = [films[:1], films[1:], films, []][number]
        image = [picture("red", size=(16, 24))] if number == 2 else []
        return ToolResponse(text=f"see {number}", image=image, video=video), 0.5, {}

class Bad(Look):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(**self.config["answer"]), 0.0, {}
"""


@pytest.fixture
def look(tmp_path):
    """Settings of a run whose policy looks in every turn of at most six tokens."""

    def make(kind: str = "Look", **answer: Any) -> dict[str, Any]:
        (tmp_path / "look.py").write_text(TOOL)
        tools = {"tools": [{"class_name": f"{tmp_path}/look.py:{kind}", "config": {"answer": answer}}]}
        (tmp_path / "tools.yaml").write_text(json.dumps(tools))
        return {
            "actor_rollout_ref__rollout__multi_turn__enable": "true",
            "actor_rollout_ref__rollout__multi_turn__tool_config_path": tmp_path / "tools.yaml",
            "actor_rollout_ref__rollout__multi_turn__format": "every_turn_looks",
            "actor_rollout_ref__rollout__multi_turn__max_assistant_turns": 4,
            "actor_rollout_ref__rollout__stop_token_ids": f"[{','.join(map(str, range(4, 40)))}]",
        }

    return make


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_pictures_of_tools_in_whole_conversations(family, look, tmp_path):
    agents = VisionAgents(tmp_path, family, data__max_response_length=160, **look())
    found = agents.answer(agents.prompts())
    columns, more = found.batch, found.non_tensor_batch
    assert set(more["trajectory_status"]) <= {"turns_used_up", "context_full"}
    assert set(more["__num_turns__"]) >= {8}  # the question, and four turns with three results between
    model = AutoModelForImageTextToText.from_pretrained(agents.path)
    drawn = columns["response_mask"].bool()
    log_probs = agents.trainers_log_probs(found)
    assert_close(columns["rollout_log_probs"][drawn], log_probs[drawn], atol=1e-5, rtol=0)
    for row in range(len(found)):
        seen = columns["attention_mask"][row].bool()
        ids = columns["input_ids"][row][seen][None]
        mask = torch.cat([torch.zeros(P, dtype=torch.bool), drawn[row]])[seen]
        images = more["multi_modal_inputs"][row]
        is_image = (ids == IMAGE) & ~mask
        assert int(is_image.sum()) == sum(int(grid.prod()) // 4 for grid in images["image_grid_thw"])
        # One plain forward pass over all tokens and pictures.
        logits = plain_logits(model, ids, is_image, images)
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None]).squeeze(1)[mask[1:]]
        assert_close(log_probs[row][drawn[row]], expected, atol=2e-5, rtol=0)
        if more["__num_turns__"][row] == 8:
            own = 0 if row // 2 == 3 else 1  # the fourth row has no picture
            later = [[1, 4, 4], [1, 4, 6], [1, 6, 4]]
            assert images["image_grid_thw"][own:].tolist() == later
            assert more["tool_rewards"][row] == [0.5] * 3
        assert "refused" not in more["rendering_differences"][row]


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_films_of_tools_in_whole_conversations(family, look, tmp_path):
    settings = look("Films") | {"data__max_prompt_length": FILM_PROMPT, "data__max_response_length": 300}
    agents = VisionAgents(tmp_path, family, **settings)
    found = agents.answer(agents.prompts(film_rows(4)))
    columns, more = found.batch, found.non_tensor_batch
    assert more["__num_turns__"].tolist() == [8] * 8
    assert more["tool_failures"].tolist() == [{}] * 8
    model = AutoModelForImageTextToText.from_pretrained(agents.path)
    drawn, log_probs = columns["response_mask"].bool(), agents.trainers_log_probs(found)
    assert_close(columns["rollout_log_probs"][drawn], log_probs[drawn], atol=1e-5, rtol=0)
    first, second = ([[1, 4, n]] * 2 if family == "qwen3_vl" else [[2, 4, n]] for n in (4, 6))
    compared = 0
    for row in range(len(found)):
        inputs = more["multi_modal_inputs"][row]
        own = {0: len(first), 1: 0, 2: 1, 3: 1 + len(first)}[row // 2]
        assert inputs["image_grid_thw"][own:].tolist() == [*first, *second, [1, 6, 4], *first, *second]
        assert "refused" not in more["rendering_differences"][row]
        seen = columns["attention_mask"][row].bool()
        ids = columns["input_ids"][row][seen]
        mask = torch.cat([torch.zeros(FILM_PROMPT, dtype=torch.bool), drawn[row]])[seen]
        if set(ids[mask].tolist()) & {IMAGE, VIDEO}:  # plain Transformers would take them for pictures
            continue
        compared += 1
        logits = model(**arguments_of(ids, inputs)).logits[0]
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)[mask[1:]]
        assert_close(log_probs[row][drawn[row]], expected, atol=2e-5, rtol=0)
    assert compared >= 4


class Talk:
    def __init__(
        self, folder: Any, messages: list[dict[str, Any]], with_images: bool = True, family: str = "qwen2_5_vl"
    ) -> None:
        self.path = tiny_vision_model_dir(folder / "model", family)
        self.tokenizer = hf_tokenizer(self.path)
        self.maker = ImagePrompts.from_processor(hf_processor(self.path)) if with_images else None
        self.it = Conversation(ChatTemplate(self.tokenizer), messages, images=self.maker)

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids).replace("<|vision_start|>", "[").replace("<|vision_end|>", "]")


def shown(*parts: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]


def test_tokens_of_a_conversation_by_hand(tmp_path):
    first = {"role": "user", "content": shown("a", png(picture("red")), "b")}
    talk = Talk(tmp_path, [first])
    pad = "<|image_pad|>"
    assert talk.text(talk.it.ids) == f"<user>a[{pad * 4}]b<assistant>"
    talk.it.add_drawn([*talk.tokenizer.encode("c"), IMAGE, 1], [-1.0, -1.0, -1.0], {"content": "c"})
    # Texts are never tokens of images, wherever they stand.
    result = {"role": "tool", "content": shown(picture("blue", size=(24, 16)), f"d{pad}" * 9, picture("red"))}
    assert not talk.it.copy().add_messages([result], max_tokens=20)
    assert talk.it.add_messages([result], max_tokens=40)
    assert len(talk.it.response_ids) - 3 <= 40
    text = talk.text(talk.it.response_ids)
    assert text.startswith(f"c{pad}<eos>tool: [{pad * 6}]d")
    assert text.endswith(f"[{pad * 4}]<assistant>")
    assert talk.it.image_data["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 6], [1, 4, 4]]
    assert talk.it.messages[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "text", "text": "b"},
    ]
    json.dumps(talk.it.messages)  # for dumps: no pixels
    assert talk.it.check().keys() <= {"history"}
    before = talk.it.branch(1)
    assert before.image_data["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert before.ids == talk.it.ids[: len(before.ids)]


def test_tokens_of_a_conversation_with_films_by_hand(tmp_path):
    shows = {"type": "video", "video": film(["red", "blue", "green", "white"]), "fps": 8.0}
    question = {"role": "user", "content": [{"type": "text", "text": "a"}, shows, *shown(picture("red")), shows]}
    result = {"role": "tool", "content": [shows, {"type": "text", "text": "d" * 40}]}
    of_video, of_image = ("[" + f"<|{kind}_pad|>" * 4 + "]" for kind in ("video", "image"))
    # Frames 0 and 1, at 0 and 1/8 s, are the first step, with the middle at 1/16 s; 2 and 3 the second, at 5/16 s.
    films = {
        "qwen2_vl": of_video.replace("<|video_pad|>" * 4, "<|video_pad|>" * 8),
        "qwen3_vl": f"<0.1 seconds>{of_video}<0.3 seconds>{of_video}",
    }
    for family, of_film in films.items():
        talk = Talk(tmp_path / family, [question], family=family)
        assert talk.text(talk.it.ids) == f"<user>a{of_film}{of_image}{of_film}<assistant>"
        begin = len(talk.it.image_data["image_grid_thw"])
        assert begin == (5 if family == "qwen3_vl" else 3)
        talk.it.add_drawn([*talk.tokenizer.encode("c"), 1], [-1.0, -1.0], {"content": "c"})
        # The text of the tool gets shorter, the times of the film do not.
        whole = talk.it.copy()
        assert whole.add_messages([result])
        assert talk.text(whole.response_ids) == f"c<eos>tool: {of_film}{'d' * 40}<assistant>"
        most = len(whole.response_ids) - 2 - 32
        assert talk.it.add_messages([result], max_tokens=most)
        assert len(talk.it.response_ids) - 2 <= most
        assert talk.text(talk.it.response_ids).startswith(f"c<eos>tool: {of_film}d")
        assert len(talk.it.image_data["image_grid_thw"]) == begin + (2 if family == "qwen3_vl" else 1)
        assert talk.it.check().keys() <= {"history"}
        json.dumps(talk.it.messages)
        assert len(talk.it.branch(1).image_data["image_grid_thw"]) == begin


def test_bad_images_of_messages(tmp_path):
    part = {"type": "image"}
    with pytest.raises(DataError, match="base64 text of an image is damaged"):
        Talk(tmp_path, [{"role": "user", "content": [part | {"image": "data:image/png;base64,%%%"}]}])
    with pytest.raises(ConfigError, match="a message has an image, and the policy reads no images"):
        Talk(tmp_path, [{"role": "user", "content": shown(picture("red"))}], with_images=False)
    with pytest.raises(DataError, match=r"1 image part\(s\) hold no image, and the row has 0"):
        Talk(tmp_path, [{"role": "user", "content": [part, *shown(picture("red"))]}])
    long = Talk(tmp_path, [{"role": "user", "content": shown(*[picture("red", size=(64, 64))] * 3)}])
    with pytest.raises(DataError, match="the prompt and with its images has 200 tokens"):
        long.it.truncate_prompt(100, "left")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"image": [3]}, "the tool look, image 0: an image is int 3. Give the bytes"),
        ({"video": [[], 3]}, "the tool look, video 0: a video has no frames"),
        ({"video": [{"video": "b.mp4", "speed": 2}]}, "a video has speed"),
    ],
)
def test_what_a_tool_returns_for_an_image(answer, said, look, tmp_path):
    agents = VisionAgents(tmp_path, data__max_response_length=600, **look("Bad", **answer))
    found = agents.answer(agents.prompts(n=1))
    for row, failures in enumerate(found.non_tensor_batch["tool_failures"]):
        assert failures == {"wrong_tool_result": 3}
        told = [m for m in found.non_tensor_batch["trajectory_conversation"][row] if m["role"] == "tool"]
        assert all(said in message["content"] for message in told), told


@pytest.mark.slow
def test_pictures_of_an_mcp_server_in_whole_conversations(look, tmp_path):
    settings = look()
    server = {"command": sys.executable, "args": [str(Path(__file__).parents[1] / "tools" / "mcp_server.py")]}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"tests": server}}))
    entry = {"class_name": "verl.tools.mcp_base_tool.MCPBaseTool", "config": {"type": "mcp"}}
    entry["mcp"] = {"mcp_servers_config_path": str(tmp_path / "servers.json"), "tool_selected_list": ["look"]}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    agents = VisionAgents(tmp_path, data__max_response_length=160, **settings)
    found = agents.answer(agents.prompts(picture_rows(2, text_every=2), n=1))
    columns, more = found.batch, found.non_tensor_batch
    assert more["tool_failures"].tolist() == [{}, {}]
    for row, images in enumerate(more["multi_modal_inputs"]):
        assert images["image_grid_thw"][1 - row :].tolist() == [[1, 4, 6]] * 3
        told = [m for m in more["trajectory_conversation"][row] if m["role"] == "tool"]
        assert [m["content"] for m in told] == [[{"type": "image"}, {"type": "text", "text": "see"}]] * 3
    drawn = columns["response_mask"].bool()
    assert_close(columns["rollout_log_probs"][drawn], agents.trainers_log_probs(found)[drawn], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_run_whose_tool_shows_pictures(look, tmp_path, monkeypatch):
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    (tmp_path / "reward.py").write_text(
        "def compute_score(solution_str, **_):\n    return float(len(solution_str) % 3)\n"
    )
    paths = make_tiny_run(tmp_path) | {
        "model": tiny_vision_model_dir(tmp_path / "vision"),
        "train": write_parquet(tmp_path / "train.parquet", picture_rows(8, text_every=4)),
        "val": write_parquet(tmp_path / "val.parquet", picture_rows(4, text_every=4)),
    }
    changes = look() | {
        "custom_reward_function__path": tmp_path / "reward.py",
        "data__max_prompt_length": 60,
        "data__max_response_length": 160,
        "actor_rollout_ref__rollout__name": "native",
        "actor_rollout_ref__actor__use_kl_loss": "true",
        "trainer__rollout_data_dir": tmp_path / "rollouts",
        "trainer__rollout_token_dump_freq": 1,
        "trainer__total_training_steps": 2,
        "trainer__test_freq": 2,
        "trainer__save_freq": 1,
    }
    run_ppo(compose(overrides(paths, tmp_path, **changes)))
    steps = {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}
    for step in (1, 2):
        assert steps[step]["training/rollout_probs_diff_max"] < 1e-5
        assert steps[step]["num_turns/max"] == 8
    assert steps[1]["actor/grad_norm"] > 0
    dumped = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    messages = [message for row in dumped for message in row["trajectory"]["conversation"]]
    assert any({"type": "image"} in message["content"] for message in messages if message["role"] == "tool")
    assert {row["input"] for row in dumped} == {
        "<image: 4 tokens>color?",
        "<image: 6 tokens>color?",
        "<image: 8 tokens>color?",
        "say white",
    }
    for row in dumped:
        assert "tool: <image: 4 tokens>see 0" in row["output"]
        place = SamplePlace(tmp_path / "rollouts" / "1.jsonl", row["run"], row["uid"], row["sample_index"], 0)
        tokens = tokens_of(place)
        assert [word for *_, word in tokens["images"]] == [f"<image: {count} tokens>" for count in (4, 6, 6)]
    # A run that goes on from step 1 makes the same second step bit by bit.
    again, first = tmp_path / "again", tmp_path / "checkpoints"
    changes |= {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": first / "global_step_1"}
    run_ppo(compose(overrides(paths, again, **changes, trainer__default_local_dir=again)))
    files = sorted((first / "global_step_2").rglob("*.pt"))
    assert len(files) >= 5  # model, optimizer, random numbers, data and driver
    for file in files:
        assert same(*(torch.load(root / file.relative_to(first), weights_only=False) for root in (first, again))), file
