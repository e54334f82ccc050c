"""Images of conversations on Ray: what travels, what is freed, and the numbers of agent loops in processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray._private.internal_api import node_stats
from ray.exceptions import OwnerDiedError
from torch.testing import assert_close

from tests.vision.agent_batches import VisionAgents
from verl.agents.images import together
from verl.base.registry import scoped_registrations
from verl.errors import RolloutError
from verl.protocol.shared import SharedTensors
from verl.serving.ray import RayConnection, RayRequests, RouterActor
from verl.serving.sent_images import ImageReceiver, ImageSender, SentRequest
from verl.single_controller.ray.watched_actor import light_actor
from verl.vision.families import IMAGE_INPUTS
from verl.workers.rollout.placed_images import digests
from verl.workers.rollout.request import RolloutOutput, RolloutRequest, SamplingParams

PATCHES, VALUES = 2048, 128
SIZE = PATCHES * VALUES * 4
"""Bytes of an image, 1 MiB."""
TURNS = 8


def image(number: int, patches: int = PATCHES) -> SharedTensors:
    pixels = torch.randn(patches, VALUES, generator=torch.Generator().manual_seed(number))
    return SharedTensors(dict(zip(IMAGE_INPUTS, (pixels, torch.tensor([[1, 2, patches // 2]])), strict=True)))


def request_with(images: SharedTensors | None) -> RolloutRequest:
    return RolloutRequest([5, 6], SamplingParams(max_tokens=3, seed=0), images, (1,))


def store() -> Any:
    """What the object store of this machine has done until now, and holds."""
    [node] = ray.nodes()
    return node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats


def made_since(before: Any) -> int:
    """Bytes of the objects that were stored since."""
    return store().cumulative_created_bytes - before.cumulative_created_bytes


@pytest.fixture
def router(ray_cluster: None) -> Iterator[Any]:
    actor = light_actor(RouterActor).remote(8)
    yield actor
    ray.kill(actor)


def test_eight_turns_store_each_image_once_and_free_it_at_their_end(router: Any) -> None:
    """Turn n has n images. By value 1 + 2 + ... + 8 = 36 of them would go to the router, and on to the engine."""
    ray.get(router.open.remote(1, 1, {}))
    connection, output = RayConnection(router), RolloutOutput([7], [-1.0], "stop", 0)
    before = store()
    images = [image(number) for number in range(TURNS)]
    with RayRequests(router, 1).open_queue(0, 0) as engine:

        def turn(conversation: str, given: SharedTensors) -> None:
            call = connection.send(conversation, request_with(given))
            [(number, came)] = engine.take(wait=True)
            assert type(came) is RolloutRequest
            assert (came.prompt_ids, came.text_places) == ([5, 6], (1,))
            assert all(torch.equal(came.images[name], given[name]) for name in IMAGE_INPUTS)
            assert digests(came.images) == digests(given)
            engine.answer(number, output)
            assert call.future().result(60) == output

        for end in range(1, TURNS + 1):
            turn("a", together(images[:end]))
        assert connection.images.stored_bytes == TURNS * SIZE
        assert TURNS * SIZE <= made_since(before) < 1.01 * TURNS * SIZE
        turn("b", together(images[2:4]))  # another response to the prompt
        assert made_since(before) < 1.01 * TURNS * SIZE
        connection.end("a")
        assert connection.images.stored_bytes == 2 * SIZE
        connection.end("b")
        assert connection.images.stored_bytes == 0
        until = time.monotonic() + 30  # while the engine still serves: nothing there keeps them
        while store().object_store_bytes_used > before.object_store_bytes_used:
            assert time.monotonic() < until, "the images of conversations that have ended are still stored"
            time.sleep(0.1)
        ray.get(router.close.remote(1))


class Owner:
    """Holds a conversation."""

    def __init__(self) -> None:
        self.images = ImageSender(ray.put)

    def send(self) -> RolloutRequest:
        return self.images.sent("a", request_with(together([image(0, 4), image(1)])))


def is_there(reference: Any) -> bool:
    try:
        ray.get(reference)
    except OwnerDiedError:
        return False
    return True


@pytest.mark.slow
def test_an_image_whose_process_is_lost_fails_its_request_alone(router: Any) -> None:
    ray.get(router.open.remote(1, 1, {}))
    owner, connection = ray.remote(Owner).options(num_cpus=0).remote(), RayConnection(router)
    request = ray.get(owner.send.remote())
    ray.kill(owner)
    until = time.monotonic() + 30
    while is_there(request.sent[1].pixels):  # the store learns of the death a moment later
        assert time.monotonic() < until
        time.sleep(0.05)
    with RayRequests(router, 1).open_queue(0, 0) as engine:
        with pytest.raises(RolloutError, match="image 1 of the prompt is lost: the process that held the conversation"):
            connection.send("a", request).future().result(60)
        call = connection.send("b", request_with(None))
        [(number, _)] = engine.take(wait=True)
        engine.answer(number, RolloutOutput([7], [-1.0], "stop", 0))
        assert call.future().result(60).token_ids == [7]
        ray.get(router.close.remote(1))


def test_small_images_travel_by_value_and_the_receiver_keeps_recent_ones() -> None:
    store: list[np.ndarray] = []
    sender = ImageSender(lambda pixels: store.append(pixels) or len(store) - 1)
    asked: list[int] = []
    receiver = ImageReceiver(lambda number: asked.append(number) or store[number], room=2 * SIZE + 1)
    small = image(9, 4)
    for number, expected in [(0, [0]), (1, [0, 1]), (0, [0, 1]), (2, [0, 1, 2]), (0, [0, 1, 2]), (1, [0, 1, 2, 1])]:
        given = together([small, image(number)])
        sent = sender.sent("a", request_with(given))
        assert isinstance(sent, SentRequest)
        assert [one.is_stored for one in sent.sent] == [False, True]
        opened = receiver.opened(sent)
        assert all(torch.equal(opened.images[name], given[name]) for name in IMAGE_INPUTS)
        assert asked == expected  # there is room for two
        assert receiver.kept_bytes <= 2 * SIZE
    assert len(store) == 3
    assert sender.stored_bytes == 3 * SIZE
    assert receiver.opened(sender.sent("a", request_with(None))) == request_with(None)
    for _ in range(2):
        sender.end("a")
        assert sender.stored_bytes == 0


LOOPS = """
from verl.agents.parsers.base import FunctionCall, ToolParser, _parsers
from verl.agents.tool_agent import ToolAgentLoop
from tests.support.vision_models import picture
from verl.tools.base_tool import BaseTool, schema
from verl.tools.schemas import ToolResponse

class EveryTurnLooks(ToolParser):
    # A random model writes no calls.
    async def extract_tool_calls(self, responses_ids, tools=None):
        return "-", [FunctionCall(name="look", arguments="{}")]

if "looks" not in _parsers:
    ToolParser.register("looks")(EveryTurnLooks)

class Looks(ToolAgentLoop):
    pass

class Look(BaseTool):
    # One picture that goes through the object store, and one that does not.
    def get_openai_tool_schema(self):
        return schema("look", "Look.", [])

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="see", image=[picture("red", size=(80, 80)), picture("blue")]), 0.5, {}
"""


@pytest.mark.slow
def test_tools_that_show_pictures_give_the_numbers_of_the_local_controller(ray_cluster: None, tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    (tmp_path / "loops.yaml").write_text(f"- {{name: looks, _target_: Looks, path: {tmp_path}/loops.py}}\n")
    (tmp_path / "tools.yaml").write_text(f'tools: [{{class_name: "{tmp_path}/loops.py:Look", config: {{}}}}]\n')
    rollout = "actor_rollout_ref__rollout__"
    settings = {
        "data__max_response_length": 300,
        f"{rollout}multi_turn__enable": "true",
        f"{rollout}multi_turn__tool_config_path": tmp_path / "tools.yaml",
        f"{rollout}multi_turn__format": "looks",
        f"{rollout}multi_turn__max_assistant_turns": 3,
        f"{rollout}stop_token_ids": f"[{','.join(map(str, range(4, 40)))}]",
        f"{rollout}agent__agent_loop_config_path": tmp_path / "loops.yaml",
        f"{rollout}agent__default_agent_loop": "looks",
        f"{rollout}agent__num_workers": 2,
    }
    found = {}
    with scoped_registrations():
        exec(compile(LOOPS, "loops", "exec"), {"__name__": "loops"})
        for controller in ("local", "ray"):
            agents = VisionAgents(tmp_path / controller, trainer__controller=controller, **settings)
            try:
                found[controller] = agents.answer(agents.prompts())
            finally:
                agents.close()
    local, on_ray = found["local"], found["ray"]
    assert on_ray.non_tensor_batch["trajectory_status"].tolist() == ["turns_used_up"] * 8
    for name, values in local.batch.items():
        if values.is_floating_point():
            assert_close(on_ray.batch[name], values, atol=1e-5, rtol=0)
        else:
            assert torch.equal(on_ray.batch[name], values), name
    rows = zip(*(batch.non_tensor_batch["multi_modal_inputs"] for batch in (local, on_ray)), strict=True)
    for number, (expected, row) in enumerate(rows):
        assert len(row["image_grid_thw"]) == 4 + (number < 6)  # two of each of two calls; the last prompt has none
        assert all(torch.equal(row[name], expected[name]) for name in IMAGE_INPUTS)
