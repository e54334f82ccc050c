"""Whole runs in which the policy is its own teacher."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_run import make_tiny_run, overrides
from verl.errors import ConfigError
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

OWN = "distillation__self_distillation"
LOSS = "distillation__distillation_loss"
SAME = "{{prompt}}"
HINT = "{{prompt}}={{reward_model.ground_truth.target}}"
TOOLS = '''
from verl.tools.function_tool import function_tool

@function_tool
def double(number: int) -> int:
    """Double a number.

    Args:
        number: any.
    """
    return 2 * number
'''


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text("def compute_score(solution_str, **_):\n    return len(solution_str) % 3 / 2\n")
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(template: str, folder: str = "run", **changes: object) -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        (tmp_path / "template.jinja").write_text(template)
        settings = {
            "custom_reward_function__path": tmp_path / "reward.py",
            "actor_rollout_ref__rollout__name": "native",
            "actor_rollout_ref__rollout__n": 2,
            "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
            "data__return_raw_chat": "true",
            "distillation__enabled": "true",
            f"{OWN}__enabled": "true",
            f"{OWN}__template_path": tmp_path / "template.jinja",
            f"{LOSS}__use_task_rewards": "false",
            "trainer__total_training_steps": 3,
        } | changes
        run_ppo(compose(overrides(paths, tmp_path / folder, **settings)))
        return {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}

    return run


def divergences(steps: dict[int, dict[str, float]]) -> list[float]:
    return [metrics["distillation/kl"] for metrics in steps.values()]


def test_without_context_the_policy_agrees_with_itself(train):
    assert divergences(train(SAME)) == [0, 0, 0]
    # Under the weights before training it does so in the first step alone.
    first, second, _ = divergences(train(SAME, **{f"{OWN}__weights": "initial", f"{LOSS}__use_task_rewards": "true"}))
    assert first == 0
    assert abs(second) > 1e-4
    # At another temperature it is another teacher.
    hotter = {"distillation__teacher_models__teacher_model__inference__temperature": 2.0}
    assert abs(divergences(train(SAME, **hotter, trainer__total_training_steps=1))[0]) > 1e-2


@pytest.mark.slow
def test_over_the_whole_vocabulary_too(train):
    full = {f"{LOSS}__loss_mode": "reverse_kl", "trainer__total_training_steps": 1}
    (same,) = train(SAME, **full, **{f"{OWN}__weights": "ema"}).values()
    assert same["distillation/loss"] == pytest.approx(0, abs=1e-7)
    assert same["distillation/agreement"] == 1
    (hinted,) = train(HINT, **full).values()
    assert hinted["distillation/loss"] > 1e-2
    assert hinted["distillation/agreement"] < 1


@pytest.mark.slow
def test_context_makes_the_teacher_another_one_from_which_the_policy_learns(train):
    steps = train(HINT, trainer__total_training_steps=4, **{f"{LOSS}__loss_mode": "k2"})
    assert abs(steps[1]["distillation/kl"]) > 1e-3
    assert steps[1]["distillation/rows_without_context"] == 0
    assert steps[1]["distillation/loss"] > 0
    assert steps[1]["actor/grad_norm"] > 0
    # A row for which the template renders nothing teaches nothing: without task rewards there is no gradient.
    nothing = train("{% if false %}x{% endif %}", trainer__total_training_steps=1)[1]
    assert nothing["distillation/rows_without_context"] == 1
    assert nothing["actor/grad_norm"] == 0


@pytest.mark.slow
def test_the_average_ends_in_the_policy_and_in_its_start(train):
    def under(weights: str, decay: float = 0.99) -> list[float]:
        settings = {f"{OWN}__weights": weights, f"{OWN}__ema_decay": decay, "trainer__total_training_steps": 2}
        return divergences(train(HINT, **settings))

    policy, initial = under("policy"), under("initial")
    assert policy[0] == initial[0]
    assert abs(policy[1] - initial[1]) > 1e-4
    assert under("ema", decay=0) == policy
    assert under("ema", decay=1) == initial


@pytest.mark.slow
def test_a_resumed_run_has_the_same_average(train):
    ema = {f"{OWN}__weights": "ema", f"{OWN}__ema_decay": 0.5, "trainer__save_freq": 2}
    straight = train(HINT, "straight", **ema, trainer__total_training_steps=4)
    train(HINT, "stopped", **ema, trainer__total_training_steps=2)
    rest = train(HINT, "stopped", **ema, trainer__total_training_steps=4)
    assert list(rest) == [3, 4]
    for step, metrics in rest.items():
        for name in ("distillation/kl", "distillation/loss", "actor/grad_norm"):
            assert metrics[name] == straight[step][name], (step, name)


@pytest.mark.slow
def test_agents_read_the_tools_of_the_run_in_both_prompts(train, tmp_path: Path):
    (tmp_path / "tools.py").write_text(TOOLS)
    steps = train(
        HINT,
        actor_rollout_ref__rollout__agent__default_agent_loop="tool_agent",
        actor_rollout_ref__rollout__multi_turn__function_tool_path=tmp_path / "tools.py",
        data__max_prompt_length=700,
        **{f"{OWN}__teacher_prompt_length": 800},
        trainer__total_training_steps=1,
    )
    assert steps[1]["distillation/rows_without_context"] == 0
    assert abs(steps[1]["distillation/kl"]) > 1e-4


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"distillation__enabled": "false"}, "distillation.enabled is false"),
        ({f"{OWN}__template": "reference"}, "needs one template"),
        ({"distillation__teacher_models__teacher_model__model_path": "/x"}, "the policy is its own teacher"),
        ({"data__return_raw_chat": "false"}, "reads the messages of the prompts"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(train, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        train(SAME, **changes)
