"""strategy=megatron on two ranks over gloo: tensor, pipeline and data parallel have the numbers of plain PyTorch."""

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from benchmarks.plan_accuracy import allocated_rise
from tests.plugins.megatron.support import CONFIG, TP, batch_that_drew_padding, megatron_engine
from tests.support.tiny_run import same
from tests.workers.support import (
    LAYOUTS,
    WHOLE,
    naive_outputs,
    naive_update,
    ppo_batch,
    run_ranks,
    share,
    weights_of,
    with_kept_ids,
)
from verl.model_merger.fsdp import saved_weights
from verl.plugins.megatron import weights
from verl.testing.models import tiny_model_dir
from verl.workers.losses import PolicyLoss, sft_loss

pytest.importorskip("verl.plugins.megatron.library")

PP = {"pipeline_model_parallel_size": 2}
INTERLEAVED = PP | {"virtual_pipeline_model_parallel_size": 2}
# Of four layers: three and one; two and then one on the first stage, none and then one on the second.
UNEVEN = PP | {
    "override_transformer_config": {"num_layers_in_first_pipeline_stage": 3, "deallocate_pipeline_outputs": True}
}
LAYOUT = PP | {"override_transformer_config": {"pipeline_model_parallel_layout": "Ett||t|tL"}}
CP = {"context_parallel_size": 2}
CASES = {
    "tensor": (TP, "three"),
    "tensor, padded, whole sequences": (TP | {"sequence_parallel": False, "use_remove_padding": False}, "whole"),
    "pipeline": (UNEVEN, "by tokens"),
    "interleaved": (INTERLEAVED, "three"),
    "interleaved by a layout, padded, by tokens": (LAYOUT | {"use_remove_padding": False}, "by tokens"),
    "context": (CP, "by tokens"),
    "context, padded": (CP | {"use_remove_padding": False}, "three"),
    "data": ({}, "three"),
    "data, whole optimizer": ({"use_distributed_optimizer": False, "use_remove_padding": False}, "one by one"),
}


def on_two_ranks(rank, world_size, folder, path):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    found = {}
    for case, (settings, layout) in CASES.items():
        engine = megatron_engine(path, **settings)
        mine = share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
        with engine.eval_mode():
            outputs = engine.infer_batch(mine, {"log_probs", "entropy"}, LAYOUTS[layout])
        with engine.train_mode():
            metrics = engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])
            engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])
        if case in ("tensor", "pipeline"):
            gathering(engine, folder / f"{case}_{rank}.json")
        place = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        found[case] = metrics, weights_of(engine), outputs if engine.is_mp_src_rank_with_outputs() else None, place
    torch.save(found, folder / f"rank_{rank}.pt")
    reshard(folder, path, batch)
    in_turn(path, batch, found)
    vocabulary(rank)


def in_turn(path, batch, alone):
    """Models of several layouts in one process: each has the bits that it has alone."""
    engines = {case: megatron_engine(path, **CASES[case][0]) for case in ("tensor", "interleaved", "data")}
    for _ in range(2):
        with ExitStack() as modes:
            for engine in engines.values():
                modes.enter_context(engine.train_mode())
            for case, engine in engines.items():
                mine = share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
                engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[CASES[case][1]])
    for case, engine in engines.items():
        assert same(weights_of(engine), alone[case][1])


def gathering(engine, trace):
    """Whole weights come in buckets: this one and the last one, the part of another rank, and small messages."""
    weights.BUCKET_BYTES = 1  # else one bucket has all of this small model
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        sizes = [weight.nbytes for _, weight in engine.get_per_tensor_param()]
    weights.BUCKET_BYTES = 2**29
    profile.export_chrome_trace(str(trace))
    assert max(sizes) <= allocated_rise(trace) < sum(sizes) / 2


def reshard(folder, path, batch):
    """What one layout saved after a step goes on in another; then memory, bit by bit."""
    layouts = {"tensor": TP, "pipeline": LAYOUT, "data": {}}
    for saver, settings in layouts.items():
        engine = megatron_engine(path, **settings)
        mine = share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
        with engine.train_mode():
            engine.train_batch(mine, sft_loss, WHOLE)
        engine.save_checkpoint(str(folder / saver), 1)
        held = engine.state(1).states
        with engine.train_mode():
            after = engine.train_batch(mine, sft_loss, WHOLE)
        weights = weights_of(engine)
        engine.load_state(held)
        with engine.train_mode():
            assert same(engine.train_batch(mine, sft_loss, WHOLE), after)
        assert same(weights_of(engine), weights)
    for settings in layouts.values():
        engine = megatron_engine(path, **settings)
        mine = share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
        for saver in layouts:
            engine.load_checkpoint(str(folder / saver))
            assert engine.weight_version == 1
            with engine.train_mode():
                engine.train_batch(mine, sft_loss, WHOLE)
            for name, weight in weights_of(engine).items():
                assert_close(weight, weights[name], atol=2e-5, rtol=0)


def vocabulary(rank):
    """9 tokens over 2 ranks, and 1 token: the second rank then has padding alone."""
    from verl.workers.engine.model.vocab_parallel import vocab_parallel_log_probs

    for vocab in (9, 1):
        g = torch.Generator().manual_seed(3)
        hidden = torch.randn(7, 4, generator=g).double().requires_grad_()
        whole = torch.randn(vocab, 4, generator=g).double().requires_grad_()
        targets, upstream = torch.randint(vocab, (7,), generator=g), torch.randn(2, 7, generator=g).double()
        log_p = (hidden @ whole.t() / 0.7).log_softmax(-1)
        expected = (
            log_p.gather(-1, targets[:, None])[:, 0],
            -(log_p.exp() * log_p).sum(-1),
            log_p.exp().square().sum(-1),
        )
        wanted = torch.autograd.grad((torch.stack(expected[:2]) * upstream).sum(), [hidden, whole])
        each = -(-vocab // 2)
        padded = torch.cat([whole.detach(), torch.full((2 * each - vocab, 4), 7.0).double()])
        mine = padded.chunk(2)[rank].clone().requires_grad_()
        found = vocab_parallel_log_probs(
            hidden, mine, targets, dist.group.WORLD, vocab, 0.7, True, True, chunk_elements=2 * each
        )
        assert_close(tuple(found[:3]), expected)
        of_hidden, of_mine = torch.autograd.grad((torch.stack(found[:2]) * upstream).sum(), [hidden, mine])
        dist.all_reduce(of_hidden)
        assert_close(of_hidden, wanted[0])
        count = min(each, max(vocab - rank * each, 0))
        assert_close(of_mine[:count], wanted[1][rank * each : rank * each + count])
        assert not of_mine[count:].any()
        with_teacher(rank, hidden, whole, mine, vocab)


def with_teacher(rank, hidden, whole, mine, vocab):
    """Candidates, most likely tokens and divergences are those of a rank that has all rows, gradients too."""
    from verl.workers.engine.model.divergence import FullDivergence, OutputMatrix, vocabulary_divergence
    from verl.workers.engine.model.head import LogitRule, TopTokens, token_log_probs
    from verl.workers.engine.model.vocab_parallel import vocab_parallel_log_probs

    g = torch.Generator().manual_seed(4)
    of_teacher, teacher = torch.randn(7, 3, generator=g).double(), torch.randn(vocab + 2, 3, generator=g).double()
    targets, candidates = torch.randint(vocab, (7,), generator=g), torch.randint(vocab, (7, 2), generator=g)
    candidates[::2, 0] = (hidden @ whole.t()).argmax(-1)[::2]
    factors = torch.randn(7, 2, generator=g).double()
    each, world = len(mine), dist.group.WORLD
    top = TopTokens(min(3, vocab))

    def check(found, expected, weighted):
        assert_close(found, expected)
        wanted = torch.autograd.grad(weighted(expected), [hidden, whole])
        of_hidden, of_mine = torch.autograd.grad(weighted(found), [hidden, mine])
        dist.all_reduce(of_hidden)
        assert_close(of_hidden, wanted[0])
        count = min(each, max(vocab - rank * each, 0))
        assert_close(of_mine[:count], wanted[1][rank * each : rank * each + count])
        assert not of_mine[count:].any()

    found = vocab_parallel_log_probs(
        hidden, mine, targets, world, vocab, 0.7, chunk_elements=2 * each, candidates=candidates, top=top
    )
    expected = token_log_probs(hidden, whole, None, targets, 0.7, candidates=candidates, top=top)
    check(found, expected, lambda statistics: (statistics.topk_log_probs * factors).sum())
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        spec = FullDivergence(
            kind=kind, teachers=[OutputMatrix(weight=teacher, bias=None, rule=LogitRule(2.0))], log_prob_min=-2.0
        )
        policies = [OutputMatrix(weight=w, bias=None, rule=LogitRule(), temperature=0.7) for w in (mine, whole)]
        found = vocabulary_divergence(
            hidden, policies[0], of_teacher, None, spec, world, vocab, chunk_elements=2 * each
        )
        expected = vocabulary_divergence(hidden, policies[1], of_teacher, None, spec)
        if vocab > 1:
            check(found, expected, lambda statistics: (statistics.divergence * factors[:, 0]).sum())


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    # A vocabulary of 105 does not divide by two; a tied embedding is on both stages of a pipeline.
    settings = {"tie_word_embeddings": True, "num_hidden_layers": 4}
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "qwen3", vocab=105, **settings)


@pytest.fixture(scope="module")
def batch(path):
    return ppo_batch(path, with_kept_ids(batch_that_drew_padding()))  # of a third of the tokens, the whole vocabulary


@pytest.fixture(scope="module")
def folder(path, batch, tmp_path_factory):
    """What two ranks left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(batch, folder / "batch.pt")
    run_ranks(on_two_ranks, 2, folder, path)
    return folder


@pytest.fixture(scope="module")
def updated(path, batch):
    return naive_update(path, batch, CONFIG)


@pytest.mark.slow
def test_layouts_save_the_same_model(folder):
    saved = [saved_weights(folder / layout) for layout in ("tensor", "pipeline", "data")]
    for one in saved[1:]:
        assert one.keys() == saved[0].keys()
        for name, weight in one.items():
            assert_close(weight, saved[0][name], atol=2e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_plain_pytorch(folder, path, batch, updated, case):
    with torch.no_grad():
        log_probs, entropy = naive_outputs(AutoModelForCausalLM.from_pretrained(path), batch)
    ranks = [torch.load(folder / f"rank_{rank}.pt", weights_only=False)[case] for rank in range(2)]
    assert same(ranks[0][0], ranks[1][0])
    assert same(ranks[0][1], ranks[1][1])
    metrics, weights, _, _ = ranks[0]
    assert metrics["grad_norm"] == pytest.approx(updated[1], rel=1e-5)
    assert weights.keys() == updated[0].keys()
    for name, weight in weights.items():
        assert_close(weight, updated[0][name], atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    have = [(outputs, place) for _, _, outputs, place in ranks if outputs is not None]
    assert sorted(rank for _, (rank, _) in have) == list(range(have[0][1][1]))  # each row once
    for outputs, (rank, size) in have:
        assert_close(outputs["log_probs"], log_probs[rank::size], atol=1e-5, rtol=0)
        assert_close(outputs["entropy"], entropy[rank::size], atol=1e-5, rtol=0)
