"""Log-probs over the tokens that truncated sampling kept (``rollout.keep_sampling_mask``): oracle, layouts, rollout."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.workers.support import (
    LAYOUTS,
    P,
    R,
    make_engine,
    naive_outputs,
    ragged_batch,
    run_ranks,
    with_kept_ids,
    with_log_probs,
)
from verl.agents.partial_responses import from_batch, to_batch
from verl.config import RefConfig
from verl.errors import ConfigError, RolloutError
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
from verl.workers.rollout.client import PartialResponse
from verl.workers.rollout.columns import joined_rows
from verl.workers.rollout.request import RolloutOutput, RolloutRequest, SamplingParams, kept_table

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "qwen3")


def oracle(path, batch):
    """Log-probs (bsz, R) in float64, with gradient, and the model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    return naive_outputs(model, batch, TEMPERATURE)[0], model


def test_log_probs_and_gradients_are_those_of_the_kept_tokens(path):
    batch = with_kept_ids(ragged_batch())
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
    batch = with_kept_ids(ragged_batch()) | DataProto.from_dict({"teacher_topk_ids": ids})
    with pytest.raises(ConfigError, match="keep_sampling_mask=true: a distillation compares"):
        make_engine(path, trained=False).infer_batch(batch, {"log_probs"}, LAYOUTS["whole"])


def shared(rank, world_size, folder, path):
    batch = with_kept_ids(ragged_batch())
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
    name = "training/sampling_mask"
    found = sampling_mask_metrics(DataProto.from_dict(columns), top_k=3)
    assert found == {f"{name}/size": 2.0, f"{name}/full": 0.25, f"{name}/unknown": 0.5}
    none = {"kept_ids": kept.int() * 0 - 1, "response_mask": columns["response_mask"]}
    assert sampling_mask_metrics(DataProto.from_dict(none), 3) == {f"{name}/full": 0.0, f"{name}/unknown": 1.0}
    without = DataProto.from_dict({"response_mask": columns["response_mask"]})  # no row has any
    assert sampling_mask_metrics(without, 3) == {f"{name}/full": 0.0, f"{name}/unknown": 1.0}


def prompts(count):
    columns = ragged_batch(count).batch
    names = {"uid": np.array([f"{i // 2}" for i in range(count)], dtype=object), "sample_index": np.arange(count) % 2}
    tensors = {"input_ids": columns["prompts"], "attention_mask": columns["attention_mask"][:, :P]}
    return DataProto.from_dict(tensors=tensors, non_tensors=names, meta_info={"global_steps": 1, "validate": False})


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("native", {"top_k": 5}),
        ("native", {"top_k": 20, "top_p": 0.8}),
        ("hf", {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8}),
    ],
    ids=["top_k", "top_p", "mixture"],
)
def test_rollout_policy_and_reference_have_one_distribution(path, name, cut):
    micro = {"log_prob_micro_batch_size_per_gpu": 3}
    rollout = RolloutConfig(
        name=name,
        tensor_model_parallel_size=1,
        prompt_length=P,
        response_length=R,
        n=2,
        dtype="fp32",
        max_num_seqs=3,
        keep_sampling_mask=True,
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
    assert kept.shape == (8, R, cut["top_k"])
    assert (kept[~mask] == -1).all()
    assert (kept == columns["responses"].unsqueeze(-1)).any(-1)[mask].all()
    old, ref = (
        call_by_row(group, method, batch, balance=True, shares_prompts=False).batch
        for method in ("compute_log_prob", "compute_ref_log_prob")
    )
    rollout_probs = columns["rollout_log_probs"].exp()
    gaps = [(values.exp() - rollout_probs)[mask].abs().max() for values in (old["old_log_probs"], ref["ref_log_prob"])]
    assert max(gaps) <= 1e-5
    without = batch.select(batch_keys=[name for name in columns.keys() if name != "kept_ids"])
    whole = group.compute_log_prob(without).batch["old_log_probs"]
    assert (whole.exp() - rollout_probs)[mask].abs().max() > 1e-2
    assert sampling_mask_metrics(batch, cut["top_k"])["training/sampling_mask/unknown"] == 0
    batch = batch | DataProto.from_dict({"old_log_probs": old["old_log_probs"], "advantages": mask.float()})
    names = policy_columns(batch, actor)
    assert "kept_ids" in names
    # The update computes the same log-probs: no ratio differs from 1 in its first and only mini-batch.
    updated = group.update_actor(batch.select(batch_keys=[*names])).meta_info["metrics"]
    assert abs(updated["actor/ppo_kl"]) < 1e-6
    to_validate = prompts(4)
    to_validate.meta_info["validate"] = True
    assert "kept_ids" not in group.generate_sequences(to_validate).batch.keys()


def table(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_the_masks_of_an_interrupted_response_are_those_of_both_parts():
    first = RolloutOutput([1], [-0.5], "abort", 0, kept_ids=table([1, 2]))
    # In a checkpoint with others, of which one has no ids; then the rest, for which the run stores one more.
    unmasked = RolloutOutput([4, 5], [-0.5, -0.5], "abort", 0)
    read = from_batch(to_batch({"a": first, "b": unmasked}))
    assert read["b"].kept_ids.tolist() == [[-1, -1], [-1, -1]]
    joined = read["a"].followed_by(
        RolloutOutput([3, 9], [0.0, -4.0], "stop", 1, kept_ids=table([3, 5, 8], [9, -1, -1]))
    )
    assert joined.kept_ids.tolist() == [[1, 2, -1], [3, 5, 8], [9, -1, -1]]
    assert unmasked.followed_by(joined).kept_ids.tolist()[:3] == [[-1] * 3, [-1] * 3, [1, 2, -1]]
    assert "kept_ids" not in to_batch({"b": unmasked}).batch.keys()


def test_parts_of_a_batch_get_the_widest_table():
    parts = [
        DataProto.from_dict({"a": torch.zeros(1, 1), "kept_ids": ids[None]}) for ids in (table([3]), table([1, 2]))
    ]
    parts.append(DataProto.from_dict({"a": torch.zeros(1, 1)}))
    assert joined_rows(parts).batch["kept_ids"].tolist() == [[[3, -1]], [[1, 2]], [[-1, -1]]]


def test_a_table_of_what_an_engine_kept():
    response = PartialResponse(RolloutRequest([1], SamplingParams(max_tokens=5, seed=0), returns_kept_ids=True), {})
    response.take([9, 4, 2], [-1.0] * 3, None, [{9, 2}, {4}, {1, 2, 3}])
    assert kept_table(response.kept_ids, 2).tolist() == [[2, 9], [4, -1], [-1, -1]]
    assert kept_table([], 2).shape == (0, 2)
    with pytest.raises(RolloutError, match=r"drew token 5, and says that it kept \[2, 9\]"):
        response.take([5], [-1.0], None, [{9, 2}])
