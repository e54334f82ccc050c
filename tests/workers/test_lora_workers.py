"""The workers with LoRA: rollout in step with merged weights, the reference without a copy, a critic."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from tests.workers.groups import FP32, N, prompts, start
from tests.workers.support import P, R, ragged_batch
from verl.config import LoRAConfig
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
    RolloutConfig,
)
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
from verl.workers.transfer import WeightTransfer


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "qwen3")


def policy(path, role="actor_rollout", engine="native", dtype="fp32", **model):
    fsdp_config = replace(FP32, dtype=dtype)
    config = ActorRolloutRefConfig(
        model=HFModelConfig(path=path, **model),
        actor=FSDPActorConfig(
            fsdp_config=fsdp_config,
            ppo_mini_batch_size=1,
            ppo_micro_batch_size_per_gpu=1,
            use_kl_loss=True,
            optim=FSDPOptimizerConfig(lr=1e-2),
        ),
        rollout=RolloutConfig(
            tensor_model_parallel_size=1,
            prompt_length=P,
            response_length=R,
            n=N,
            temperature=0.8,
            dtype=dtype,
            name=engine,
            log_prob_micro_batch_size_per_gpu=4,
        ),
        ref=RefConfig(fsdp_config=fsdp_config, log_prob_micro_batch_size_per_gpu=4),
    )
    return start(ActorRolloutRefWorker, config=config, role=role)


def one_step(group, step):
    """Sample, score and update; the batch with all log-probs."""
    batch = prompts(step=step).select(batch_keys=[]) | group.generate_sequences(prompts(step=step))
    batch = batch | group.compute_log_prob(batch) | group.compute_ref_log_prob(batch)
    noise = torch.randn(batch.batch["response_mask"].shape, generator=torch.Generator().manual_seed(step))
    group.update_actor(batch | DataProto.from_dict(tensors={"advantages": noise, "returns": noise}))
    return batch


def rollout_gap(group):
    """Return the mean difference between the log-probs of rollout and training."""
    batch = prompts().select(batch_keys=[]) | group.generate_sequences(prompts())
    old_log_probs = group.compute_log_prob(batch).batch["old_log_probs"]
    return (batch.batch["rollout_log_probs"] - old_log_probs).abs().mean()


EXPERTS = {"target_parameters": ("gate_up_proj", "down_proj")}


@pytest.mark.parametrize(
    "engine, dtype, lora",
    [
        ("native", "fp32", {}),
        ("native", "bfloat16", {}),
        ("hf", "bfloat16", {}),
        ("native", "fp32", {"use_dora": True}),
        ("native", "fp32", EXPERTS),
    ],
    ids=["native", "native-bf16", "hf-bf16", "DoRA", "experts"],
)
def test_rollout_samples_from_the_policy_and_the_reference_is_its_base(path, engine, dtype, lora, tmp_path):
    path = tiny_model_dir(tmp_path, "qwen3_moe") if lora is EXPERTS else path
    group = policy(path, engine=engine, dtype=dtype, lora_rank=4, lora=LoRAConfig(**lora))
    rounding = rollout_gap(policy(path, engine=engine, dtype=dtype)) if dtype == "bfloat16" else 0.0
    separate = policy(path, role="ref", dtype=dtype)
    for step in range(3):
        batch = one_step(group, step)
        columns = batch.batch
        if dtype == "fp32":
            assert_close(columns["rollout_log_probs"], columns["old_log_probs"], atol=1e-5, rtol=0)
        else:  # weights merged in bf16 differ by 0.027; processors without bf16 round the base alone by up to 0.006
            gap = (columns["rollout_log_probs"] - columns["old_log_probs"]).abs().mean()
            assert gap < max(1e-3, 1.5 * rounding)
        expected = separate.compute_ref_log_prob(batch).batch["ref_log_prob"]
        assert_close(columns["ref_log_prob"], expected, atol=1e-5 if dtype == "fp32" else 0.02, rtol=0)
        moved = (columns["old_log_probs"] - columns["ref_log_prob"]).abs().max()
        assert moved == 0 if step == 0 else moved > 0.05


def test_a_rollout_alone_has_the_trained_adapters(path, tmp_path):
    group = policy(path, lora_rank=4)
    one_step(group, 0)
    group.save_checkpoint(str(tmp_path))
    expected = group.generate_sequences(prompts()).batch
    found = policy(path, role="rollout", lora_adapter_path=str(tmp_path / "lora_adapter"))
    found = found.generate_sequences(prompts()).batch
    assert torch.equal(found["responses"], expected["responses"])
    assert_close(found["rollout_log_probs"], expected["rollout_log_probs"], atol=1e-5, rtol=0)


def test_a_critic_learns_through_adapters_and_goes_on_from_them(path, tmp_path):
    config = FSDPCriticConfig(
        model=FSDPCriticModelCfg(
            path=path, tokenizer_path=path, fsdp_config=FP32, lora_rank=4, target_modules=("q_proj", "v_proj")
        ),
        ppo_mini_batch_size=4,
        ppo_micro_batch_size_per_gpu=4,
        forward_micro_batch_size_per_gpu=4,
        cliprange_value=50.0,
        optim=FSDPOptimizerConfig(lr=1e-2),
    )
    group, batch = start(CriticWorker, config=config), ragged_batch(4)
    losses = [group.update_critic(batch).meta_info["metrics"]["critic/vf_loss"] for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]
    values = group.compute_values(batch).batch["values"]
    assert values.abs().max() > 0.01
    group.save_checkpoint(str(tmp_path))
    model = replace(config.model, lora_rank=0, lora_adapter_path=str(tmp_path / "lora_adapter"))
    again = start(CriticWorker, config=replace(config, model=model)).compute_values(batch).batch["values"]
    assert_close(again, values, atol=1e-5, rtol=0)


def test_adapters_alone_are_sent_to_ranks_that_hold_the_base(path):
    lora = {"lora_rank": 4, "lora_alpha": 6, "dtype": "bf16"}  # the native engine computes adapters beside bf16
    actor, both, alone = (policy(path, role, **lora) for role in ("actor", "actor_rollout", "rollout"))
    transfer = WeightTransfer.from_config(actor.workers[0].config)
    given = actor.workers[0].engine.adapted_weights()
    base = sum(2 * tensor.numel() for _, tensor in given.base())
    adapters = sum(tensor.nbytes for _, tensor in given.adapters())  # as they are trained
    sizes, responses = [], []
    for version in (1, 2, 3):
        if version == 3:
            transfer.close()  # as after an error: the sender knows no more what it sent
        for group in (actor, both):
            group.workers[0].engine.model.apply(grow_adapters)
            group.workers[0].engine.weight_version += 1
        sizes.append(transfer.update(actor, alone, version)["weight_transfer/bytes_of_weights"])
        expected, found = both.generate_sequences(prompts()), alone.generate_sequences(prompts())
        for column in ("responses", "rollout_log_probs"):
            assert torch.equal(expected.batch[column], found.batch[column])
        responses.append(found.batch["rollout_log_probs"])
    assert sizes == [base + adapters, adapters, base + adapters]
    assert not torch.equal(*responses[:2])


def grow_adapters(module):
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad:
            parameter.data.add_(0.01)
