"""Log-probs over the tokens that truncated sampling kept (``rollout.keep_sampling_mask``): oracle, layouts, rollout."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.workers.support import LAYOUTS, P, R, make_engine, ragged_batch, run_ranks, with_log_probs
from verl.config import RefConfig
from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.schema import check_columns
from verl.single_controller.local import LocalWorkerGroup
from verl.testing.models import tiny_model_dir
from verl.trainer.ppo.metric_utils import sampling_mask_metrics
from verl.trainer.ppo.stages import call_by_row, policy_columns
from verl.workers.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    HFModelConfig,
    RolloutConfig,
)
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.losses import PolicyLoss
from verl.workers.rollout.request import RolloutOutput

TEMPERATURE, K = 0.7, 5


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "qwen3")


def masked_batch():
    """One to five kept ids per token, that of the response among them; of every third token they are unknown."""
    batch = ragged_batch()
    g = torch.Generator().manual_seed(1)
    kept = torch.rand(len(batch), R, 104, generator=g).topk(K).indices.int()
    places = torch.arange(R)
    kept[(kept == batch.batch["responses"].unsqueeze(-1)).any(-1)] = torch.arange(K, dtype=torch.int32)
    kept[..., 0] = batch.batch["responses"]
    kept[torch.arange(K) > places.unsqueeze(-1) % K + torch.zeros_like(kept)] = -1
    kept[:, 2::3] = -1
    kept[batch.batch["response_mask"] == 0] = -1
    return batch | DataProto.from_dict({"kept_ids": kept})


def oracle(path, batch):
    """Log-probs (bsz, R) in float64, with gradient, and the model."""
    model, columns = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), batch.batch
    rows = []
    for ids, seen, chosen, kept in zip(
        *(columns[name] for name in ("input_ids", "attention_mask", "response_mask", "kept_ids")), strict=True
    ):
        tokens = ids[seen.bool()]
        logits, start = model(input_ids=tokens[None]).logits[0] / TEMPERATURE, int(seen[:P].sum())
        row = [logits.sum() * 0.0] * R
        for t in chosen.nonzero().flatten().tolist():
            of_token, allowed = logits[start + t - 1], kept[t][kept[t] >= 0].unique().long()
            total = of_token[allowed] if len(allowed) else of_token
            row[t] = of_token[tokens[start + t]] - total.logsumexp(-1)
        rows.append(torch.stack(row))
    return torch.stack(rows), model


def test_log_probs_and_gradients_are_those_of_the_kept_tokens(path):
    batch = masked_batch()
    plain = batch.select(batch_keys=[name for name in batch.batch.keys() if name != "kept_ids"])
    expected, model = oracle(path, batch)
    advantages = batch.batch["advantages"]
    (-(expected * advantages).sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    unknown = (batch.batch["kept_ids"] < 0).all(-1) & batch.batch["response_mask"].bool()
    config = ActorConfig(loss_agg_mode="token-sum", clip_ratio=1e3, entropy_coeff=0.0)
    for packed, name in [
        (True, "whole"),
        (True, "three"),
        (True, "by tokens"),
        (False, "whole"),
        (False, "one by one"),
    ]:
        engine = make_engine(path, use_remove_padding=packed)
        with engine.eval_mode():
            outputs = {"log_probs", "entropy"}
            found = engine.infer_batch(batch, outputs, LAYOUTS[name], TEMPERATURE)
            whole = engine.infer_batch(plain, outputs, LAYOUTS[name], TEMPERATURE)
        assert_close(found["log_probs"], expected.detach().float(), atol=1e-5, rtol=0)
        assert torch.equal(found["entropy"], whole["entropy"])
        assert torch.equal(found["log_probs"][unknown], whole["log_probs"][unknown])
        assert (found["log_probs"] - whole["log_probs"])[~unknown].max() > 1
        # Where the ratio is 1, the gradient of the loss is that of -Σ A log p.
        with engine.train_mode():
            trained = with_log_probs(batch, found["log_probs"])
            trained.batch["old_log_probs"] = found["log_probs"]
            engine.forward_backward_batch(trained, PolicyLoss(config), LAYOUTS[name], TEMPERATURE)
        for weight_name, weight in engine.model.named_parameters():
            assert weight.grad is not None
            grad = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
            assert_close(grad.double(), gradients[weight_name], atol=1e-4, rtol=1e-4)


def test_a_distillation_is_not_restricted(path):
    ids = torch.zeros(8, R, 2, dtype=torch.int32)
    batch = masked_batch() | DataProto.from_dict({"teacher_topk_ids": ids})
    with pytest.raises(ConfigError, match="keep_sampling_mask=true: a distillation compares"):
        make_engine(path, trained=False).infer_batch(batch, {"log_probs"}, LAYOUTS["whole"])


def shared(rank, world_size, folder, path):
    batch = masked_batch()
    expected, _ = oracle(path, batch)
    engine = make_engine(path, trained=False, ulysses_sequence_parallel_size=2)
    with engine.eval_mode():
        found = engine.infer_batch(batch, {"log_probs"}, LAYOUTS["three"], TEMPERATURE)
    assert_close(found["log_probs"], expected.detach().float(), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_ranks_that_share_sequences(path, tmp_path):
    run_ranks(shared, 2, tmp_path, path)


def test_metrics_by_hand():
    kept = torch.tensor([[[1, 2, 3], [4, -1, -1], [-1, -1, -1]], [[-1, -1, -1], [5, 6, -1], [7, 8, 9]]])
    columns = {"kept_ids": kept.int(), "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    found = sampling_mask_metrics(DataProto.from_dict(columns))
    assert found == {"training/sampling_mask/size": 2.0, "training/sampling_mask/unknown": 0.5}
    none = {"kept_ids": kept.int() * 0 - 1, "response_mask": columns["response_mask"]}
    assert sampling_mask_metrics(DataProto.from_dict(none)) == {"training/sampling_mask/unknown": 1.0}
    with pytest.raises(SchemaError, match="'kept_ids' is made by generate_sequences with"):
        sampling_mask_metrics(DataProto.from_dict({"response_mask": columns["response_mask"]}))


def prompts(count):
    columns = ragged_batch(count).batch
    names = {"uid": np.array([f"{i // 2}" for i in range(count)], dtype=object), "sample_index": np.arange(count) % 2}
    tensors = {"input_ids": columns["prompts"], "attention_mask": columns["attention_mask"][:, :P]}
    return DataProto.from_dict(tensors=tensors, non_tensors=names, meta_info={"global_steps": 1, "validate": False})


@pytest.mark.parametrize(
    ("cut", "limit", "width"),
    [
        ({"top_k": 5}, 64, 5),
        ({"top_p": 0.8}, 104, 104),
        ({"min_p": 0.3, "temperature": 0.8}, 64, 64),
        ({"top_k": 30, "top_p": 0.9, "min_p": 0.05}, 64, 30),
        ({"top_p": 0.8}, 20, 20),
    ],
    ids=["top_k", "top_p", "min_p", "mixture", "narrow"],
)
def test_rollout_policy_and_reference_have_one_distribution(path, cut, limit, width):
    micro = {"log_prob_micro_batch_size_per_gpu": 3}
    rollout = RolloutConfig(
        tensor_model_parallel_size=1,
        prompt_length=P,
        response_length=R,
        n=2,
        dtype="fp32",
        max_num_seqs=3,
        keep_sampling_mask=True,
        keep_sampling_mask_limit=limit,
        **micro,
        **cut,
    )
    actor = FSDPActorConfig(
        fsdp_config=FSDPEngineConfig(dtype="fp32"), ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=3
    )
    ref = RefConfig(fsdp_config=FSDPEngineConfig(dtype="fp32"), **micro)
    config = ActorRolloutRefConfig(model=HFModelConfig(path=path), actor=actor, rollout=rollout, ref=ref)
    group = LocalWorkerGroup(
        ray_cls_with_init=LocalWorkerGroup.describe(
            ActorRolloutRefWorker, device_name="cpu", config=config, role="actor_rollout_ref"
        )
    )
    group.init_model()
    batch = prompts(8).select(batch_keys=[]) | group.generate_sequences(prompts(8))
    check_columns(batch)
    columns = batch.batch
    mask, kept = columns["response_mask"].bool(), columns["kept_ids"]
    known = (kept >= 0).any(-1)
    assert kept.shape == (8, R, width)
    assert (kept[~mask] == -1).all()
    assert (kept == columns["responses"].unsqueeze(-1)).any(-1)[known].all()
    old, ref = (
        call_by_row(group, method, batch, balance=True, shares_prompts=False).batch
        for method in ("compute_log_prob", "compute_ref_log_prob")
    )
    rollout_probs = columns["rollout_log_probs"].exp()
    gaps = [
        (values.exp() - rollout_probs)[mask & known].abs().max()
        for values in (old["old_log_probs"], ref["ref_log_prob"])
    ]
    assert max(gaps) <= 1e-5
    without = batch.select(batch_keys=[name for name in columns.keys() if name != "kept_ids"])
    whole = group.compute_log_prob(without).batch["old_log_probs"]
    assert (whole.exp() - rollout_probs)[mask].abs().max() > 1e-2
    metrics = sampling_mask_metrics(batch)
    if limit == 20:  # nuclei of 20 tokens and more are counted, and trained on the whole vocabulary
        assert 0 < metrics["training/sampling_mask/unknown"] < 1
        assert metrics["training/sampling_mask/unknown"] == pytest.approx(1 - (known.sum() / mask.sum()).item())
        assert torch.equal(old["old_log_probs"][~known], whole[~known])
    else:
        assert metrics["training/sampling_mask/unknown"] == 0
        assert torch.equal(known, mask)
    batch = batch | DataProto.from_dict({"old_log_probs": old["old_log_probs"], "advantages": mask.float()})
    names = policy_columns(batch, actor)
    assert "kept_ids" in names
    # The update computes the same log-probs: no ratio differs from 1 in its first and only mini-batch.
    updated = group.update_actor(batch.select(batch_keys=[*names])).meta_info["metrics"]
    assert abs(updated["actor/ppo_kl"]) < 1e-6
    to_validate = prompts(4)
    to_validate.meta_info["validate"] = True
    assert "kept_ids" not in group.generate_sequences(to_validate).batch.keys()


def test_the_masks_of_an_interrupted_response_are_those_of_both_parts():
    begun, rest = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[3, -1], [-1, -1]], dtype=torch.int32)
    first = RolloutOutput([1], [-0.5], "abort", 0, kept_ids=begun)
    joined = first.followed_by(RolloutOutput([3, 9], [0.0, -4.0], "stop", 1, kept_ids=rest))
    assert joined.kept_ids is not None
    assert joined.kept_ids.tolist() == [[1, 2], [3, -1], [-1, -1]]
    assert first.followed_by(RolloutOutput([], [], "abort", 0)).kept_ids is not None
