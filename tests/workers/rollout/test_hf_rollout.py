"""What the hf engine promises beyond the contract."""

from __future__ import annotations

import pytest
import torch

from verl.errors import ConfigError, RolloutError
from verl.testing.models import tiny_model, tiny_model_dir
from verl.testing.rollout_conformance import PROMPTS, EngineUnderTest, greedy, oracle, request, weights_of
from verl.utils import hf_tokenizer
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout, get_rollout_class
from verl.workers.rollout.decoding import DecodingBatch, PromptWithImages
from verl.workers.rollout.hf_rollout import HFRollout
from verl.workers.rollout.state import EngineState


def engine_for(path: str, override: dict | None = None, **settings) -> HFRollout:
    defaults = {"dtype": "float32", "prompt_length": 8, "response_length": 12, "free_cache_engine": False}
    model = HFModelConfig(path=path, override_config=override or {})
    return HFRollout(RolloutConfig(name="hf", **(defaults | settings)), model, hf_tokenizer(path), "cpu")


def ready(path: str, model: torch.nn.Module, **settings) -> HFRollout:
    engine = engine_for(path, **settings)
    engine.load_weights(model.state_dict().items(), version=0)
    return engine


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "gemma", "mistral"])
def test_greedy_equals_generate_of_transformers_token_for_token(tmp_path, family):
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    theirs = (
        oracle(family)
        .generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=1
        )[:, width:]
        .tolist()
    )
    ours = EngineUnderTest("hf", tmp_path).ready(family).generate([greedy(p, ignore_eos=False) for p in PROMPTS])
    for output, expected in zip(ours, theirs, strict=True):
        ends = expected.index(1) + 1 if 1 in expected else len(expected)
        assert output.token_ids == expected[:ends]


@pytest.mark.parametrize(
    "family, fields",
    [
        ("mistral", {"sliding_window": 4}),
        ("gemma2", {"sliding_window": 4, "attn_implementation": "eager"}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ],
)
def test_sliding_windows_and_capped_logits(tmp_path, family, fields):
    model = tiny_model(family, **fields)
    path = tiny_model_dir(tmp_path, family, **fields)
    override = {"attn_implementation": "eager"} if "attn_implementation" in fields else {}
    engine = engine_for(path, override)
    engine.load_weights(model.state_dict().items(), version=0)
    requests = [request(p, seed=i, temperature=0.8, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    for asked, given in zip(requests, engine.generate(requests), strict=True):
        ids = torch.tensor([asked.prompt_ids + given.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(asked.prompt_ids) - 1 : -1] / 0.8
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(given.token_ids)[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(given.log_probs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("names", [("model.embed_tokens.weight",), ("lm_head.weight",), ("both",)])
def test_tied_weights_come_under_either_name(tmp_path, names):
    model = tiny_model("qwen3", tie_word_embeddings=True, seed=3)
    path = tiny_model_dir(tmp_path, "qwen3", tie_word_embeddings=True)
    engine = engine_for(path)
    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    weights = {n: t for n, t in model.state_dict().items() if n not in tied or n in names or names == ("both",)}
    engine.load_weights(weights.items(), version=0)
    with torch.no_grad():
        first = model(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax().item()
    assert engine.generate([greedy(PROMPTS[0], max_tokens=1)])[0].token_ids == [first]
    neither = {n: t for n, t in weights.items() if n not in tied}
    with pytest.raises(RolloutError, match=r"model.embed_tokens.weight is missing"):
        engine.load_weights(neither.items(), version=1)


def test_sleep_gives_the_memory_back(tmp_path):
    engine = EngineUnderTest("hf", tmp_path).build(free_cache_engine=True)
    assert engine.weight_bytes == 0
    with engine.awake(weights_of, version=0):
        assert engine.weight_bytes == 4 * sum(p.numel() for p in oracle().parameters())
    assert engine.weight_bytes == 0
    assert engine.weight_version == -1
    kept = EngineUnderTest("hf", tmp_path).ready(free_cache_engine=False)
    kept.sleep()
    assert kept.weight_bytes > 0
    assert kept.weight_version == 0


def test_weights_take_the_dtype_of_the_engine(tmp_path):
    engine = EngineUnderTest("hf", tmp_path).ready(dtype="bfloat16")
    assert engine.weight_bytes == 2 * sum(p.numel() for p in oracle().parameters())
    asked = [request(p, seed=i) for i, p in enumerate(PROMPTS)]
    exact = EngineUnderTest("hf", tmp_path).ready().generate(asked)
    rounded = engine.generate(asked)
    # The same random numbers: but for rounding at the edge of an interval the first tokens agree.
    assert sum(a.token_ids[0] == b.token_ids[0] for a, b in zip(exact, rounded, strict=True)) >= 4


def test_a_copy_is_kept_not_a_view(tmp_path):
    weights = {name: tensor.clone() for name, tensor in weights_of()}
    engine = EngineUnderTest("hf", tmp_path).build()
    engine.load_weights(weights.items(), version=0)
    before = engine.generate([greedy(PROMPTS[0])])
    for tensor in weights.values():
        tensor.zero_()
    assert engine.generate([greedy(PROMPTS[0])]) == before


def test_rows_that_end_leave_the_batch(tmp_path, monkeypatch):
    sizes = []
    forward = DecodingBatch.forward
    monkeypatch.setattr(DecodingBatch, "forward", lambda self, t: sizes.append(len(t)) or forward(self, t))
    engine = EngineUnderTest("hf", tmp_path).ready()
    lengths = [1, 2, 2, 2, 2, 2, 2, 12]
    outputs = engine.generate([greedy(PROMPTS[i % 6], max_tokens=n) for i, n in enumerate(lengths)])
    assert [len(output.token_ids) for output in outputs] == lengths
    # One of eight ends: not worth a copy. Then six of eight: one row goes on alone, ten times.
    assert sizes == [8] + [1] * 10


def test_states_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_REPORT_EVERY_S", 0)  # before every token
    engine = EngineUnderTest("hf", tmp_path).ready(max_num_seqs=4)
    told = []
    engine.on_state = told.append
    lengths = [(1, 3), (2, 2), (3, 3), (4, 3), (5, 1)]  # of prompts, and of responses
    engine.generate([greedy(list(range(4, 4 + prompt)), max_tokens=own) for prompt, own in lengths])

    def state(running, waiting, prompt_tokens, response_tokens):
        counts = {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens, "preemptions": 0}
        return EngineState(weight_version=0, requests_running=running, requests_waiting=waiting, **counts)

    # Four rows at once. The second ends after two tokens, and is still in the batch when the others get their third.
    assert told == [state(4, 1, 10, 0), state(4, 1, 10, 4), state(3, 1, 10, 8), state(1, 0, 15, 11)]
    assert engine.state() == state(0, 0, 15, 12)


def test_equal_prompts_go_through_the_model_once():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.seen, self.device = oracle(), [], torch.device("cpu")
            self.config = self.model.config

        def forward(self, input_ids, **kwargs):
            self.seen.append(tuple(input_ids.shape))
            return self.model(input_ids=input_ids, **kwargs)

    module = Counting()
    with torch.inference_mode():
        prompts = [PromptWithImages(ids) for ids in ((5, 6), (5, 6), (7, 8, 9), (5, 6))]
        batch = DecodingBatch(prompts, 4, module, prefill_tokens=3)
    assert module.seen == [(1, 3), (1, 3)]  # two distinct prompts, three tokens wide, one at a time
    assert torch.equal(batch.logits[0], batch.logits[3])
    with torch.no_grad():
        torch.testing.assert_close(batch.logits[2], oracle()(torch.tensor([[7, 8, 9]])).logits[0, -1])


def test_weights_that_are_not_finite_are_reported(tmp_path):
    engine = EngineUnderTest("hf", tmp_path).build()
    broken = {name: tensor * float("nan") for name, tensor in weights_of()}
    engine.load_weights(broken.items(), version=4)
    with pytest.raises(RolloutError, match="not finite with weights of version 4"):
        engine.generate([request(PROMPTS[0])])


def test_lengths_that_do_not_fit_are_refused_before_any_weight_is_loaded(tmp_path):
    path = tiny_model_dir(tmp_path, max_position_embeddings=64)
    assert engine_for(path, prompt_length=32, response_length=32).max_model_len == 64
    with pytest.raises(ConfigError, match=r"may take 65 tokens, but the model has max_position_embeddings=64"):
        engine_for(path, prompt_length=33, response_length=32)
    with pytest.raises(ConfigError, match=r"max_model_len=19 is less than .* 8 \+ 12. Raise it to 20"):
        engine_for(path, max_model_len=19)
    longer = engine_for(path, {"max_position_embeddings": 128}, prompt_length=33, response_length=32)
    assert longer.max_model_len == 65


def test_layers_without_keys_and_values_are_refused(tmp_path):
    path = tiny_model_dir(tmp_path)
    with pytest.raises(RolloutError, match="layers of type linear_attention"):
        engine_for(path, {"layer_types": ["linear_attention", "full_attention"]})


def test_a_tokenizer_that_is_too_large_is_refused(tmp_path):
    path = tiny_model_dir(tmp_path, vocab=104, tokenizer="bpe")
    with pytest.raises(ConfigError, match="the tokenizer is larger than the model"):
        engine_for(path)


def test_engines_by_name():
    assert get_rollout_class("hf") is get_rollout_class(rollout_name="hf", mode="sync") is HFRollout
    with pytest.raises(ConfigError, match=r"^mode=server: .* sync, async"):
        get_rollout_class("hf", "server")
    assert issubclass(HFRollout, BaseRollout)
    with pytest.raises(ConfigError, match=r"rollout_name=tgi: there is no such .* Use one of: hf"):
        get_rollout_class("tgi")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_what_the_cpu_draws(tmp_path):
    # These 288 draws lie 9.4e-5 or more from the boundaries between tokens. Devices sum in other orders, so boundaries
    # differ by some 1e-6: of the seeds 0 to 23, one draw lies 1.7e-7 from a boundary and may fall on either side.
    asked = [request(p, seed=200 + i) for i, p in enumerate(PROMPTS * 4)]
    cpu = EngineUnderTest("hf", tmp_path).ready().generate(asked)
    gpu = EngineUnderTest("hf", tmp_path, device="cuda").ready().generate(asked)
    assert [output.token_ids for output in gpu] == [output.token_ids for output in cpu]
