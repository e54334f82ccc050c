"""Passes that have a prompt of several rows once: the numbers of separate rows, and which rows come together."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.workers.engine.test_passes import Memory
from tests.workers.support import make_engine, naive_outputs, run_ranks, weights_of
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir
from verl.workers.config import ActorConfig, CriticConfig
from verl.workers.engine import MicroBatchConfig
from verl.workers.engine.model.inputs import prepare_inputs
from verl.workers.engine.passes import split_micro_batches
from verl.workers.losses import PolicyLoss, ValueLoss
from verl.workers.shared_prompts import Siblings, same_prompts

P, R, CPU = 6, 8, torch.device("cpu")
LAYOUTS = {
    "whole": {},
    "one by one": {"micro_batch_size_per_gpu": 1},
    "three": {"micro_batch_size_per_gpu": 3},
    "by tokens": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 17},
}
FAMILIES = {
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},  # with biases
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4},  # with soft caps
}


def groups_of_rows(sizes, seed=0, vocab=104, mixed=False):
    """Groups of these sizes, their prompts padded on the left; responses of all lengths, the first one empty."""
    g = torch.Generator().manual_seed(seed)
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    if mixed:
        group = group[torch.randperm(len(group), generator=g)]
    prompt = torch.randint(1, P + 1, (len(sizes),), generator=g)[group]
    response = torch.randint(1, R + 1, (len(group),), generator=g)
    response[0] = 0
    mask = torch.cat([torch.arange(P) >= P - prompt[:, None], torch.arange(R) < response[:, None]], dim=1).long()
    prompts = torch.randint(2, vocab, (len(sizes), P), generator=g)[group]
    ids = torch.cat([prompts, torch.randint(2, vocab, (len(group), R), generator=g)], dim=1) * mask
    response_mask = mask[:, P:].clone()
    response_mask[-1, :1] = 0  # what a tool said
    noise = [torch.randn(len(group), R, generator=g) * scale * response_mask for scale in (1.0, 0.4)]
    return DataProto.from_dict(
        tensors={
            "responses": ids[:, P:],
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "advantages": noise[0],
            "noise": noise[1],
        }
    )


def gradients(engine, batch, micro):
    loss = PolicyLoss(ActorConfig(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1))
    engine.optimizer_zero_grad()
    with engine.train_mode():
        metrics = engine.forward_backward_batch(batch, loss, micro)
    found = {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}
    return found, metrics


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_separate_rows(family, tmp_path):
    path = tiny_model_dir(tmp_path, family, **FAMILIES[family])
    engine = make_engine(path)
    engine.check_shared_prompts("actor.use_prefix_grouper")
    for seed, sizes in enumerate(([4, 1, 3], [2, 2, 2, 2], [5], [1, 1])):
        batch = groups_of_rows(sizes, seed, mixed=seed == 0)
        with torch.no_grad():
            log_probs, entropy = naive_outputs(AutoModelForCausalLM.from_pretrained(path), batch)
        batch = with_log_probs_of(batch, log_probs)
        expected, metrics = gradients(engine, batch, MicroBatchConfig())
        for settings in LAYOUTS.values():
            micro = MicroBatchConfig(**settings, shares_prompts=True)
            found = engine.infer_batch(batch, {"log_probs", "entropy"}, micro)
            assert_close(found["log_probs"], log_probs, atol=1e-5, rtol=1e-5)
            assert_close(found["entropy"], entropy, atol=1e-5, rtol=1e-5)
            shared, same_metrics = gradients(engine, batch, micro)
            assert_close(shared, expected, atol=1e-5, rtol=1e-5)
            assert same_metrics == pytest.approx(metrics, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_rows_and_passes_that_do_not_fit(layout, tmp_path):
    path = tiny_model_dir(tmp_path, "qwen3")
    batch = groups_of_rows([4, 1, 3], seed=7)
    columns = batch.batch
    columns["attention_mask"][5:, : P - 1] = 0  # a group of prompts of one token
    columns["position_ids"] = (columns["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    columns["response_mask"][[1, 6]] = 0  # rejected responses
    batch = DataProto.concat([batch, batch.select_idxs([2, 4])])  # padding of ranks repeats rows
    columns = batch.batch
    columns["response_mask"][-2:] = 0
    assert len(Siblings.from_batch(batch).groups) == 3
    engine, apart = make_engine(path), make_engine(path)
    whole = MicroBatchConfig()
    batch = with_log_probs_of(batch, apart.infer_batch(batch, {"log_probs"}, whole)["log_probs"])
    expected, expected_metrics = gradients(apart, batch, whole)
    tokens = int(columns["attention_mask"].sum(-1).max())
    Memory(engine, tokens)
    found, metrics = gradients(engine, batch, MicroBatchConfig(**LAYOUTS[layout], shares_prompts=True))
    assert (engine.pass_sizes.cuts > 0) == (layout != "one by one")
    assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert metrics == pytest.approx(expected_metrics, abs=1e-5, rel=1e-5)


def with_log_probs_of(batch, log_probs):
    noise = batch.batch["noise"]
    columns = {"old_log_probs": log_probs + noise, "ref_log_prob": log_probs - noise}
    return batch | DataProto.from_dict(tensors=columns)


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_values_are_those_of_separate_rows(family, tmp_path):
    path = tiny_model_dir(tmp_path, family, task="token_classification", **FAMILIES[family])
    engine = make_engine(path, "value_model")
    engine.check_shared_prompts("critic.use_prefix_grouper")
    batch = groups_of_rows([4, 1, 3], seed=2, mixed=True)
    values = engine.infer_batch(batch, {"values"}, MicroBatchConfig())["values"]
    assert values.std() > 0.01
    noise = batch.batch["noise"]
    batch = batch | DataProto.from_dict(tensors={"values": values + noise, "returns": values - noise})
    loss, found = ValueLoss(CriticConfig()), []
    for shares in (False, True):
        for settings in LAYOUTS.values():
            micro = MicroBatchConfig(**settings, shares_prompts=shares)
            assert_close(engine.infer_batch(batch, {"values"}, micro)["values"], values, atol=1e-5, rtol=1e-5)
            engine.optimizer_zero_grad()
            with engine.train_mode():
                metrics = engine.forward_backward_batch(batch, loss, micro)
            found.append((metrics, {name: p.grad.clone() for name, p in engine.model.named_parameters()}))
    for metrics, shared in found[1:]:
        assert metrics == pytest.approx(found[0][0], abs=1e-5, rel=1e-5)
        assert_close(shared, found[0][1], atol=1e-5, rtol=1e-5)


def test_a_pass_has_each_prompt_once():
    # prompts [7 8] twice and [9] once; rows 0 and 2 are siblings
    ids = torch.tensor([[7, 8, 1, 2], [0, 9, 3, 0], [7, 8, 4, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [1, 1, 1, 0]])
    batch = DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, 2:],
            "response_mask": mask[:, 2:],
        }
    )
    assert same_prompts(batch) == [0, 1, 0]
    inputs = prepare_inputs(batch, packed=True, device=CPU, shares_prompts=True)
    assert inputs.input_ids.tolist() == [[7, 8, 1, 2, 9, 3, 4]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert inputs.take.tolist() == [1, 2, 4, 1]  # the last token of the shared prompt predicts 1 and 4
    assert inputs.packing.lengths == (2, 2, 2, 1)  # prompt, response, a row alone, response
    assert inputs.packing.keys.lengths == (2, 4, 2, 3)
    assert inputs.packing.key_parts == (0, 0, 1, 2, 0, 3)
    # 5 tokens of siblings and 2 of the other row in passes of 5: the prompt counts once
    micro = MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=5, shares_prompts=True)
    assert [part.rows for part in split_passes(batch, micro)] == [[0, 2], [1]]
    apart = MicroBatchConfig(micro_batch_size_per_gpu=2, shares_prompts=True)
    assert [part.rows for part in split_passes(batch, apart)] == [[0, 2], [1]]


def split_passes(batch, micro):
    make_group()
    return list(split_micro_batches(batch, micro, CPU))


def test_no_token_of_a_filler_counts():
    make_group()
    of_tokens = ("response_mask", "distillation_mask", "observation_weights")
    columns = {"attention_mask": torch.ones(1, 3)} | {name: torch.ones(1, 2) for name in of_tokens}
    _, filler = split_micro_batches(DataProto.from_dict(tensors=columns), MicroBatchConfig(), CPU, multiple=2)
    assert filler.is_filler
    assert not any(filler.data.batch[name].any() for name in of_tokens)


def make_group():
    from verl.utils.device import ensure_process_group

    ensure_process_group(CPU, 60)


def test_bundles_of_siblings():
    # prompt of 4; responses of 1, 2, 3, 1: together 11 tokens; a row alone of 2 + 2
    found = Siblings([[0, 1, 2, 3], [4]], [4, 4, 4, 4, 2], [1, 2, 3, 1, 2])
    assert found.tokens([0, 1, 2, 3]) == 11
    assert found.repeated() == [4, 4, 4]
    assert found.bundles(11) == [[0, 1, 2, 3], [4]]
    assert found.bundles(8) == [[0, 1], [2, 3], [4]]
    assert found.bundles(11, count=4) == [[0, 1], [2], [3], [4]]
    assert found.bundles(1) == [[0], [1], [2], [3], [4]]
    assert len(found.bundles(11, count=9)) == 5


def test_same_tokens_at_other_positions_are_not_shared():
    batch = groups_of_rows([3])
    batch.batch["position_ids"][1] += 1
    assert same_prompts(batch) == [0, 1, 0]


def test_what_cannot_share_is_refused(tmp_path):
    path = tiny_model_dir(tmp_path, "qwen3")
    batch, micro = groups_of_rows([2]), MicroBatchConfig(shares_prompts=True)
    padded = make_engine(path, trained=False, use_remove_padding=False)
    with pytest.raises(ConfigError, match=r"runs padded\. Set it false"):
        padded.check_shared_prompts("actor.use_prefix_grouper")
    with pytest.raises(ConfigError, match="needs packed rows"):
        padded.infer_batch(batch, {"log_probs"}, micro)
    with pytest.raises(ConfigError, match=r"router_replay\.mode=disabled"):
        make_engine(path, trained=False).infer_batch(batch, {"routed_experts"}, micro)


def on_each_rank(rank, world_size, folder, path):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    # Rank 0 has five rows of two groups, rank 1 the others: siblings are apart.
    mine = batch.select_idxs([0, 1, 2, 3, 4] if rank == 0 else [5, 6, 7])
    found = {}
    for case, ulysses in (("fsdp", 1), ("ulysses", 2)):
        rows = mine if ulysses == 1 else batch
        for name, settings in LAYOUTS.items():
            engine = make_engine(path, ulysses_sequence_parallel_size=ulysses)
            engine.check_shared_prompts("actor.use_prefix_grouper")
            micro = MicroBatchConfig(**settings, shares_prompts=True)
            loss = PolicyLoss(ActorConfig(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1))
            with engine.train_mode():
                metrics = engine.train_batch(rows, loss, micro)
            found[case, name] = metrics, weights_of(engine)
    torch.save(found, folder / f"rank_{rank}.pt")


def test_two_ranks(tmp_path):
    path = tiny_model_dir(tmp_path / "model", "qwen3", num_attention_heads=4, num_key_value_heads=2)
    batch = groups_of_rows([4, 3, 1], seed=3)
    with torch.no_grad():
        log_probs, _ = naive_outputs(AutoModelForCausalLM.from_pretrained(path), batch)
    batch = with_log_probs_of(batch, log_probs)
    torch.save(batch, tmp_path / "batch.pt")
    run_ranks(on_each_rank, 2, tmp_path, path)
    one = make_engine(path)
    loss = PolicyLoss(ActorConfig(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1))
    with one.train_mode():
        expected = one.train_batch(batch, loss, MicroBatchConfig())
    for rank in range(2):
        for case, (metrics, weights) in torch.load(tmp_path / f"rank_{rank}.pt", weights_only=False).items():
            assert metrics == pytest.approx(expected, abs=1e-5, rel=1e-5), case
            assert_close(weights, weights_of(one), atol=1e-5, rtol=1e-5)
