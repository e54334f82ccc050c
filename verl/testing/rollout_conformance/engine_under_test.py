"""An engine under test, the oracle that it is held to, and requests for both."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from verl.config import HFModelConfig, RolloutConfig
from verl.protocol import DataProto
from verl.testing.models import tiny_model, tiny_model_dir
from verl.utils import hf_tokenizer
from verl.workers.rollout.base import BaseRollout, RolloutOutput, RolloutRequest, SamplingParams, get_rollout_class

VOCAB, EOS = 104, 1
KIB, MIB = 2**10, 2**20
HEAD_DIM = 32
"""Head size of the tiny models: vLLM's kernels for a CPU have no smaller heads."""
PROMPTS = [[10, 20, 30], [7], [40, 41, 42, 43, 44, 45, 46], [10, 20, 31], [90, 91, 92, 93], [10, 20, 30]]


def shape_of(family: str) -> dict[str, int]:
    """Heads of ``HEAD_DIM``; Qwen2, and Mixtral in SGLang, divide their width of 64 by their number."""
    two_heads = {"num_attention_heads": 2, "num_key_value_heads": 1} if family in ("qwen2", "mixtral") else {}
    return two_heads | ({"head_dim": HEAD_DIM} if family != "qwen2" else {})


def tensor_bytes(engine: BaseRollout) -> int:
    """Memory of all tensors that this process holds, whoever made them; each storage once."""
    gc.collect()
    held = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not issubclass(type(thing), FakeTensor) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


@dataclasses.dataclass(frozen=True)
class EngineUnderTest:
    """An engine's name in the registry, and how exact it is.

    Attributes:
        name: ``rollout.name``.
        folder: where tiny models may be written.
        families: model families that the engine must serve.
        log_prob_tolerance: largest difference to the oracle, in fp32.
        device: where it runs.
        settings: rollout settings that the engine needs.
        held_bytes: memory that an engine holds; the default counts the tensors of this process.
        keeps_memory: why sleep does not give the memory back; empty: it does.
        streams: whether it tells tokens of a response that streams before its end.
        counts_preemptions: whether it tells how often it interrupted a response for want of memory.
        draws_anew: why random numbers of an interrupted response do not go on where they stopped; empty: they do.
    """

    name: str
    folder: Path
    families: tuple[str, ...] = ("qwen3", "qwen2", "llama")
    log_prob_tolerance: float = 1e-5
    device: str = "cpu"
    settings: dict[str, object] = dataclasses.field(default_factory=dict)
    held_bytes: Callable[[BaseRollout], int] = tensor_bytes
    keeps_memory: str = ""
    streams: bool = False
    counts_preemptions: bool = False
    draws_anew: str = ""

    def engine_class(self) -> type[BaseRollout]:
        """Return the engine class under test."""
        return get_rollout_class(self.name)

    def build(self, family: str = "qwen3", *, eos: list[int] | None = None, **settings: object) -> BaseRollout:
        """The engine for a tiny model, asleep and without weights; ``eos`` are the model's own end tokens."""
        path = Path(tiny_model_dir(self.folder / f"{family}-{eos}", family, **shape_of(family)))
        if eos is not None:
            (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        defaults: dict[str, object] = {"dtype": "float32", "prompt_length": 8, "response_length": 12}
        defaults |= {"tensor_model_parallel_size": 1, "free_cache_engine": False}
        config = RolloutConfig(name=self.name, **(defaults | self.settings | settings))
        return self.engine_class()(config, HFModelConfig(path=str(path)), hf_tokenizer(str(path)), self.device)

    def ready(self, family: str = "qwen3", **settings: object) -> BaseRollout:
        """The engine, awake, with the weights of seed 0."""
        engine = self.build(family, **settings)
        engine.wake()
        engine.load_weights(weights_of(family), version=0)
        return engine

    def assert_same(self, outputs: list[RolloutOutput], expected: list[RolloutOutput]) -> None:
        """The same responses to the same requests, served in different company."""
        assert tokens_of(outputs) == tokens_of(expected)
        assert [output.finish_reason for output in outputs] == [same.finish_reason for same in expected]
        self.assert_close([output.log_probs for output in outputs], [same.log_probs for same in expected])

    def assert_close(self, actual: list[list[float]], expected: list[list[float]]) -> None:
        """The same log-probs, up to the engine's tolerance."""
        for values, expected_values in zip(actual, expected, strict=True):
            assert len(values) == len(expected_values)
            np.testing.assert_allclose(values, expected_values, atol=self.log_prob_tolerance, rtol=1e-5)

    def assert_of_the_model(
        self, requests: list[RolloutRequest], outputs: list[RolloutOutput], seed: int = 0, family: str = "qwen3"
    ) -> None:
        """The log-probs are those of the oracle with the weights of ``seed``."""
        expected = [
            oracle_processed_log_probs(request, output.token_ids, family, seed).tolist()
            for request, output in zip(requests, outputs, strict=True)
        ]
        self.assert_close([output.log_probs for output in outputs], expected)


@functools.cache
def oracle(family: str = "qwen3", seed: int = 0) -> torch.nn.Module:
    return tiny_model(family, seed=seed, **shape_of(family))


def weights_of(family: str = "qwen3", seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    yield from oracle(family, seed).state_dict().items()


@torch.no_grad()
def oracle_log_probs(prompt: list[int], response: list[int], temperature: float, family: str, seed: int = 0) -> Tensor:
    logits = oracle(family, seed)(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


@torch.no_grad()
def oracle_processed_log_probs(request: RolloutRequest, response: list[int], family: str, seed: int = 0) -> Tensor:
    """log p of each token under the distribution that it is drawn from: the slow definition, token by token.

    A greedy response has those of softmax(logits).
    """
    if request.sampling.is_greedy:
        return oracle_log_probs(request.prompt_ids, response, 1.0, family, seed)
    rows = _oracle_distributions(request, response, family, seed)
    return torch.tensor([row[token] for row, token in zip(rows, response, strict=True)]).log().float()


@torch.no_grad()
def oracle_kept_tokens(request: RolloutRequest, response: list[int]) -> list[list[int]]:
    """The tokens that could be drawn in the place of each."""
    return [row.nonzero()[0].tolist() for row in _oracle_distributions(request, response, "qwen3", seed=0)]


def _oracle_distributions(request: RolloutRequest, response: list[int], family: str, seed: int) -> list[np.ndarray]:
    prompt, sampling = request.prompt_ids, request.sampling
    logits = oracle(family, seed)(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    return [
        slow_distribution(row, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) for row in logits
    ]


@torch.no_grad()
def oracle_greedy(prompt: list[int], count: int, family: str = "qwen3", seed: int = 0) -> list[int]:
    """``count`` most likely tokens, one full forward pass for each; end tokens are tokens like any other."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(oracle(family, seed)(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def slow_distribution(
    logits: Tensor, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """softmax(logits / temperature), cut by min_p, to top_k, then to the fewest tokens with the share top_p of it."""
    probs = (logits / temperature).softmax(-1).tolist()
    ranked = [v for v in sorted(range(len(probs)), key=lambda v: (-probs[v], v)) if probs[v] >= min_p * max(probs)]
    ranked = ranked[:top_k] if top_k > 0 else ranked
    mass, nucleus = sum(probs[v] for v in ranked), []
    for v in ranked:
        nucleus.append(v)
        if sum(probs[w] for w in nucleus) >= top_p * mass:
            break
    total = sum(probs[v] for v in nucleus)
    return np.array([probs[v] / total if v in nucleus else 0.0 for v in range(len(probs))])


def request(prompt: list[int], seed: int = 0, **sampling: object) -> RolloutRequest:
    return RolloutRequest(list(prompt), SamplingParams(**({"max_tokens": 12, "seed": seed} | sampling)))


def greedy(prompt: list[int], **sampling: object) -> RolloutRequest:
    return request(prompt, temperature=0.0, **({"ignore_eos": True} | sampling))


def tokens_of(outputs: list[RolloutOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def prompt_batch(
    prompts: list[list[int]], width: int = 8, indices: list[int] | None = None, **meta: object
) -> DataProto:
    """Left-padded prompts as the driver sends them; the pad positions hold 99, to show that they are not read."""
    ids = torch.tensor([[99] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)},
        non_tensors={
            "uid": np.array([f"prompt-{p}" for p in prompts], dtype=object),
            "sample_index": np.array(indices or [0] * len(prompts)),
        },
        meta_info={"global_steps": 1, "validate": False} | meta,
    )
