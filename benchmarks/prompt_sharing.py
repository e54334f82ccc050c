"""An update and log-probs with each prompt computed once (``actor.use_prefix_grouper``) and with every row its own.

    python -m benchmarks.prompt_sharing [--prompts 2] [--samples 8] [--rounds 4]

Both contestants are the training engine on the same rows, in one process and in turn: one pass of log-probs without
gradients, then one update. Memory is how far the resident memory grows at most in an update, in a process for each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import shape
from benchmarks.logprob_memory import memory_bytes
from benchmarks.shape import FIRST_ORDINARY_TOKEN, TINY, Row, Work
from benchmarks.training_step import with_entropy
from verl.backends.cpu.allocator import keep_freed_memory
from verl.protocol import DataProto
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry, MicroBatchConfig

SHAPES = {"prompt 512, response 128": (512, 128), "prompt 128, response 512": (128, 512)}
TARGETS = {"prompt 512, response 128": 1.5, "prompt 128, response 512": 1.0}
TINY_SHAPES = {"prompt 8, response 4": (8, 4)}


def rows_of_groups(prompts: int, samples: int, prompt: int, response: int, vocabulary: int) -> DataProto:
    """Random tokens: ``samples`` responses to each of ``prompts`` prompts, all of full length."""
    g = torch.Generator().manual_seed(0)
    rows, low = prompts * samples, FIRST_ORDINARY_TOKEN
    first = torch.randint(low, vocabulary, (prompts, prompt), generator=g).repeat_interleave(samples, dim=0)
    ids = torch.cat([first, torch.randint(low, vocabulary, (rows, response), generator=g)], dim=1)
    columns = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(prompt + response).repeat(rows, 1),
        "responses": ids[:, prompt:],
        "response_mask": torch.ones_like(ids[:, prompt:]),
        "advantages": torch.randn(rows, response, generator=g),
    }
    return DataProto.from_dict(tensors=columns)


def update(folder: str, batch: DataProto, is_shared: bool) -> Callable[[], None]:
    """Log-probs and the gradients of an update, of one engine."""
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(path=folder, enable_gradient_checkpointing=False),
        engine_config=FSDPEngineConfig(dtype="fp32"),
        optimizer_config=FSDPOptimizerConfig(lr=1e-6),
        device_name="cpu",
    )
    engine.initialize()
    micro = MicroBatchConfig(shares_prompts=is_shared)

    def run() -> None:
        with engine.eval_mode():
            engine.infer_batch(batch, {"log_probs", "entropy"}, micro)
        with engine.train_mode():
            engine.train_batch(batch, with_entropy, micro)

    return run


def memory_of(folder: str, sizes: tuple[int, int, int, int, int], is_shared: bool, threads: int) -> int:
    """Bytes by which an update's peak lies above what a small one left."""
    torch.set_num_threads(threads)
    update(folder, rows_of_groups(1, 1, 4, 4, sizes[-1]), is_shared)()
    run = update(folder, rows_of_groups(*sizes), is_shared)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = memory_bytes("/proc/self/status", "VmRSS")
    run()
    return memory_bytes("/proc/self/status", "VmHWM") - before


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2, help="groups of a batch")
    parser.add_argument("--samples", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--rounds", type=int, default=4, help="times that are counted")
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    parser.add_argument("--tiny", action="store_true", help="a size for tests, whose figures mean nothing")
    parser.add_argument("--json", help="write the numbers to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    work, shapes = (TINY, TINY_SHAPES) if arguments.tiny else (Work(), SHAPES)
    rows, seconds = [], {}
    with tempfile.TemporaryDirectory() as place:
        folder = work.save_model(f"{place}/model")
        for name, (prompt, response) in shapes.items():
            sizes = arguments.prompts, arguments.samples, prompt, response, work.vocabulary
            batch = rows_of_groups(*sizes)
            names = {shared: f"{name}, {'shared' if shared else 'apart'}" for shared in (True, False)}
            calls = {names[shared]: update(folder, batch, shared) for shared in names}
            found = {key: shape.summary(times) for key, times in shape.interleaved(calls, arguments.rounds).items()}
            seconds |= found
            what = f"log-probs and update, {name}, n={arguments.samples}"
            target = TARGETS.get(name)
            rows.append(shape.speed_row(what, "every row its own prompt", found, names[True], names[False], target))
            with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                ours, theirs = (pool.apply(memory_of, (folder, sizes, on, arguments.threads)) for on in (True, False))
            detail = f"{ours / 2**20:,.0f} MiB : {theirs / 2**20:,.0f} MiB"
            rows.append(Row(f"peak memory, {name}", "every row its own prompt", ours / theirs, 1.0, False, detail))
    for row in rows:
        print(f"{row.what}: {row.ratio:.3g} ({row.detail})")
    if arguments.json:
        words = f"{arguments.prompts} prompts of {arguments.samples} responses, {work.describe()}"
        shape.write_result(
            arguments.json, part="prompt_sharing", work=words, machine=shape.machine(), seconds=seconds, rows=rows
        )


if __name__ == "__main__":
    main()
