"""What goes to SGLang and what is made of its answers, without SGLang."""

from __future__ import annotations

import inspect
import json
import pickle
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.support.vision_models import tiny_vision_model_dir
from verl.errors import ConfigError, RolloutError
from verl.testing.models import tiny_model_dir
from verl.utils import hf_tokenizer
from verl.utils.model import hf_config_of
from verl.workers.config import HFModelConfig, RolloutConfig, SamplingConfig
from verl.workers.rollout.base import RolloutOutput, RolloutRequest, SamplingParams
from verl.workers.rollout.client import PartialResponse
from verl.workers.rollout.sglang_rollout import SGLangRollout
from verl.workers.rollout.sglang_rollout.adapters import ATTENTION, LAYERS, completed
from verl.workers.rollout.sglang_rollout.client import _Bytes, check_report, reports_of, request_of, take
from verl.workers.rollout.sglang_rollout.settings import engine_arguments, process_environment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), max_position_embeddings=24)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that finds a module with the name of SGLang's arguments, and three of them in it."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "sglang" / "srt").mkdir(parents=True)
    (folder / "sglang" / "srt" / "server_args.py").write_text(
        "print('a word of greeting')\n"
        "class ServerArgs:\n    def __init__(self, model_path, page_size=1, attention_backend=None): pass\n"
    )
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return str(file)


def engine(folder: str, model: dict[str, Any] | None = None, **settings: Any) -> SGLangRollout:
    defaults = {"dtype": "float32", "prompt_length": 8, "response_length": 12, "tensor_model_parallel_size": 1}
    config = RolloutConfig(name="sglang", **(defaults | settings))
    return SGLangRollout(config, HFModelConfig(path=folder, **(model or {})), hf_tokenizer(folder), "cpu")


def test_settings_become_arguments(folder, python):
    given = engine(
        folder,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        enforce_eager=True,
        gpu_memory_utilization=0.7,
        engine_kwargs={"sglang": {"page_size": 4, "python": python, "attention_backend": "torch_native"}},
    )._arguments
    assert given["max_running_requests"] == 16
    assert (given["max_prefill_tokens"], given["chunked_prefill_size"]) == (32, -1)
    assert (given["disable_radix_cache"], given["disable_cuda_graph"]) == (True, True)
    assert given["mem_fraction_static"] == 0.7
    assert (given["page_size"], given["attention_backend"]) == (4, "torch_native")
    assert "python" not in given
    # 8 + 12 tokens and 8 positions that SGLang keeps for itself, more than the 24 of the model.
    assert given["context_length"] == 28
    assert json.loads(given["json_model_override_args"]) == {"max_position_embeddings": 28}
    assert given["max_total_tokens"] == 16 * 28


def test_settings_for_a_gpu_have_sglangs_names_and_health_checks_generate_nothing(folder, monkeypatch):
    monkeypatch.delenv("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", raising=False)
    mtp: Any = {"enable": True, "enable_rollout": True, "speculative_num_steps": 3}
    gpu, model = torch.device("cuda"), HFModelConfig(path=folder, lora_rank=4, mtp=mtp)
    config = RolloutConfig(name="sglang", cudagraph_capture_sizes=(1, 2), merge_adapters=False)
    given = engine_arguments(config, model, hf_config_of(model), 20, gpu)
    assert given["cuda_graph_bs_decode"] == [1, 2]
    assert (given["speculative_algorithm"], given["speculative_num_steps"]) == ("EAGLE", 3)
    # No update brings the heads' weights: they are read while the model's are not, and kept while SGLang sleeps.
    assert (given["load_format"], given["speculative_draft_load_format"]) == ("dummy", "auto")
    assert given["enable_draft_weights_cpu_backup"]
    with pytest.raises(ConfigError, match="it takes the most likely token whatever the temperature"):
        engine_arguments(config, model, hf_config_of(model), 20, torch.device("cpu"))
    assert process_environment(config, gpu)["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    if find_spec("sglang"):
        from sglang.srt.server_args import ServerArgs

        assert given.keys() <= inspect.signature(ServerArgs).parameters.keys()


def test_a_name_that_sglang_lacks_is_refused_before_anything_starts(folder, python):
    kwargs = {"python": python, "page_size": 4, "pages_size": 4, "x": 1}
    with pytest.raises(ConfigError, match=r"no argument pages_size, x. Did you mean 'page_size'\?"):
        engine(folder, engine_kwargs={"sglang": kwargs})


def test_a_python_without_sglang_is_refused_before_anything_starts(folder, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"python cannot import SGLang: .* No module named 'sglang'"):
        engine(folder, engine_kwargs={"sglang": {"python": str(python), "page_size": 4}})


def test_the_tokenizer_is_loaded_for_stop_texts_alone(folder):
    assert engine(folder)._arguments["skip_tokenizer_init"]
    assert not engine(folder, stop=("x",))._arguments["skip_tokenizer_init"]
    assert not engine(folder, val_kwargs=SamplingConfig(stop=("x",)))._arguments["skip_tokenizer_init"]


def test_adapters_alone_are_arguments_of_the_engine_and_of_its_requests(folder):
    assert not {"enable_lora", "max_lora_rank"} & engine(folder)._arguments.keys()
    rollout = engine(folder, {"lora_rank": 6}, merge_adapters=False)
    assert rollout.applies_adapters
    assert (rollout._arguments["enable_lora"], rollout._arguments["max_lora_rank"]) == (True, 6)
    layers = {f"{layer}_proj" for layer in ("q", "k", "v", "o", "gate", "up", "down")}
    assert set(rollout._arguments["lora_target_modules"]) == layers
    asked = RolloutRequest([5], params())
    assert "lora_path" not in request_of([rollout._partial(asked)])
    rollout._holds_base = True
    assert request_of([rollout._partial(asked)] * 2)["lora_path"] == ["policy", "policy"]


def test_layers_whose_adapters_sglang_does_not_apply_are_refused(folder, tmp_path):
    """A mixture has adapters of attention alone; target_modules count only where no folder has adapters."""
    mixture = tiny_model_dir(tmp_path / "mixture", "qwen3_moe")
    saved = tmp_path / "adapters"
    saved.mkdir()

    def refused(model: str, names: tuple[str, ...], in_folder: tuple[str, ...] | None = None) -> str:
        settings: dict[str, Any] = {"lora_rank": 6, "target_modules": names}
        if in_folder is not None:
            (saved / "adapter_config.json").write_text(json.dumps({"r": 4, "target_modules": in_folder}))
            settings["lora_adapter_path"] = str(saved)
        try:
            engine(model, settings, merge_adapters=False)
        except ConfigError as error:
            return str(error)
        return ""

    assert "those of kv_b_proj only merged. Set rollout.merge_adapters=true" in refused(
        folder, ("q_proj", "a.kv_b_proj")
    )
    assert not refused(folder, ("kv_b_proj",), ("q_proj", "up_proj"))
    assert "those of kv_b_proj only merged" in refused(folder, ("q_proj",), ("kv_b_proj",))
    assert not refused(mixture, ("q_proj",))
    assert "adapters of q_proj, k_proj, v_proj, o_proj by itself, and those of up_proj only" in refused(
        mixture, ("q_proj", "up_proj")
    )


def test_models_with_images_have_a_processor_and_patches_that_sglang_knows(tmp_path):
    with pytest.raises(ConfigError, match=r"in patches of 1176 numbers .* this model's have 96\. Set rollout.name"):
        engine(tiny_vision_model_dir(tmp_path / "small", "qwen2_5_vl"))
    given = engine(tiny_vision_model_dir(tmp_path / "model", "qwen2_5_vl", patch=14))._arguments
    assert (given["enable_multimodal"], given["skip_tokenizer_init"]) == (True, False)


def test_adapters_get_their_neighbours_and_one_rank():
    """q alone of q, k and v; gate and up of another rank than q; o has no neighbours."""
    shapes = {f"a.{layer}.weight": size for layer, size in {
        "q_proj": (4, 3), "k_proj": (2, 3), "v_proj": (2, 3), "o_proj": (3, 4), "gate_proj": (5, 3), "up_proj": (5, 3)
    }.items()}  # fmt: skip
    ones = {"q_proj": 2, "o_proj": 1, "gate_proj": 1, "up_proj": 1}
    given = {}
    for layer, rank in ones.items():
        out, width = shapes[f"a.{layer}.weight"]
        given |= {
            f"a.{layer}.lora_A.weight": torch.ones(rank, width),
            f"a.{layer}.lora_B.weight": torch.ones(out, rank),
        }
    found = completed(given, shapes, LAYERS)
    assert {name.split(".")[1] for name in found} == {*ones, "k_proj", "v_proj"}
    for name, tensor in found.items():
        layer, part = name.split(".")[1:3]
        out, width = shapes[f"a.{layer}.weight"]
        expected = torch.zeros((2, width) if part == "lora_A" else (out, 2))
        rank = ones.get(layer, 0)
        (expected[:rank] if part == "lora_A" else expected[:, :rank]).fill_(1.0)
        assert tensor.equal(expected)
    with pytest.raises(ConfigError, match="those of in_proj only merged"):
        completed({"a.in_proj.lora_A.weight": torch.ones(1, 2)}, {}, LAYERS)
    with pytest.raises(ConfigError, match="those of gate_proj, up_proj only merged"):
        completed(given, shapes, ATTENTION)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine_kwargs": {"sglang": {"tp_size": 2}}}, "engine_kwargs.sglang sets tp_size"),
        ({"engine_kwargs": {"sglang": {"python": "/no/such/python"}}}, "python=/no/such/python: there is no such file"),
        ({"tensor_model_parallel_size": 2}, r"tensor_model_parallel_size=2 does not divide the 1 rank"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2: verl loads new weights into all"),
        ({"limit_images": 1}, "limit_images=1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(folder, settings, words):
    with pytest.raises(ConfigError, match=words):
        engine(folder, **settings)


def test_a_request_as_sglang_gets_it(folder):
    running = engine(folder, stop=("ab",), logprobs_mode="raw_logprobs")
    eos, other = RolloutRequest([5, 6, 7], params(stop=("ab",))), RolloutRequest([5], params(ignore_eos=True))
    first, second = request_of([running._partial(one) for one in (eos, other)])["sampling_params"]
    assert (first["ignore_eos"], first["stop_token_ids"], first["stop"]) == (False, [1, 9], ["ab"])
    assert (second["ignore_eos"], second["stop_token_ids"]) == (True, [])
    assert (first["custom_params"]["prompt_length"], first["custom_params"]["raw"]) == (3, True)
    assert first["custom_params"]["row"] == {
        "max_tokens": 6,
        "seed": 2**63 - 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.0,
        "is_greedy": False,
        "truncates": True,
    }


def params(**changes: Any) -> SamplingParams:
    given = {"max_tokens": 6, "seed": 2**63 - 1, "temperature": 0.5, "top_p": 0.9, "stop_token_ids": (9,)}
    return SamplingParams(**(given | changes))


def answer(tokens: list[int], reason: str, log_probs: list[Any] | None = None) -> dict[str, Any]:
    values = [-0.5] * len(tokens) if log_probs is None else log_probs
    entries = [(value, token, None) for value, token in zip(values, tokens, strict=False)]
    return {"output_ids": tokens, "meta_info": {"finish_reason": {"type": reason}, "output_token_logprobs": entries}}


def taken(running: SGLangRollout, requests: list[RolloutRequest], answers: list[dict[str, Any]]) -> list[RolloutOutput]:
    """What the rollout makes of answers."""
    responses: dict[int, PartialResponse] = {number: running._partial(one) for number, one in enumerate(requests)}
    take([*responses.values()], answers)
    return [*running._outputs(responses).values()]


def test_responses_that_ran_on_are_cut_where_the_rules_end_them(folder):
    running = engine(folder)
    a, b = (running.tokenizer.encode(text)[0] for text in "ab")
    asked = [params(stop=("ab",)), params(ignore_eos=True), params(ignore_eos=True, stop_token_ids=()), params()]
    tokens = [[a, a, b, 20, 21, 22], [1, 20, 9, 21, 9, 22], [1, 1, 1, 1, 1, 1], [20, 1]]
    requests = [RolloutRequest([5], one) for one in asked]
    outputs = taken(running, requests, [answer(t, "length" if len(t) == 6 else "stop") for t in tokens])
    assert [output.token_ids for output in outputs] == [[a, a, b], [1, 20, 9], [1] * 6, [20, 1]]
    assert [output.finish_reason for output in outputs] == ["stop", "stop", "length", "stop"]
    assert [len(output.log_probs) for output in outputs] == [3, 3, 6, 2]


def test_an_aborted_response_stays_aborted_and_may_be_empty(folder):
    running = engine(folder)
    requests = [RolloutRequest([5], params(stop=("ab",))), RolloutRequest([5], params(stop=("ab",)))]
    outputs = taken(running, requests, [answer([20, 21], "abort"), answer([], "abort")])
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [([20, 21], "abort"), ([], "abort")]


def test_a_response_that_was_complete_when_the_abort_came_is_no_aborted_one(folder):
    running = engine(folder)
    tokens = list(range(20, 26))
    (output,) = taken(running, [RolloutRequest([5], params(max_tokens=6))], [answer(tokens, "abort")])
    assert (output.token_ids, output.finish_reason) == (tokens, "length")


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_log_probs_that_are_no_numbers_stop_the_run(folder, value):
    with pytest.raises(RolloutError, match="not finite"):
        taken(engine(folder), [RolloutRequest([5], params())], [answer([20], "stop", [value])])


def test_missing_log_probs_stop_the_run(folder):
    with pytest.raises(RolloutError, match="1 log-probs for 2 tokens"):
        taken(engine(folder), [RolloutRequest([5], params())], [answer([20, 21], "stop", [-1.0])])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"problem": "KeyError: 'x'"}, "cannot load the new weights: KeyError: 'x'"),
        ({"sampler": False}, "does not use verl's sampler"),
        ({"arrived": {"a": "1", "b": "3"}}, r"did not arrive in SGLang \(rank 0\) .*: b\."),
        ({"arrived": {"a": "1"}}, r"did not arrive in SGLang \(rank 0\) .*: b\."),
        ({"arrived": {"a": "1", "b": "2", "c": "5"}}, r"did not arrive in SGLang \(rank 0\) .*: c\."),
        ({"held": {"a": "7"}}, r"did not arrive in the model of SGLang \(rank 0\) .*: a\."),
    ],
)
def test_the_report_of_an_update(changes, words):
    sent = {"a": "1", "b": "2"}
    report = {"problem": "", "sampler": True, "arrived": sent, "held": {"a": "1"}} | changes
    if words is None:
        check_report(sent, sent, report, rank=0)
    else:
        with pytest.raises(RolloutError, match=words):
            check_report(sent, sent, report, rank=0)


def test_the_reports_of_all_ranks_are_read(tmp_path):
    reports = [{"problem": "", "sampler": True, "arrived": {name: "1"}, "held": {}} for name in "ab"]
    (tmp_path / "r.json").write_text(json.dumps(reports))
    assert reports_of(str(tmp_path / "r"), 2) == reports
    check_report({"a": "1", "b": "1"}, {"b": "1"}, reports[1], rank=1)  # each rank verifies its share
    with pytest.raises(RolloutError, match=r"did not arrive in SGLang \(rank 1\) .*: a, b\."):
        check_report({"a": "1", "b": "1"}, {"a": "1"}, reports[1], rank=1)
    with pytest.raises(RolloutError, match=r"2 of SGLang's 4 ranks reported what they loaded.*not supported"):
        reports_of(str(tmp_path / "r"), 4)
    with pytest.raises(RolloutError, match=r"0 of SGLang's 2 ranks"):
        reports_of(str(tmp_path / "none"), 2)


def test_bytes_travel_as_a_tensor():
    assert bytes(pickle.loads(pickle.dumps(_Bytes(b"ab\xff"))).tolist()) == b"ab\xff"
