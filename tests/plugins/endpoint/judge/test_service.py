"""The judge's endpoint and engine without a training around them, asked by the official client."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from tests.plugins.endpoint.judge.test_judge_in_a_run import settings
from tests.support.tiny_run import make_tiny_run, overrides
from tests.support.waiting import eventually
from tests.workers.reward_manager.batches import TOKENIZER, batch_of
from verl.agents.worker import check_agent_loops
from verl.errors import ConfigError
from verl.experience.scoring import submit_scores
from verl.plugins.endpoint.judge import ASLEEP, JudgeService
from verl.single_controller.local import LocalWorkerGroup
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.deferred import Deferred
from verl.workers.fsdp_workers import ActorRolloutRefWorker

PAGE = Path(__file__).parents[4] / "docs" / "plugins" / "judge.md"
REWARD = """
import httpx2

def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer):
    messages = [{"role": "user", "content": solution_str}]
    body = {"model": "judge", "messages": messages, "temperature": 0, "max_tokens": 6}
    if solution_str == "bad":
        body["logit_bias"] = {"5": 1}
    reply = httpx2.post(f"http://{reward_router_address}/v1/chat/completions", json=body)
    reply.raise_for_status()
    words = reward_model_tokenizer(solution_str)["input_ids"]
    return {"score": len(words), "reply": reply.json()["choices"][0]["message"]["content"]}
"""


class Served:
    """A judge and its worker group."""

    def __init__(self, folder: Path, model: str | None = None) -> None:
        self.overrides = overrides(make_tiny_run(folder), folder, **settings(folder, REWARD))
        self.overrides += [f"reward_model.model.path={model}"] if model else []
        config = load_config(compose(self.overrides))
        self.judge = JudgeService(config)
        describe = LocalWorkerGroup.describe(
            ActorRolloutRefWorker, config=config.judge, role="rollout", device_name="cpu"
        )
        self.group = LocalWorkerGroup(ray_cls_with_init=describe)
        self.group.init_model()

    @property
    def weight_bytes(self) -> int:
        return self.group.workers[0].rollout.weight_bytes

    def client(self) -> openai.AsyncOpenAI:
        base_url = f"http://{self.judge.reward_router_address}/v1"
        return openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)

    def asked(self, *calls: dict[str, Any], step: int = 1) -> list[Any]:
        """Answers to calls that are sent at once; errors as they are."""

        async def all_of_them() -> list[Any]:
            async with self.client() as client:
                return await asyncio.gather(*(_ask(client, call) for call in calls), return_exceptions=True)

        return self.judge.serve_while(
            self.group, step, lambda: Deferred([], lambda: asyncio.run(all_of_them()))
        ).result()


async def _ask(client: openai.AsyncOpenAI, call: dict[str, Any]) -> Any:
    return await client.chat.completions.create(**({"model": "judge", "max_tokens": 6} | call))


def user(text: Any, **further: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **further}


def texts(answers: list[Any]) -> list[str]:
    return [choice.message.content for answer in answers for choice in answer.choices]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("judge"))
    yield served
    served.judge.close()


def test_many_calls_at_once_get_the_answers_that_each_gets_alone(served: Served):
    calls = [user(f"question {number}", seed=3) for number in range(24)]  # the engine runs 4 at once
    together = texts(served.asked(*calls))
    assert len(set(together)) > 20
    alone = [texts(served.asked(call, step=step))[0] for step, call in ((2, calls[5]), (3, calls[17]))]
    assert alone == [together[5], together[17]]


def test_answers_without_a_seed_differ_and_follow_from_the_step(served: Served):
    call = user("the same", n=3)
    first, second, again = (set(texts(served.asked(call, call, step=step))) for step in (1, 2, 1))
    assert len(first) == 6
    assert first == again
    assert first.isdisjoint(second)


def test_texts_are_no_control_tokens(served: Served):
    # <user>, 5 + 11 characters, <assistant>
    answer = served.asked(user("<eos><assistant>"))[0]
    assert answer.usage.prompt_tokens == 1 + len("<eos><assistant>") + 1


def test_stop_texts_and_lengths(served: Served):
    whole, short = served.asked(user("a", temperature=0, max_tokens=12), user("a", temperature=0, max_tokens=3))
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)
    text = whole.choices[0].message.content
    assert text.startswith(short.choices[0].message.content)
    stopped = served.asked(user("a", temperature=0, max_tokens=12, stop=[text[4:6]]))[0]
    assert stopped.choices[0].message.content == text[: text.index(text[4:6])]
    assert stopped.choices[0].finish_reason == "stop"


TOOL = {"type": "function", "function": {"name": "double"}}


@pytest.mark.parametrize(
    "call, status, said",
    [
        (user("x" * 3000), 400, "maximum context length is 2016 tokens"),
        (user("x", logit_bias={"5": 1}), 400, "logit_bias"),
        (user("x", extra_body={"top_k": -7}), 400, "top_k"),
        (user("x", extra_body={"chat_template_kwargs": {"tokenize": False}}), 400, "chat_template_kwargs"),
        (user("x", n=0), 400, "n:"),
        (user("x", tools=[TOOL], tool_choice="required"), 400, "a judge calls no tools"),
        (user([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]), 400, "judge reads texts"),
    ],
)
def test_what_is_refused_costs_only_itself(served: Served, call: dict[str, Any], status: int, said: str):
    refused, answered = served.asked(call, user("x"))
    assert (refused.status_code, said in str(refused)) == (status, True), refused
    assert answered.usage.completion_tokens == 6


def test_it_sleeps_while_others_work(served: Served):
    async def ask() -> Any:
        async with served.client() as client:
            return await _ask(client, user("x"))

    seen = []
    served.judge.serve_while(
        served.group, 1, lambda: Deferred([], lambda: [asyncio.run(ask()), seen.append(served.weight_bytes)])
    ).result()
    # embedding and head 104 x 64; per layer q, o 64 x 64, k, v 64 x 32, three of 64 x 128, two norms; the last norm
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert seen == [4 * (2 * 104 * 64 + 2 * layer + 64)]
    assert served.weight_bytes == 0
    with pytest.raises(openai.InternalServerError, match=re.escape(ASLEEP)):
        asyncio.run(ask())


def test_calls_that_nobody_waits_for_do_not_keep_it_awake(served: Served):
    ended: list[Any] = []

    async def ask() -> None:
        async with served.client() as client:
            ended.extend(await asyncio.gather(_ask(client, user("x", n=128, max_tokens=100)), return_exceptions=True))

    thread = threading.Thread(target=lambda: asyncio.run(ask()))
    served.judge.metrics()

    def start() -> Deferred[None]:
        thread.start()
        return Deferred([], lambda: eventually(lambda: served.judge._backend._counts["calls"] == 1, "a call"))

    served.judge.serve_while(served.group, 1, start).result()
    thread.join(30)
    assert served.weight_bytes == 0
    assert [error.status_code for error in ended] == [503]


def test_an_error_of_the_scoring_ends_the_serving(served: Served):
    def fails(error: Exception) -> Callable[[], Any]:
        def work() -> Any:
            raise error

        return work

    with pytest.raises(ValueError, match="while it starts"):
        served.judge.serve_while(served.group, 1, fails(ValueError("while it starts"))).result()
    with pytest.raises(ValueError, match="later"):
        served.judge.serve_while(served.group, 1, lambda: Deferred([], fails(ValueError("later")))).result()
    assert served.weight_bytes == 0
    assert len(served.asked(user("x"))) == 1


def test_what_is_counted(served: Served):
    served.judge.metrics()
    answers = served.asked(user("ab"), user("abc", n=2), user("x" * 3000))
    drawn = sum(answer.usage.completion_tokens for answer in answers[:2])
    counted = served.judge.metrics()
    assert counted.pop("judge/wake_s") > 0
    # <user>, text, <assistant>
    assert counted == {
        "judge/calls": 3.0,
        "judge/failed_calls": 1.0,
        "judge/prompt_tokens": 4.0 + 5.0,
        "judge/tokens": float(drawn),
    }


def test_the_function_of_the_page(served: Served):
    [page] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    address = served.judge.reward_router_address

    def scored(example: str) -> Any:
        space: dict[str, Any] = {}
        exec(example, space)
        info = {"raw_prompt": [{"role": "user", "content": "2+2?"}]}
        work = Deferred([], lambda: asyncio.run(space["compute_score"]("d", "5", "4", info, address)))
        return served.judge.serve_while(served.group, 1, lambda: work).result()

    with pytest.raises(IndexError):  # the model writes at random, and no "Score: N"
        scored(page)
    found = scored(page.replace(r"Score: (\d+)", r"(\d)"))
    task = "Question: 2+2?\nAnswer: 5\nIs the answer right? End with 'Score: N', N from 0 to 10."
    [reply] = texts(served.asked(user(task, temperature=0, max_tokens=512)))
    assert found == {"score": int(re.findall(r"\d", reply)[-1]) / 10, "judge_reply": reply}


def test_a_plain_function_asks_and_what_fails_costs_only_itself(served: Served):
    manager = load_reward_manager(load_config(compose(served.overrides)), TOKENIZER, 0, **served.judge.arguments)
    batch = batch_of(["four", "bad", "6"], ["4"] * 3)
    scores, extra = served.judge.serve_while(served.group, 1, lambda: submit_scores(batch, manager)).result()
    assert extra["reward_status"] == ["ok", "error", "ok"]
    assert scores.sum(-1).tolist() == [4.0, 0.0, 1.0]
    alone = texts(served.asked(user("four", temperature=0), user("6", temperature=0)))
    assert extra["reply"] == [alone[0], None, alone[1]]


def test_the_scorer_llm_judge_asks_the_judge_of_the_run(served: Served):
    scorer = {"pattern": "'(\\d)'", "score_range": "[0,9]", "max_tokens": 256, "question_key": "raw_prompt"}
    changes = {f"+reward_model.scorer_kwargs.{name}": value for name, value in scorer.items()}
    own = {"reward_model.reward_format": "llm_judge", "custom_reward_function.path": "null"}
    config = load_config(compose([*served.overrides, *(f"{key}={value}" for key, value in (own | changes).items())]))
    manager = load_reward_manager(config, TOKENIZER, 0, **served.judge.arguments)
    question = [{"role": "user", "content": "2+2?"}]
    batch = batch_of(["4", "five"], ["4", "4"], raw_prompt=[question, question])
    scores, extra = served.judge.serve_while(served.group, 1, lambda: submit_scores(batch, manager)).result()
    digits = [int(re.findall(r"\d", reply)[-1]) for reply in extra["judge_reply"]]
    assert extra["judge_reply"][0] != extra["judge_reply"][1]
    assert extra["judge_score"] == digits
    assert scores.sum(-1).tolist() == pytest.approx([digit / 9 for digit in digits])


def test_a_page_in_a_browser_does_not_reach_it(served: Served):
    url = f"http://{served.judge.reward_router_address}/v1/models"
    asked = [httpx2.get(url, headers={"Host": host}).status_code for host in ("rebound.example", "localhost:1")]
    assert asked == [400, 200]


def test_a_manager_of_ones_own_gets_the_judge_that_it_names(served: Served, tmp_path: Path):
    (tmp_path / "managers.py").write_text(
        "class Asking:\n"
        "    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key, reward_router_address):\n"
        "        self.address = reward_router_address\n"
    )
    own = {"source": "importlib", "name": "Asking", "module.path": tmp_path / "managers.py"}
    settings = [*(f"reward_manager.{name}={value}" for name, value in own.items()), "custom_reward_function.path=null"]
    config = load_config(compose([*served.overrides, *settings]))
    manager: Any = load_reward_manager(config, TOKENIZER, 0, **served.judge.arguments)
    assert manager.address == served.judge.reward_router_address


def test_a_judge_that_nobody_asks_and_a_function_that_asks_nobody_are_refused(served: Served, tmp_path: Path):
    (tmp_path / "reward.py").write_text("def compute_score(solution_str): return 0.0")
    deaf = [*served.overrides, f"custom_reward_function.path={tmp_path}/reward.py"]
    with pytest.raises(ConfigError, match="does not ask it: it has no parameter reward_router_address"):
        load_reward_manager(load_config(compose(deaf)), TOKENIZER, 0, **served.judge.arguments)
    alone = [*served.overrides, "reward_model.enable=false"]
    with pytest.raises(ConfigError, match=r"needs reward_model_tokenizer, reward_router_address.*rollout\.name"):
        load_reward_manager(load_config(compose(alone)), TOKENIZER, 0)


@pytest.mark.slow
def test_the_memory_of_a_sleeping_judge_goes_back_to_the_machine(tmp_path: Path):
    big = tiny_model_dir(tmp_path / "big", "llama", hidden_size=1024, intermediate_size=4096, head_dim=64)
    served = Served(tmp_path, big)
    process, awake = psutil.Process(), []

    def ask() -> None:
        async def all_of_it() -> None:
            async with served.client() as client:
                await _ask(client, user("x"))

        asyncio.run(all_of_it())
        awake.append((process.memory_info().rss, served.weight_bytes))

    served.judge.serve_while(served.group, 1, lambda: Deferred([], ask)).result()
    gc.collect()
    asleep = process.memory_info().rss
    [(rss, weights)] = awake
    assert weights > 100 * 2**20
    assert rss - asleep > 0.9 * weights
    served.judge.close()


def test_an_agent_loop_that_asks_a_judge_which_does_not_answer_it_is_refused(tmp_path: Path):
    (tmp_path / "loops.yaml").write_text(f"- {{name: asks, _target_: Asks, path: {tmp_path / 'asks.py'}}}")
    (tmp_path / "asks.py").write_text(
        "from verl.experimental.agent_loop.agent_loop import AgentLoopBase\n"
        "class Asks(AgentLoopBase):\n"
        "    async def run(self, sampling_params, *, reward_router_address, **kwargs): ...\n"
    )
    loops = {"actor_rollout_ref__rollout__agent__agent_loop_config_path": tmp_path / "loops.yaml"}
    paths, judged = make_tiny_run(tmp_path), settings(tmp_path, REWARD)
    own = {
        "reward_model__enable_resource_pool": "true",
        "reward_model__nnodes": 1,
        "reward_model__n_gpus_per_node": 1,
        "trainer__controller": "ray",
    }

    def check(**changes: Any) -> None:
        config = load_config(compose(overrides(paths, tmp_path, **loops, **changes)))
        check_agent_loops(config, TOKENIZER, ["asks"])

    with pytest.raises(ConfigError, match=r"'asks' \(reward_router_address of its run\) asks .*, and the run has none"):
        check()
    with pytest.raises(ConfigError, match="it shares the policy's processes"):
        check(**judged)
    check(**judged, **own)
    with pytest.raises(ConfigError, match=r"other machines \(trainer.nnodes=2\) do not reach"):
        check(**judged, **own, trainer__nnodes=2)
