"""Router replay under strategy=megatron: two ranks record and repeat the choices of plain Transformers."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.plugins.megatron.support import TP, megatron_engine
from tests.workers.engine.test_router_replay import (
    CONFIGS,
    chosen_by_transformers,
    random_choice,
    replayed_update,
    without_routing,
)
from tests.workers.support import LAYOUTS, run_ranks, share, weights_of
from verl.errors import ConfigError
from verl.testing.models import tiny_model_dir, tiny_tokenizer
from verl.workers.losses import sft_loss

pytest.importorskip("verl.plugins.megatron.library")

EP = {"expert_model_parallel_size": 2}
PARTS = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CASES = {
    "tensor and experts": (TP | EP | {"expert_tensor_parallel_size": 1}, "three"),
    # Of a packed row of 47 tokens and a padding token each rank has 24.
    "context": ({"context_parallel_size": 2, "override_transformer_config": PARTS}, "whole"),
    # Layers 1 and 2, then 4, on the first stage; layer 3 on the second, whose last chunk is empty.
    "interleaved pipeline, padded": (
        {
            "pipeline_model_parallel_size": 2,
            "override_transformer_config": {"pipeline_model_parallel_layout": "Ett|t|t|L"},
            "use_remove_padding": False,
        },
        "by tokens",
    ),
    "data": ({"enable_gradient_checkpointing": False}, "one by one"),
}

UNEVEN = {
    "pipeline_model_parallel_size": 2,
    "override_transformer_config": {"num_layers_in_first_pipeline_stage": 3},
}
OF_FOUR = {
    "tensor x pipeline of 3 layers and 1": (TP | UNEVEN | {"expert_tensor_parallel_size": 1}, "three"),
    "experts x pipeline of 3 layers and 1": (EP | UNEVEN, "by tokens"),
    "tensor, experts by columns": (TP | EP | {"expert_tensor_parallel_size": 2}, "three"),
    "experts over more ranks than layers": (TP | {"expert_tensor_parallel_size": 4}, "whole"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    fields = CONFIGS["qwen3"].to_dict() | {"num_hidden_layers": 4, "mlp_only_layers": [1]}
    AutoModelForCausalLM.from_config(CONFIGS["qwen3"].__class__(**fields)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def on_each_rank(rank, world_size, folder, path, cases):
    expected = torch.load(folder / "expected.pt", weights_only=False)
    whole, chosen, log_probs, weights = expected
    for case in cases:
        settings, layout = (CASES | OF_FOUR)[case]
        engine = megatron_engine(path, **settings)
        place, copies = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        batch = share(whole, place, copies)
        with engine.eval_mode():
            free = batch.select(batch_keys=without_routing(batch))
            found = engine.infer_batch(free, {"log_probs", "routed_experts"}, LAYOUTS[layout])
            repeated = engine.infer_batch(batch, {"log_probs"}, LAYOUTS[layout])["log_probs"]
        assert torch.equal(found["routed_experts"].sort(-1).values, chosen[place::copies]), case
        if engine.is_mp_src_rank_with_outputs():
            assert_close(repeated, log_probs[place::copies], atol=1e-5, rtol=0)
            assert (found["log_probs"] - repeated).abs().max() > 1e-2
        with engine.train_mode():
            engine.train_batch(batch, sft_loss, LAYOUTS[layout])
        for name, weight in weights_of(engine).items():
            assert (weight - weights[name]).abs().max() < 1e-5, (case, name)


def replay(folder, path, ranks, cases):
    batch = random_choice(path)
    chosen = chosen_by_transformers(path, batch).sort(-1).values
    torch.save((batch, chosen, *replayed_update(path, batch)), folder / "expected.pt")
    run_ranks(on_each_rank, ranks, folder, path, cases)


def test_two_ranks_record_and_repeat(path, tmp_path):
    replay(tmp_path, path, 2, [*CASES])


@pytest.mark.slow
def test_four_ranks_record_and_repeat(path, tmp_path):
    replay(tmp_path, path, 4, [*OF_FOUR])


def test_what_has_nothing_to_repeat_is_refused(path, tmp_path):
    batch = random_choice(path)
    batch.batch["routed_experts"] = batch.batch["routed_experts"].repeat(1, 1, 3, 1)
    engine = megatron_engine(path, trained=False)
    with engine.eval_mode(), pytest.raises(ConfigError, match="the choices of 9 layers, and the model has 3 routers"):
        engine.infer_batch(batch, {"log_probs"}, LAYOUTS["whole"])
    dense = megatron_engine(tiny_model_dir(tmp_path), trained=False)
    with dense.eval_mode(), pytest.raises(ConfigError, match="the model has no experts"):
        dense.infer_batch(batch, {"routed_experts"}, LAYOUTS["whole"])
