"""The workers through a worker group of one rank: roles, what each call returns, rollout in step with the policy."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.workers.groups import FP32, N, prompts, start
from tests.workers.support import P, R, ragged_batch
from verl.config import RewardModelModelConfig
from verl.config.rollout import CheckpointEngineConfig
from verl.errors import CheckpointError, ConfigError, SchemaError
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir
from verl.workers.config import (
    ActorRolloutRefConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPCriticModelCfg,
    FSDPOptimizerConfig,
    HFModelConfig,
    RefConfig,
    RewardModelConfig,
    RolloutConfig,
)
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
from verl.workers.transfer import WeightTransfer


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "qwen3")


def policy(path, role="actor_rollout_ref", **settings):
    return start(ActorRolloutRefWorker, config=policy_config(path, **settings), role=role)


def policy_config(path, calculate_sum_pi_squared=False, actor=None, **rollout):
    return ActorRolloutRefConfig(
        model=HFModelConfig(path=path),
        actor=FSDPActorConfig(
            fsdp_config=FP32,
            ppo_mini_batch_size=1,
            ppo_micro_batch_size_per_gpu=1,
            ppo_epochs=2,
            use_kl_loss=True,
            calculate_sum_pi_squared=calculate_sum_pi_squared,
            optim=FSDPOptimizerConfig(lr=1e-2, lr_warmup_steps=1),
        )
        if actor is None
        else actor,
        rollout=RolloutConfig(
            tensor_model_parallel_size=1,
            prompt_length=P,
            response_length=R,
            n=N,
            temperature=0.8,
            dtype="fp32",
            **rollout,
        ),
        ref=RefConfig(fsdp_config=FP32),
    )


def test_one_step_of_the_policy(path):
    group = policy(path)
    batch = prompts().select(batch_keys=[]) | group.generate_sequences(prompts())
    mask = batch.batch["response_mask"]
    scored = group.compute_log_prob(batch)
    assert set(scored.batch.keys()) == {"old_log_probs", "entropys"}
    # what was sampled is what is trained on, at the temperature of the rollout
    assert_close(scored.batch["old_log_probs"], batch.batch["rollout_log_probs"], atol=1e-5, rtol=0)
    assert scored.batch["entropys"][mask.bool()].min() > 0
    reference = group.compute_ref_log_prob(batch).batch["ref_log_prob"]
    assert_close(reference, scored.batch["old_log_probs"], atol=1e-6, rtol=0)

    columns = {"advantages": torch.tensor([[1.0], [-1.0], [0.5], [0.0]]) * mask, "ref_log_prob": reference}
    full = batch | DataProto.from_dict(tensors={**columns, "old_log_probs": scored.batch["old_log_probs"]})
    metrics = group.update_actor(full).meta_info["metrics"]
    assert metrics["actor/lr"] == pytest.approx(1e-2 / 2)
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/skipped_steps"] == 0
    assert metrics["perf/cpu_memory_used_gb"] > 0
    worker = group.workers[0]
    assert worker.engine.weight_version == 4  # 2 epochs of 2 mini-batches, each a prompt with 2 responses
    # better responses became more likely, the reference stayed
    gain = (group.compute_log_prob(batch).batch["old_log_probs"] - scored.batch["old_log_probs"]).sum(-1)
    assert gain[0] > gain[1]
    assert torch.equal(group.compute_ref_log_prob(batch).batch["ref_log_prob"], reference)
    again = group.generate_sequences(prompts(step=2))
    assert set(again.non_tensor_batch["weight_version"]) == {4}
    recomputed = group.compute_log_prob(again).batch["old_log_probs"]
    assert_close(recomputed, again.batch["rollout_log_probs"], atol=1e-5, rtol=0)


def test_an_update_of_one_step_returns_what_compute_log_prob_would_have(path):
    one_step = FSDPActorConfig(
        fsdp_config=FP32,
        ppo_mini_batch_size=2,
        ppo_micro_batch_size_per_gpu=1,
        optim=FSDPOptimizerConfig(lr=1e-2, lr_warmup_steps=1),
    )
    batch = prompts().select(batch_keys=[]) | policy(path, "actor_rollout").generate_sequences(prompts())
    mask = batch.batch["response_mask"]
    batch = batch | DataProto.from_dict(tensors={"advantages": torch.tensor([[1.0], [-1.0], [0.5], [0.0]]) * mask})
    group, other = policy(path, "actor", actor=one_step), policy(path, "actor", actor=one_step)
    scored = group.compute_log_prob(batch)
    expected = group.update_actor(batch | scored.select(batch_keys=["old_log_probs"])).meta_info["metrics"]
    made = other.update_actor(batch, own_forward=True, record_tokens=True)
    seen = made.pop(batch_keys=["update_log_probs", "update_clipped"]).batch
    assert torch.equal(seen["update_log_probs"][mask.bool()], made.batch["old_log_probs"][mask.bool()])
    assert not seen["update_clipped"][mask.bool()].any()
    assert_close(dict(made.batch.items()), dict(scored.batch.items()), atol=1e-6, rtol=0)
    metrics = made.meta_info["metrics"]
    assert {k: v for k, v in metrics.items() if k.startswith("actor/")} == pytest.approx(
        {k: v for k, v in expected.items() if k.startswith("actor/")}, rel=1e-5, abs=1e-7
    )
    pairs = zip(other.workers[0].engine.model.parameters(), group.workers[0].engine.model.parameters(), strict=True)
    for own, recomputed in pairs:
        assert_close(own, recomputed, atol=1e-6, rtol=0)
    several = policy(path, "actor")  # two epochs of two mini-batches
    with pytest.raises(ConfigError, match="4 sequences of this rank in mini-batches of 2, 2 times over"):
        several.update_actor(batch, own_forward=True)


def test_what_the_loss_saw_of_each_token_is_what_its_metrics_are_made_of(path):
    actor = FSDPActorConfig(
        fsdp_config=FP32,
        ppo_mini_batch_size=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.01,
        clip_ratio_low=0.01,
        clip_ratio_high=0.01,
        optim=FSDPOptimizerConfig(lr=1e-2, lr_warmup_steps=0),
    )
    batch = prompts().select(batch_keys=[]) | policy(path, "actor_rollout").generate_sequences(prompts())
    mask = batch.batch["response_mask"].bool()
    batch = batch | DataProto.from_dict(tensors={"advantages": torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]) * mask})
    group = policy(path, "actor", actor=actor)
    batch = batch | group.compute_log_prob(batch).select(batch_keys=["old_log_probs"])
    made = group.update_actor(batch, record_tokens=True)
    seen, clipped = made.batch["update_log_probs"], made.batch["update_clipped"]
    assert torch.equal(seen.isnan(), ~mask)
    assert torch.equal(clipped.isnan(), ~mask)
    gap = batch.batch["old_log_probs"] - seen
    # Two rows per optimizer step (n = 2): the first step's policy is still the old one, the second's has moved.
    assert gap[:2][mask[:2]].abs().max() < 1e-6
    assert clipped[:2][mask[:2]].sum() == 0
    steps = [(gap[rows][mask[rows]].mean(), clipped[rows][mask[rows]].mean()) for rows in ([0, 1], [2, 3])]
    kl, fraction = (torch.stack(values).mean().item() for values in zip(*steps, strict=True))
    metrics = made.meta_info["metrics"]
    assert metrics["actor/ppo_kl"] == pytest.approx(kl, rel=1e-4)
    assert metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"] == pytest.approx(fraction, rel=1e-5)
    assert 0 < fraction < 0.5


def test_dropout_of_the_model_is_told(path):
    assert policy(path, "actor").training_randomness() == [{}]


def test_the_sum_of_squares_comes_with_the_log_probs(path):
    batch = prompts().select(batch_keys=[]) | policy(path, "actor_rollout").generate_sequences(prompts())
    squares = policy(path, "actor", calculate_sum_pi_squared=True).compute_log_prob(batch).batch["sum_pi_squared"]
    mask = batch.batch["response_mask"].bool()
    chosen = batch.batch["rollout_log_probs"].exp()
    # Σπ² lies between the square of any one probability and 1
    assert (squares[mask] > chosen[mask] ** 2).all()
    assert (squares[mask] < 1).all()
    assert (squares[~mask] == 0).all()


def test_a_restored_policy_samples_as_it_did(path, tmp_path):
    group = policy(path, "actor_rollout", free_cache_engine=False)  # the engine keeps its weights between calls
    folder = str(tmp_path / "global_step_1" / "actor")
    group.save_checkpoint(folder, None, 1)
    with torch.no_grad():
        for parameter in group.workers[0].engine.model.parameters():
            parameter.add_(0.1)  # other weights, under the same version number
    other = group.generate_sequences(prompts())
    group.load_checkpoint(folder, None, False)
    restored = group.generate_sequences(prompts())
    expected = policy(path, "actor_rollout").generate_sequences(prompts())
    assert not torch.equal(other.batch["responses"], expected.batch["responses"])
    assert torch.equal(restored.batch["responses"], expected.batch["responses"])
    assert torch.equal(restored.batch["rollout_log_probs"], expected.batch["rollout_log_probs"])


def test_checkpoints_are_counted_and_removed_when_asked(path, tmp_path):
    group = policy(path, "actor")
    for step in (1, 2, 3):
        group.save_checkpoint(str(tmp_path / f"step_{step}"), None, step, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_2", "step_3"]
    group.load_checkpoint(str(tmp_path / "step_3"), None, True)
    assert [p.name for p in tmp_path.iterdir()] == ["step_2"]
    with pytest.raises(CheckpointError, match="hdfs_path=hdfs://x"):
        group.save_checkpoint(str(tmp_path / "step_4"), "hdfs://x")


def test_a_rollout_alone_has_the_pretrained_weights_until_it_is_sent_others(path):
    actor, both, alone = policy(path, "actor"), policy(path, "actor_rollout"), policy(path, "rollout")
    transfer = WeightTransfer.from_config(alone.workers[0].config)
    expected, found = both.generate_sequences(prompts()), alone.generate_sequences(prompts())
    assert torch.equal(expected.batch["responses"], found.batch["responses"])
    assert found.non_tensor_batch["weight_version"].tolist() == [0] * len(found)
    for version in (7, 7, 3):  # other weights under the same number, too
        with torch.no_grad():
            for group in (actor, both):
                next(group.workers[0].engine.model.parameters()).mul_(-1.5)
                group.workers[0].engine.weight_version += 1
        transfer.update(actor, alone, version)
        expected, found = both.generate_sequences(prompts()), alone.generate_sequences(prompts())
        assert found.non_tensor_batch["weight_version"].tolist() == [version] * len(found)
        for column in ("responses", "rollout_log_probs"):
            assert torch.equal(expected.batch[column], found.batch[column])
    with pytest.raises(ConfigError, match="samples from the policy that it trains"):
        transfer.update(actor, both, 1)
    broadcast = WeightTransfer.from_config(
        policy_config(path, checkpoint_engine=CheckpointEngineConfig(backend="nccl"))
    )
    with pytest.raises(ConfigError, match=r"trainer and rollout are one process here\. Set it to naive"):
        broadcast.update(actor, alone, 1)


@pytest.mark.parametrize(
    ("engine_name", "order"),
    [("hf", ["loaded", "offloaded", "sampled"]), ("native", ["loaded", "sampled", "offloaded"])],
)
def test_trained_weights_leave_the_device_while_an_engine_with_copies_samples(path, monkeypatch, engine_name, order):
    """The native engine samples with the trainer's own tensors."""
    offloads = dataclasses.replace(FP32, param_offload=True, optimizer_offload=True)
    actor = FSDPActorConfig(fsdp_config=offloads, ppo_mini_batch_size=1, ppo_micro_batch_size_per_gpu=1)
    [worker] = policy(path, actor=actor, name=engine_name).workers
    events, move, sample = [], worker.engine.to, worker.rollout.generate_sequences

    def moved(device, model=True, optimizer=True):
        events.append("offloaded" if optimizer else "loaded")
        move(device, model=model, optimizer=optimizer)

    def sampled(data):
        events.append("sampled")
        return sample(data)

    monkeypatch.setattr(worker.engine, "to", moved)
    monkeypatch.setattr(worker.rollout, "generate_sequences", sampled)
    worker.generate_sequences(prompts())
    assert [event for k, event in enumerate(events) if event not in events[:k]] == order


def test_roles(path):
    with pytest.raises(ConfigError, match=r"role 'actor_ref' .* is unknown. Use one of: actor, rollout, ref"):
        policy(path, "actor_ref")
    group = policy(path, "ref")
    assert group.workers[0].rollout is None
    with pytest.raises(ConfigError, match="has no model to train"):
        group.save_checkpoint("/tmp/never")


def test_critic(path):
    model = FSDPCriticModelCfg(path=path, fsdp_config=FP32)
    group = start(
        CriticWorker,
        config=FSDPCriticConfig(
            model=model, ppo_mini_batch_size=4, rollout_n=1, optim=FSDPOptimizerConfig(lr=1e-2), cliprange_value=100.0
        ),
    )
    batch = ragged_batch()
    values = group.compute_values(batch)
    assert values.batch["values"].shape == (8, R)
    assert not group.workers[0].engine.is_packed  # critic.model.use_remove_padding is false by default
    losses = []
    for _ in range(10):
        metrics = group.update_critic(batch).meta_info["metrics"]
        losses.append(metrics["critic/vf_loss"])
    assert losses[-1] < losses[0]
    assert {"critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/lr"} <= metrics.keys()


# ---- the reward model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reward_path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("reward"), "llama", task="sequence_classification")


@pytest.fixture(scope="module")
def other_reward_path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("other"), "llama", tokenizer="bpe", task="sequence_classification")


def reward(path, input_tokenizer, **settings):
    model = RewardModelModelConfig(path=path, input_tokenizer=input_tokenizer, fsdp_config=FP32)
    return start(RewardModelWorker, config=RewardModelConfig(enable=True, model=model, **settings))


def score_of(path, ids):
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return model(input_ids=torch.as_tensor(ids)[None]).logits[0, 0]


def test_scores_stand_on_the_last_response_token(reward_path, path):
    batch = ragged_batch()
    found = reward(reward_path, path, micro_batch_size_per_gpu=3).compute_rm_score(batch).batch["rm_scores"]
    lengths = batch.batch["attention_mask"][:, P:].sum(-1)
    assert found[0].eq(0).all()  # an empty response
    for row in range(1, 8):
        ids = batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()]
        expected = torch.zeros(R)
        expected[lengths[row] - 1] = score_of(reward_path, ids)
        assert_close(found[row], expected, atol=1e-5, rtol=0)


def test_long_input_is_read_from_its_end(reward_path):
    batch = ragged_batch()
    found = reward(reward_path, None, max_length=4).compute_rm_score(batch).batch["rm_scores"].sum(-1)
    ids = batch.batch["input_ids"][1][batch.batch["attention_mask"][1].bool()]
    assert_close(found[1], score_of(reward_path, ids[-4:]), atol=1e-5, rtol=0)


def test_another_tokenizer_reads_the_conversation_anew(other_reward_path, path):
    policy_tokenizer = AutoTokenizer.from_pretrained(path)
    own = AutoTokenizer.from_pretrained(other_reward_path)
    answers = ["one", "", "2+2"]
    ids = [
        policy_tokenizer(text, add_special_tokens=False)["input_ids"] + [policy_tokenizer.eos_token_id]
        for text in answers
    ]
    mask = torch.tensor([[1] * len(row) + [0] * (R - len(row)) for row in ids])
    responses = torch.tensor([row + [0] * (R - len(row)) for row in ids])
    messages = np.empty(3, dtype=object)
    messages[:] = [[{"role": "user", "content": f"question {i}"}] for i in range(3)]
    batch = DataProto.from_dict(
        tensors={
            "input_ids": torch.cat([torch.full((3, 2), 9), responses], 1),
            "attention_mask": torch.cat([torch.ones(3, 2, dtype=torch.long), mask], 1),
            "responses": responses,
            "response_mask": mask,
        },
        non_tensors={"raw_prompt": messages},
    )
    group = reward(other_reward_path, path)
    found = group.compute_rm_score(batch).batch["rm_scores"]
    for row, answer in enumerate(answers):
        text = f"<user>question {row}<assistant>{answer}<eos>"  # the template of verl/testing/models.py
        expected = torch.zeros(R)
        expected[len(ids[row]) - 1] = score_of(other_reward_path, own(text, add_special_tokens=False)["input_ids"])
        assert_close(found[row], expected, atol=1e-5, rtol=0)
    with pytest.raises(SchemaError, match="needs column 'raw_prompt'"):
        group.compute_rm_score(batch.select(non_tensor_batch_keys=[]))
