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

from tests.vision.agent_batches import P, VisionAgents
from tests.vision.test_native_serving_with_images import plain_logits
from verl.agents.chat_template import ChatTemplate
from verl.agents.conversation import Conversation
from verl.agents.parsers.base import FunctionCall, ToolParser
from verl.base.registry import scoped_registrations
from verl.errors import ConfigError, DataError
from verl.testing.tiny_run import make_tiny_run, overrides, same
from verl.testing.vision_models import picture, picture_rows, png, tiny_vision_model_dir, write_parquet
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.utils import hf_processor, hf_tokenizer
from verl.view.tokens import tokens_of
from verl.vision.families import FAMILIES
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
from verl.testing.vision_models import picture
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


@pytest.mark.parametrize("family", FAMILIES)
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


class Talk:
    def __init__(self, folder: Any, messages: list[dict[str, Any]], with_images: bool = True) -> None:
        self.path = tiny_vision_model_dir(folder / "model")
        self.tokenizer = hf_tokenizer(self.path)
        self.maker = ImagePrompts.of(hf_processor(self.path)) if with_images else None
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
        ({"image": ["data:image/png;base64,AAAA"]}, "base64,AAAA' cannot be read: it is no image file"),
        ({"image": [3]}, "the tool look, image 0: an image is int 3. Give the bytes"),
        ({"image": ["http://a/b.png"]}, "is a remote address"),
        ({"text": "-", "video": ["a.mp4"]}, "gave a video, which is not read here"),
    ],
)
def test_what_a_tool_returns_for_an_image(answer, said, look, tmp_path):
    agents = VisionAgents(tmp_path, data__max_response_length=600, **look("Bad", **answer))
    found = agents.answer(agents.prompts(n=1))
    for row, failures in enumerate(found.non_tensor_batch["tool_failures"]):
        assert failures == {"wrong_tool_result": 3}
        told = [m for m in found.non_tensor_batch["trajectory_conversation"][row] if m["role"] == "tool"]
        assert all(said in message["content"] for message in told), told


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
        tokens = tokens_of(tmp_path / "rollouts" / "1.jsonl", row["uid"], row["sample_index"], 0)
        assert [word for *_, word in tokens["images"]] == [f"<image: {count} tokens>" for count in (4, 6, 6)]
    # A run that goes on from step 1 makes the same second step bit by bit.
    again, first = tmp_path / "again", tmp_path / "checkpoints"
    changes |= {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": first / "global_step_1"}
    run_ppo(compose(overrides(paths, again, **changes, trainer__default_local_dir=again)))
    files = sorted((first / "global_step_2").rglob("*.pt"))
    assert len(files) >= 5  # model, optimizer, random numbers, data and driver
    for file in files:
        assert same(*(torch.load(root / file.relative_to(first), weights_only=False) for root in (first, again))), file
