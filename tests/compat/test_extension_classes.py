"""Classes of programs in the public style: each reads a key of its own and the attributes that its base offers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.agents.script import Script
from tests.support.tiny_run import make_tiny_run, overrides
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


def run_loop(folder: Path, source: str, texts: list[str], entry: str = "", **changes: object) -> tuple[Any, Any]:
    """Run the class ``Mine`` of a program for one prompt, on a policy that says ``texts``; the result, the policy."""
    paths = make_tiny_run(folder)
    (folder / "loop_of_program.py").write_text(source)
    (folder / "loops.yaml").write_text(f"- {{name: mine, _target_: Mine, path: {folder}/loop_of_program.py{entry}}}\n")
    agent = "actor_rollout_ref__rollout__agent__"
    settings = {
        "data__max_prompt_length": 80,
        "data__max_response_length": 200,
        f"{agent}agent_loop_config_path": folder / "loops.yaml",
        f"{agent}default_agent_loop": "mine",
        **changes,
    }
    command = [*overrides(paths, folder, **settings), "+my_section.switch=on", "+data.my_switch=on"]
    config = load_config(compose(command), for_program=True)
    tokenizer = hf_tokenizer(paths["model"])
    script = Script(tokenizer)
    script.begin(texts)
    trajectory = Trajectory(
        agent_name="mine",
        sample=SampleId(step=1, uid="1-0", sample_index=0, prompt_ids=(5, 6)),
        sampling=SamplingParams(seed=1, max_tokens=200),
        row={"raw_prompt": [{"role": "user", "content": "2*21?"}]},
    )
    result: TrajectoryResult = asyncio.run(AgentLoopWorker(config, tokenizer, None, script).run(trajectory))
    assert result.status == "done", result.message
    return result.outputs[0], script


def test_an_agent_loop_reads_keys_of_its_program_and_the_attributes_of_its_base(tmp_path: Path):
    output, _ = run_loop(tmp_path, LOOP, ["42"], ", greeting: hello")
    assert output.extra_fields["seen"] == ("on", "on", "hello", True)
    assert output.extra_fields["system"] == ""  # the template of the tiny model writes none
    assert output.extra_fields["dataset"] == "RLHFDataset"
    assert output.extra_fields["lengths"] == (80, 200)


def test_hooks_of_a_tool_loop_of_states_are_refused_where_nothing_calls_them():
    async def hook(self: object, *arguments: object) -> None: ...

    message = r"Mine\._call_tool would never be called: ToolAgentLoop\.run has no states"
    with pytest.raises(ConfigError, match=message):
        type("Mine", (ToolAgentLoop,), {"_call_tool": hook})
    assert type("Mine", (ToolAgentLoop,), {"_call_tool": hook, "run": hook}).run is hook


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
