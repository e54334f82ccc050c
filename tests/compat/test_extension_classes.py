"""Classes of programs in the public style: each reads a key of its own and the attributes that its base offers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.agents.script import Script
from tests.support.tiny_run import make_tiny_run, overrides
from verl.agents.loop import AgentLoopOutput
from verl.agents.policy import SampleId
from verl.agents.tool_agent import ToolAgentLoop
from verl.agents.worker import AgentLoopWorker, Trajectory, TrajectoryResult
from verl.compat.toolkit.losses import ppo_loss
from verl.config import ActorConfig
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.testing.models import tiny_tokenizer
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.reward_manager import DAPORewardManager, NaiveRewardManager
from verl.workers.rollout.request import SamplingParams

LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

class Mine(AgentLoopBase):
    def __init__(self, trainer_config, server_manager, tokenizer, processor, dataset_cls=None, data_config=None,
                 greeting="", **kwargs):
        super().__init__(trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config, **kwargs)
        self.greeting = greeting
        self.switch = self.config.get("my_section", {}).get("switch", "default")
        self.data_switch = self.data_config.get("my_switch", "default")

    async def run(self, sampling_params, **kwargs):
        media = await self.process_multi_modal_info(kwargs["raw_prompt"])
        prompt = await self.apply_chat_template(
            kwargs["raw_prompt"], images=media.get("images"), audios=media.get("audios"), mm_processor_kwargs=None)
        text = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(prompt))
        output = await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=sampling_params)
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=output.token_ids, response_mask=[1] * len(output.token_ids),
            metrics=AgentLoopMetrics(), num_turns=2,
            extra_fields={
                "seen": (self.switch, self.data_switch, self.greeting, len(text) > 0),
                "system": self.tokenizer.decode(self.system_prompt), "dataset": self.dataset_cls.__name__,
                "lengths": (self.rollout_config.prompt_length, self.rollout_config.get("response_length")),
            },
        )
"""


TOOL_LOOPS = """
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.tools.function_tool import function_tool

@function_tool
def double(x: int) -> int:
    "Double.\\n\\nArgs:\\n    x: a number."
    return 2 * x

class Plain(ToolAgentLoop):
    pass

class Hooks(ToolAgentLoop):
    def __init__(self, *args, repeats=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.repeats = repeats

    async def _call_tool(self, tool_call, tools_kwargs, agent_data):
        response, reward, metrics = await super()._call_tool(tool_call, tools_kwargs, agent_data)
        response.text += self.config.my_section.switch * self.repeats
        return response, 0.5, {**metrics, "calls": len(agent_data.tool_calls)}

    async def _handle_processing_tools_state(self, agent_data):
        state = await super()._handle_processing_tools_state(agent_data)
        agent_data.extra_fields["seen"] = (agent_data.user_turns, self.tokenizer.decode(agent_data.prompt_ids[-8:]))
        return AgentState.TERMINATED if agent_data.user_turns == 2 else state

class Writes(ToolAgentLoop):
    async def _handle_processing_tools_state(self, agent_data):
        ids = self.tokenizer.encode("[3]", add_special_tokens=False)
        agent_data.prompt_ids += ids
        agent_data.response_mask += [0] * len(ids)
        if agent_data.response_logprobs:
            agent_data.response_logprobs += [0.0] * len(ids)
        return AgentState.GENERATING

class OwnRun(ToolAgentLoop):
    async def run(self, sampling_params, **kwargs):
        data = AgentData(messages=list(kwargs["raw_prompt"]), image_data=None, video_data=None, metrics={},
                         request_id="a", tools_kwargs={})
        state = await self._handle_pending_state(data, sampling_params)
        for _ in range(2):
            assert await self._handle_generating_state(data, sampling_params) == AgentState.PROCESSING_TOOLS
            assert await self._handle_processing_tools_state(data) == AgentState.GENERATING
        count = len(data.response_mask)
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[:-count], response_ids=data.prompt_ids[-count:],
            response_mask=data.response_mask, response_logprobs=data.response_logprobs, metrics=data.metrics,
            num_turns=data.user_turns + data.assistant_turns + 1, extra_fields={"tool_rewards": data.tool_rewards})

class Long(Hooks):
    pass

class Broken(ToolAgentLoop):
    async def _handle_processing_tools_state(self, agent_data):
        agent_data.response_mask += [0] * 999
        return AgentState.GENERATING
"""
CALL = '<tool_call>{"name": "double", "arguments": {"x": 3}}</tool_call>'


class Loops:
    """Agent loops of a program, by the names of their classes, and a policy that says given texts."""

    def __init__(self, folder: Path) -> None:
        paths, file = make_tiny_run(folder), folder / "loops_of_program.py"
        file.write_text(LOOP + TOOL_LOOPS)
        names = ("Mine", "Plain", "Hooks", "Long", "Writes", "OwnRun", "Broken")
        more = {"Mine": ", greeting: hello", "Long": ", repeats: 20"}
        entries = [f"- {{name: {name}, _target_: {name}, path: {file}{more.get(name, '')}}}\n" for name in names]
        (folder / "loops.yaml").write_text("".join(entries))
        rollout = "actor_rollout_ref__rollout__"
        settings = {
            "data__max_prompt_length": 900,
            "data__max_response_length": 400,
            f"{rollout}agent__agent_loop_config_path": folder / "loops.yaml",
            f"{rollout}agent__default_agent_loop": "Mine",
            f"{rollout}multi_turn__function_tool_path": file,
            f"{rollout}multi_turn__max_tool_response_length": 20,
        }
        command = [*overrides(paths, folder, **settings), "+my_section.switch=on", "+data.my_switch=on"]
        self.tokenizer = hf_tokenizer(paths["model"])
        self.policy = Script(self.tokenizer)
        config = load_config(compose(command), for_program=True)
        self._worker = AgentLoopWorker(config, self.tokenizer, None, self.policy)

    def run(self, name: str, *texts: str) -> AgentLoopOutput:
        self.policy.begin(list(texts))
        trajectory = Trajectory(
            agent_name=name,
            sample=SampleId(step=1, uid="1-0", sample_index=0, prompt_ids=(5, 6)),
            sampling=SamplingParams(seed=1, max_tokens=200),
            row={"raw_prompt": [{"role": "user", "content": "2*21?"}]},
        )
        result: TrajectoryResult = asyncio.run(self._worker.run(trajectory))
        assert result.status == "done", result.message
        return result.outputs[0]

    def written(self, output: AgentLoopOutput) -> str:
        """The response, with the tokens of mask 0 in ()."""
        marked = (
            self.tokenizer.decode([token]) if mask else f"({self.tokenizer.decode([token])})"
            for token, mask in zip(output.response_ids, output.response_mask, strict=True)
        )
        return "".join(marked).replace(")(", "")


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    return Loops(tmp_path_factory.mktemp("loops"))


def test_an_agent_loop_reads_keys_of_its_program_and_the_attributes_of_its_base(loops: Loops):
    output = loops.run("Mine", "42")
    assert output.extra_fields["seen"] == ("on", "on", "hello", True)
    assert output.extra_fields["system"] == ""  # the template of the tiny model writes none
    assert output.extra_fields["dataset"] == "RLHFDataset"
    assert output.extra_fields["lengths"] == (900, 400)


def test_a_tool_loop_with_methods_of_a_program(loops: Loops):
    drawn = CALL + "<eos>"

    # With no method overridden it is the loop of tools, token by token.
    plain = loops.run("Plain", CALL, CALL, "42")
    result = "tool: 6\n<assistant>"
    assert loops.written(plain) == f"{drawn}({result}){drawn}({result})42<eos>"
    assert loops.tokenizer.decode(loops.policy.prompts[-1]) == f"<user>2*21?<assistant>{drawn}{result}{drawn}{result}"
    prompts, times = loops.policy.prompts, {"metrics", "conversation"}
    ours = loops.run("tool_agent", CALL, CALL, "42")
    assert plain.model_dump(exclude=times) == ours.model_dump(exclude=times)
    assert prompts == loops.policy.prompts

    # The tool's answer has the program's text and reward; the second one ends the conversation.
    hooks = loops.run("Hooks", CALL, CALL)
    assert loops.written(hooks) == f"{drawn}(tool: 6on\n<assistant>){drawn}(tool: 6on\n<assistant>)"
    assert hooks.extra_fields["tool_rewards"] == [0.5, 0.5]
    assert hooks.extra_fields["tool_extra_fields"]["metrics"] == [{"calls": 1}] * 2
    assert hooks.extra_fields["seen"] == (2, "l: 6on\n<assistant>")
    # A long text of the program is shortened as that of a tool is.
    long = loops.written(loops.run("Long", CALL, "42"))
    assert long == f"{drawn}(tool: 6...(truncated)...on\n<assistant>)42<eos>"

    # Tokens that a method wrote itself; the policy goes on after them.
    writes = loops.run("Writes", CALL, CALL, "42")
    assert loops.written(writes) == f"{drawn}([3]){drawn}([3])42<eos>"
    assert writes.response_logprobs == [-0.25 * mask for mask in writes.response_mask]
    assert writes.extra_fields["tool_call_counts"] == 0

    # A run of the program's own, with the methods of the base.
    own_run = loops.run("OwnRun", CALL, CALL)
    assert loops.written(own_run) == f"{drawn}({result}){drawn}({result})"
    assert (own_run.num_turns, own_run.extra_fields["tool_rewards"]) == (5, [0.0, 0.0])

    with pytest.raises(AssertionError, match=r"response_mask has 1064 values, and prompt and response have 72 tokens"):
        loops.run("Broken", CALL, "42")


def test_methods_of_a_tool_loop_that_nothing_could_call_are_refused():
    async def hook(self: object, *arguments: object) -> None: ...

    async def short(self: object, tool_call: object) -> None: ...

    with pytest.raises(ConfigError, match=r"Mine\._build_assistant_message would never be called"):
        type("Mine", (ToolAgentLoop,), {"_build_assistant_message": hook})
    with pytest.raises(ConfigError, match=r"Mine\._call_tool cannot be called: too many positional arguments"):
        type("Mine", (ToolAgentLoop,), {"_call_tool": short})
    assert type("Mine", (ToolAgentLoop,), {"_call_tool": short, "run": hook}).run is hook


REWARD = """
import torch
from verl import DataProto
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawRewardFn

@register("for_program")
class MyManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score: RawRewardFn | None = None,
                 reward_fn_key="data_source", my_bonus=0.0, **kwargs):
        self.tokenizer, self.compute_score, self.my_bonus = tokenizer, compute_score, my_bonus

    def __call__(self, data: DataProto, return_dict=False):
        scores = torch.full(data.batch["responses"].shape, self.my_bonus)
        return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict else scores
"""


def test_a_reward_manager_reads_an_argument_of_its_own_and_the_names_of_its_base(tmp_path: Path):
    (tmp_path / "manager_of_program.py").write_text(REWARD)
    manager = {
        "reward_manager": {
            "source": "importlib",
            "name": "MyManager",
            "module": {"path": str(tmp_path / "manager_of_program.py")},
        },
        "reward_model": {"reward_kwargs": {"my_bonus": 0.5}},
    }
    made = load_reward_manager(manager, tiny_tokenizer("char"))
    batch = DataProto.from_dict({"responses": torch.ones(2, 3, dtype=torch.long)})
    assert made(batch).tolist() == [[0.5] * 3] * 2
    naive = NaiveRewardManager(tiny_tokenizer("char"), 0, compute_score=score)
    assert naive.compute_score is score
    buffer = {"enable": True, "len": 2, "penalty_factor": 0.5}
    dapo = DAPORewardManager(tiny_tokenizer("char"), 0, score, max_resp_len=6, overlong_buffer_cfg=buffer)
    assert (dapo.overlong_buffer_cfg.enable, dapo.overlong_buffer_cfg.len) == (True, 2)


def score(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> float:
    return 1.0


def test_the_loss_of_the_policy_in_the_public_form():
    config = ActorConfig(strategy="fsdp", rollout_n=4, clip_ratio=0.2, loss_agg_mode="token-mean")
    assert config.rollout_n == 4
    data = TensorDict(
        {
            "responses": torch.ones(1, 2, dtype=torch.long),
            "attention_mask": torch.ones(1, 4, dtype=torch.long),
            "response_mask": torch.ones(1, 2, dtype=torch.long),
            "old_log_probs": torch.zeros(1, 2),
            "advantages": torch.tensor([[1.0, -1.0]]),
        },
        batch_size=1,
    )
    # Two tokens after two of the prompt: the values stand at positions 1 and 2. Ratios 1.5 and 0.5.
    flat = torch.tensor([9.0, 1.5, 0.5, 9.0]).log()
    nested = torch.nested.nested_tensor_from_jagged(flat, torch.tensor([0, 4]))
    # -min(1.5, 1.2) * 1 and max(0.5, 0.8) * 1: (-1.2 + 0.8) / 2 tokens.
    value, metrics = ppo_loss(config, {"log_probs": nested}, data)
    assert value.item() == pytest.approx(-0.2)
    assert float(metrics["actor/pg_loss"]) == pytest.approx(-0.2)
    # As one of four micro-batches of a mini-batch of 8 tokens on two ranks: (-1.2 + 0.8) / 8 * 2.
    for name, count in {"dp_size": 2, "batch_num_tokens": 8, "global_batch_size": 4}.items():
        data.set_non_tensor(name, count)
    assert ppo_loss(config, {"log_probs": nested}, data)[0].item() == pytest.approx(-0.1)


def test_names_that_programs_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from verl.experimental.agent_loop.agent_loop import resolve_config_path
    from verl.single_controller.ray.base import get_random_string
    from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY
    from verl.trainer.ppo.ray_trainer import _timer
    from verl.utils.ulysses import gather_outpus_and_unpad, gather_outputs_and_unpad
    from verl.workers.config import AgentLoopConfig, CustomAsyncServerConfig

    assert gather_outpus_and_unpad is gather_outputs_and_unpad
    assert len(get_random_string(6)) == 6
    assert get_random_string(20) != get_random_string(20)
    timing: dict[str, float] = {}
    with _timer("step", timing):
        pass
    assert set(timing) == {"step"}
    assert "forward_kl_topk" in DISTILLATION_LOSS_REGISTRY
    assert callable(DISTILLATION_LOSS_REGISTRY["k1"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loops.yaml").write_text("[]")
    assert resolve_config_path("loops.yaml") == str(tmp_path / "loops.yaml")
    with pytest.raises(FileNotFoundError, match=r"there is no nowhere\.yaml"):
        resolve_config_path("nowhere.yaml")
    assert AgentLoopConfig(custom_async_server=CustomAsyncServerConfig()).custom_async_server.path is None
