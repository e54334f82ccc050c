"""Parts of responses on their way through the router's process."""

from __future__ import annotations

import queue

import ray

from verl.serving.ray import RayConnection, RayRequests, RouterActor
from verl.single_controller.ray.watched_actor import light_actor
from verl.workers.rollout.request import DrawnPart, RolloutOutput, RolloutRequest, SamplingParams


def test_parts_come_before_the_answer_and_a_cancelled_stream_ends(ray_cluster: None) -> None:
    router = light_actor(RouterActor).remote(8)
    ray.get(router.open.remote(1, 1, {}))
    connection, told = RayConnection(router), queue.SimpleQueue[DrawnPart]()
    request = RolloutRequest([5], SamplingParams(max_tokens=3, seed=0), streams=True)
    output = RolloutOutput([7, 8, 9], [-1.0, -2.0, -3.0], "stop", 4)
    with RayRequests(router, 1).open_queue(0, 4) as engine:
        call = connection.send("a", request, told.put)
        [(number, came)] = engine.take(wait=True)
        assert came == request
        parts = [DrawnPart(0, [7]), DrawnPart(1, [8])]
        for part in parts:
            engine.answer_part(number, part)
            assert told.get(timeout=60) == part
        engine.answer(number, output)
        assert call.future().result(60) == output
        left = connection.send("b", request, told.put)
        [(number, _)] = engine.take(wait=True)
        left.cancel()
        while number not in engine.take_cancelled():
            pass
        assert ray.get(router.__ray_call__.remote(lambda self: len(self._streams))) == 0
        ray.get(router.close.remote(1))
    ray.kill(router)
