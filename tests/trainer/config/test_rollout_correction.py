"""Rules of rollout correction and truncated sampling; how the actor learns of the bypass mode."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from tests.trainer.config.support import Run, only
from verl.config import RolloutConfig
from verl.errors import ConfigError
from verl.trainer.config import RolloutCorrectionConfig, load_config
from verl.trainer.ppo.old_log_probs import OldLogProbs

CORRECTION = "algorithm.rollout_correction"
ROLLOUT = "actor_rollout_ref.rollout"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
LIMIT = "trainer.max_rollout_actor_probs_diff"
PRESETS = [name for name, value in vars(RolloutCorrectionConfig).items() if isinstance(value, classmethod)]


def settings(**changes: Any) -> dict[str, Any]:
    return {f"{CORRECTION}.{name}": value for name, value in changes.items()}


# ---- settings


@pytest.mark.parametrize("name", ["vespo", "topr", "m2po"])
def test_a_loss_that_compares_with_the_rollout_gets_no_weights(run: Run, name: str):
    own = {LOSS_MODE: name, "trainer.async.lag": 4, "algorithm.adv_estimator": "grpo"}
    assert run.load(own).algorithm.rollout_correction.rollout_is is None
    assert run.load(own | {LOSS_MODE: "vanilla"}).algorithm.rollout_correction.rollout_is == "token"
    message = only(run.refusal(own | settings(rollout_is="token")))
    assert f"{LOSS_MODE}={name} has the ratio to the policy that sampled" in message


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("_")])
def test_every_preset_can_be_configured(run: Run, name: str):
    preset = getattr(RolloutCorrectionConfig, name)()
    config = run.load(settings(**preset.to_dict()))
    assert config.algorithm.rollout_correction == preset


def test_thresholds_on_the_command_line(run: Run):
    from tests.trainer.config.test_scripts import GRPO, with_our_engine

    text = f" {CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=0.5_5.0"
    text += (
        f""" {CORRECTION}.rollout_rs="'seq_mean_k1,token_k3'" {CORRECTION}.rollout_rs_threshold="'0.999_1.001,0.1'" """
    )
    found = run.script(with_our_engine(GRPO) + text).algorithm.rollout_correction
    assert (found.rollout_is_threshold, found.rollout_rs) == ("0.5_5.0", "seq_mean_k1,token_k3")
    assert found.rollout_rs_threshold == "0.999_1.001,0.1"


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"rollout_is_threshold": 0.5}, "rollout_is_threshold=0.5", "must be a cap of at least 1"),
        ({"rollout_is_threshold": "x"}, "rollout_is_threshold=x", "is neither a number"),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 1.0}, "rollout_rs=geometric", "there is no criterion"),
        ({"rollout_rs": "token_k1"}, "rollout_rs=token_k1", "needs rollout_rs_threshold"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "rollout_rs=token_k2", "must be one number"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold=2.0", "nothing is rejected without a criterion"),
        ({"loss_type": "reinforce"}, "loss_type=reinforce", "it is the loss of the bypass mode"),
    ],
)
def test_settings_that_do_not_fit(run: Run, changes: dict[str, Any], key: str, said: str):
    message = only(run.refusal(settings(**changes)))
    assert f"{CORRECTION}.{key}" in message
    assert said in message


@pytest.mark.parametrize("level", ["geometric", "tokens", True])
def test_an_unknown_level_lists_those_there_are(run: Run, level: Any):
    assert "token, sequence" in only(run.refusal(settings(rollout_is=level)))


def test_a_loss_must_read_the_weights(run: Run):
    from verl.algorithms import agg_loss, register_policy_loss

    @register_policy_loss("loss_without_weights")
    def loss(log_prob, advantages, response_mask, loss_agg_mode):
        return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {}

    changes = {LOSS_MODE: "loss_without_weights"}
    run.load(changes | settings(rollout_rs="token_k1", rollout_rs_threshold=2.0))
    message = only(run.refusal(changes | settings(rollout_is="token")))
    assert "loss_without_weights has no parameter rollout_is_weights" in message


# ---- the bypass mode


def test_the_actor_learns_of_the_bypass_mode(run: Run):
    config = run.load(settings(bypass_mode=True, loss_type="reinforce", rollout_is="token"))
    loss = config.actor_rollout_ref.actor.policy_loss
    assert loss.loss_mode == "bypass_mode"
    assert loss.rollout_correction is config.algorithm.rollout_correction
    again = load_config(config.to_dict())  # what was loaded can be loaded
    assert again.actor_rollout_ref.actor.policy_loss == loss


def test_the_actor_learns_of_weights_that_it_can_make_itself(run: Run):
    config = run.load(settings(rollout_is="token"))
    loss = config.actor_rollout_ref.actor.policy_loss
    assert (loss.loss_mode, loss.rollout_correction) == ("vanilla", config.algorithm.rollout_correction)
    for changes in ({"rollout_rs": "token_k2", "rollout_rs_threshold": 1.0}, {"rollout_is_batch_normalize": True}):
        config = run.load(settings(rollout_is="token", **changes))
        assert config.actor_rollout_ref.actor.policy_loss.rollout_correction is None
    assert run.load().actor_rollout_ref.actor.policy_loss.rollout_correction is None


def test_the_copy_of_the_loss_is_another_spelling(run: Run):
    config = run.load({"actor_rollout_ref.actor.policy_loss.rollout_correction.rollout_is": "token"})
    assert config.algorithm.rollout_correction.rollout_is == "token"


def test_batch_normalised_weights_are_turned_off_inside_of_a_loss(run: Run, caplog: pytest.LogCaptureFixture):
    changes = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True}
    config = run.load(settings(**changes))
    loss = config.actor_rollout_ref.actor.policy_loss.rollout_correction
    assert not config.algorithm.rollout_correction.rollout_is_batch_normalize
    assert not loss.rollout_is_batch_normalize
    assert "would depend on how the batch is cut and dealt to ranks" in caplog.text
    config = run.load(settings(**(changes | {"bypass_mode": False, "loss_type": "ppo_clip"})))
    assert config.algorithm.rollout_correction.rollout_is_batch_normalize
    run.load(settings(rollout_is_batch_normalize=True))
    assert "there are no weights" in caplog.text


def test_another_loss_is_not_replaced_in_silence(run: Run):
    message = only(run.refusal({LOSS_MODE: "gspo"} | settings(bypass_mode=True)))
    assert f"{LOSS_MODE}=gspo: with {CORRECTION}.bypass_mode=true the loss is {CORRECTION}.loss_type" in message
    message = only(run.refusal({LOSS_MODE: "bypass_mode"}))
    assert f"remedy: set {CORRECTION}.bypass_mode=true, which chooses this loss by itself" in message
    run.load({LOSS_MODE: "bypass_mode"} | settings(bypass_mode=True))


def test_weights_beside_the_clip_are_said_to_have_no_effect(run: Run, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        run.load(settings(bypass_mode=True, rollout_is="token"))
    assert "has no effect with algorithm.rollout_correction.loss_type=ppo_clip" in caplog.text


def test_in_the_bypass_mode_there_is_no_gap_to_limit(run: Run):
    message = only(run.refusal({LIMIT: 0.1} | settings(bypass_mode=True)))
    assert "the trainer makes no pass for old log-probs: there is nothing to compare" in message


@pytest.mark.parametrize("changes", [{"entropy_target": 0.5}, {"policy_loss.top_entropy_quantile": 0.2}])
def test_in_the_bypass_mode_there_is_no_entropy(run: Run, changes: dict[str, Any]):
    keys = {f"actor_rollout_ref.actor.{name}": value for name, value in changes.items()}
    assert "and so has no entropy" in only(run.refusal(keys | settings(bypass_mode=True)))


# ---- truncated sampling

CUTS = [("top_p", 0.9, 1), ("top_k", 20, -1), ("min_p", 0.05, 0)]


@pytest.mark.parametrize(("name", "value", "off"), CUTS)
def test_truncated_samples_are_weighed_by_default(
    run: Run, name: str, value: float, off: int, caplog: pytest.LogCaptureFixture
):
    key = f"{ROLLOUT}.{name}"
    assert run.load({key: value}).algorithm.rollout_correction.rollout_is == "token"
    assert f"rollout_correction.rollout_is: token, because {key}={value} samples from a truncated" in caplog.text
    greedy = {f"{ROLLOUT}.do_sample": False, f"{ROLLOUT}.n": 1, "algorithm.adv_estimator": "reinforce_plus_plus"}
    for changes in ({f"{ROLLOUT}.val_kwargs.{name}": value}, {key: value} | greedy, {key: off}):
        assert run.load(changes).algorithm.rollout_correction.rollout_is is None


@pytest.mark.parametrize(
    ("changes", "is_set"),
    [
        ({"rollout_is": "sequence"}, "sequence"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, "token"),
        ({"bypass_mode": True}, None),  # the clipped ratio is the weight
        ({"bypass_mode": True, "loss_type": "reinforce"}, "token"),
        ({"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"}, "sequence"),
    ],
)
def test_what_corrects_truncation(
    run: Run, changes: dict[str, Any], is_set: str | None, caplog: pytest.LogCaptureFixture
):
    config = run.load({f"{ROLLOUT}.top_p": 0.9} | settings(**changes))
    assert config.algorithm.rollout_correction.rollout_is == is_set
    assert "is biased" not in caplog.text.replace("without these weights the gradient is biased", "")


def test_what_does_not_correct_truncation_is_told(run: Run, caplog: pytest.LogCaptureFixture):
    off = {f"{ROLLOUT}.top_p": 0.9} | settings(rollout_is=None)
    assert run.load(off, explicit={"algorithm.rollout_correction.rollout_is"})
    assert f"{ROLLOUT}.top_p=0.9: the samples then come from a truncated distribution" in caplog.text
    assert f"remedy: set {ROLLOUT}.top_p=1 for training (validation may truncate: val_kwargs.top_p)" in caplog.text
    assert "rollout_correction.rollout_is=token" in caplog.text


def test_the_correction_needs_the_log_probs_of_what_was_sampled_from(run: Run):
    changes = {f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.logprobs_mode": "raw_logprobs"} | settings(rollout_is="token")
    message = only(run.refusal(changes))
    assert f"{ROLLOUT}.logprobs_mode=raw_logprobs: these are not the log-probs of the distribution" in message
    assert f"({ROLLOUT}.top_p=0.9)" in message
    assert f"remedy: set {ROLLOUT}.logprobs_mode=processed_logprobs" in message


def test_raw_log_probs_know_nothing_of_the_temperature(run: Run):
    raw = {f"{ROLLOUT}.logprobs_mode": "raw_logprobs"}
    run.load(raw)
    run.load({f"{ROLLOUT}.temperature": 0.7})
    assert f"({ROLLOUT}.temperature=0.7)" in only(run.refusal(raw | {f"{ROLLOUT}.temperature": 0.7}))


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "logprobs"])
def test_other_modes_are_refused(run: Run, mode: str):
    message = only(run.refusal({f"{ROLLOUT}.logprobs_mode": mode}))
    assert "processed_logprobs" in message


def test_the_gap_is_not_limited_where_it_is_meant_to_be(run: Run):
    changes = {LIMIT: 0.1, f"{ROLLOUT}.top_k": 20} | settings(rollout_is="token")
    message = only(run.refusal(changes))
    assert f"{LIMIT}=0.1: with {ROLLOUT}.top_k=20 the rollout's probabilities are larger" in message
    run.load({LIMIT: 0.1} | settings(rollout_is="token"))


KEEPS = f"{ROLLOUT}.keep_sampling_mask"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{ROLLOUT}.top_p": 1}, "without truncated sampling every token is kept, and the mask changes nothing"),
        ({f"{ROLLOUT}.do_sample": False, f"{ROLLOUT}.n": 1}, "without truncated sampling every token is kept"),
        ({f"{ROLLOUT}.top_k": 65}, "top_k=65: with keep_sampling_mask at most keep_sampling_mask_limit=64 ids are"),
        ({f"{ROLLOUT}.logprobs_mode": "raw_logprobs"}, "these are not the log-probs of the distribution"),
        ({f"{ROLLOUT}.skip_rollout": True}, "do not say whether they have the kept tokens"),
        ({"algorithm.adv_estimator": "optimal_token_baseline"}, "is that of the whole vocabulary, and log π that of"),
        ({"distillation.enabled": True, "distillation.teacher_models.teacher_model.model_path": "org/name"},
         "compares the policy with its teacher over the whole vocabulary"),
        ({f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.top_k": 10, f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs": 25,
          f"{ROLLOUT}.engine_kwargs.vllm.python": sys.executable},
         "max_logprobs=25: keep_sampling_mask with top_k=10 asks for the 26 most likely tokens"),
    ],
)  # fmt: skip
def test_sampling_masks_that_cannot_be(run: Run, changes: dict[str, Any], said: str):
    assert said in run.refusal({f"{ROLLOUT}.top_p": 0.9, KEEPS: True} | changes)


def test_a_whole_sampling_mask_needs_no_weights(run: Run, caplog: pytest.LogCaptureFixture):
    whole = run.load({f"{ROLLOUT}.top_k": 20, f"{ROLLOUT}.top_p": 0.9, KEEPS: True, LIMIT: 0.1})
    assert whole.algorithm.rollout_correction.rollout_is is None
    assert whole.actor_rollout_ref.rollout.kept_ids_width == 20
    assert "biased" not in caplog.text
    assert "keep_sampling_mask_limit" not in caplog.text
    # A nucleus alone has no bound.
    nucleus = run.load({f"{ROLLOUT}.top_p": 0.9, KEEPS: True})
    assert nucleus.algorithm.rollout_correction.rollout_is is None
    assert (nucleus.actor_rollout_ref.rollout.top_k, nucleus.actor_rollout_ref.rollout.val_kwargs.top_k) == (64, -1)
    assert nucleus.actor_rollout_ref.rollout.kept_ids_width == 64
    assert RolloutConfig(name="vllm", top_k=64, keep_sampling_mask=True).kept_ids_width == 64 + 15
    assert f"{ROLLOUT}.top_k: 64, because keep_sampling_mask stores the tokens that sampling keeps" in caplog.text
    assert run.load().actor_rollout_ref.rollout.kept_ids_width == 0


@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_min_p_is_a_share(run: Run, value: float):
    with pytest.raises(ConfigError, match=r"rollout.min_p"):
        run.load({f"{ROLLOUT}.min_p": value})


# ---- A-3PO

LOGLINEAR = settings(prox_logp_method="loglinear")


def test_the_policy_loss_learns_of_the_interpolation(run: Run, caplog: pytest.LogCaptureFixture):
    changes = LOGLINEAR | {"trainer.async.lag": 2, f"{CORRECTION}.rollout_is_batch_normalize": True}
    config = run.load(changes | {f"{CORRECTION}.rollout_is": "token", LOSS_MODE: "cispo"})
    loss, correction = config.actor_rollout_ref.actor.policy_loss, config.algorithm.rollout_correction
    assert (loss.loss_mode, loss.rollout_correction) == ("cispo", correction)
    assert (correction.is_decoupled, correction.rollout_is_batch_normalize) == (False, False)
    assert "prox_logp_method=recompute normalises over the whole batch" in caplog.text
    assert str(OldLogProbs.from_config(config, {})) == (
        "old_log_probs come from the policy loss, which interpolates them by the age of each token: "
        "algorithm.rollout_correction.prox_logp_method=loglinear."
    )
    assert "the interpolated policy is the one that sampled" not in caplog.text
    run.load(LOGLINEAR)
    assert "the interpolated policy is the one that sampled" in caplog.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{CORRECTION}.bypass_mode": True}, "the bypass mode has no proximal policy"),
        ({"algorithm.use_kl_in_reward": True}, "the KL in the reward reads old log-probs before the update"),
        ({LOSS_MODE: "kl_cov"}, "the loss reads old log-probs of the whole mini-batch first"),
        ({LOSS_MODE: "gpg"}, "the loss has no ratio to the old policy"),
        ({LIMIT: 0.1}, "with algorithm.rollout_correction.prox_logp_method=loglinear the trainer makes no pass"),
        ({"actor_rollout_ref.actor.entropy_target": 0.5}, "and so has no entropy"),
        ({"actor_rollout_ref.actor.router_replay.mode": "R2"}, "loglinear skips the pass of the actor"),
    ],
)
def test_nothing_reads_old_log_probs_before_the_loss_makes_them(run: Run, changes: dict[str, Any], said: str):
    assert said in only(run.refusal(changes | LOGLINEAR))


def test_a_band_for_rounding_is_too_narrow_for_updates(run: Run, caplog: pytest.LogCaptureFixture):
    narrow = settings(rollout_rs="token_k2,seq_mean_k1", rollout_rs_threshold="1.0,0.999_1.001")
    run.load(narrow)
    run.load({"trainer.async.lag": 1} | settings(rollout_rs="seq_mean_k1", rollout_rs_threshold="0.8_1.25"))
    assert "nearly every response" not in caplog.text
    run.load({"trainer.async.lag": 1} | narrow)
    assert "with trainer.async.lag=1 the ratios are those of whole updates" in caplog.text
