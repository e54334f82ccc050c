"""Pairs through the engine: against plain Transformers one pair at a time, whatever the layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.workers.support import EPS, LR, make_engine, run_ranks, weights_of
from verl.config import DirectPreferenceLossConfig, RewardModelLossConfig
from verl.errors import ConfigError, DataError, SchemaError
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir, tiny_tokenizer
from verl.trainer.preference import as_rows, last_response_token
from verl.trainer.sft_trainer import to_batch
from verl.workers.engine import BatchTotals, MicroBatchConfig
from verl.workers.losses import DirectPreferenceLoss, RewardModelLoss

PAIRS, LENGTH = 5, 12
LAYOUTS = {
    "whole": MicroBatchConfig(),
    "one by one": MicroBatchConfig(micro_batch_size_per_gpu=1),
    "three": MicroBatchConfig(micro_batch_size_per_gpu=3),
    "by tokens": MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=2 * LENGTH),
}
CENTRED = RewardModelLossConfig(margin=0.2, label_smoothing=0.1, center_rewards_coefficient=0.05)
DPO = {
    "dpo": DirectPreferenceLossConfig(beta=0.3, label_smoothing=0.1, sft_coef=0.2),
    "ipo": DirectPreferenceLossConfig(beta=0.3, loss_type="ipo"),
    "simpo": DirectPreferenceLossConfig(beta=2.0, margin=0.5, reference_free=True, average_log_prob=True),
}


def pairs(seed: int = 0) -> dict[str, Tensor]:
    """Prompts of 1 to 4 tokens, responses of 1 to 7, padded at the right; as a data set of pairs has them."""
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, 5, (PAIRS, 1, 1), generator=g)
    length = prompt + torch.randint(1, 8, (PAIRS, 2, 1), generator=g)
    place = torch.arange(LENGTH)
    mask = (place < length).long()
    ids = torch.randint(2, 104, (PAIRS, 2, LENGTH), generator=g)
    ids = torch.where(place < prompt, ids[:, :1], ids) * mask  # both sides begin with the same prompt
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "loss_mask": mask * (place >= prompt),
    }


def reward_batch(columns: dict[str, Tensor]) -> DataProto:
    rows = as_rows(columns)
    last = last_response_token(rows["loss_mask"])
    return DataProto.from_dict(tensors=rows | {"responses": rows["input_ids"], "response_mask": last})


def side(columns: dict[str, Tensor], p: int, s: int) -> tuple[Tensor, Tensor]:
    seen = columns["attention_mask"][p, s].bool()
    return columns["input_ids"][p, s][seen], columns["loss_mask"][p, s][seen].bool()


def naive_score(model, columns, p, s):
    return model(input_ids=side(columns, p, s)[0][None]).logits[0, 0]


def naive_log_prob(model, columns, p, s):
    """(sum, mean) of the response's log-probs."""
    ids, chosen = side(columns, p, s)
    log_p = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    of_tokens = torch.stack([log_p[t - 1, ids[t]] for t in range(1, len(ids)) if chosen[t]])
    return of_tokens.sum(), of_tokens.mean()


def naive_reward_loss(model, columns, config):
    total = 0.0
    for p in range(PAIRS):
        better, worse = (naive_score(model, columns, p, s) for s in (0, 1))
        right = torch.sigmoid(better - worse - config.margin)
        total -= (1 - config.label_smoothing) * right.log() + config.label_smoothing * (1 - right).log()
        total += config.center_rewards_coefficient * (better + worse) ** 2
    return total / PAIRS


def naive_preference_loss(model, reference, columns, config):
    total = 0.0
    for p in range(PAIRS):
        reward = []
        for s in (0, 1):
            log_prob = naive_log_prob(model, columns, p, s)[config.average_log_prob]
            if not config.reference_free:
                log_prob = log_prob - naive_log_prob(reference, columns, p, s)[config.average_log_prob].detach()
            reward.append(config.beta * log_prob)
        z = reward[0] - reward[1] - config.margin
        if config.loss_type == "ipo":
            total += (z / config.beta - 1 / (2 * config.beta)) ** 2
        else:
            right = torch.sigmoid(z)
            total -= (1 - config.label_smoothing) * right.log() + config.label_smoothing * (1 - right).log()
        total -= config.sft_coef * naive_log_prob(model, columns, p, 0)[1]
    return total / PAIRS


def one_step(model, loss):
    """Weights after one AdamW step of plain PyTorch, the loss and the gradient's norm."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, eps=EPS)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return dict(model.named_parameters()), loss.item(), float(norm)


def assert_same_step(engine, batch, loss, layout, expected):
    weights, value, norm = expected
    with engine.train_mode():
        metrics = engine.train_batch(batch, loss, LAYOUTS[layout])
    assert metrics["loss"] == pytest.approx(value, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, weight in weights_of(engine).items():
        assert_close(weight, weights[name], atol=2e-6, rtol=1e-5)
    return metrics


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("scorer"), "qwen3", task="sequence_classification")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("policy"), "qwen3")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("other"), "qwen3", seed=1)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reward_model_step_is_that_of_plain_transformers(scorer, layout, packed):
    columns = pairs()
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    expected = one_step(model, naive_reward_loss(model, columns, CENTRED))
    engine = make_engine(scorer, "reward_model", use_remove_padding=packed)
    metrics = assert_same_step(engine, reward_batch(columns), RewardModelLoss(CENTRED), layout, expected)
    with torch.no_grad():
        model = AutoModelForSequenceClassification.from_pretrained(scorer)
        scores = torch.stack([naive_score(model, columns, p, s) for p in range(PAIRS) for s in (0, 1)]).view(-1, 2)
    better, worse = scores.unbind(-1)
    assert metrics["accuracy"] == pytest.approx((better > worse).float().mean().item())
    assert metrics["margin"] == pytest.approx((better - worse).mean().item(), rel=1e-4)
    assert metrics["rewards/chosen"] == pytest.approx(better.mean().item(), rel=1e-4)
    assert metrics["rewards/rejected"] == pytest.approx(worse.mean().item(), rel=1e-4)


@pytest.mark.parametrize("kind", DPO)
@pytest.mark.parametrize("layout", ["whole", "by tokens"])
def test_a_preference_step_is_that_of_plain_transformers(policy, other, layout, kind):
    columns, config = pairs(), DPO[kind]
    batch = to_batch(as_rows(columns))
    reference = AutoModelForCausalLM.from_pretrained(other)
    if not config.reference_free:
        frozen = make_engine(other, trained=False).infer_batch(batch, {"log_probs"}, LAYOUTS["three"])
        batch = batch | DataProto.from_dict(tensors={"ref_log_prob": frozen["log_probs"]})
    model = AutoModelForCausalLM.from_pretrained(policy)
    expected = one_step(model, naive_preference_loss(model, reference, columns, config))
    engine = make_engine(policy)
    metrics = assert_same_step(engine, batch, DirectPreferenceLoss(config), layout, expected)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(policy)
        log_probs = [naive_log_prob(model, columns, p, 1)[config.average_log_prob] for p in range(PAIRS)]
    assert metrics["logps/rejected"] == pytest.approx(sum(map(float, log_probs)) / PAIRS, rel=1e-4)


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_parts_of_a_batch_add_up_to_the_whole(data):
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    count = data.draw(st.integers(1, 6))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=3)))
    ranks = data.draw(st.integers(1, 4))
    mask = (torch.rand(2 * count, 4, generator=g) < 0.6).long()
    scores = torch.randn(2 * count, 4, generator=g, dtype=torch.float64) * mask
    batch = DataProto.from_dict(tensors={"response_mask": mask, "ref_log_prob": torch.randn(2 * count, 4, generator=g)})
    totals = BatchTotals(dp_size=ranks, batch_num_tokens=max(int(mask.sum()), 1), global_batch_size=2 * count)
    for loss, name in ((RewardModelLoss(CENTRED), "scores"), (DirectPreferenceLoss(DPO["dpo"]), "log_probs")):
        whole_in = scores.clone().requires_grad_()
        whole, found = loss({name: whole_in}, batch, totals)
        whole.backward()
        parts_in = scores.clone().requires_grad_()
        total, sums = 0.0, dict.fromkeys(found, 0.0)
        for start, stop in zip([0, *cuts], [*cuts, count], strict=True):
            rows = list(range(2 * start, 2 * stop))
            part, metrics = loss({name: parts_in[rows]}, batch.select_idxs(rows), totals)
            total = total + part
            sums = {key: value + float(metrics[key].value) for key, value in sums.items()}
        total.backward()
        assert_close(total, whole)
        assert_close(parts_in.grad, whole_in.grad)
        assert sums == pytest.approx({key: float(share.value) for key, share in found.items()}, rel=1e-5, abs=1e-6)
        # gradients are averaged over ranks; the metrics are not
        assert found["loss"].value == pytest.approx(whole.item() / ranks, rel=1e-5)


def one_pair_against_four(rank, world_size, folder, policy):
    """Rank 0 has one pass to rank 1's four: it fills up with pairs that must not count."""
    engine = make_engine(policy)
    rows = [0, 1] if rank == 0 else list(range(2, 2 * PAIRS))
    batch = to_batch(as_rows(pairs())).select_idxs(rows)
    with engine.train_mode():
        metrics = engine.train_batch(batch, DirectPreferenceLoss(DPO["simpo"]), LAYOUTS["one by one"])
    torch.save({"weights": weights_of(engine), "metrics": metrics}, folder / f"rank_{rank}.pt")


def test_ranks_with_other_numbers_of_pairs(policy, tmp_path):
    run_ranks(one_pair_against_four, 2, tmp_path, policy)
    alone = make_engine(policy)
    with alone.train_mode():
        metrics = alone.train_batch(to_batch(as_rows(pairs())), DirectPreferenceLoss(DPO["simpo"]), LAYOUTS["whole"])
    found = torch.load(tmp_path / "rank_0.pt", weights_only=True)
    assert found["metrics"] == pytest.approx(metrics, rel=1e-5)
    for name, weight in weights_of(alone).items():
        assert_close(found["weights"][name], weight, atol=2e-6, rtol=1e-5)


def test_a_tie_is_half_right():
    batch = DataProto.from_dict(tensors={"response_mask": torch.ones(6, 1)})
    totals = BatchTotals(dp_size=1, batch_num_tokens=6, global_batch_size=6)
    scores = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 1.0]).unsqueeze(-1)  # right, tie, wrong
    _, metrics = RewardModelLoss(RewardModelLossConfig())({"scores": scores}, batch, totals)
    assert float(metrics["accuracy"].value) == 0.5


def test_prompt_and_padding_have_no_influence(policy):
    """Log-probs of prompt tokens are not learned, what lies in the padding is not read."""
    columns = pairs()
    changed = {name: column.clone() for name, column in columns.items()}
    changed["input_ids"][columns["attention_mask"] == 0] = 99
    engine = make_engine(policy)
    loss = DirectPreferenceLoss(DPO["simpo"])
    results = []
    for version in (columns, changed):
        engine.optimizer_zero_grad()
        metrics = engine.forward_backward_batch(to_batch(as_rows(version)), loss, LAYOUTS["three"])
        results.append((metrics, [parameter.grad.clone() for parameter in engine.model.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    # A prompt token that counted as a response token would change both.
    columns["loss_mask"] = columns["attention_mask"]
    other = engine.forward_backward_batch(to_batch(as_rows(columns)), loss, LAYOUTS["three"])
    assert other["loss"] != pytest.approx(results[0][0]["loss"], rel=1e-3)


def test_the_score_is_read_where_the_response_ends():
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 1, 0]])
    assert last_response_token(mask).tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 1, 0]]


def test_a_language_model_becomes_a_reward_model_that_starts_undecided(policy, tmp_path):
    columns, batch = pairs(), reward_batch(pairs())
    engine = make_engine(policy, "reward_model")
    assert engine.infer_batch(batch, {"scores"}, LAYOUTS["whole"])["scores"].eq(0).all()
    backbone = AutoModelForCausalLM.from_pretrained(policy).model.state_dict()
    weights = weights_of(engine)
    assert weights.keys() == {f"model.{name}" for name in backbone} | {"score.weight"}
    assert all(torch.equal(weights[f"model.{name}"], weight) for name, weight in backbone.items())
    with engine.train_mode():
        losses = [engine.train_batch(batch, RewardModelLoss(CENTRED), LAYOUTS["whole"])["loss"] for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    # The export is a plain classifier: Transformers itself, the frozen engine and the trained one agree.
    engine.save_checkpoint(str(tmp_path / "step"), 1, ("model", "hf_model"))
    folder = str(tmp_path / "step" / "huggingface")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert type(model).__name__ == "Qwen3ForSequenceClassification"
    with torch.no_grad():
        expected = torch.stack([naive_score(model, columns, p, s) for p in range(PAIRS) for s in (0, 1)])
        # in one batch, where Transformers has to find the ends itself
        at_once = model(input_ids=batch.batch["input_ids"], attention_mask=batch.batch["attention_mask"]).logits[:, 0]
    assert expected.abs().min() > 0
    assert_close(at_once, expected, atol=1e-5, rtol=1e-5)
    for scored in (engine, make_engine(folder, "reward_model", trained=False)):
        found = scored.infer_batch(batch, {"scores"}, LAYOUTS["by tokens"])["scores"]
        assert_close(found.sum(-1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("pad", "named"), [("<pad>", 0), ("<eos>", 0)])  # another special token pads
def test_a_padding_token_that_ends_responses_is_not_named(tmp_path, pad, named):
    path = tiny_model_dir(tmp_path, pad_token_id=None)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(path)
    assert make_engine(path, "reward_model").model.hf.config.pad_token_id == named


def test_pairs_that_would_be_parted_are_refused(policy):
    batch = to_batch(as_rows(pairs())).select_idxs([0, 1, 2])
    engine = make_engine(policy)
    with pytest.raises(SchemaError, match="3 rows do not divide into units of 2"):
        engine.train_batch(batch, DirectPreferenceLoss(DPO["simpo"]), LAYOUTS["whole"])
    with pytest.raises(SchemaError, match="ref_log_prob"):
        engine.train_batch(to_batch(as_rows(pairs())), DirectPreferenceLoss(DPO["dpo"]), LAYOUTS["whole"])
    budget = MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=LENGTH)  # a row fits, a pair does not
    with pytest.raises(ConfigError, match="does not fit into a micro-batch of 12"):
        engine.train_batch(to_batch(as_rows(pairs())), DirectPreferenceLoss(DPO["simpo"]), budget)


def test_batches_that_are_no_pairs_are_refused():
    columns = pairs()
    with pytest.raises(DataError, match=r"'input_ids' of a batch of pairs has shape \(10, 12\)"):
        as_rows({name: column.flatten(0, 1) for name, column in columns.items()})
    columns["loss_mask"][3, 1] = 0
    with pytest.raises(DataError, match="rejected side of pair 3"):
        as_rows(columns)
