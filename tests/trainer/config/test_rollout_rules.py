"""Engines that are programs of their own: what is told before any model loads."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.config.support import Run, only
from verl.base.engine_python import engine_python
from verl.config import HFModelConfig, MtpConfig, Problem, RolloutConfig
from verl.trainer.config import GenerationConfig, rules_engines
from verl.trainer.config.derive import engine_for_gpu
from verl.trainer.config.rules_engines import not_for_serving
from verl.trainer.config.rules_prediction import heads as prediction_heads
from verl.workers.rollout.engine_kwargs import launch_settings

ROLLOUT = "actor_rollout_ref.rollout"


def settings(**more: Any) -> dict[str, Any]:
    """A run with vLLM in an environment that is there (it is not started)."""
    return {
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.engine_kwargs": {"vllm": {"python": sys.executable}},
    } | {f"{ROLLOUT}.{key}": value for key, value in more.items()}


def test_an_engine_in_another_environment_is_taken(run: Run):
    assert run.load(settings()).actor_rollout_ref.rollout.name == "vllm"


@pytest.mark.parametrize(("changes", "is_staged"), [({}, False), ({"param_offload": True}, True)])
def test_keys_and_values_wait_until_offloaded_weights_are_gone(run: Run, changes: dict[str, Any], is_staged: bool):
    offloads = {f"actor_rollout_ref.actor.fsdp_config.{name}": value for name, value in changes.items()}
    assert run.load(settings() | offloads).actor_rollout_ref.rollout.multi_stage_wake_up is is_staged
    key = f"{ROLLOUT}.multi_stage_wake_up"
    assert not run.load(
        settings() | offloads | {key: False}, explicit=[key]
    ).actor_rollout_ref.rollout.multi_stage_wake_up


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_told(run: Run, engine: str):
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed here")
    message = only(run.refusal(settings(name=engine, engine_kwargs={})))
    assert f"the package {engine} is not installed here, nor is there /opt/{engine}/bin/python" in message
    assert f"{ROLLOUT}.engine_kwargs.{engine}.python" in message


def test_an_engine_in_the_environment_of_the_image_is_found(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = "sglang" if importlib.util.find_spec("sglang") is None else "vllm"
    python = tmp_path / engine / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr("verl.base.engine_python.ENVIRONMENTS", tmp_path)
    assert run.load(settings(name=engine, engine_kwargs={})).actor_rollout_ref.rollout.name == engine
    assert launch_settings(RolloutConfig(name=engine), 60).python == str(python)


def test_a_python_that_is_not_there_is_told(run: Run):
    message = only(run.refusal(settings(engine_kwargs={"vllm": {"python": "/nowhere/bin/python"}})))
    assert f"{ROLLOUT}.engine_kwargs.vllm.python=/nowhere/bin/python: there is no such file" in message


@pytest.mark.parametrize("size, ranks, fits", [(1, 1, True), (2, 1, False), (2, 4, True), (3, 4, False), (8, 4, False)])
def test_the_ranks_of_a_machine_divide_among_the_engines(run: Run, size: int, ranks: int, fits: bool):
    given = settings(tensor_model_parallel_size=size) | {"trainer.n_gpus_per_node": ranks, "trainer.controller": "ray"}
    if fits:
        run.load(given)
        return
    message = only(run.refusal(given, explicit={f"{ROLLOUT}.tensor_model_parallel_size"}))
    assert f"{ROLLOUT}.tensor_model_parallel_size={size}" in message
    assert f"does not divide trainer.n_gpus_per_node={ranks}" in message
    assert "tensor_model_parallel_size=1" in message


@pytest.mark.parametrize(
    "sizes, nodes, allowed",
    [
        ({"tensor_model_parallel_size": 8}, 2, None),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}, 2, None),
        ({"tensor_model_parallel_size": 8, "data_parallel_size": 2, "expert_parallel_size": 16}, 4, None),
        ({"tensor_model_parallel_size": 8}, 3, "1, 2, 4, 12"),
        ({"tensor_model_parallel_size": 6, "pipeline_model_parallel_size": 2}, 2, "1, 2, 4"),
    ],
)
def test_an_engine_has_whole_machines(run: Run, sizes: dict[str, Any], nodes: int, allowed: str | None):
    layout = {"trainer.n_gpus_per_node": 4, "trainer.nnodes": nodes, "trainer.controller": "ray"}
    given = settings(**sizes) | layout | {"data.train_batch_size": 48, f"{ROLLOUT}.n": 8}
    explicit = {f"{ROLLOUT}.tensor_model_parallel_size"}
    if allowed is None:
        rollout = run.load(given, explicit=explicit).actor_rollout_ref.rollout
        assert rollout.ranks_per_engine in (8, 16)
        return
    message = run.refusal(given, explicit=explicit)
    assert "does not divide trainer.n_gpus_per_node=4" in message
    assert f"allowed: {allowed}" in message


def test_copies_of_the_model_are_engines_unless_they_share_experts(run: Run, caplog: pytest.LogCaptureFixture):
    rollout = run.load(settings(data_parallel_size=2)).actor_rollout_ref.rollout
    assert "data_parallel_size=2: each copy is an engine of its own" in caplog.text
    assert rollout.ranks_per_engine == rollout.tensor_model_parallel_size
    shared = {"data_parallel_size": 2, "expert_parallel_size": 2, "tensor_model_parallel_size": 1}
    layout = {"trainer.n_gpus_per_node": 2, "trainer.controller": "ray"}
    config = run.folder / "model" / "config.json"
    config.write_text('{"num_hidden_layers": 2}')
    assert "expert_parallel_size=2: the model has no experts" in only(run.refusal(settings(**shared) | layout))
    config.write_text('{"num_hidden_layers": 2, "num_experts": 8}')
    assert run.load(settings(**shared) | layout).actor_rollout_ref.rollout.ranks_per_engine == 2
    other = {"name": "sglang", "engine_kwargs": {"sglang": {"python": sys.executable}}}
    message = only(run.refusal(settings(**shared | other) | layout))
    assert "expert_parallel_size=2: actor_rollout_ref.rollout.name=sglang shares experts within one copy" in message
    message = only(run.refusal(settings(**shared | {"expert_parallel_size": 4, "data_parallel_size": 2}) | layout))
    assert "expert_parallel_size=4: vllm shares experts among all ranks" in message
    assert "allowed: 1, 2\n" in message
    assert f"or set {ROLLOUT}.data_parallel_size=4" in message
    split = {"expert_parallel_size": 2, "tensor_model_parallel_size": 3, "data_parallel_size": 1}
    layout = {"trainer.n_gpus_per_node": 3, "data.train_batch_size": 12, f"{ROLLOUT}.n": 3}
    message = only(run.refusal(settings(**split | other) | layout))
    assert "expert_parallel_size=2: sglang divides the 3 ranks of" in message
    assert "allowed: 1, 3" in message


def test_rounded_weights_are_corrected_for(run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    own = settings(quantization="int8", name="native", tensor_model_parallel_size=1)
    assert run.load(own).actor_rollout_ref.rollout.quantization == "int8"
    assert "set algorithm.rollout_correction.rollout_is=token" in caplog.text
    caplog.clear()
    run.load(own | {"algorithm.rollout_correction.rollout_is": "token"})
    assert "rollout_is=token" not in caplog.text
    rounded = settings(quantization="fp8", dtype="bfloat16")
    assert "quantization=fp8: vllm's build for CPUs has no kernel" in only(run.refusal(rounded))
    lora = settings(quantization="int8") | {"actor_rollout_ref.model.lora_rank": 4}
    caplog.clear()
    run.load(lora)
    assert "merge_adapters=true: adapters are rounded with the weights" in caplog.text
    message = only(run.refusal(lora | {f"{ROLLOUT}.merge_adapters": False}))
    assert "layers of quantization=int8 take no adapters in vllm on a CPU" in message
    generation = {"rollout.name": "vllm", "rollout.engine_kwargs": {"vllm": {"python": sys.executable}}}
    generation |= {"rollout.quantization": "fp8", "rollout.dtype": "bfloat16"}
    assert "rollout.quantization=fp8: vllm's build for CPUs" in run.refusal(generation, GenerationConfig)
    monkeypatch.setattr(rules_engines, "resolve_device", lambda config: "cuda")
    assert run.load(rounded).actor_rollout_ref.rollout.quantization == "fp8"
    message = only(run.refusal(rounded | {f"{ROLLOUT}.dtype": "float32"}))
    assert "dtype=float32: with actor_rollout_ref.rollout.quantization=fp8 vllm computes in bfloat16" in message
    for name in ("hf", "sglang"):
        engine = {f"{ROLLOUT}.name": name, f"{ROLLOUT}.engine_kwargs": {"sglang": {"python": sys.executable}}}
        message = only(run.refusal(own | engine))
        assert f"{ROLLOUT}.quantization=int8: {ROLLOUT}.name={name} computes with the weights as" in message
    assert "quantization=int4" in run.refusal(settings(quantization="int4"))
    message = run.refusal(own | {f"{ROLLOUT}.quantization_config_file": "q.json"})
    assert "weights are rounded by the rule of rollout.quantization" in message


def test_the_usual_size_fits_the_machine_unless_it_was_set(run: Run, caplog: pytest.LogCaptureFixture):
    usual = {key: value for key, value in settings().items() if not key.endswith("parallel_size")}
    for ranks, size in ((1, 1), (2, 2), (3, 1)):
        sizes = {"trainer.n_gpus_per_node": ranks, "data.train_batch_size": 12, f"{ROLLOUT}.n": 6}
        config = run.load(usual | sizes)
        assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == size
    assert f"{ROLLOUT}.tensor_model_parallel_size: 1 and not 2, the usual value" in caplog.text
    generation = {"rollout.name": "vllm", "rollout.engine_kwargs": {"vllm": {"python": sys.executable}}}
    changes = generation | {"trainer.n_gpus_per_node": 3}
    message = run.refusal(changes, GenerationConfig, explicit={"rollout.tensor_model_parallel_size"})
    assert "rollout.tensor_model_parallel_size=2" in message


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_programs_are_servers_in_both_modes(run: Run, name: str, caplog: pytest.LogCaptureFixture):
    engine = {f"{ROLLOUT}.name": name, f"{ROLLOUT}.engine_kwargs": {name: {"python": sys.executable}}}
    config = run.load(engine | {f"{ROLLOUT}.mode": "sync"})
    assert config.actor_rollout_ref.rollout.mode == "async"
    assert f"{ROLLOUT}.mode: async and not sync, because {name} runs as a server only" in caplog.text
    caplog.clear()
    run.load(engine)
    assert f"{ROLLOUT}.mode" not in caplog.text


def test_engines_of_this_process_say_what_they_do_not_read(run: Run, caplog: pytest.LogCaptureFixture):
    run.load({f"{ROLLOUT}.mode": "sync", f"{ROLLOUT}.disable_log_stats": False}, explicit={f"{ROLLOUT}.mode"})
    assert f"no effect: {ROLLOUT}.disable_log_stats (only vllm and sglang read it" in caplog.text
    assert f"{ROLLOUT}.mode" not in caplog.text  # they run in the worker's process, as it says
    run.load({f"{ROLLOUT}.mode": "async"}, explicit={f"{ROLLOUT}.mode"})
    assert f"{ROLLOUT}.mode: native answers inside the worker's process, as sync does" in caplog.text
    eager = f"{ROLLOUT}.enforce_eager"
    run.load({eager: True})
    assert eager not in caplog.text  # native reads it on a GPU alone
    run.load({eager: True, "trainer.device": "cpu"}, explicit={f"{ROLLOUT}.name"})
    assert f"no effect: {eager} (only vllm" in caplog.text
    caching = f"{ROLLOUT}.enable_prefix_caching"
    run.load({caching: False})
    assert caching not in caplog.text
    run.load({caching: False, f"{ROLLOUT}.name": "hf"})
    assert f"no effect: {caching} ({ROLLOUT}.name=hf keeps nothing of earlier requests)" in caplog.text


@pytest.mark.parametrize("engine", ["native", "hf"])
@pytest.mark.parametrize("kind", ["tensor_model", "pipeline_model", "data", "expert"])
def test_engines_of_this_process_are_not_split(run: Run, engine: str, kind: str):
    key = f"{ROLLOUT}.{kind}_parallel_size"
    given = {f"{ROLLOUT}.name": engine, key: 2, "trainer.n_gpus_per_node": 2, "trainer.controller": "ray"}
    message = only(run.refusal(given, explicit={key}))
    assert f"{key}=2: with {ROLLOUT}.name={engine} each rank generates with a whole copy of the model" in message
    assert f"set {ROLLOUT}.name=vllm or sglang" in message
    run.load({f"{ROLLOUT}.name": engine, key: 1}, explicit={key})


def test_settings_of_a_server_of_metrics_that_is_not_enabled_are_told(run: Run, caplog: pytest.LogCaptureFixture):
    server = f"{ROLLOUT}.prometheus"
    run.load({f"{server}.port": 9100})
    assert f"no effect: {server}.port ({server}.enable=false)" in caplog.text
    caplog.clear()
    run.load({f"{server}.port": 9100, f"{server}.enable": True})
    assert "no effect" not in caplog.text


def test_engines_without_kernels_for_serving_are_advised_against_on_a_gpu():
    (advice,) = not_for_serving(ROLLOUT, "native", "cuda")
    assert advice.advice
    assert f"{ROLLOUT}.name=native: it has PyTorch's kernels" in str(advice)
    assert "only dense models of text are recorded as CUDA graphs" in str(advice)
    assert f"set {ROLLOUT}.name=vllm" in str(advice)
    assert not [*not_for_serving(ROLLOUT, "native", "cpu"), *not_for_serving(ROLLOUT, "vllm", "cuda")]
    assert "it starts each operation of each token" in str(*not_for_serving(ROLLOUT, "hf", "cuda"))


def test_the_usual_tensor_parallel_size_is_that_of_engines_that_are_split(run: Run):
    assert run.load().actor_rollout_ref.rollout.tensor_model_parallel_size == 1
    generation = {"rollout.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 3}
    message = run.refusal(generation, GenerationConfig, explicit=generation)
    assert "rollout.tensor_model_parallel_size=2: with rollout.name=native each rank" in message


def test_agent_loops_get_the_messages_of_prompts(run: Run):
    enable = {"actor_rollout_ref.rollout.multi_turn.enable": True}
    assert run.load(enable).actor_rollout_ref.rollout.default_agent_loop == "tool_agent"
    message = only(run.refusal(enable | {"data.return_raw_chat": False}))
    assert "data.return_raw_chat=false: the agent loop tool_agent answers prompts by their messages" in message


def test_a_loss_of_what_an_environment_writes_has_an_environment(run: Run, caplog: pytest.LogCaptureFixture):
    echo = {"actor_rollout_ref.actor.use_echo_loss": True}
    run.load(echo)
    assert "actor_rollout_ref.actor.use_echo_loss=true: rows whose agent_name is not set are answered by" in caplog.text
    caplog.clear()
    talks = {"actor_rollout_ref.rollout.multi_turn.enable": True}
    run.load(echo | talks)
    assert "use_echo_loss" not in caplog.text
    assert "ECHO" not in caplog.text
    run.load(echo | talks | {"actor_rollout_ref.rollout.temperature": 0.7})
    assert "actor_rollout_ref.rollout.temperature=0.7: the cross entropy of ECHO is that of the" in caplog.text


MODE = "actor_rollout_ref.actor.router_replay.mode"
RECORDS = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({MODE: "R3"}, f"{RECORDS}=false: {MODE}=R3 replays the choice of the rollout, which must record it"),
        ({RECORDS: True}, f"{RECORDS}=true: nothing reads what the rollout records with {MODE}=disabled"),
        ({MODE: "R3", RECORDS: True, "actor_rollout_ref.rollout.name": "vllm"}, "vllm does not return the experts"),
        (
            {MODE: "R2", "algorithm.rollout_correction.bypass_mode": True},
            "bypass_mode=true skips the pass of the actor",
        ),
        ({MODE: "R1"}, "R1"),
    ],
)
def test_router_replay_that_cannot_be(run: Run, changes, said):
    assert said in run.refusal(changes)


SHARES = "actor_rollout_ref.actor.use_prefix_grouper"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actor_rollout_ref.actor.strategy": "megatron"}, "megatron computes every row with its own prompt"),
        ({"actor_rollout_ref.model.use_remove_padding": False}, "a prompt is shared in packed rows"),
        ({"actor_rollout_ref.actor.use_remove_padding": False}, "a prompt is shared in packed rows"),
        ({MODE: "R2"}, f"{MODE}=R2 repeats the choice of experts of every row"),
        (
            {"actor_rollout_ref.model.override_config": {"router_aux_loss_coef": 0.001}},
            "the load of experts (router_aux_loss_coef, output_router_logits) is balanced",
        ),
    ],
)
def test_shared_prompts_that_cannot_be(run: Run, caplog: pytest.LogCaptureFixture, changes, said):
    assert not run.load({SHARES: True} | changes).actor_rollout_ref.actor.use_prefix_grouper
    assert f"no effect: {SHARES} (" in caplog.text
    assert said in caplog.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model_type": "qwen2_5_vl"}, "prompts with images are not shared"),
        (
            {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]},
            "the model has layers (linear_attention) other than full or sliding attention",
        ),
        # As their files were published.
        ({"model_type": "qwen3_next", "full_attention_interval": 4}, "the model has layers (linear_attention)"),
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "the model has layers (indexed_attention)"),
    ],
)
def test_shared_prompts_of_models_that_cannot(run: Run, caplog: pytest.LogCaptureFixture, content, said):
    (run.folder / "model" / "config.json").write_text(json.dumps(content))
    run.load({SHARES: True})
    assert f"no effect: {SHARES} ({said}" in caplog.text


def test_shared_prompts(run: Run, caplog: pytest.LogCaptureFixture):
    assert run.load({SHARES: True}).actor_rollout_ref.actor.use_prefix_grouper
    critic = {"critic.model.path": str(run.folder / "model"), "critic.ppo_micro_batch_size_per_gpu": 1}
    critic |= {"algorithm.adv_estimator": "gae", "critic.use_prefix_grouper": True}
    assert run.load(critic | {"critic.model.use_remove_padding": True}).critic.use_prefix_grouper
    assert not run.load(critic).critic.use_prefix_grouper
    needed = "which need critic.model.use_remove_padding=true"
    assert f"no effect: critic.use_prefix_grouper (a prompt is shared in packed rows, {needed}" in caplog.text


def test_router_replay(run: Run):
    assert run.load({MODE: "R3", RECORDS: True}).actor_rollout_ref.rollout.enable_rollout_routing_replay
    assert run.load({MODE: "R2"}).actor_rollout_ref.actor.router_replay.mode == "R2"


def test_a_run_on_a_gpu_takes_the_fast_engine_unless_it_names_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    assert engine_for_gpu(has_vllm=True, takes_images=False) == ("vllm", "the run is on a GPU and vLLM is installed")
    assert engine_for_gpu(has_vllm=False, takes_images=False)[0] == "native"
    assert engine_for_gpu(has_vllm=True, takes_images=True)[0] == "native"
    name, set_by_hand = f"{ROLLOUT}.name", {"data.train_batch_size"}
    assert run.load(explicit=set_by_hand).actor_rollout_ref.rollout.name == "native"
    assert name not in caplog.text  # on a CPU nothing is chosen
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # tests before may have left one running
    engine, why = engine_for_gpu(engine_python("vllm") is not None, takes_images=False)
    assert run.load(explicit=set_by_hand).actor_rollout_ref.rollout.name == engine
    assert f"{name}: {engine}, because {why}" in caplog.text
    caplog.clear()
    own_choices: list[tuple[dict[str, Any], set[str]]] = [
        ({}, {name}),
        ({name: "hf"}, {name}),
        ({}, set()),  # from a program, which may mean the default
        ({"trainer.device": "cpu"}, set_by_hand),
        ({f"{ROLLOUT}.keep_sampling_mask": True, f"{ROLLOUT}.top_p": 0.9}, set_by_hand),
    ]
    for changes, explicit in own_choices:
        assert run.load(changes, explicit=explicit).actor_rollout_ref.rollout.name == changes.get(name, "native")
    assert "because the run is on a GPU" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (
            {f"{ROLLOUT}.name": "native", "lora_rank": 4},
            "name=native merges where that rounds nothing; only vllm",
        ),
        ({}, "no adapters are trained (model.lora_rank=0)"),
        ({"lora_rank": 4, "lora.use_dora": True}, "vllm has no DoRA (model.lora.use_dora=true)"),
        ({f"{ROLLOUT}.name": "sglang", "lora_rank": 4, "lora.use_dora": True}, "sglang has no DoRA"),
    ],
)
def test_adapters_are_sent_alone_where_there_are_some_and_the_engine_applies_them(run: Run, settings: dict, wrong: str):
    model = {k if k.startswith(ROLLOUT) else f"actor_rollout_ref.model.{k}": v for k, v in settings.items()}
    engines = {name: {"python": sys.executable} for name in ("vllm", "sglang")}
    kwargs = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.engine_kwargs": engines}
    assert wrong in run.refusal(kwargs | model | {f"{ROLLOUT}.merge_adapters": False})
    allowed = kwargs | {f"{ROLLOUT}.merge_adapters": False, "actor_rollout_ref.model.lora_rank": 4}
    assert not run.load(allowed).actor_rollout_ref.rollout.merge_adapters


def test_heads_are_trained_and_used_where_that_is_possible(run: Run):
    heads = {f"actor_rollout_ref.model.mtp.{key}": True for key in ("enable", "enable_train", "enable_rollout")}
    message = run.refusal(heads | {f"{ROLLOUT}.name": "native"})
    assert "mtp.enable_train=true: actor_rollout_ref.actor.strategy=fsdp does not build heads" in message
    assert "mtp.enable_rollout=true: actor_rollout_ref.rollout.name=native draws token by token" in message
    heads["actor_rollout_ref.model.mtp.enable"] = False
    assert not run.load(heads).actor_rollout_ref.model.mtp.is_trained
    model = HFModelConfig(path="org/name", mtp=MtpConfig(enable=True, enable_train=True, enable_rollout=True))

    def problems(**settings: Any) -> list[Problem]:
        return list(prediction_heads(GenerationConfig(model=model, rollout=RolloutConfig(**settings))))

    assert not problems(name="vllm", top_p=0.7, top_k=9)
    (min_p,) = problems(name="vllm", val_kwargs={"min_p": 0.2})
    assert "rollout.val_kwargs.min_p=0.2: vllm verifies proposals" in str(min_p)
    (rounded,) = problems(name="vllm", quantization="int8")
    assert "are not rounded" in str(rounded)
    cut, untried, old = problems(name="sglang", top_p=0.7)
    assert not cut.advice
    assert "rollout.top_p=0.7: where SGLang verifies proposals" in str(cut)
    assert untried.advice
    assert old.advice
    assert "random numbers of its own, and no test has run it" in str(untried)
    assert "updates, so trained heads too, pass it by" in str(old)
