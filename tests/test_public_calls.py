"""Public classes and functions of verl take the arguments that public programs call them with."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.public_names import public_names
from verl.compat.absent_names import absence_of
from verl.config.base import BaseConfig
from verl.workers.config import (
    ActorConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    RolloutConfig,
)

LIST = Path(__file__).with_name("public_names.txt")


def forms(*kinds: str) -> list[tuple[str, str, str]]:
    """Modules, names and calling forms of the list that are here; each form once."""
    chosen: dict[tuple[str, str], tuple[str, str, str]] = {}
    for (module, name), known in public_names(LIST.read_text().splitlines()).items():
        for kind, form in known:
            if kind in kinds and form and absence_of(f"{module}.{name}") is None and (name, form) not in REFUSED:
                chosen.setdefault((name, form), (module, name, form))
    return list(chosen.values())


def arguments_of(form: str) -> dict[str, str | None]:
    """Map the parameters of ``(a, b=1)`` to the text of their defaults."""
    arguments: dict[str, str | None] = {}
    for part in re.split(r", (?=\**\w+(?:=|,|$)|\*,)", form[1:-1]):
        name, _, default = part.partition("=")
        if name:
            arguments[name] = default or None
    return arguments


# ---- functions, methods and constructors -----------------------------------------------------

_BATCH_IN_PARTS = "batches are DataProto, and their passes are described by MicroBatchConfig"
_OWN_ENGINE = "an engine of one's own derives from our BaseEngine (docs/extending.md)"
_PATH_FIRST = "the path is called local_path, as in v0.8.0; it comes first in all forms"

REFUSED = {
    ("RayPPOTrainer", "(config, tokenizer, role_worker_mapping, resource_pool_manager, ray_worker_group_cls=RayWorkerGroup, processor=None, train_dataset=None, val_dataset=None, collate_fn=None, train_sampler=None, device_name=None)"): "two orders are public; all arguments after processor go by keyword",  # noqa: E501
    ("need_reward_model", "(role_worker_mapping)"): "its one argument goes by place",
    ("no_padding_2_padding", "(tensor, data)"): "the two arguments go by place, or as nested_tensor and data",
    ("collect_lazy_compute_data_proto", "(mesh_name, worker_group, *args, **kwargs)"): "the outputs are one argument",
    ("ActorRolloutRefWorker.load_checkpoint", "(checkpoint_path, hdfs_path=None, del_local_after_load=True)"): _PATH_FIRST,  # noqa: E501
    ("ActorRolloutRefWorker.save_checkpoint", "(checkpoint_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None)"): _PATH_FIRST,  # noqa: E501
    ("CriticWorker.load_checkpoint", "(checkpoint_path, hdfs_path=None, del_local_after_load=True)"): _PATH_FIRST,
    ("CriticWorker.save_checkpoint", "(checkpoint_path, hdfs_path=None, global_steps=0, max_ckpt_to_keep=None)"): _PATH_FIRST,  # noqa: E501
    ("BaseRollout", "(config, model_config, device_mesh)"): _OWN_ENGINE,
    ("BaseRollout", "(config, model_config, device_mesh, *args, **kwargs)"): _OWN_ENGINE,
    ("BaseEngine.to", "(device, model=True, optimizer=True, grad=True)"): _OWN_ENGINE,
    ("BaseEngine.load_checkpoint", "(local_path, hdfs_path=None, del_local_after_load=True, **kwargs)"): _OWN_ENGINE,
    ("BaseEngine.save_checkpoint", "(local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None, **kwargs)"): _OWN_ENGINE,  # noqa: E501
    ("BaseEngine.forward_backward_batch", "(data, loss_function, forward_only=False)"): _BATCH_IN_PARTS,
    ("BaseEngine.infer_batch", "(data, loss_function=None)"): _BATCH_IN_PARTS,
    ("BaseEngine.train_batch", "(data, loss_function)"): _BATCH_IN_PARTS,
    ("ToolAgentLoop.run", "(sampling_params, priority=0, **kwargs)"): "the other arguments go by name",
    ("process_validation_metrics", "(data_sources, sample_uids, infos_dict, seed=42, expected_acc_counts=None)"): "metrics are of the responses that there are",  # noqa: E501
    ("BaseEngine", "(delta_pin_snapshots=True)"): _OWN_ENGINE,
}  # fmt: skip
"""Public calling forms that are not taken, with the reason."""


def problem_of_call(function: Callable[..., Any], form: str) -> str | None:
    """Say which public argument a function does not take, or takes at another place."""
    signature = inspect.signature(function, follow_wrapped=False)
    arguments = arguments_of(form)
    named = [name for name in arguments if not name.startswith("*")]
    by_place = list(dict.fromkeys(named if "*" not in arguments else list(arguments)[: list(arguments).index("*")]))
    if not named:
        return None
    try:
        signature.bind(**{name: name for name in named if arguments[name] is None})
        signature.bind(**{name: name for name in named})
        bound = signature.bind(*by_place).arguments
    except TypeError as error:
        return str(error)
    for name, value in bound.items():
        if signature.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and value != name:
            return f"argument {value!r} is taken as {name!r}"
    return None


def called(module: str, name: str) -> Callable[..., Any] | None:
    """The function or class behind a name, without ``self``; None for an attribute that is no method, or absent."""
    owner, _, attribute = name.partition(".")
    home = getattr(importlib.import_module(module), owner)
    if not attribute:
        return home
    if not hasattr(home, attribute):
        return None
    method = inspect.getattr_static(home, attribute)
    if isinstance(method, (staticmethod, classmethod)):
        return getattr(home, attribute)
    return method.__get__(object()) if hasattr(method, "__code__") else None


def here(*kinds: str) -> Iterator[tuple[str, str, str]]:
    """The forms of names that can be imported."""
    for module, name, form in forms(*kinds):
        try:
            getattr(importlib.import_module(module), name.partition(".")[0])
        except (ImportError, AttributeError):
            continue  # benchmarks.public_names lists these
        yield module, name, form


def test_public_arguments_are_taken_in_their_order_and_by_name():
    problems = {}
    forms_here = list(here("def", "method", "class"))
    for module, name, form in forms_here:
        if (function := called(module, name)) and (problem := problem_of_call(function, form)):
            problems[f"{module}.{name}{form}"] = problem
    assert problems == {}
    assert len(forms_here) > 400


def test_a_function_of_other_arguments_would_be_reported():
    def scores(data: Any, tokenizer: Any = None) -> None: ...

    assert problem_of_call(scores, "(data, tokenizer=None)") is None
    assert problem_of_call(scores, "(data, processor=None)") == "got an unexpected keyword argument 'processor'"
    assert problem_of_call(scores, "(tokenizer, data=None)") == "missing a required argument: 'data'"


# ---- dataclasses --------------------------------------------------------------------------------

REQUIRED: dict[str, Any] = {
    "strategy": "fsdp",
    "rollout_n": 4,
    "name": "vllm",
    "arguments": "{}",
    "path": "model",
    "optim": None,
    "prompt_ids": [1],
    "response_ids": [2],
    "response_mask": [1],
    "metrics": {},
    "token_ids": [1],
    "tool": "torch",
    "tool_config": None,
    "tiled_mlp": {"enabled": False, "num_shards": 4},
    "save_contents": ["model", "optimizer", "extra"],
    "load_contents": ["model", "optimizer", "extra"],
    "backend": "naive",
    "save_path": "profiles",
    "type": "function",
    "id": "call",
    "properties": {},
    "required": [],
    "description": "adds",
    "parameters": {"type": "object", "properties": {}, "required": []},
    "function": {"name": "add", "description": "adds"},
    "collect_fn": list,
    "futures": [],
    "resource_pool_spec": {},
    "mapping": {},
    "forward_micro_batch_size_per_gpu": 1,
}
"""Values of fields that have no default in public classes, or one that must be set."""
OTHERS = {
    "OpenAIFunctionCallSchema": {"arguments": {}},
    "OpenAIFunctionToolCall": {"function": {"name": "add", "arguments": {}}},
    "OpenAIFunctionPropertySchema": {"type": "string"},
    "OpenAIFunctionParametersSchema": {"type": "object"},
}


def values_of(name: str, form: str) -> dict[str, Any]:
    """The public fields with their public defaults; without those that are made by a class of the same module."""
    values: dict[str, Any] = {}
    for field, default in arguments_of(form).items():
        if field in OTHERS.get(name, {}):
            values[field] = OTHERS[name][field]
        elif default is None or default in ("MISSING", "field(default_factory=MISSING)"):
            values[field] = REQUIRED[field]
        elif default in ("field(default_factory=dict)", "field(default_factory=list)"):
            values[field] = {} if "dict" in default else []
        elif not default.lower().startswith("field("):
            values[field] = ast.literal_eval(default)
    return values


def test_public_dataclasses_are_made_with_their_public_fields():
    problems = {}
    classes = list(here("dataclass"))
    for module, name, form in classes:
        try:
            getattr(importlib.import_module(module), name)(**values_of(name, form))
        except (TypeError, ValueError, KeyError) as error:
            problems[f"{module}.{name}{form}"] = repr(error)
    assert problems == {}
    assert len(classes) > 30


def test_what_a_keyword_of_a_public_section_does():
    # rollout_n is required elsewhere, and is rollout.n here.
    assert ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=2).ppo_micro_batch_size_per_gpu == 2
    assert FSDPOptimizerConfig(lr=0.1, warmup_style="cosine").lr_scheduler_type == "cosine"
    engine = FSDPEngineConfig(wrap_policy={"layer_class": "Block", "min_num_params": 0}, use_orig_params=True)
    assert engine.wrap_policy.transformer_layer_cls_to_wrap == ("Block",)
    assert FSDPActorConfig(optim={"lr": 0.5, "warmup_style": "cosine"}).optim.lr_scheduler_type == "cosine"
    for keywords, message in (
        ({"ppo_micro_batch_size": 8}, "ActorConfig.ppo_micro_batch_size=8 counts sequences over all ranks"),
        ({"ppo_mini_batchsize": 8}, "has no 'ppo_mini_batchsize'. Did you mean 'ppo_mini_batch_size'"),
        ({"qat": {"enable": True}}, "quantized weights is not in this version"),
        ({"clip_ratio": -1}, "clip_ratio=-1"),
    ):
        for kind in (ValueError, AssertionError, TypeError):  # what public code catches around such a call
            with pytest.raises(kind, match=re.escape(message)):
                ActorConfig(**keywords)


def test_a_keyword_without_effect_is_told_unless_it_has_its_default(caplog: pytest.LogCaptureFixture):
    RolloutConfig(name="hf", standalone_gpu_memory_utilization=None, server=object())
    assert caplog.messages == []
    config: BaseConfig = RolloutConfig(name="hf", standalone_gpu_memory_utilization=0.8)
    assert caplog.messages == [
        "RolloutConfig.standalone_gpu_memory_utilization=0.8 has no effect: gpu_memory_utilization counts on ranks of "
        "their own too"
    ]
    assert "standalone_gpu_memory_utilization" not in config


def test_a_section_is_checked_by_itself():
    ActorConfig(ppo_mini_batch_size=8).validate(n_gpus=8, train_batch_size=8, model_config={})
    with pytest.raises(AssertionError, match=r"actor.ppo_mini_batch_size[\s\S]*train_batch_size=4"):
        ActorConfig(ppo_mini_batch_size=8).validate(8, 4)
    with pytest.raises(ValueError, match=r"critic.ppo_mini_batch_size"):
        FSDPCriticConfig(ppo_mini_batch_size=8).validate(8, 4)
