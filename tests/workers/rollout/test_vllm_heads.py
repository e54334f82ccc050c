"""vLLM with heads of multi-token prediction that propose tokens: what it draws is of the model alone.

The model is a tiny GLM-4.5, whose heads are stored as further layers. Run by ``make test-vllm SLOW=1``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from tests.plugins.megatron.heads import PlainHead, add_heads
from tests.workers.rollout.vllm_engines import KWARGS, PooledVLLM, needs_vllm, pool
from verl.config import HFModelConfig, PrometheusConfig, RolloutConfig
from verl.testing.models import tiny_tokenizer
from verl.testing.rollout_conformance import PROMPTS, greedy, request, tokens_of
from verl.testing.rollout_conformance.engine_under_test import slow_distribution
from verl.testing.rollout_conformance.sampling import assert_same_distribution
from verl.utils import hf_tokenizer

pytestmark = [needs_vllm, pytest.mark.slow]
VOCAB, LAYERS, RESPONSE = 104, 2, 40
PREFIX = f"model.layers.{LAYERS}."
COMMON = slice(10, 14)
"""Tokens that are likely, so that proposals are accepted now and then whatever the head."""


@functools.cache
def model(seed: int) -> Any:
    torch.manual_seed(seed)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_nextn_predict_layers": 1}
    experts: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Glm4MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=1,
        max_position_embeddings=1024,
        head_dim=32,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=1,
        pad_token_id=0,
        **heads,
        **experts,
    )
    made = Glm4MoeForCausalLM(config).float().eval()
    made.lm_head.weight.data[COMMON] *= 4
    return made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model folder with a head; the servers end with it."""
    folder = tmp_path_factory.mktemp("heads")
    model(0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    add_heads(str(folder))
    with pool():
        yield folder


def engine(path: Path, proposals: int) -> Any:
    config = RolloutConfig(
        name="vllm",
        dtype="float32",
        prompt_length=8,
        response_length=RESPONSE,
        tensor_model_parallel_size=1,
        enforce_eager=True,
        free_cache_engine=False,
        prometheus=PrometheusConfig(enable=True),
        engine_kwargs={"vllm": KWARGS},
    )
    mtp: Any = {"enable": True, "enable_rollout": True, "num_speculative_tokens": proposals}
    made: Any = PooledVLLM
    return made(config, HFModelConfig(path=str(path), mtp=mtp), hf_tokenizer(str(path)), "cpu")


@torch.no_grad()
def logits_of(ids: list[int], seed: int) -> Tensor:
    return model(seed)(input_ids=torch.tensor([ids])).logits[0]


def greedy_of(prompt: list[int], seed: int) -> list[int]:
    ids = list(prompt)
    for _ in range(RESPONSE):
        ids.append(int(logits_of(ids, seed)[-1].argmax()))
    return ids


def proposed(head: PlainHead, ids: list[int], seed: int) -> Tensor:
    """Logits of the token after the next one at each position; vLLM gives the first position no embedding."""
    decoder = model(seed).model
    hidden = decoder(input_ids=torch.tensor([ids])).last_hidden_state[:, :-1].detach()
    embedded = decoder.embed_tokens(torch.tensor([ids[1:]])).detach()
    embedded[:, 0] = 0
    positions = torch.arange(len(ids) - 1)[None]
    mask = torch.full((len(ids) - 1, len(ids) - 1), float("-inf")).triu(1)[None, None]
    x = head.eh_proj(torch.cat([head.enorm(embedded), head.hnorm(hidden)], -1))
    rotations = decoder.rotary_emb(x, positions)
    x = head.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotations)
    return model(seed).lm_head(head.final(x))[0]


def accepted(head: PlainHead, prompt: list[int], seed: int) -> int:
    """How many tokens of the greedy response the head proposes, one at a time."""
    ids = greedy_of(prompt, seed)
    guesses = proposed(head, ids, seed).argmax(-1).tolist()
    count, last = 0, len(prompt)
    while last + 1 < len(ids):
        is_right = guesses[last - 1] == ids[last + 1]
        count, last = count + is_right, last + 1 + is_right
    return count


def trained_head(seed: int) -> PlainHead:
    """A head that has learned the greedy responses of the model."""
    torch.manual_seed(7)
    head = PlainHead(model(seed))
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1 + (1.0 if parameter.dim() == 1 else 0.0)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    rows = [greedy_of(prompt, seed) for prompt in PROMPTS]
    for _ in range(20):
        for ids in rows:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(proposed(head, ids, seed)[:-1], torch.tensor(ids[2:])).backward()
            optimizer.step()
    return head


def head_in(path: Path) -> PlainHead:
    """The head of the folder."""
    from safetensors.torch import load_file

    stored, head = load_file(path / "model.safetensors"), PlainHead(model(0))
    for name, tensor in head.named(PREFIX).items():
        if name in stored:
            tensor.data.copy_(stored[name])
    gates = [f"{PREFIX}mlp.experts.{e}." for e in range(4)]
    joined = [torch.cat([stored[f"{g}gate_proj.weight"], stored[f"{g}up_proj.weight"]]) for g in gates]
    head.layer.mlp.experts.gate_up_proj.data.copy_(torch.stack(joined))
    head.layer.mlp.experts.down_proj.data.copy_(torch.stack([stored[f"{g}down_proj.weight"] for g in gates]))
    return head


def assert_log_probs(prompt: list[int], output: Any, seed: int, **way: Any) -> None:
    rows = logits_of(prompt + output.token_ids, seed)[len(prompt) - 1 : -1].double()
    expected = [
        float(np.log(slow_distribution(row, **way)[token])) for row, token in zip(rows, output.token_ids, strict=True)
    ]
    np.testing.assert_allclose(output.log_probs, expected, atol=1e-5, rtol=1e-5)


def test_updates_reach_model_and_heads(path: Path) -> None:
    """Greedy responses are those of the model, and as many proposals are accepted as the head's definition says."""
    running = engine(path, proposals=1)
    running.wake()
    counted, new = 0, trained_head(1)
    weights: dict[int, dict[str, Tensor]] = {seed: dict(model(seed).state_dict()) for seed in (0, 1)}
    heads = {0: head_in(path), 1: new}
    named = {n: t.detach() for n, t in new.named(PREFIX).items() if not n.endswith("inv_freq")}
    for version, sent in enumerate([weights[0], weights[1] | named]):
        running.load_weights(iter(sent.items()), version=version)
        outputs = running.generate([greedy(prompt, max_tokens=RESPONSE) for prompt in PROMPTS])
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert prompt + output.token_ids == greedy_of(prompt, version)
            assert_log_probs(prompt, output, version)
        expected = sum(accepted(heads[version], prompt, version) for prompt in PROMPTS)
        total = running.state().accepted_tokens
        assert total is not None
        assert total - counted == expected, (version, total - counted, expected)
        counted = total
    assert expected > 0.3 * RESPONSE * len(PROMPTS)  # of the head that learned


def test_draws_follow_the_distribution_of_the_model(path: Path) -> None:
    """Chi-square at the 0.1 % level of three tokens in a row, of which the last two are proposed, kept or replaced."""
    running, draws, prompt = engine(path, proposals=3), 1500, PROMPTS[4]
    running.wake()
    running.load_weights(model(0).state_dict().items(), version=0)
    before = running.state().accepted_tokens or 0
    ways: list[dict[str, Any]] = [
        {"top_k": 3},
        {"temperature": 1.5, "top_k": 4},
        {"temperature": 0.7, "top_k": 4, "top_p": 0.8},
    ]
    for way in ways:
        outputs = running.generate(
            [request(prompt, seed=i, max_tokens=3, ignore_eos=True, **way) for i in range(draws)]
        )
        exact: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(3):
            exact = {
                (*drawn, int(v)): share * row[v]
                for drawn, share in exact.items()
                for row in [slow_distribution(logits_of(prompt + list(drawn), 0)[-1].double(), **way)]
                for v in row.nonzero()[0]
            }
        cells = {drawn: index for index, drawn in enumerate(exact)}
        counts = np.bincount([cells[tuple(output.token_ids)] for output in outputs], minlength=len(cells))
        assert_same_distribution(counts, np.array(list(exact.values())) * draws)
        for output in outputs[:50]:
            assert_log_probs(prompt, output, 0, **way)
    outputs = running.generate([request(prompt, seed=i, max_tokens=2, ignore_eos=True) for i in range(draws)])
    first = torch.tensor(slow_distribution(logits_of(prompt, 0)[-1].double()))
    with torch.no_grad():
        rows = model(0)(input_ids=torch.tensor([[*prompt, v] for v in range(VOCAB)])).logits[:, -1].double()
    counts = np.bincount([output.token_ids[1] for output in outputs], minlength=VOCAB)
    assert_same_distribution(counts, (first @ rows.softmax(-1)).numpy() * draws)
    for output in outputs[:50]:
        assert_log_probs(prompt, output, 0)
    assert (running.state().accepted_tokens or 0) > before + 100


def test_a_response_depends_on_its_own_request_alone(path: Path) -> None:
    """Each request has its seed: alone, in another order, and with greedy ones beside it."""
    running = engine(path, proposals=3)
    running.wake()
    running.load_weights(model(0).state_dict().items(), version=0)
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.0}]
    asked = [request(p, seed=7 * i, **way) for i, p in enumerate(PROMPTS) for way in ways]
    whole = tokens_of(running.generate(asked))
    assert tokens_of(running.generate(asked[::-1])) == whole[::-1]
    assert [tokens_of(running.generate([one]))[0] for one in asked[:7]] == whole[:7]
