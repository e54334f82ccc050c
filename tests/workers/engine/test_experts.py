"""The load of experts: counts of tokens, whatever the passes and ranks."""

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from tests.workers.support import LAYOUTS, make_engine, ragged_batch, run_ranks, share
from verl.errors import ConfigError
from verl.testing.models import tiny_model_dir, tiny_tokenizer
from verl.workers.losses import sft_loss

COMMON = {"vocab_size": 104, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
COMMON |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.2, "bos_token_id": None}
CONFIGS = {
    "qwen3": Qwen3MoeConfig(**COMMON, head_dim=8, num_experts=8, moe_intermediate_size=16),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4, intermediate_size=16),
}


@pytest.fixture(scope="module", params=CONFIGS)
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def expected(path):
    """By the router logits of Transformers, one sequence at a time."""
    model, columns = AutoModelForCausalLM.from_pretrained(path), ragged_batch().batch
    counts = None
    for ids, seen in zip(columns["input_ids"], columns["attention_mask"].bool(), strict=True):
        with torch.no_grad():
            logits = model(ids[seen][None], output_router_logits=True).router_logits
        chosen = torch.stack([layer.topk(2).indices.flatten() for layer in logits])
        found = torch.nn.functional.one_hot(chosen, logits[0].shape[-1]).sum(1)
        counts = found if counts is None else counts + found
    load = counts / counts.float().mean(1, keepdim=True)
    return {"load_max": load.max().item(), "load_min": load.min().item(), "unused_experts": (counts == 0).sum().item()}


def loads(engine, batch, layout):
    with engine.train_mode():
        metrics = engine.train_batch(batch, sft_loss, LAYOUTS[layout])
    return {name.removeprefix("moe/"): value for name, value in metrics.items() if name.startswith("moe/")}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", ["one by one", "three"])
def test_each_token_counts_once_and_padding_does_not(path, packed, layout):
    engine = make_engine(path, use_remove_padding=packed)
    assert engine.is_packed == packed
    assert loads(engine, ragged_batch(), layout) == pytest.approx(expected(path), rel=1e-6)


def on_each_rank(rank, world_size, folder, path):
    torch.save(loads(make_engine(path), share(ragged_batch(), rank, world_size), "three"), folder / f"{rank}.pt")


def test_two_ranks_count_together(path, tmp_path):
    run_ranks(on_each_rank, 2, tmp_path, path)
    for rank in (0, 1):
        assert torch.load(tmp_path / f"{rank}.pt") == pytest.approx(expected(path), rel=1e-6)


def test_an_auxiliary_loss_is_refused(path):
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0.01: the auxiliary loss of experts is not in"):
        make_engine(path, override_config={"router_aux_loss_coef": 0.01})


def test_a_model_without_experts_has_no_such_metrics(tmp_path):
    assert loads(make_engine(tiny_model_dir(tmp_path)), ragged_batch(), "three") == {}
