"""The native engine's own promises: nothing computed twice or in vain, nothing copied, nothing served wrongly."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests import forks
from verl.backends.cpu.decoder import compiled_decoder
from verl.config.rollout import MAX_GRAPHS
from verl.errors import ConfigError, RolloutError
from verl.testing.models import tiny_model, tiny_model_dir, tiny_tokenizer
from verl.testing.rollout_conformance import (
    EngineUnderTest,
    greedy,
    oracle,
    oracle_greedy,
    request,
    tokens_of,
    weights_of,
)
from verl.utils import hf_tokenizer
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import RolloutOutput
from verl.workers.rollout.native.graphs import DecodeGraphs
from verl.workers.rollout.native.memory import (
    CacheShape,
    CopiedPromptMemory,
    KeyValueMemory,
    SharedPromptMemory,
    TokenPlaces,
)
from verl.workers.rollout.native.model import NativeModel
from verl.workers.rollout.native_rollout import NativeRollout

SMALL = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def saved(model: transformers.PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def engine_for(path: str, **settings: object) -> NativeRollout:
    defaults: dict[str, object] = {"dtype": "float32", "prompt_length": 24, "response_length": 24}
    defaults |= {"tensor_model_parallel_size": 1, "free_cache_engine": False}
    config = RolloutConfig(name="native", **(defaults | settings))
    return NativeRollout(config, HFModelConfig(path=path), hf_tokenizer(path), "cpu")


def loaded(model: transformers.PreTrainedModel, folder: Path, **settings: object) -> NativeRollout:
    engine = engine_for(saved(model, folder), **settings)
    engine.wake()
    engine.load_weights(model.state_dict().items(), version=0)
    return engine


def test_ranks_do_not_share_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size=2: .* Set it to 1, or rollout.name to vllm"):
        engine_for(tiny_model_dir(tmp_path / "model"), tensor_model_parallel_size=2)


@torch.no_grad()
def full_forward(model: nn.Module, prompt: list[int], response: list[int]) -> Tensor:
    """log p of each response token, by one forward pass of the whole sequence."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


# ---- what it computes


class Counter:
    """Tokens that go into a model, pass by pass."""

    def __init__(self, model: NativeModel) -> None:
        self.passes: list[int] = []
        embedding = model.module.get_input_embeddings()
        embedding.register_forward_hook(lambda _, inputs, __: self.passes.append(inputs[0].numel()))


def test_a_prompt_is_computed_once_for_all_its_samples_and_no_ended_row_goes_on(tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).ready()
    counter = Counter(engine._model)
    lengths = [3, 9, 1, 12, 5, 7]
    requests = [greedy([10, 20, 30, 40], max_tokens=n, seed=i) for i, n in enumerate(lengths)]
    requests += [greedy([7, 8], max_tokens=2)]
    engine.generate(requests)
    assert counter.passes[0] == 4 + 2  # both prompts, without padding, in one pass
    # A row goes into the model once for each of its tokens but the last.
    assert counter.passes[1:] == [sum(n > step for n in [*lengths, 2]) for step in range(1, 12)]


def test_waiting_rows_enter_as_others_leave(tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).ready(max_num_seqs=4)
    counter = Counter(engine._model)
    lengths = [2, 12, 2, 12, 11, 11]
    requests = [greedy([10 + i, 20], max_tokens=n) for i, n in enumerate(lengths)]
    outputs = engine.generate(requests)
    assert [len(output.token_ids) for output in outputs] == lengths
    assert tokens_of(outputs) == [oracle_greedy([10 + i, 20], n) for i, n in enumerate(lengths)]
    # Four prompts of 2 tokens; four rows; after their second tokens two leave, and the pass after that is of two. Then
    # two more prompts enter. The first two end after nine more passes, the others one later.
    assert counter.passes == [8, 4, 2, 4, *[4] * 9, 2]


def test_a_group_larger_than_the_places_is_served_in_parts(tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).ready(max_num_seqs=3)
    requests = [request([10, 20, 30], seed=i) for i in range(8)]
    whole = EngineUnderTest("native", tmp_path).ready().generate(requests)
    assert tokens_of(engine.generate(requests)) == tokens_of(whole)


def test_calls_from_several_threads_take_turns(tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).ready(max_num_seqs=4)
    prompts = [[10 + i, 20] for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: tokens_of(engine.generate([greedy(prompt)]))[0], prompts))
    assert found == [oracle_greedy(prompt, 12) for prompt in prompts]


MEANWHILE: dict[str, Callable[[NativeRollout], None]] = {
    "an update": lambda engine: engine.load_weights(weights_of(seed=1), version=1),
    "sleep": lambda engine: engine.sleep(),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_what_another_thread_does_waits_for_the_responses_that_are_being_drawn(what: str, tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).ready(free_cache_engine=True)
    assert isinstance(engine, NativeRollout)
    is_asked, is_done = threading.Event(), threading.Event()

    def other() -> None:
        is_asked.set()
        MEANWHILE[what](engine)
        is_done.set()

    thread = threading.Thread(target=other)
    passes = []

    def at_a_pass(*_: object) -> None:
        passes.append(is_done.is_set())
        if len(passes) == 4:
            thread.start()
            is_asked.wait()
            is_done.wait(0.2)  # it would be done by then if it did not wait

    engine._model.module.get_input_embeddings().register_forward_hook(at_a_pass)
    outputs = engine.generate([greedy([10, 20, 30])])
    thread.join()
    assert tokens_of(outputs) == [oracle_greedy([10, 20, 30], 12)]
    assert outputs[0].weight_version == 0
    assert passes[:12] == [False] * 12


def test_an_abort_is_heard_between_two_prompts(tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).ready(max_num_batched_tokens=2)
    assert isinstance(engine, NativeRollout)
    counter = Counter(engine._model)
    hook = engine._model.module.get_input_embeddings().register_forward_hook(lambda *_: engine.abort())
    outputs = engine.generate([greedy([10 + i, 20]) for i in range(9)])
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert counter.passes[0] == 2
    assert sum(counter.passes) <= 3  # the first prompt, and at most one token after it
    hook.remove()
    assert tokens_of(engine.generate([greedy([10, 20])])) == [oracle_greedy([10, 20], 12)]


def test_memory_grows_for_whatever_asks_for_more(tmp_path: Path) -> None:
    """More rows than are needed do not make up for prompts or responses that do not fit."""
    engine = EngineUnderTest("native", tmp_path).ready(prompt_length=64, response_length=64)
    rows = [greedy([10 + i, 20], max_tokens=4) for i in range(4)]
    longer = [greedy([10 + i] * 40, max_tokens=4) for i in range(3)]
    further = [greedy([10 + i], max_tokens=50) for i in range(3)]
    for requests in (rows, longer, rows, further):
        expected = [oracle_greedy(asked.prompt_ids, asked.sampling.max_tokens) for asked in requests]
        assert tokens_of(engine.generate(requests)) == expected


def test_rows_at_once_follow_from_the_memory_that_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = EngineUnderTest("native", tmp_path).ready(gpu_memory_utilization=1e-9)
    with caplog.at_level(logging.WARNING):
        outputs = engine.generate([greedy([10 + i, 20]) for i in range(3)])
    assert tokens_of(outputs) == [oracle_greedy([10 + i, 20], 12) for i in range(3)]
    assert engine._memory is not None
    assert engine._memory.room == 1
    assert "memory for 0 rows" in caplog.text


# ---- weights


def test_weights_are_the_trainers_own_tensors_where_they_fit(tmp_path: Path) -> None:
    model = copy.deepcopy(oracle())
    engine = EngineUnderTest("native", tmp_path).build()
    engine.load_weights(model.named_parameters(), version=0)
    own = dict(engine._model.module.named_parameters())
    assert {name: p.data_ptr() for name, p in own.items()} == {n: p.data_ptr() for n, p in model.named_parameters()}
    before = engine.generate([greedy([10, 20, 30])])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    engine.load_weights(model.named_parameters(), version=1)
    assert engine.generate([greedy([10, 20, 30])]) != before


def test_weights_that_it_holds_already_are_not_taken_anew_and_any_other_is(tmp_path: Path) -> None:
    prompt = [greedy([10, 20, 30])]
    model = copy.deepcopy(oracle())
    engine = EngineUnderTest("native", tmp_path).build()

    def after(weights: dict[str, Tensor]) -> list[RolloutOutput]:
        engine.load_weights(weights.items(), version=0)
        return engine.generate(prompt)

    def of_a_new_engine(weights: dict[str, Tensor]) -> list[RolloutOutput]:
        new = EngineUnderTest("native", tmp_path).build()
        new.load_weights(weights.items(), version=0)
        return new.generate(prompt)

    own = {name: p.detach() for name, p in model.named_parameters()}
    first = after(own)
    held = dict(engine._model.module.named_parameters())
    with torch.no_grad():
        own["model.layers.0.mlp.up_proj.weight"].neg_()
    assert after(own) == of_a_new_engine(own) != first
    assert all(p is held[name] for name, p in engine._model.module.named_parameters())
    # One tensor after the other is another, with other numbers: no update leaves an old one in use.
    seen = [first]
    for name in own:
        own[name] = own[name] * 1.5 + 0.01
        found = after(own)
        assert found == of_a_new_engine(own)
        assert found not in seen
        seen.append(found)
    # Rows that lie apart are copied where they are used, so that each update has to look at them.
    name = "model.layers.1.mlp.down_proj.weight"
    apart = own[name].t().contiguous().t()
    own[name] = apart
    assert after(own) == seen[-1]
    apart.mul_(-2)
    assert after(own) == of_a_new_engine(own) != seen[-1]
    # The memory that it holds, read in another order, or in another format.
    name = "model.layers.1.self_attn.v_proj.weight"
    own[name] = torch.arange(64 * 64).view(64, 64).remainder(5).to(torch.int32).view(torch.float32)
    nearly_zero = after(own)
    own[name] = own[name].view(torch.int32)
    rows = after(own)
    assert rows == of_a_new_engine(own) != nearly_zero
    own[name] = own[name].float()
    assert after(own) == rows
    own[name] = own[name].t()
    assert after(own) == of_a_new_engine(own) != rows


@pytest.mark.parametrize("problem", ["shape", "unknown", "missing"])
def test_weights_that_no_longer_fit_are_found_after_others_that_did(problem: str, tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).build()
    own = {name: p.detach() for name, p in copy.deepcopy(oracle()).named_parameters()}
    engine.load_weights(own.items(), version=0)
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = own.pop(name)
    bad = {"shape": {name: tensor[:-1]}, "unknown": {name: tensor, "model.layers.9.weight": tensor}, "missing": {}}
    expected = {
        "shape": rf"{name} has shape \[{len(tensor) - 1}, ",
        "unknown": r"model.layers.9.weight is unknown",
        "missing": rf"{name} is missing",
    }
    with pytest.raises(RolloutError, match=expected[problem]):
        engine.load_weights((own | bad[problem]).items(), version=1)
    with pytest.raises(RolloutError, match="holds no weights"):
        engine.generate([greedy([10, 20, 30])])
    engine.load_weights((own | {name: tensor}).items(), version=2)
    assert tokens_of(engine.generate([greedy([10, 20, 30])])) == [oracle_greedy([10, 20, 30], 12)]


def test_weights_of_another_format_are_copied(tmp_path: Path) -> None:
    model = copy.deepcopy(oracle()).double()
    engine = EngineUnderTest("native", tmp_path).build()
    engine.load_weights(model.named_parameters(), version=0)
    assert {p.dtype for p in engine._model.module.parameters()} == {torch.float32}
    assert tokens_of(engine.generate([greedy([10, 20, 30])])) == [oracle_greedy([10, 20, 30], 12)]


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, tie_word_embeddings=True)).eval()
    engine = loaded(model, tmp_path)
    module = engine._model.module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    output = engine.generate([greedy([10, 20, 30])])[0]
    torch.testing.assert_close(
        torch.tensor(output.log_probs), full_forward(model, [10, 20, 30], output.token_ids), atol=1e-5, rtol=1e-5
    )


def test_before_weights_come_the_model_takes_no_memory(tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).build()
    assert engine.weight_bytes == 0
    engine.load_weights(weights_of(), version=0)
    assert engine.weight_bytes > 0


# ---- attention that sees only a window


WINDOWED = {
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **SMALL, use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
        )
    ),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=5)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SMALL, sliding_window=5, attn_logit_softcapping=20.0, query_pre_attn_scalar=8)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **SMALL, sliding_window=5, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8
        )
    ),
}


@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_shorter_than_the_text(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WINDOWED[family]().eval()
    engine = loaded(model, tmp_path)
    prompts = [[10, 20], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40], [50]]
    for asked in (request(p, seed=i, max_tokens=20, ignore_eos=True) for i, p in enumerate(prompts)):
        output = engine.generate([asked])[0]
        expected = full_forward(model, asked.prompt_ids, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=1e-5)


# ---- both kinds of memory


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gemma"])
@pytest.mark.parametrize("kind", ["shared", "copied", "graphs"])
def test_rows_that_come_and_go_keep_their_own_past(kind: str, family: str) -> None:
    """Random arrivals and departures; every row's logits against a forward pass of its own text."""
    reference = tiny_model(family, seed=0)  # type: ignore[arg-type]
    sizes = (2, 4) if kind == "graphs" else ()  # five rows run without, other numbers are filled up
    model = NativeModel(reference.config, torch.float32, torch.device("cpu"), graph_sizes=sizes)
    model.load(reference.state_dict().items())
    room, prompt_room, response_room = 5, 6, 12
    assert model.kernels is not None
    memory: KeyValueMemory = (
        SharedPromptMemory(model.kernels, model.shape, room, prompt_room, response_room)
        if kind == "shared"
        else CopiedPromptMemory(model.shape, room, prompt_room, response_room)
    )
    generator = torch.Generator().manual_seed(1)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    texts: list[list[int]] = []
    checked = 0
    with torch.inference_mode():
        for _ in range(25):
            new = []
            while len(texts) + sum(count for _, count in new) < room and draw(3):
                free = room - len(texts) - sum(count for _, count in new)
                new.append(([2 + draw(100) for _ in range(1 + draw(prompt_room))], 1 + draw(free)))
            if new:
                memory.admit([len(prompt) for prompt, _ in new], [count for _, count in new])
                logits = model.prefill(memory, [prompt for prompt, _ in new])
                for (prompt, count), row in zip(new, logits, strict=True):
                    torch.testing.assert_close(row, last_logits(reference, prompt), atol=2e-4, rtol=1e-4)
                    texts += [list(prompt) for _ in range(count)]
            if texts:
                newest = [2 + draw(100) for _ in texts]
                texts = [[*text, token] for text, token in zip(texts, newest, strict=True)]
                logits = model.decode(memory, torch.tensor(newest))
                for text, row in zip(texts, logits, strict=True):
                    torch.testing.assert_close(row, last_logits(reference, text), atol=2e-4, rtol=1e-4)
                    checked += 1
                stay = [i for i in range(len(texts)) if draw(4) and len(texts[i]) < response_room]
                order = memory.keep(torch.tensor(stay, dtype=torch.long))
                assert sorted(order.tolist()) == stay
                texts = [texts[i] for i in order.tolist()]
    assert checked > 40
    assert (model.graphs is not None and model.graphs.recorded > 0) == (kind == "graphs")


@pytest.mark.parametrize(
    ("family", "fields", "is_recorded"),
    [
        ("gemma2", {"sliding_window": 4}, True),
        ("qwen3_moe", {}, False),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, False),
    ],
)
def test_decoding_is_recorded_by_default_for_dense_models_of_text(
    family: str, fields: dict[str, Any], is_recorded: bool
) -> None:
    config = tiny_model(family, **fields).config
    model = NativeModel(config, torch.bfloat16, torch.device("cpu"), graph_sizes=None)
    assert (model.graphs is not None) == is_recorded


def test_the_newest_graphs_are_kept_until_the_memory_is_another() -> None:
    computed: list[int] = []

    def logits(tokens: Tensor, offsets: Tensor, places: TokenPlaces, memory: CopiedPromptMemory) -> Tensor:
        computed.append(len(tokens))
        return tokens[:, None] * torch.ones(3)

    shape = CacheShape(layers=1, kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
    graphs = DecodeGraphs(logits, range(1, 49))
    for _ in range(2):
        memory = CopiedPromptMemory(shape, room=40, prompt_room=1, response_room=1)
        for rows in range(1, 41):
            memory.admit([1], [1])
            for _ in range(2):
                assert graphs(memory, torch.arange(rows)).tolist() == [[float(row)] * 3 for row in range(rows)]
            assert graphs.recorded == min(rows, MAX_GRAPHS)
    assert max(computed) == 40
    graphs.forget()
    assert graphs.recorded == 0


def last_logits(model: nn.Module, text: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([text])).logits[0, -1]


# ---- other formats, other machines


def test_bfloat16_agrees_with_the_models_own_forward_in_bfloat16(tmp_path: Path) -> None:
    """Both round to 8 bits at every step, at different places: a mean of 2^-8 and a few times that at most."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(SMALL | {"initializer_range": 0.1}))).eval()
    model = model.to(torch.bfloat16)
    engine = loaded(model, tmp_path, dtype="bfloat16")
    differences = []
    for seed in range(6):
        output = engine.generate([request([10, 20, 30, 40], seed=seed, max_tokens=20, ignore_eos=True)])[0]
        expected = full_forward(model, [10, 20, 30, 40], output.token_ids).float()
        differences.append((torch.tensor(output.log_probs) - expected).abs())
    difference = torch.cat(differences)
    assert difference.mean() < 0.02
    assert difference.max() < 0.1
    assert difference.max() > 0  # or this compared a thing with itself


WITHOUT_COMPILER = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from pathlib import Path
from verl.testing.rollout_conformance import EngineUnderTest, greedy, oracle_greedy, tokens_of
engine = EngineUnderTest("native", Path(sys.argv[1])).ready()
assert engine._model.kernels is None
found = tokens_of(engine.generate([greedy([10, 20, 30]), greedy([7])]))
assert found == [oracle_greedy([10, 20, 30], 12), oracle_greedy([7], 12)], found
"""


def test_without_a_compiler_it_says_so_and_computes_the_same(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "CC": ""}
    ended = forks.run(["-c", WITHOUT_COMPILER, tmp_path], **environment)
    assert ended.returncode == 0, ended.stderr
    assert "no C compiler" in ended.stderr


# ---- what it cannot serve


UNKNOWN = {
    "a recurrent state": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=104, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0, eos_token_id=1
        )
    ),
    "attention sinks": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **SMALL,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["full_attention", "full_attention"],
            sliding_window=None,
        )
    ),
    "linear attention": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            **SMALL,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            num_experts=2,
            num_experts_per_tok=1,
        )
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_architecture_that_it_cannot_serve_is_refused_with_the_engines_that_may(kind: str, tmp_path: Path) -> None:
    model = UNKNOWN[kind]().eval()
    with pytest.raises(RolloutError, match=r"cannot serve .*rollout\.name.*vllm, sglang, hf"):
        loaded(model, tmp_path)


def test_weights_that_are_no_numbers_tell_nothing_about_an_architecture(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SMALL)).eval()  # two softmaxes a head
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in model.state_dict().items()}
    engine = engine_for(saved(model, tmp_path))
    engine.load_weights(broken.items(), version=0)
    with pytest.raises(RolloutError, match="not finite"):
        engine.generate([request([10, 20])])
    with pytest.raises(RolloutError, match=r"DiffLlama.*differ by"):
        engine.load_weights(model.state_dict().items(), version=1)


def test_a_window_that_attention_is_not_told_of_is_refused_however_wide_it_is(tmp_path: Path) -> None:
    """Transformers' Qwen2-MoE has its windows in masks alone."""
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **SMALL | {"head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
            shared_expert_intermediate_size=16,
            use_sliding_window=True,
            sliding_window=20,
            layer_types=["sliding_attention", "full_attention"],
        )
    ).eval()
    with pytest.raises(RolloutError, match=r"Qwen2Moe.*differ by"):
        loaded(model, tmp_path)
    assert model.config.sliding_window == 20


def test_a_rotation_that_depends_on_the_longest_text_of_a_pass_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope |= {"factor": 8.0, "original_max_position_embeddings": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, rope_parameters=rope)).eval()
    with pytest.raises(RolloutError, match=r"longrope.* 32 tokens.* 33 .*vllm, sglang, hf"):
        loaded(model, tmp_path, prompt_length=13, response_length=20)
    engine = loaded(model, tmp_path, prompt_length=12, response_length=20)
    output = engine.generate([request([10, 20, 30], max_tokens=20, ignore_eos=True)])[0]
    expected = full_forward(model, [10, 20, 30], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=1e-5)


def test_latent_attention_is_refused_by_what_it_is(tmp_path: Path) -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=104,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    path = tmp_path / "model"
    config.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    with pytest.raises(RolloutError, match=r"latent attention.*vllm, sglang, hf"):
        engine_for(str(path))


def test_memory_serves_batches_of_two_kinds_by_turns(tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).ready()
    few_long, many_short = [greedy([10, 20], max_tokens=12)], [greedy([10 + i] * 6, max_tokens=2) for i in range(5)]
    engine.generate(few_long)
    expected = [oracle_greedy([10 + i] * 6, 2) for i in range(5)]
    assert tokens_of(engine.generate(many_short)) == expected
    memory = engine._memory
    assert tokens_of(engine.generate(few_long)) == [oracle_greedy([10, 20], 12)]
    assert tokens_of(engine.generate(many_short)) == expected
    assert engine._memory is memory


def test_a_default_format_of_the_users_own_changes_nothing(tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).ready()
    torch.set_default_dtype(torch.float64)
    try:
        outputs = engine.generate([request([10, 20, 30], temperature=0.7)])
    finally:
        torch.set_default_dtype(torch.float32)
    assert outputs == engine.generate([request([10, 20, 30], temperature=0.7)])


# ---- which models decode in one call


def compiled(model: transformers.PreTrainedModel) -> bool:
    return compiled_decoder(model.eval()) is not None


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral", "gemma", "gemma2"])
def test_the_families_that_the_c_code_knows(family: str) -> None:
    assert compiled(tiny_model(family)) == (family != "gemma2")  # type: ignore[arg-type]


@pytest.mark.parametrize("rope_type", ["default", "llama3", "yarn", "dynamic"])
def test_angles_that_depend_on_the_longest_text_are_left_to_the_model(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, rope_parameters=rope))
    assert compiled(model) == (rope_type != "dynamic")


def test_another_activation_is_left_to_the_model() -> None:
    config = transformers.LlamaConfig(**SMALL, hidden_act="relu")
    assert not compiled(transformers.LlamaForCausalLM(config))


def test_biases_and_longer_rotations_agree_with_a_full_forward_pass(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    config = transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, rope_parameters=rope)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    engine = loaded(model, tmp_path)
    asked = request([10, 20, 30], max_tokens=20, ignore_eos=True)
    output = engine.generate([asked])[0]
    expected = full_forward(model, asked.prompt_ids, output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-5, rtol=1e-5)
