"""Router replay: training repeats the choice of experts of an earlier pass or of the rollout."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

from tests.workers.engine.test_experts import COMMON
from tests.workers.support import (
    EPS,
    LAYOUTS,
    LR,
    P,
    R,
    make_engine,
    naive_outputs,
    ragged_batch,
    run_ranks,
    weights_of,
)
from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.schema import check_columns
from verl.single_controller.local import LocalWorkerGroup
from verl.testing.models import tiny_model_dir, tiny_tokenizer
from verl.trainer.ppo.stages import policy_columns
from verl.workers.config import (
    ActorRolloutRefConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    HFModelConfig,
    RolloutConfig,
    RouterReplayConfig,
)
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.losses import sft_loss
from verl.workers.routers import choice_dtype, routers_of, unknown

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
CONFIGS = {
    "qwen3": Qwen3MoeConfig(**COMMON, head_dim=8, num_experts=8, moe_intermediate_size=16, norm_topk_prob=True),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4, intermediate_size=16),
    # Two of four groups, then two of eight experts: both choices have the same shape.
    "deepseek": DeepseekV3Config(
        **(COMMON | LATENT | {"num_key_value_heads": 4}),
        intermediate_size=32,
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def random_choice(path, seed=0):
    """Any two different experts for each token and layer, and no choice for a third of the tokens."""
    batch, g = ragged_batch(), torch.Generator().manual_seed(seed)
    routers = routers_of(AutoModelForCausalLM.from_pretrained(path))
    experts = routers[0].weight.shape[0]
    size = (len(batch), P + R, len(routers))
    chosen = torch.rand(*size, experts, generator=g).argsort(-1)[..., :2].to(torch.uint8)
    chosen[torch.rand(size[:2], generator=g) < 1 / 3] = 255
    return batch | DataProto.from_dict(tensors={"routed_experts": chosen})


def weights_by_hand(router, hidden, own, wanted):
    """Experts and their weights where the choice is given, by the formulas of the models."""
    known = wanted != 255
    chosen = torch.where(known, wanted.long(), own)
    logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
    if type(router).__name__.startswith("Deepseek"):
        found = logits.sigmoid().gather(-1, chosen)
        return logits, found / (found.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor, chosen
    found = logits.softmax(-1).gather(-1, chosen)
    return logits, found / found.sum(-1, keepdim=True), chosen


def replayed_update(path, batch):
    """Log-probs, and weights after one AdamW step, by plain Transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(path)
    row = [0]

    def hook(number):
        def replace(router, inputs, output):
            columns = batch.batch
            wanted = columns["routed_experts"][row[0]][columns["attention_mask"][row[0]].bool()][:, number]
            return weights_by_hand(router, inputs[0], output[-1], wanted)

        return replace

    for number, router in enumerate(routers_of(model)):
        router.register_forward_hook(hook(number))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, eps=EPS)
    found = []
    for place in range(len(batch)):
        row[0] = place
        found.append(naive_outputs(model, batch.select_idxs([place]))[0])
    log_probs, mask = torch.cat(found), batch.batch["response_mask"]
    (-(log_probs * mask).sum() / mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return log_probs.detach() * mask, {name: p.detach() for name, p in model.named_parameters()}


def assert_replays(engine, batch, path, layout):
    log_probs, weights = replayed_update(path, batch)
    with engine.eval_mode():
        found = engine.infer_batch(batch, {"log_probs"}, LAYOUTS[layout])["log_probs"]
        free = engine.infer_batch(batch.select(batch_keys=without_routing(batch)), {"log_probs"}, LAYOUTS[layout])
    assert (found - log_probs).abs().max() < 1e-5
    assert (free["log_probs"] - log_probs).abs().max() > 1e-2
    with engine.train_mode():
        engine.train_batch(batch, sft_loss, LAYOUTS[layout])
    trained = weights_of(engine)
    for name, weight in weights.items():
        assert (trained[name] - weight).abs().max() < 1e-5, name


def without_routing(batch):
    return [name for name in batch.batch.keys() if name != "routed_experts"]


@pytest.mark.parametrize(
    ("packed", "layout", "checkpointing"), [(True, "three", True), (False, "by tokens", True), (True, "whole", False)]
)
def test_a_choice_is_repeated_with_its_gradients(path, packed, layout, checkpointing):
    engine = make_engine(path, use_remove_padding=packed, enable_gradient_checkpointing=checkpointing)
    assert_replays(engine, random_choice(path), path, layout)


def test_what_a_pass_records_is_what_transformers_chose(path):
    batch = ragged_batch()
    with (engine := make_engine(path, trained=False)).eval_mode():
        found = engine.infer_batch(batch, {"log_probs", "routed_experts"}, LAYOUTS["three"])["routed_experts"]
    check_columns(batch | DataProto.from_dict(tensors={"routed_experts": found}))
    assert torch.equal(found.sort(-1).values, chosen_by_transformers(path, batch).sort(-1).values)


@torch.no_grad()
def chosen_by_transformers(path, batch):
    model = AutoModelForCausalLM.from_pretrained(path)
    seen = {}
    for number, router in enumerate(routers_of(model)):
        router.register_forward_hook(lambda _, __, output, number=number: seen.update({number: output[-1]}))
    rows = []
    for ids, mask in zip(batch.batch["input_ids"], batch.batch["attention_mask"].bool(), strict=True):
        model(ids[mask][None])
        chosen = torch.stack([seen[number] for number in sorted(seen)], dim=1)
        row = torch.full((len(mask), *chosen.shape[1:]), 255, dtype=torch.uint8)
        row[mask] = chosen.to(torch.uint8)
        rows.append(row)
    return torch.stack(rows)


def on_each_rank(rank, world_size, folder, path):
    for packed, layout in ((True, "three"), (False, "whole")):  # an odd length is padded to an even one
        settings = {"use_remove_padding": packed, "ulysses_sequence_parallel_size": 2}
        engine, batch = make_engine(path, **settings), random_choice(path)
        with engine.eval_mode():
            free = batch.select(batch_keys=without_routing(batch))
            found = engine.infer_batch(free, {"log_probs", "routed_experts"}, LAYOUTS[layout])["routed_experts"]
        assert torch.equal(found.sort(-1).values, chosen_by_transformers(path, batch).sort(-1).values)
        assert_replays(engine, batch, path, layout)


@pytest.mark.parametrize(
    "path",
    ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "qwen3")],
    indirect=True,
)
def test_ranks_that_share_sequences_record_and_repeat(path, tmp_path):
    run_ranks(on_each_rank, 2, tmp_path, path)


# ---- runs


def prompts(count):
    columns = ragged_batch(count).batch
    names = {"uid": np.array([f"{i // 2}" for i in range(count)], dtype=object), "sample_index": np.arange(count) % 2}
    tensors = {"input_ids": columns["prompts"], "attention_mask": columns["attention_mask"][:, :P]}
    return DataProto.from_dict(tensors=tensors, non_tensors=names, meta_info={"global_steps": 1, "validate": False})


def policy(path, mode, engine="native"):
    actor = FSDPActorConfig(
        fsdp_config=FSDPEngineConfig(dtype="fp32"),
        ppo_mini_batch_size=1,
        ppo_micro_batch_size_per_gpu=1,
        router_replay=RouterReplayConfig(mode=mode),
    )
    rollout = RolloutConfig(
        tensor_model_parallel_size=1,
        prompt_length=P,
        response_length=R,
        n=2,
        dtype="fp32",
        name=engine,
        log_prob_micro_batch_size_per_gpu=3,
        enable_rollout_routing_replay=mode == "R3",
        max_num_seqs=3,
    )
    config = ActorRolloutRefConfig(model=HFModelConfig(path=path), actor=actor, rollout=rollout)
    described = LocalWorkerGroup.describe(ActorRolloutRefWorker, device_name="cpu", config=config, role="actor_rollout")
    group = LocalWorkerGroup(ray_cls_with_init=described)
    group.init_model()
    return group, actor


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_rollouts_tell_what_they_chose(name, engine, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    group, _ = policy(str(tmp_path), "R3", engine)
    batch = group.generate_sequences(prompts(8))
    check_columns(batch)
    found, expected = batch.batch["routed_experts"], chosen_by_transformers(str(tmp_path), batch)
    lengths = batch.batch["response_mask"].sum(-1)
    # The last token drawn has not gone into the model, so its experts are not known.
    for row, length in enumerate(lengths.tolist()):
        expected[row, P + length - 1] = 255
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
    to_validate = prompts(4)
    to_validate.meta_info["validate"] = True
    assert "routed_experts" not in group.generate_sequences(to_validate).batch.keys()


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_a_step_replays_in_old_log_probs_and_in_the_update(path, mode):
    group, actor = policy(path, mode, "hf" if "deepseek" in path else "native")
    batch = prompts(4).select(batch_keys=[]) | group.generate_sequences(prompts(4))
    if mode == "R3":
        # Experts that the policy would not have chosen, so that the pass without them gives other log-probs.
        batch.batch["routed_experts"] = (batch.batch["routed_experts"] + 1) % 4
    old = group.compute_log_prob(batch)
    plain = group.compute_log_prob(batch.select(batch_keys=without_routing(batch)))
    differs = (old.batch["old_log_probs"] - plain.batch["old_log_probs"]).abs().max() > 1e-3
    assert bool(differs) == (mode == "R3")
    batch = batch | (old if mode == "R2" else old.select(batch_keys=["old_log_probs", "entropys"]))
    batch = batch | DataProto.from_dict(tensors={"advantages": batch.batch["response_mask"].float()})
    columns = policy_columns(batch, actor)
    assert "routed_experts" in columns
    updated = group.update_actor(batch.select(batch_keys=[*columns]))
    assert updated.meta_info["metrics"]["actor/grad_norm"] > 0


# ---- what does not fit


def test_formats():
    assert (choice_dtype(255), unknown(torch.uint8)) == (torch.uint8, 255)
    assert (choice_dtype(256), unknown(torch.int16)) == (torch.int16, 32767)


def test_a_model_without_routers_records_nothing(tmp_path):
    engine = make_engine(tiny_model_dir(tmp_path), trained=False)
    with engine.eval_mode(), pytest.raises(ConfigError, match="has no routers that return their choice"):
        engine.infer_batch(ragged_batch(), {"log_probs", "routed_experts"}, LAYOUTS["whole"])


def test_the_choice_of_another_model_is_refused(path):
    batch = random_choice(path)
    batch.batch["routed_experts"] = batch.batch["routed_experts"].repeat(1, 1, 3, 1)
    engine = make_engine(path, trained=False)
    with engine.eval_mode(), pytest.raises(ConfigError, match=r"has the choices of \d layers, and the model has"):
        engine.infer_batch(batch, {"log_probs"}, LAYOUTS["whole"])


def test_an_update_without_the_rollouts_choice_is_refused():
    actor = FSDPActorConfig(router_replay=RouterReplayConfig(mode="R3"))
    batch = ragged_batch() | DataProto.from_dict(tensors={"old_log_probs": torch.zeros(8, R)})
    with pytest.raises(SchemaError, match=r"'routed_experts' is made by .*generate_sequences with R3"):
        policy_columns(batch, actor)
