"""The real vLLM and SGLang with the ranks of two nodes: what they answer, and what a killed process changes.

vLLM runs in the environment that has it (``make test-vllm SLOW=1``), SGLang beside an environment with Ray
(``pytest -m slow``), which its own lacks.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verl.testing.rollout_conformance import PROMPTS, oracle

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]


@torch.no_grad()
def check_is_greedy(answers: tuple[list[list[int]], list[list[float]]], family: str, seed: int) -> None:
    """Each token is the most likely one after those before it, and has its log-prob."""
    for prompt, response, log_probs in zip(PROMPTS, *answers, strict=True):
        assert len(response) == 200
        logits = oracle(family, seed)(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == response
        expected = logits.log_softmax(-1).amax(-1)
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "engine, family, sizes",
    [
        ("vllm", "qwen3", ["tensor_model_parallel_size=2"]),
        ("vllm", "qwen3", ["tensor_model_parallel_size=1", "pipeline_model_parallel_size=2"]),
        ("vllm", "qwen3_moe", ["tensor_model_parallel_size=1", "data_parallel_size=2", "expert_parallel_size=2"]),
        ("sglang", "qwen3", ["tensor_model_parallel_size=2"]),
    ],
)
def test_an_engine_over_two_nodes(engine: str, family: str, sizes: list[str], tmp_path: Path) -> None:
    """With two versions of the weights, and after the death of a process on either node."""
    python = Path(sys.executable) if importlib.util.find_spec(engine) else ROOT / f".venv-{engine}/bin/python"
    if not python.is_file() or not importlib.util.find_spec("ray"):
        pytest.skip(f"there is no Ray here, or no environment with {engine}")
    program = "tests.workers.rollout.engine_over_nodes"
    command = [sys.executable, "-m", program, engine, family, str(python), str(tmp_path), *sizes]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert run.returncode == 0, run.stderr[-5000:]
    seen = json.loads(run.stdout.splitlines()[-1])
    for seed, answers in enumerate(seen["undisturbed"]):
        check_is_greedy(answers, family, seed)
    assert seen["disturbed"] == [seen["undisturbed"][1]] * 2
    assert seen["restarts"] == 2
    assert all(seen["processes"]), "each node has processes of the engine"
