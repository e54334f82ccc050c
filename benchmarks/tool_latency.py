"""Trajectories per second with slow tools: each conversation at its own pace, and all turns in lock-step, in one run.

    python -m benchmarks.tool_latency [--conversations 64] [--trajectories 256] [--turns 4] [--median_s 0.2]

Both contestants are the agent loops of :mod:`verl.agents` with the ``native`` engine, ``--conversations`` of them at
once. Each turn draws the same number of tokens and calls a tool, whose time is log-normal (``--sigma`` of its
logarithm): most answers come soon, a few late. In lock-step nobody goes on before all conversations have their
answers, as in rollouts that generate a turn for the whole batch, call all tools at once, and wait for the last.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks import grpo_step, shape
from benchmarks.shape import TINY, Turns, Work

TARGET = 3.0
RESPONSE, TOOL_ANSWER = 16, 16
"""Tokens of each turn's response, and of what the tool answers."""
AGENT = "calls_each_turn"
SMALL = Work(hidden=64, layers=2, heads=2, head_dim=32, key_value_heads=1, intermediate=192)
"""A model that takes little of the time, which is the tool's in runs whose engine has a GPU."""


class LockStep:
    """A place where conversations, each in a thread with an event loop of its own, wait for each other."""

    def __init__(self, parties: int) -> None:
        self._parties = parties
        self._waiting: list[Future[None]] = []
        self._lock = threading.Lock()

    async def wait(self) -> None:
        """Return when as many as there are parties have come."""
        mine: Future[None] = Future()
        with self._lock:
            self._waiting.append(mine)
            complete = self._waiting if len(self._waiting) == self._parties else []
            if complete:
                self._waiting = []
        for future in complete:
            future.set_result(None)
        await asyncio.wrap_future(mine)


def agent_class(lock_step: LockStep | None) -> type[Any]:
    """An agent loop whose every turn calls the tool, whatever the policy drew."""
    from verl.agents.loop import AgentLoopBase, AgentLoopOutput
    from verl.agents.parsers import FunctionCall
    from verl.agents.tool_calls import ToolRunner
    from verl.tools.base_tool import BaseTool, schema
    from verl.tools.schemas import ToolResponse

    class Slow(BaseTool):
        """Answers after as long as it is told."""

        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            await asyncio.sleep(parameters["seconds"])
            return ToolResponse(text="o" * TOOL_ANSWER), None, {}

    class CallsEachTurn(AgentLoopBase):
        """Draws a turn, calls the tool, goes on with its answer."""

        @classmethod
        def prepare(cls, config: Any, tokenizer: Any) -> ToolRunner:
            described = schema("slow", "Answers late.", ["seconds"], seconds={"type": "number"})
            return ToolRunner([Slow({}, described)], lambda text, tokens, side: text)

        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            prompt, response, mask = kwargs["raw_prompt_ids"], [], []
            async with self.shared.session() as tools:
                for seconds in kwargs["seconds"]:
                    drawn = await self.server_manager.generate(
                        "talk", prompt_ids=prompt + response, sampling_params=sampling_params
                    )
                    [result] = await tools.call_all([FunctionCall(name="slow", arguments=f'{{"seconds": {seconds}}}')])
                    answer = self.tokenizer.encode(result.response.text, add_special_tokens=False)
                    assert result.failure is None, result
                    assert len(drawn.token_ids) == RESPONSE
                    assert len(answer) == TOOL_ANSWER
                    response += drawn.token_ids + answer
                    mask += [1] * RESPONSE + [0] * TOOL_ANSWER
                    if lock_step is not None:
                        await lock_step.wait()
            return AgentLoopOutput(prompt_ids=prompt, response_ids=response, response_mask=mask)

    return CallsEachTurn


def rollout(arguments: Any, folder: Path, work: Work, is_in_lock_step: bool) -> Callable[[], None]:
    """All trajectories from their first to their last turn."""
    import torch
    from transformers import AutoModelForCausalLM

    from verl.agents.columns import SequenceColumns
    from verl.agents.local import LocalAgents
    from verl.agents.loop import register
    from verl.agents.policy import SampleId
    from verl.agents.worker import Trajectory
    from verl.trainer.config.command_line import compose
    from verl.trainer.config.load import load_config
    from verl.utils import hf_tokenizer
    from verl.workers.rollout.base import SamplingParams, get_rollout_class

    count, at_once, turns = arguments.trajectories, arguments.conversations, arguments.turns
    register(AGENT)(agent_class(LockStep(at_once) if is_in_lock_step else None))
    settings = {
        "data.train_files": folder / "prompts.jsonl",
        "data.val_files": folder / "prompts.jsonl",
        "data.max_prompt_length": work.prompt_length,
        "data.max_response_length": turns * (RESPONSE + TOOL_ANSWER),
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.actor.use_dynamic_bsz": "true",
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.name": "native",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.free_cache_engine": "false",
        "actor_rollout_ref.rollout.agent.default_agent_loop": AGENT,
        "actor_rollout_ref.rollout.agent.max_concurrent": at_once,
        "trainer.controller": "local",
        "trainer.device": "cpu",
        "trainer.logger": "[]",
        "trainer.n_gpus_per_node": 1,
    }
    config = load_config(compose([f"{key}={value}" for key, value in settings.items()]))
    model_path = config.actor_rollout_ref.model.path
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    tokenizer = hf_tokenizer(model_path)
    settings_of_engine = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    engine = get_rollout_class("native")(*settings_of_engine, tokenizer, "cpu")
    columns = SequenceColumns(config.actor_rollout_ref.rollout, tokenizer, None)
    agents = LocalAgents(config, columns, tokenizer, None)
    chance = random.Random(0)
    prompts = work.prompt_ids()
    rows = [
        {
            "raw_prompt_ids": prompts[number % len(prompts)],
            "seconds": [arguments.median_s * chance.lognormvariate(0, arguments.sigma) for _ in range(turns)],
        }
        for number in range(count)
    ]
    version = 0

    class Engine:
        """The one engine, as the agents' worker group."""

        def limit_silence(self, silent_s: Callable[[], float]) -> AbstractContextManager[None]:
            """No limit."""
            return nullcontext()

        def serve(self, requests: Any) -> None:
            with engine.awake(model.named_parameters, version), requests.open_queue(0, version) as queue:
                engine.serve(queue)

    def run() -> None:
        nonlocal version
        version += 1  # nothing of an earlier round is used
        sampling = SamplingParams(max_tokens=RESPONSE, seed=0, ignore_eos=True)
        trajectories = [
            Trajectory(
                agent_name=AGENT, sample=SampleId(step=version, uid=str(n), sample_index=0), sampling=sampling, row=row
            )
            for n, row in enumerate(rows)
        ]
        future = agents.thread.submit(agents.run(trajectories))
        agents.serve_until(Engine(), future.done)
        results, _ = future.result()
        assert [result.status for result in results] == ["done"] * count, results[0].message
        assert all(len(result.outputs[0].response_ids) == turns * (RESPONSE + TOOL_ANSWER) for result in results)

    return run


def main() -> None:
    """The command line."""
    parser = shape.parser(__doc__)
    parser.add_argument("--conversations", type=int, default=64, help="at once")
    parser.add_argument("--trajectories", type=int, default=256, help="in all, a multiple of --conversations")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--median_s", type=float, default=0.2, help="of the tool")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the logarithm of its time")
    parser.add_argument("--contestant", help=shape.argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=shape.argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = TINY if arguments.tiny else SMALL
    if arguments.trajectories % arguments.conversations:
        parser.error("--trajectories must be a multiple of --conversations")
    if arguments.contestant:
        turns = Turns()
        run = rollout(arguments, arguments.folder, work, arguments.contestant == "lock-step")
        turns.serve(run, versions=shape.versions("torch", "transformers"))
        return
    names = ("conversations", "trajectories", "turns", "median_s", "sigma")
    options = [f"--{name}={getattr(arguments, name)}" for name in names] + (["--tiny"] if arguments.tiny else [])
    with tempfile.TemporaryDirectory() as name:
        grpo_step.prepare(Path(name), work)
        command = [sys.executable, "-m", "benchmarks.tool_latency", *options, "--folder", name]
        threads = {"OMP_NUM_THREADS": str(arguments.threads)}
        field = {title: ([*command, "--contestant", title], threads) for title in ("own pace", "lock-step")}
        found = shape.compare(field, arguments.rounds)
    found.print_times()
    what = f"trajectories/s, {arguments.conversations} conversations at once, slow tools"
    row = shape.speed_row(what, "turns in lock-step", found.seconds, "own pace", "lock-step", TARGET)
    print(f"{what}: {row.ratio:.2f} times as many (target {TARGET:g})")
    found.write(
        arguments.json,
        part="tool_latency",
        work=(
            f"{work.describe()}; {arguments.trajectories} trajectories of {arguments.turns} turns, each of {RESPONSE} "
            f"new tokens and a call of log-normal time (median {arguments.median_s:g} s, sigma {arguments.sigma:g})"
        ),
        rows=[row],
    )


if __name__ == "__main__":
    main()
