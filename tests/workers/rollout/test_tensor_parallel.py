"""The native engine with one model over two ranks: real gloo processes, held to what one rank promises."""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from tests.support.vision_models import tiny_vision_model
from tests.workers.rollout.test_native_rollout import SMALL, saved
from tests.workers.support import run_ranks
from verl.errors import RolloutError
from verl.testing.models import tiny_model_dir
from verl.testing.rollout_conformance import (
    CHECKS,
    PROMPTS,
    EngineUnderTest,
    greedy,
    mixed_requests,
    oracle_greedy,
    prompt_batch,
    shape_of,
    tokens_of,
    weights_of,
)
from verl.utils import hf_tokenizer
from verl.utils.model_facts.model_files import head_split_problem
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout, RolloutOutput, RolloutRequest
from verl.workers.rollout.native.model import NativeModel
from verl.workers.rollout.native.tensor_parallel import EngineRanks
from verl.workers.rollout.native_rollout import NativeRollout
from verl.workers.rollout.request_queue import RequestQueue

SPLIT = {"tensor_model_parallel_size": 2}
MOE = transformers.Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
FAMILIES = ("qwen3", "qwen2", "llama", "gemma", "gemma2", "mistral")


def make_models(folder: Path) -> None:
    """Write the models of both ranks: in a process group Transformers writes on the first rank alone."""
    for rank in (0, 1):
        for family in FAMILIES:
            tiny_model_dir(folder / f"{rank}" / f"{family}-None", family, **shape_of(family))


# ---- what the ranks compute together


def check_families(rank: int, folder: Path) -> None:
    """Greedy tokens and log-probs are those of one full forward pass; Qwen2 has one key/value head for both ranks."""
    engine = EngineUnderTest("native", folder / f"{rank}", settings=SPLIT)
    for family in ("qwen3", "qwen2", "gemma2"):
        running = engine.ready(family)
        outputs = running.generate([greedy(p) for p in PROMPTS])
        assert tokens_of(outputs) == [oracle_greedy(p, 12, family) for p in PROMPTS], family
        engine.assert_of_the_model([greedy(p) for p in PROMPTS], outputs, family=family)
        requests = mixed_requests()
        engine.assert_of_the_model(requests, running.generate(requests), family=family)


def check_one_rank_draws_the_same(rank: int, folder: Path) -> None:
    """The same samples and columns as an engine of one rank; those of the first rank alone are collected."""
    batch = prompt_batch(PROMPTS)
    split = EngineUnderTest("native", folder / f"{rank}", settings=SPLIT).ready()
    whole = EngineUnderTest("native", folder / f"{rank}", settings={"tensor_model_parallel_size": 1}).ready()
    assert (split.ranks_per_engine, split.leads, whole.ranks_per_engine, whole.leads) == (2, rank == 0, 1, True)
    found, expected = split.generate_sequences(batch), whole.generate_sequences(batch)
    if rank:
        assert len(found) == 0
        return
    assert torch.equal(found.batch["responses"], expected.batch["responses"])
    torch.testing.assert_close(
        found.batch["rollout_log_probs"], expected.batch["rollout_log_probs"], atol=1e-5, rtol=1e-5
    )


def check_bf16(rank: int, folder: Path) -> None:
    """The usual format of weights: as far as both draw the same tokens, log-probs agree to its rounding."""
    outputs = [
        EngineUnderTest("native", folder / f"{rank}", settings={"tensor_model_parallel_size": size})
        .ready(dtype="bfloat16")
        .generate([greedy(p) for p in PROMPTS])
        for size in (1, 2)
    ]
    for whole, split in zip(*outputs, strict=True):
        same = [a == b for a, b in zip(whole.token_ids, split.token_ids, strict=True)]
        count = same.index(False) if False in same else len(same)
        torch.testing.assert_close(
            torch.tensor(split.log_probs[:count]), torch.tensor(whole.log_probs[:count]), atol=0.1, rtol=0
        )


def check_weights(rank: int, folder: Path) -> None:
    """A rank keeps its half of the matrices, none of it in the memory of a whole one, and drops it."""
    running = EngineUnderTest("native", folder / f"{rank}", settings=SPLIT).build()
    weights = dict(weights_of())
    running.load_weights(weights.items(), version=3)
    assert isinstance(running, NativeRollout)
    split = {id(t): t for name, t in weights.items() if t.dim() == 2}.values()
    storages = {t.untyped_storage().data_ptr() for t in split}
    held = dict(running._model.module.named_parameters())
    assert not storages & {p.untyped_storage().data_ptr() for p in held.values() if p.dim() == 2}
    matrices = sum(p.nbytes for p in held.values() if p.dim() == 2)
    assert matrices == sum(p.untyped_storage().nbytes() for p in held.values() if p.dim() == 2)
    assert 2 * matrices == sum(t.nbytes for name, t in weights.items() if t.dim() == 2 and name in held)
    with pytest.raises(RolloutError, match=r"model.norm.weight is missing"):
        running.load_weights([(n, t) for n, t in weights.items() if n != "model.norm.weight"], version=4)
    with pytest.raises(RolloutError, match=r"q_proj.weight has shape \[1, 2\] where \[128, 64\] is needed"):
        running.load_weights({**weights, "model.layers.0.self_attn.q_proj.weight": torch.ones(1, 2)}.items(), 4)
    running.load_weights(weights.items(), version=5)
    assert tokens_of(running.generate([greedy([7])])) == [oracle_greedy([7], 12)]


def check_quantized(rank: int, folder: Path) -> None:
    """A rank has its part of the weights that one rank rounds to 8 bits, and the same log-probs."""
    split, whole = (
        EngineUnderTest("native", folder / f"{rank}", settings={"tensor_model_parallel_size": size}).ready(
            quantization="int8"
        )
        for size in (2, 1)
    )
    assert isinstance(split, NativeRollout)
    assert isinstance(whole, NativeRollout)
    parts, weights = (dict(engine._model.module.named_parameters()) for engine in (split, whole))
    layer = "model.layers.1.self_attn"
    for name, dim in (("q_proj.weight", 0), ("q_proj.weight_scale", 0), ("o_proj.weight", 1)):
        assert torch.equal(parts[f"{layer}.{name}"], weights[f"{layer}.{name}"].chunk(2, dim)[rank])
    assert torch.equal(parts[f"{layer}.o_proj.weight_scale"], weights[f"{layer}.o_proj.weight_scale"])
    requests = [greedy(p) for p in PROMPTS]
    EngineUnderTest("native", folder).assert_same(split.generate(requests), whole.generate(requests))


def odd_model() -> transformers.PreTrainedModel:
    """Biases, an odd vocabulary and odd columns, one key/value head, and a last layer that is not tied."""
    config = transformers.LlamaConfig(
        **(SMALL | {"vocab_size": 105, "num_key_value_heads": 1, "intermediate_size": 49}),
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for bias in (p for name, p in model.named_parameters() if name.endswith("bias")):
        torch.nn.init.normal_(bias, std=0.3)
    return model


def check_odd_sizes(rank: int, folder: Path) -> None:
    model, path, outputs = odd_model(), str(folder / "odd"), []
    for size in (1, 2):
        config = RolloutConfig(
            name="native", dtype="float32", prompt_length=8, response_length=12, tensor_model_parallel_size=size
        )
        engine = NativeRollout(config, HFModelConfig(path=path), hf_tokenizer(path), "cpu")
        engine.load_weights(model.state_dict().items(), version=0)
        outputs.append(engine.generate([greedy(p) for p in PROMPTS]))
    EngineUnderTest("native", folder).assert_same(*outputs)


def check_refusals(rank: int, folder: Path) -> None:
    ranks = EngineRanks(2, torch.device("cpu"))
    for config, said in (
        (MOE, "its layers are split by moe_tp_experts, packed_colwise, and this engine splits by columns and rows"),
        (transformers.GPT2Config(vocab_size=104, n_embd=32, n_layer=1, n_head=2), "Transformers has no plan"),
        (tiny_vision_model().config, "this engine splits models of text alone"),
        (transformers.Qwen3Config(**(SMALL | {"num_attention_heads": 3, "num_key_value_heads": 1})), "3 attention"),
    ):
        with pytest.raises(RolloutError, match=said):
            NativeModel(config, torch.float32, torch.device("cpu"), ranks=ranks)


def on_each_rank(rank: int, world_size: int, folder: Path) -> None:
    for check in (
        check_families,
        check_one_rank_draws_the_same,
        check_bf16,
        check_weights,
        check_quantized,
        check_odd_sizes,
        check_refusals,
    ):
        check(rank, folder)


def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    make_models(tmp_path)
    saved(odd_model(), tmp_path / "odd")
    run_ranks(on_each_rank, 2, tmp_path)


def test_without_other_ranks_nothing_is_exchanged() -> None:
    ranks = EngineRanks(1, torch.device("cpu"))
    tensor = torch.ones(2)
    assert ranks.leads
    assert ranks.share("a") == "a"
    assert ranks.smallest(3) == 3
    assert ranks.added(tensor) is ranks.of_first(tensor) is ranks.joined(tensor, 2) is tensor


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fits"),
    [(8, 8, 2, True), (8, 2, 2, True), (8, 2, 4, True), (8, 2, 8, True), (6, 2, 4, False), (12, 3, 2, False)],
)
def test_heads_are_dealt_out_evenly(heads: int, kv_heads: int, size: int, fits: bool) -> None:
    assert (head_split_problem(heads, kv_heads, size) is None) == fits


# ---- the conformance suite
#
# The checks run on the first rank. What they do with an engine it tells the second one, which does the same, as the
# worker of that rank would.


def tell(*what: Any) -> None:
    dist.broadcast_object_list([what], 0)


class Leading(NativeRollout):
    """The first rank's engine."""

    number = 0
    count = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        weights = list(weights)
        tell("load_weights", self.number, weights, version)
        super().load_weights(weights, version)

    def sleep(self) -> None:
        tell("sleep", self.number)
        super().sleep()

    def generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        tell("generate", self.number, requests)
        return super().generate(requests)

    def serve(self, queue: RequestQueue) -> None:
        tell("serve", self.number)
        super().serve(queue)


class SplitUnderTest(EngineUnderTest):
    def engine_class(self) -> type[BaseRollout]:
        return Leading

    def build(self, family: str = "qwen3", *, eos: list[int] | None = None, **settings: Any) -> BaseRollout:
        tell("build", family, eos, settings)
        engine = super().build(family, eos=eos, **settings)
        Leading.count += 1
        engine.number = Leading.count  # type: ignore[attr-defined]
        return engine


def lead(folder: Path) -> None:
    """Run all checks; write what went wrong in each."""
    problems = {}
    for check in CHECKS:
        try:
            check(SplitUnderTest("native", folder / "0", families=FAMILIES, settings=SPLIT))
            problems[check.__name__] = ""
        except (AssertionError, RolloutError, pytest.fail.Exception):
            problems[check.__name__] = traceback.format_exc()
    tell("end")
    (folder / "problems.json").write_text(json.dumps(problems))


def follow(folder: Path) -> None:
    """Do what the first rank tells."""
    engines: dict[int, BaseRollout] = {}
    while True:
        told: list[Any] = [None]
        dist.broadcast_object_list(told, 0)
        what, *given = told[0]
        if what == "end":
            return
        try:
            if what == "build":
                family, eos, settings = given
                if eos is not None:
                    plain = folder / "1" / f"{family}-None"
                    shutil.copytree(plain, plain.with_name(f"{family}-{eos}"), dirs_exist_ok=True)
                under_test = EngineUnderTest("native", folder / "1", settings=SPLIT)
                engines[len(engines) + 1] = under_test.build(family, eos=eos, **settings)
            elif what == "serve":
                queue = RequestQueue(lambda number, answer: None)
                queue.close()
                engines[given[0]].serve(queue)
            else:
                getattr(engines[given[0]], what)(*given[1:])
        except RolloutError as error:
            print("second rank:", error)


def suite_on_each_rank(rank: int, world_size: int, folder: Path) -> None:
    (follow if rank else lead)(folder)


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("suite")
    make_models(folder)
    run_ranks(suite_on_each_rank, 2, folder)
    return json.loads((folder / "problems.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_suite(check: Callable[[EngineUnderTest], None], problems: dict[str, str]) -> None:
    assert problems[check.__name__] == ""
