"""Checkpoints of any layout go on in any other, over other numbers of ranks, under FSDP and Megatron.

``python -m pytest -m slow -s tests/workers/engine/test_resharding.py`` shows the largest differences.
"""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.plugins.megatron.support import TP, megatron_engine
from tests.workers.support import WHOLE, make_engine, ragged_batch, run_ranks, share, weights_of
from verl.testing.models import tiny_model_dir
from verl.workers.losses import sft_loss

pytest.importorskip("verl.plugins.megatron.library")
pytestmark = pytest.mark.slow

PP = {"pipeline_model_parallel_size": 2}
LAYOUTS = {
    "fsdp": {1: {"1": {}}, 2: {"2": {}}, 4: {"4": {}, "2 copies over 2": {"fsdp_size": 2}}},
    "megatron": {
        1: {"1": {}},
        2: {"TP 2": TP, "PP 2": PP | {"virtual_pipeline_model_parallel_size": 2}, "2 copies": {}},
        4: {"TP 2 × PP 2": TP | PP, "TP 2, 2 copies": TP, "4 copies": {}},
    },
}


def train(engine):
    batch = share(ragged_batch(), engine.get_data_parallel_rank(), engine.get_data_parallel_size())
    with engine.train_mode():
        engine.train_batch(batch, sft_loss, WHOLE)


def on_ranks(rank, world_size, own_folder, folder, path, kind, readers_of):
    """Save after a step in each layout of so many ranks; or go on from all of ``readers_of`` in each."""
    make = {"fsdp": make_engine, "megatron": megatron_engine}[kind]
    for layout, settings in LAYOUTS[kind][world_size].items():
        engine = make(path, **settings)
        if not readers_of:
            train(engine)
            engine.save_checkpoint(str(folder / layout), 1)
        for saved in readers_of:
            engine.load_checkpoint(str(folder / saved))
            assert engine.weight_version == 1
            train(engine)
            weights = weights_of(engine)
            if rank == 0:
                torch.save(weights, folder / f"{saved} to {layout}.pt")
            dist.barrier()


@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_a_step_in_one_layout_then_one_in_another(kind, tmp_path):
    odd = {"num_hidden_layers": 4, "intermediate_size": 130, "tie_word_embeddings": True}
    path = tiny_model_dir(tmp_path / "model", "qwen3", **odd)
    names = [layout for of_ranks in LAYOUTS[kind].values() for layout in of_ranks]
    (tmp_path / "run").mkdir()
    for readers_of, world_size in product(([], names), LAYOUTS[kind]):
        own = tmp_path / f"{'goes on' if readers_of else 'saves'} {world_size}"  # where its ranks meet
        own.mkdir()
        run_ranks(on_ranks, world_size, own, tmp_path / "run", path, kind, readers_of)
    straight = make_engine(path)
    first = weights_of(straight)
    train(straight)
    train(straight)
    expected = weights_of(straight)
    moved = max(float((expected[name] - weight).abs().max()) for name, weight in first.items())
    print(f"\n{kind}; two steps move a weight by up to {moved:.1e}\n| from \\ to | {' | '.join(names)} |")
    for saved in names:
        gaps = []
        for layout in names:
            found = torch.load(tmp_path / "run" / f"{saved} to {layout}.pt", weights_only=True)
            gaps.append(max(float((found[name] - weight).abs().max()) for name, weight in expected.items()))
        print(f"| {saved} | {' | '.join(f'{gap:.1e}' for gap in gaps)} |")
        assert max(gaps) < 2e-5
        assert moved > 100 * max(gaps)
