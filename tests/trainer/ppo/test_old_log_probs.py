"""Leaving out the forward pass for old_log_probs changes no number; it is left out only where that is so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_run import make_tiny_run, overrides
from verl.algorithms import register_adv_est, register_policy_loss
from verl.protocol import DataProto
from verl.trainer.balance import deal, layout_for_ranks
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.old_log_probs import OldLogProbs
from verl.workers.engine.non_finite import NonFinite

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if len(solution_str) % 5 == 4:
        raise ValueError("some responses cannot be scored")
    return sum(c.isdigit() for c in solution_str) / 8
"""
CORRECTION = "algorithm__rollout_correction"
CLOCKS = ("timing", "perf/")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "reward.py").write_text(REWARD)
    return make_tiny_run(folder) | {"reward": str(folder / "reward.py")}


@pytest.fixture
def train(paths: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two steps of a run; the metrics of each, and the weights at the end."""

    def run(**changes: object) -> tuple[dict[int, dict[str, float]], dict[str, Any]]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        log = folder / "metrics.jsonl"
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
        settings: dict[str, object] = {
            "custom_reward_function__path": paths["reward"],
            "reward_model__max_error_rate": 1.0,
            "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
            "trainer__save_freq": 2,
            "trainer__default_local_dir": folder / "checkpoints",
        }
        run_ppo(compose(overrides(paths, folder, **settings | changes)))
        steps = {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}
        saved = sorted((folder / "checkpoints" / "global_step_2" / "actor").glob("model_*"))
        return steps, torch.load(saved[0], weights_only=False)

    return run


def assert_same_run(a: Any, b: Any, *, exact: bool = True, beside: frozenset[str] = frozenset()) -> None:
    """The same metrics, but for clocks, and the same weights."""
    (steps, weights), (others, other_weights) = a, b
    assert steps.keys() == others.keys()
    for step, left in steps.items():
        right = others[step]
        names = {name for name in left.keys() | right.keys() if not name.startswith(CLOCKS)} - beside
        for name in sorted(names):
            close = pytest.approx(left[name], rel=0 if exact else 1e-4, abs=0 if exact else 5e-6, nan_ok=True)
            assert right[name] == close, (step, name)
    assert weights.keys() == other_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(other_weights[name], tensor, rtol=0, atol=0 if exact else 1e-5)


LOSSES: dict[str, dict[str, object]] = {
    "vanilla": {},
    "dual clip": {"clip_ratio_c": 1.001, "clip_ratio_low": 0, "clip_ratio_high": 0},
    "kl loss and entropy": {"use_kl_loss": "true", "entropy_coeff": 0.01, "loss_agg_mode": "seq-mean-token-mean"},
    "prompt-mean": {"loss_agg_mode": "prompt-mean", "calculate_entropy": "true"},
    "gspo": {"policy_loss__loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "cispo": {"policy_loss__loss_mode": "cispo"},
    "gpg": {"policy_loss__loss_mode": "gpg"},
    "sapo": {"policy_loss__loss_mode": "sapo"},
    "dro": {"policy_loss__loss_mode": "dro", "policy_loss__dro_beta": 1.0},
}


def test_importance_weights_need_no_pass_of_their_own(train):
    """Samples of earlier weights, by default weighted: the same bits, and the weights are metrics as before."""
    changes = {"trainer__async__lag": 1, "algorithm__rollout_correction__rollout_is": "sequence"}
    found = train(**changes)
    recomputed = train(actor_rollout_ref__actor__recompute_old_log_probs="always", **changes)
    assert_same_run(found, recomputed)
    assert "timing_s/old_log_prob" not in found[0][2]
    assert recomputed[0][2]["timing_s/old_log_prob"] > 0
    assert abs(found[0][2]["rollout_corr/rollout_is_max"] - 1) > 1e-3


@pytest.mark.slow  # the test above is the one of the default runs
@pytest.mark.parametrize("name", LOSSES)
def test_weights_and_metrics_are_the_same_to_the_last_bit(train, name):
    changes = {f"actor_rollout_ref__actor__{key}": value for key, value in LOSSES[name].items()}
    found = train(**changes)
    recomputed = train(actor_rollout_ref__actor__recompute_old_log_probs="always", **changes)
    assert_same_run(found, recomputed)
    for step in (1, 2):
        metrics = found[0][step]
        assert not {"timing_s/old_log_prob", "perf/mfu/actor_infer"} & metrics.keys()
        assert recomputed[0][step]["timing_s/old_log_prob"] > 0
        assert recomputed[0][step]["perf/mfu/actor_infer"] > 0
        assert metrics["perf/mfu/actor"] > 0
        assert metrics["actor/entropy"] > 0.1
        assert metrics["training/rollout_probs_diff_valid"] == 1
        assert 0 < metrics["training/rollout_probs_diff_max"] < 1e-5
        assert metrics["actor/ppo_kl"] == 0
        assert metrics["actor/pg_clipfrac"] == 0
        assert metrics["actor/grad_norm"] > 0
        assert metrics["reward/left_out_rate"] < 1


@pytest.mark.slow
def test_with_a_critic_that_warms_up(train):
    """The step that does not update the policy has a pass of its own, for the metrics."""
    changes = {
        "algorithm__adv_estimator": "gae",
        "trainer__critic_warmup": 1,
        "trainer__total_training_steps": 3,
        "trainer__save_freq": 1,
        "reward_model__launch_reward_fn_async": "true",
    }
    found = train(**changes)
    assert_same_run(found, train(actor_rollout_ref__actor__recompute_old_log_probs="always", **changes))
    assert ["timing_s/old_log_prob" in found[0][step] for step in (1, 2, 3)] == [True, False, False]
    assert ["actor/pg_loss" in found[0][step] for step in (1, 2, 3)] == [False, True, True]
    assert all("actor/entropy" in found[0][step] for step in (1, 2, 3))


@pytest.mark.slow
def test_dynamic_sampling_and_micro_batches_by_tokens(train):
    changes = {
        "algorithm__filter_groups__enable": "true",
        "algorithm__filter_groups__metric": "seq_reward",
        "algorithm__filter_groups__max_num_gen_batches": 8,
        "actor_rollout_ref__actor__use_dynamic_bsz": "true",
        "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 90,
        "actor_rollout_ref__rollout__log_prob_use_dynamic_bsz": "true",
        "actor_rollout_ref__rollout__log_prob_max_token_len_per_gpu": 200,
    }
    found = train(**changes)
    recomputed = train(actor_rollout_ref__actor__recompute_old_log_probs="always", **changes)
    assert_same_run(found, recomputed, exact=False)  # the two passes are cut in other places
    assert "timing_s/old_log_prob" not in found[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["update", "interpolation"])
def test_two_ranks_make_the_same_step(train, kind):
    changes = {"actor_rollout_ref__actor__use_kl_loss": "true", "actor_rollout_ref__actor__entropy_coeff": 0.01}
    if kind == "interpolation":
        changes |= {"trainer__async__lag": 1, f"{CORRECTION}__prox_logp_method": "loglinear"}
    one = train(**changes)
    two = train(trainer__controller="ray", trainer__n_gpus_per_node=2, **changes)
    balance = frozenset(name for name in one[0][1] if name.startswith("global_seqlen/"))
    assert "timing_s/old_log_prob" not in two[0][1]
    (steps, _), (others, _) = one, two
    assert_same_run((steps, {}), (others, {}), exact=False, beside=balance)


def test_what_the_update_returns_is_in_the_order_of_the_batch():
    lengths = [7, 1, 2, 6, 3, 5]
    batch = DataProto.from_dict(tensors={"attention_mask": (torch.arange(8) < torch.tensor(lengths)[:, None]).long()})
    dealt = deal(batch, 2, balance=True, columns=["attention_mask"])
    columns = DataProto.from_dict(tensors={"old_log_probs": dealt.rows.batch["attention_mask"].cumsum(-1)})
    assert dealt.restore(columns).batch["old_log_probs"][:, -1].tolist() == lengths
    assert dealt.metrics["global_seqlen/balanced_max"] == 12
    order, _ = layout_for_ranks(lengths, dp_size=2, sizes=[len(lengths)], balance=True)
    last = NonFinite(kind="output", name="log_probs", value="nan", rank=1, row=2)
    assert [one.row for one in dealt.problems([last])] == [order[5]]  # the third row of the second rank


def test_rows_of_a_unit_stay_together():
    mask = (torch.arange(8) < torch.tensor([7, 1, 2, 6, 3, 5, 1, 1])[:, None]).long()
    batch = DataProto.from_dict(tensors={"attention_mask": mask, "row": torch.arange(8)})
    dealt = deal(batch, 2, balance=True, rows_per_unit=2)
    units = dealt.rows.batch["row"].view(-1, 2)
    assert (units[:, 1] == units[:, 0] + 1).all()
    assert (units[:, 0] % 2 == 0).all()
    assert dealt.restore(dealt.rows).batch["row"].tolist() == list(range(8))


# ---- when


def plan(paths: dict[str, str], randomness: dict[str, float] | None = None, **changes: object) -> OldLogProbs:
    settings: dict[str, object] = {"actor_rollout_ref__actor__ppo_mini_batch_size": 4}
    return OldLogProbs.from_config(
        load_config(compose(overrides(paths, Path("unused"), **settings | changes))), randomness or {}
    )


def test_one_optimizer_step_per_batch_needs_no_pass_of_its_own(paths):
    found = plan(paths)
    assert found.source == "update"
    assert str(found) == (
        "old_log_probs come from the update's own forward pass (actor.recompute_old_log_probs=always adds one for "
        "them): a batch is one optimizer step, so the update computes the same log-probs."
    )
    assert plan(paths, algorithm__adv_estimator="gae").source == "update"
    assert plan(paths, actor_rollout_ref__actor__shuffle="true").source == "update"
    assert plan(paths, reward_model__enable="true").source == "update"
    assert plan(paths, **{f"{CORRECTION}__rollout_is": "sequence"}).source == "update"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"actor_rollout_ref__actor__recompute_old_log_probs": "always"}, "recompute_old_log_probs=always"),
        ({"actor_rollout_ref__actor__ppo_mini_batch_size": 2}, "2 optimizer steps"),
        ({"actor_rollout_ref__actor__ppo_epochs": 3}, "3 optimizer steps"),
        ({"algorithm__use_kl_in_reward": "true"}, "use_kl_in_reward"),
        ({f"{CORRECTION}__rollout_rs": "token_k2", f"{CORRECTION}__rollout_rs_threshold": 1.0}, "rollout_rs"),
        ({f"{CORRECTION}__rollout_is": "token", f"{CORRECTION}__rollout_is_batch_normalize": "true"}, "normalize"),
        ({"algorithm__use_pf_ppo": "true"}, "use_pf_ppo"),
        ({"algorithm__adv_estimator": "optimal_token_baseline"}, "optimal_token_baseline"),
        ({"actor_rollout_ref__actor__calculate_sum_pi_squared": "true"}, "adv_estimator"),
        ({"actor_rollout_ref__actor__policy_loss__loss_mode": "clip_cov"}, "clip_cov"),
        ({"actor_rollout_ref__actor__policy_loss__loss_mode": "kl_cov"}, "kl_cov"),
        ({"actor_rollout_ref__actor__policy_loss__top_entropy_quantile": 0.5}, "top_entropy_quantile"),
        ({"actor_rollout_ref__actor__entropy_target": 0.5}, "entropy_target"),
        ({"trainer__max_rollout_actor_probs_diff": 0.1}, "max_rollout_actor_probs_diff"),
    ],
)
def test_what_reads_them_before_the_update_gets_them(paths, changes, word):
    found = plan(paths, **changes)
    assert found.source == "forward"
    assert word in found.reason
    assert ";" not in found.reason


def test_a_model_that_is_random_in_training(paths):
    found = plan(paths, {"attention_dropout": 0.1})
    assert found.source == "forward"
    assert "attention_dropout=0.1" in found.reason


def test_all_reasons_are_told(paths):
    found = plan(paths, actor_rollout_ref__actor__ppo_epochs=2, algorithm__use_kl_in_reward="true")
    assert found.reason.count(";") == 1


def test_bypass_mode_has_no_pass_at_all(paths):
    assert plan(paths, algorithm__rollout_correction__bypass_mode="true").source == "rollout"


def test_estimators_and_losses_of_users(paths):
    @register_adv_est("test_reads_entropy")
    def reads(token_level_rewards, response_mask, entropys=None):
        return token_level_rewards, token_level_rewards

    @register_adv_est("test_reads_everything")
    def everything(token_level_rewards, response_mask, **columns):
        return token_level_rewards, token_level_rewards

    @register_policy_loss("test_reads_entropy")
    def loss(old_log_prob, log_prob, advantages, response_mask, entropys=None, **arguments):
        return log_prob.sum(), {}

    for name in ("test_reads_entropy", "test_reads_everything"):
        assert name in plan(paths, algorithm__adv_estimator=name).reason
    changes = {"actor_rollout_ref__actor__policy_loss__loss_mode": "test_reads_entropy"}
    assert "test_reads_entropy" in plan(paths, **changes).reason


def test_dropout_is_seen_and_told_in_the_log(train, caplog):
    override = "{attention_dropout: 0.1}"
    with caplog.at_level(logging.INFO, logger="verl.trainer.ppo.trainer"):
        steps, _ = train(actor_rollout_ref__model__override_config=override)
    told = [record.getMessage() for record in caplog.records if "old_log_probs come from" in record.getMessage()]
    assert told == [
        "old_log_probs come from a forward pass of their own: the model is random in training (attention_dropout=0.1)."
    ]
    assert all("timing_s/old_log_prob" in steps[step] for step in (1, 2))
