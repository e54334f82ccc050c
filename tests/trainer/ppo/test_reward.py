"""From the configuration to a reward manager."""

import asyncio

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.datasets.test_rl_dataset import jsonl
from tests.forks import run
from tests.workers.reward_manager.batches import LENGTH, TOKENIZER, batch_of
from verl import DataProto
from verl.datasets import RLHFDataset
from verl.errors import ConfigError, DataError, RewardError, SchemaError
from verl.experience.scoring import PartScores, Scorer, joined_scores
from verl.scorers import UnknownDataSourceError
from verl.trainer.config import DataConfig, PPOConfig
from verl.trainer.config.command_line import compose
from verl.trainer.ppo.reward import (
    check_reward_data,
    compute_reward,
    extract_reward,
    get_custom_reward_fn,
    load_reward_manager,
)
from verl.workers.reward_manager import NaiveRewardManager, get_reward_manager_cls

PER_SAMPLE = """
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return {"score": float(solution_str == ground_truth) + bonus, "acc": solution_str == ground_truth}

async def later(data_source, solution_str, ground_truth, extra_info):
    return 0.25

def neither(x, y):
    return 0.0

CONSTANT = 3
"""
PER_BATCH = """
import torch
from verl import DataProto

def compute_reward(data: DataProto, **kwargs) -> torch.Tensor:
    rewards = torch.zeros(len(data.batch))
    for i in range(len(data.batch)):
        rewards[i] = 1.0 if is_correct(data.responses[i], data.ground_truth_answers[i]) else 0.0
    return rewards

def is_correct(response, ground_truth):
    return response.split("=")[-1] == ground_truth
"""
MANAGER = """
from verl.workers.reward_manager import AbstractRewardManager
import torch

class Constant(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key="data_source", value=1.0):
        self.value = value

    def __call__(self, data, return_dict=False):
        return torch.full(data.batch["responses"].shape, self.value)
"""


def config(**sections):
    return PPOConfig(**sections)


def custom(tmp_path, code, name, **changes):
    path = tmp_path / "my_reward.py"
    path.write_text(code)
    return {"custom_reward_function": {"path": str(path), "name": name, **changes}}


def scores(settings, data, **kwargs):
    tensor, extra = compute_reward(data, load_reward_manager(settings, TOKENIZER, num_examine=0, **kwargs))
    return tensor.sum(-1).tolist(), extra


def test_no_custom_function_scores_by_data_source():
    assert get_custom_reward_fn(config()) is None
    assert scores(config(), batch_of(["#### 3"], ["3"], "openai/gsm8k"))[0] == [1.0]


def test_a_function_per_sample(tmp_path):
    data = batch_of(["ab", "c"], ["ab", "x"])
    settings = config(**custom(tmp_path, PER_SAMPLE, "compute_score", reward_kwargs={"bonus": 0.5}))
    values, extra = scores(settings, data)
    assert values == [1.5, 0.5]
    assert extra == {"acc": [True, False], "score": [1.5, 0.5], "reward_status": ["ok", "ok"]}


def test_settings_of_the_scorer_reach_a_custom_function(tmp_path):
    settings = config(**custom(tmp_path, PER_SAMPLE, "compute_score"), reward_model={"scorer_kwargs": {"bonus": 0.5}})
    assert scores(settings, batch_of(["ab"], ["ab"]))[0] == [1.5]


def test_an_async_function(tmp_path):
    assert scores(config(**custom(tmp_path, PER_SAMPLE, "later")), batch_of(["a", "b"]))[0] == [0.25, 0.25]


def test_a_function_per_batch(tmp_path):
    data = batch_of(["1+1=2", "1+1=3"], ["2", "2"])
    values, extra = scores(config(**custom(tmp_path, PER_BATCH, "compute_reward")), data)
    assert values == [1.0, 0.0]
    assert extra == {"score": [1.0, 0.0], "reward_status": ["ok", "ok"]}


@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("neither", {}, "(data: DataProto, **kwargs)"),
        ("compute_scor", {}, "Did you mean 'compute_score'"),
        ("CONSTANT", {}, "is int, not a function"),
        ("compute_score", {"reward_kwargs": {"bonnus": 1}}, "takes no bonnus"),
    ],
)
def test_a_function_that_cannot_be_called(tmp_path, name, changes, says):
    with pytest.raises(ConfigError) as caught:
        load_reward_manager(config(**custom(tmp_path, PER_SAMPLE, name, **changes)), TOKENIZER, 0)
    assert says in str(caught.value)


def test_a_missing_file():
    settings = config(custom_reward_function={"path": "nowhere/my_reward.py"})
    with pytest.raises(ConfigError, match=r"custom_reward_function\.path='nowhere/my_reward\.py'"):
        get_custom_reward_fn(settings)


def test_one_scorer_for_all_rows():
    data = batch_of(["#### 3", "#### 4"], ["3", "3"], "whatever")
    assert scores(config(reward_model={"reward_format": "gsm8k"}), data)[0] == [1.0, 0.0]
    strict = config(reward_model={"reward_format": "gsm8k", "scorer_kwargs": {"format_score": 0.25}})
    assert scores(strict, data)[0] == [1.0, 0.25]
    box = batch_of([r"\fbox3"], ["3"], "whatever")
    assert scores(config(reward_model={"reward_format": "math"}), box)[0] == [1.0]
    with pytest.raises(UnknownDataSourceError, match="gsm9k"):
        load_reward_manager(config(reward_model={"reward_format": "gsm9k"}), TOKENIZER, 0)


def test_two_choices_of_a_reward(tmp_path):
    settings = config(**custom(tmp_path, PER_SAMPLE, "compute_score"), reward_model={"reward_format": "gsm8k"})
    with pytest.raises(ConfigError, match="Set one"):
        load_reward_manager(settings, TOKENIZER, 0)


def test_a_setting_that_no_scorer_takes_is_found_at_loading():
    with pytest.raises(ConfigError, match="'format_scor'"):
        load_reward_manager(config(reward_model={"scorer_kwargs": {"format_scor": 1}}), TOKENIZER, 0)


def test_settings_reach_the_manager():
    settings = config(
        reward_model={"max_error_rate": 0.5, "reward_kwargs": {"max_concurrent": 3}}, data={"reward_fn_key": "k"}
    )
    manager = load_reward_manager(settings, TOKENIZER, 2)
    assert isinstance(manager, NaiveRewardManager)
    assert (manager.max_error_rate, manager.num_examine, manager.reward_fn_key) == (0.5, 2, "k")
    assert manager.function.max_concurrent == 3
    assert load_reward_manager(settings, TOKENIZER, 0, max_error_rate=0.0).max_error_rate == 0.0


def test_a_manager_of_ones_own(tmp_path):
    (tmp_path / "managers.py").write_text(MANAGER)
    chosen = {"source": "importlib", "name": "Constant", "module": {"path": str(tmp_path / "managers.py")}}
    settings = config(reward_manager=chosen, reward_model={"reward_kwargs": {"value": 2.0}})
    values, extra = scores(settings, batch_of(["a"]))
    assert values == [2.0 * LENGTH]
    assert extra == {"score": [2.0 * LENGTH], "reward_status": ["ok"]}
    with pytest.raises(ConfigError, match=r"reward_manager\.module\.path"):
        load_reward_manager(config(reward_manager={"source": "importlib"}), TOKENIZER, 0)
    with pytest.raises(ConfigError, match="unknown reward manager 'nobody'"):
        load_reward_manager(config(reward_manager={"name": "nobody"}), TOKENIZER, 0)


@pytest.mark.parametrize("statuses", [None, ["ok", "timeout", "ok"]])
def test_a_score_that_cannot_be_used_is_a_failed_sample_whoever_gave_it(statuses, caplog):
    tokens = torch.zeros(3, LENGTH)
    tokens[0, 1], tokens[1, 0], tokens[2, 3] = 0.5, float("inf"), float("nan")
    result = tokens if statuses is None else {"reward_tensor": tokens, "reward_extra_info": {"reward_status": statuses}}
    data = batch_of(["a", "b", "c"])
    found, extra = compute_reward(data, lambda data, return_dict: result, max_error_rate=0.7)
    assert found.sum(-1).tolist() == [0.5, 0.0, 0.0]
    assert extra["reward_status"] == ["ok", "timeout" if statuses else "error", "error"]
    assert extra["score"] == [0.5, 0.0, 0.0]
    first, value = (2, "nan") if statuses else (1, "inf")
    assert (
        f"2 of 3 samples could not be scored (66.7%). The first whose score from function cannot be used: row {first}"
        in caplog.text
    )
    assert f"the reward function returned {value}" in caplog.text
    assert tokens[1, 0] == float("inf")  # the manager's own tensor is left alone
    with pytest.raises(RewardError, match=r"more than reward_model\.max_error_rate=0\.5"):
        compute_reward(data, lambda data: tokens)


def test_how_many_samples_failed_is_judged_over_all_parts_of_a_batch():
    failed = PartScores((torch.zeros(1, LENGTH), {"reward_status": ["error"]}), 1, 1, "1 of 1 samples: no answer")
    scored = PartScores((torch.ones(3, LENGTH), {"reward_status": ["ok"] * 3, "acc": [1, 0, 1]}), 3, 0)
    tokens, extra = joined_scores([failed, scored], 0.25)
    assert tokens.sum(-1).tolist() == [0.0, LENGTH, LENGTH, LENGTH]
    assert extra == {"reward_status": ["error", "ok", "ok", "ok"], "acc": [None, 1, 0, 1]}
    with pytest.raises(RewardError, match=r"1 of 4 samples could not be scored \(25\.0%\)\. .*no answer"):
        joined_scores([failed, scored], 0.2)
    [first, second] = PartScores((tokens, extra), 4, 1, "why").split([1, 3])
    assert (first.num_samples, first.num_failed, first.failures) == (1, 1, "why")
    assert (second.num_samples, second.num_failed, second.failures) == (3, 0, "")


@pytest.mark.parametrize(
    "result, says",
    [
        (torch.zeros(2, LENGTH - 1), "shape (2, 5); expected that of the responses, (2, 6)"),
        ({"reward_tensor": torch.zeros(2, LENGTH), "reward_extra_info": {"acc": [1]}}, "'acc'] with 1 values for 2"),
    ],
)
def test_what_a_manager_may_not_return(result, says):
    with pytest.raises(RewardError) as caught:
        compute_reward(batch_of(["a", "b"]), lambda data, return_dict: result)
    assert says in str(caught.value)


# ---- as public code calls it ---------------------------------------------------------------------


def public_batch(texts, truths):
    """Without ``response_mask``, ``uid`` and ``extra_info``."""
    data = batch_of(texts, truths, "openai/gsm8k")
    data.batch.pop("response_mask")
    return data.select(non_tensor_batch_keys=["data_source", "reward_model"])


@pytest.mark.parametrize("name", ["naive", "batch", "prime", "dapo"])
def test_every_manager_takes_a_batch_without_response_mask_by_data_source(name):
    manager = get_reward_manager_cls(name)(TOKENIZER, 0)
    data = public_batch(["#### 3", "x"], ["3", "3"])
    expected = torch.zeros(2, LENGTH)
    expected[0, LENGTH - 1] = 1.0  # "#### 3" fills the response
    assert torch.equal(manager(data), expected)
    assert "response_mask" not in data.batch.keys()


def test_a_call_gives_a_tensor_that_also_unpacks_to_scores_and_further_values():
    manager = NaiveRewardManager(TOKENIZER, 0)
    data = public_batch(["#### 3", "x"], ["3", "3"])
    whole = manager(data)
    assert isinstance(whole, torch.Tensor)
    assert type(whole.sum(-1)) is torch.Tensor
    scores, extra = manager(data)
    assert type(scores) is torch.Tensor
    assert scores.sum(-1).tolist() == whole.sum(-1).tolist() == [1.0, 0.0]
    assert extra == {"score": [1.0, 0.0], "reward_status": ["ok", "ok"]}
    data.batch["token_level_scores"] = manager(data)
    assert data[1:].batch["token_level_scores"].shape == (1, LENGTH)


def test_prime_verifies_and_adds_the_column_acc():
    data = public_batch(["#### 3", "x"], ["3", "3"])
    assert get_reward_manager_cls("prime")(TOKENIZER, 0).verify(data) == [1.0, 0.0]
    assert data.batch["acc"].tolist() == [1.0, 0.0]


def test_a_manager_from_a_composed_configuration(tmp_path):
    cfg = compose([f"custom_reward_function.path={tmp_path / 'my_reward.py'}", "reward_model.reward_manager=batch"])
    (tmp_path / "my_reward.py").write_text(PER_SAMPLE)
    data = public_batch(["3", "x"], ["3", "3"])
    kwargs = cfg.reward_model.get("reward_kwargs", {})
    for manager in (
        load_reward_manager(config=cfg, tokenizer=TOKENIZER, num_examine=0, **kwargs),
        load_reward_manager(
            OmegaConf.create({"custom_reward_function": dict(cfg.custom_reward_function)}), TOKENIZER, 0
        ),
    ):
        assert manager(data).sum(-1).tolist() == [1.0, 0.0]
    assert get_custom_reward_fn(cfg)("", "3", "3", {})["acc"] is True


def test_a_column_that_reward_fn_key_names_must_be_there():
    with pytest.raises(SchemaError, match="reward_fn_key needs column 'task'"):
        NaiveRewardManager(TOKENIZER, 0, reward_fn_key="task")(public_batch(["x"], ["3"]))


def test_scores_of_the_rollout_are_extracted():
    scored = public_batch(["a"], ["3"]) | DataProto.from_dict(
        tensors={"rm_scores": torch.ones(1, LENGTH)},
        non_tensors={"acc": np.array([True], dtype=object)},
        meta_info={"reward_extra_keys": ["acc"]},
    )
    scores, extra = extract_reward(scored)
    assert scores.sum() == LENGTH
    assert extra["acc"].tolist() == [True]


WITHOUT_SANDBOX = """
import sys
from tests.workers.reward_manager.batches import TOKENIZER
from verl.errors import ConfigError
from verl.trainer.config import DataConfig, PPOConfig
from verl.trainer.ppo.reward import check_reward_data, load_reward_manager
from verl.datasets import RLHFDataset
from verl.plugins.sandbox import bubblewrap

bubblewrap.TOOLS = "/nowhere"
dataset = RLHFDataset(sys.argv[1], TOKENIZER, DataConfig(max_prompt_length=20))
for reward_model in ({}, {"sandbox_fusion": {"url": "http://127.0.0.1:1/run_code"}}):
    config = PPOConfig(reward_model=reward_model)
    try:
        check_reward_data(config, load_reward_manager(config, TOKENIZER, 0), dataset)
        print("accepted")
    except ConfigError as error:
        print("refused", error)
"""


def test_code_is_refused_before_the_run_where_nothing_can_run_it(tmp_path):
    # In a process of its own: a sandbox that was proven once is not looked for again.
    row = {"prompt": "a", "data_source": "taco", "reward_model": {"ground_truth": {"inputs": ["1"], "outputs": ["1"]}}}
    file = str(jsonl(tmp_path / "x.jsonl", [row]))
    done = run(["-c", WITHOUT_SANDBOX, file], PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    refused, accepted = done.stdout.strip().rsplit("\n", 1)
    assert refused.startswith("refused")
    assert "apt-get install bubblewrap" in refused
    assert accepted == "accepted"


def test_data_is_checked_unless_a_model_scores(tmp_path):
    dataset = RLHFDataset(jsonl(tmp_path / "x.jsonl", [{"prompt": "a"}]), TOKENIZER, DataConfig(max_prompt_length=20))
    with pytest.raises(DataError, match="no column 'data_source'"):
        check_reward_data(config(), load_reward_manager(config(), TOKENIZER, 0), dataset)
    model = config(reward_model={"enable": True})
    check_reward_data(model, load_reward_manager(model, TOKENIZER, 0), dataset)
    row = {"prompt": "a", "data_source": "countdown", "reward_model": {"style": "rule", "ground_truth": "1"}}
    rows = [row, row | {"reward_model": {"style": "model", "ground_truth": ""}}]
    dataset = RLHFDataset(jsonl(tmp_path / "y.jsonl", rows), TOKENIZER, DataConfig(max_prompt_length=20))
    with pytest.raises(DataError, match=r"row 1: reward_model\.style is 'model' \(1 of 2 rows\).*no model that scores"):
        check_reward_data(config(), load_reward_manager(config(), TOKENIZER, 0), dataset)
    check_reward_data(model, load_reward_manager(model, TOKENIZER, 0), dataset)
    check_reward_data(config(), load_reward_manager(config(), TOKENIZER, 0), [{"of my own": 1}])


class Halved(NaiveRewardManager):
    """A manager of a user, who wrote ``__call__`` alone."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict:  # type: ignore[override]
        result = super().__call__(data, return_dict=True)
        halved = result["reward_tensor"] / 2
        return {**result, "reward_tensor": halved} if return_dict else halved


def test_a_subclass_that_replaces_call_alone_scores_by_it_and_whole_batches() -> None:
    def one(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
        return 1.0

    manager = Halved(TOKENIZER, 0, one)
    tokens, _ = compute_reward(batch_of(["3", "x"], ["3", "3"], "any"), manager)
    assert tokens.sum(-1).tolist() == [0.5, 0.5]
    single = asyncio.run(manager.run_single(batch_of(["3"], ["3"], "any")))
    assert single == {"reward_score": 0.5, "reward_extra_info": {"score": 1.0, "reward_status": "ok"}}
    scorer = Scorer(config(), lambda: pytest.fail("no workers"), None)
    assert not scorer.scores_any_time(manager)
    assert scorer.scores_any_time(NaiveRewardManager(TOKENIZER, 0, one))
