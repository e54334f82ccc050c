"""Whole runs whose trajectories have one to three training sequences, of two agents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.utils.tokenizer import hf_tokenizer

LOOPS = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class Delegates(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt, few = row["raw_prompt_ids"], {**sampling_params, "max_tokens": 4}
        last = 1 + sum(prompt) % 3
        sequences = []
        for number in range(last):
            context = prompt[number:]  # each sequence has another context
            drawn = await self.server_manager.generate("a", prompt_ids=context, sampling_params=few)
            ids = drawn.token_ids
            agent = "helper" if number == 1 else "main"
            sequences.append(AgentLoopOutput(
                prompt_ids=context, response_ids=ids, response_mask=[1] * len(ids), agent=agent, num_turns=2 + number))
        return sequences
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": sum(c.isdigit() for c in solution_str) / 8, "read": solution_str}
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[int, dict[str, float]]]:
    """Run two steps with changed settings; the metrics of every step."""
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "loops.py").write_text(LOOPS)
    (tmp_path / "loops.yaml").write_text(f"- {{name: delegates, _target_: Delegates, path: {tmp_path}/loops.py}}\n")
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(**changes: Any) -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        settings = {
            "custom_reward_function__path": tmp_path / "reward.py",
            "actor_rollout_ref__rollout__agent__agent_loop_config_path": tmp_path / "loops.yaml",
            "actor_rollout_ref__rollout__agent__default_agent_loop": "delegates",
            "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean",
        }
        run_ppo(compose(overrides(paths, tmp_path, **(settings | changes))))
        records = [json.loads(line) for line in log.read_text().splitlines()]
        return {record["step"]: record["data"] for record in records}

    return run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.read_text().splitlines()]


def test_trajectories_of_one_to_three_sequences_are_trained_on(train, tmp_path: Path):
    steps = train(
        trainer__rollout_data_dir=tmp_path / "rollouts",
        trainer__validation_data_dir=tmp_path / "validation",
        trainer__test_freq=2,
        actor_rollout_ref__actor__use_kl_loss="true",
        actor_rollout_ref__rollout__val_kwargs__n=2,
        actor_rollout_ref__rollout__val_kwargs__do_sample="true",
        actor_rollout_ref__rollout__val_kwargs__temperature=1.0,
    )
    for step in (1, 2):
        data = steps[step]
        assert data["agent/num_sequences/max"] == 3
        assert 1 < data["agent/num_sequences/mean"] < 3
        assert data["agent/status/done"] == 1
        assert data["training/rollout_probs_diff_max"] < 1e-5
        assert data["actor/grad_norm"] > 0
        records = lines(tmp_path / "rollouts" / f"{step}.jsonl")
        assert len(records) == round(16 * data["agent/num_sequences/mean"])
        of_trajectory: dict[str, set[float]] = {}
        turns: dict[str, int] = {}
        said: dict[str, list[str]] = {}
        for record in records:
            name = record["trajectory"]["id"]
            of_trajectory.setdefault(name, set()).add(record["score"])
            if record["trajectory"]["agent"] == "main":
                turns[name] = record["trajectory"]["num_turns"]
                said.setdefault(name, []).append(record["output"])
        assert all(record["read"] == "\n".join(said[record["trajectory"]["id"]]) for record in records)
        assert len(of_trajectory) == 16
        assert data["num_turns/mean"] == sum(turns.values()) / 16  # of the sequence that is scored
        scores = [score for (score,) in of_trajectory.values()]  # one for all sequences
        assert data["critic/score/mean"] == pytest.approx(sum(scores) / 16, abs=1e-6)
    validated = {record["trajectory"]["id"]: record["score"] for record in lines(tmp_path / "validation" / "2.jsonl")}
    assert len(validated) == 4 * 2
    [mean] = [value for key, value in steps[2].items() if key.startswith("val-core/") and "/mean@2" in key]
    assert mean == pytest.approx(sum(validated.values()) / 8)


def test_every_optional_stage_takes_batches_of_any_number_of_rows(train):
    """A critic, correction, resampling, dynamic sampling, and two epochs."""
    steps = train(
        algorithm__adv_estimator="gae",
        algorithm__use_kl_in_reward="true",
        algorithm__use_pf_ppo="true",
        algorithm__filter_groups__enable="true",
        algorithm__filter_groups__metric="seq_reward",
        algorithm__filter_groups__max_num_gen_batches=20,
        algorithm__rollout_correction__rollout_is="token",
        algorithm__rollout_correction__rollout_is_threshold=2.0,
        actor_rollout_ref__actor__use_dynamic_bsz="true",
        actor_rollout_ref__actor__ppo_max_token_len_per_gpu=128,
        actor_rollout_ref__actor__ppo_epochs=2,
        trainer__total_training_steps=1,
    )
    assert steps[1]["critic/grad_norm"] > 0
    assert steps[1]["agent/num_sequences/max"] == 3


USERS = """
from verl.agents.parsers import ToolParser
from verl.interactions.base import BaseInteraction

@ToolParser.register("thinks_first")
class ThinksFirst(ToolParser):
    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        return f"<think>{text[:3]}</think>{text[3:]}", []

class AsksTwice(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        number = sum(message["role"] == "assistant" for message in messages)
        return number == 2, "Again.", 0.25 * number, {}
"""
STRIPS = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<assistant>{{ m['content'].split('</think>')[-1] }}<eos>"
    "{% else %}<user>{{ m['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_template_that_strips_thoughts_begins_a_sequence_for_each_turn(train, tmp_path: Path, monkeypatch):
    (tmp_path / "thinkers.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "thinkers")
    (tmp_path / "users.yaml").write_text("interaction: [{name: asks, class_name: thinkers.AsksTwice}]")
    (tmp_path / "model" / "chat_template.jinja").write_text(STRIPS)
    rows = lines(tmp_path / "train.jsonl")
    for row in rows:
        row["extra_info"]["interaction_kwargs"] = {"name": "asks"}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = "actor_rollout_ref__rollout__multi_turn__"
    steps = train(
        data__max_response_length=96,
        data__max_prompt_length=400,
        algorithm__adv_estimator="grpo_per_turn",
        actor_rollout_ref__rollout__stop_token_ids=list(range(20, 60)),
        actor_rollout_ref__rollout__agent__default_agent_loop="tool_agent",
        trainer__rollout_data_dir=tmp_path / "rollouts",
        trainer__total_training_steps=1,
        **{
            f"{turns}enable": "true",
            f"{turns}interaction_config_path": tmp_path / "users.yaml",
            f"{turns}format": "thinks_first",
            f"{turns}use_inference_chat_template": "true",
        },
    )
    assert steps[1]["agent/num_sequences/max"] == 2
    assert steps[1]["training/rollout_probs_diff_max"] < 1e-5
    tokenizer = hf_tokenizer(str(tmp_path / "model"))
    sequences: dict[str, list[dict[str, Any]]] = {}
    for record in lines(tmp_path / "rollouts" / "1.jsonl"):
        sequences.setdefault(record["trajectory"]["id"], []).append(record["trajectory"])
    pairs = [pair for pair in sequences.values() if pair[-1]["status"] == "done"]
    assert pairs
    for first, second in pairs:
        assert [drawn for drawn, _ in first["response_mask"]] == [1]
        (_, history), (_, drawn) = second["response_mask"]
        assert drawn == len(second["response_ids"]) - history
        said = tokenizer.decode(first["response_ids"], skip_special_tokens=True)
        whole = first["prompt_ids"] + tokenizer.encode(said[3:] + "<eos><user>Again.<assistant>")
        assert second["prompt_ids"] + second["response_ids"][:history] == whole
        assert (first["turn_scores"], second["turn_scores"]) == ([0.25], [0.5])


CLOCKS = ("timing", "perf/", "global_seqlen/", "recovery/", "rollout_corr/", "training/rollout_")


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_two_ranks_on_ray_make_the_steps_of_one_process(train, ray_cluster, estimator):
    """Mini-batches of odd numbers of rows: the second rank gets a row of padding."""
    changes = {"algorithm__adv_estimator": estimator, "actor_rollout_ref__rollout__name": "native"}
    local = train(**changes)
    on_ray = train(**changes, trainer__controller="ray", trainer__n_gpus_per_node=2)
    for step, expected in local.items():
        same = {key: value for key, value in on_ray[step].items() if not key.startswith(CLOCKS)}
        assert same == pytest.approx({key: expected[key] for key in same}, rel=1e-4, abs=5e-6, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("loss_mode", ["k2", "reverse_kl"])
def test_the_policy_teaches_itself_in_the_sequences_that_begin_with_the_prompt(train, tmp_path: Path, loss_mode: str):
    (tmp_path / "template.jinja").write_text("{{prompt}}={{reward_model.ground_truth.target}} {{best_response}}")
    own = "distillation__self_distillation"
    steps = train(
        **{f"{own}__enabled": "true", f"{own}__template_path": tmp_path / "template.jinja"},
        **{f"{own}__success_score": 0, f"{own}__weights": "ema"},
        data__return_raw_chat="true",
        distillation__enabled="true",
        distillation__distillation_loss__loss_mode=loss_mode,
        distillation__distillation_loss__use_task_rewards="false",
    )
    for metrics in steps.values():
        # Of each trajectory the first sequence alone has the prompt of the data.
        learnt = 1 / metrics["agent/num_sequences/mean"]
        assert metrics["distillation/rows_without_context"] == pytest.approx(1 - learnt)
        assert metrics["distillation/loss"] > 0
        assert metrics["actor/grad_norm"] > 0
