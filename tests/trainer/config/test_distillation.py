"""Keys of distillation: teachers have names of the user's own, and all keys below them are checked."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from tests.trainer.config.support import Run, only
from verl.config import DistillationConfig, TeacherInferenceConfig
from verl.testing.models import hollow_model_dir
from verl.trainer.config.load import load_config

MATH, TEACHER = "distillation.teacher_models.math", "distillation.teacher_models.teacher_model"


def test_a_teacher_under_a_name_of_the_users_has_the_defaults_of_the_declared_one(run: Run):
    config = run.load({f"{MATH}.key": "math", "actor_rollout_ref.rollout.temperature": 0.7})
    teacher = config.distillation.teacher_models["math"]
    assert (teacher.key, teacher.model_path) == ("math", None)
    assert (teacher.inference.name, teacher.inference.temperature) == ("native", 0.7)
    assert teacher.inference == config.distillation.teacher_models["teacher_model"].inference
    assert load_config(config.to_dict()) == config
    # A greedy policy is trained at temperature 1, which its teachers follow unless told otherwise.
    greedy = {"actor_rollout_ref.rollout.do_sample": False, "actor_rollout_ref.rollout.n": 1}
    greedy |= {f"{MATH}.key": "math", "actor_rollout_ref.rollout.temperature": 0.7}
    teachers = run.load(greedy | {f"{TEACHER}.inference.temperature": 0.9}).distillation.teacher_models
    assert {name: teacher.inference.temperature for name, teacher in teachers.items()} == {
        "teacher_model": 0.9,
        "math": 1.0,
    }


@pytest.mark.parametrize(
    "key, value, said",
    [
        (f"{MATH}.inference.gpu_memory_utilisation", 0.3, f"did you mean {MATH}.inference.gpu_memory_utilization?"),
        (f"{MATH}.inference.gpu_memory_utilization", 3, "a number > 0 and <= 1"),
        (f"{MATH}.inference.name", "trtllm", "this engine is not in this version"),
        (f"{MATH}.inference", 3, "this is a section"),
    ],
)
def test_keys_below_it_are_checked(run: Run, key: str, value: object, said: str):
    report = only(run.refusal({key: value}, explicit=[key]))
    assert key in report
    assert said in report


SCRIPT = """
    algorithm.adv_estimator=grpo data.train_files=$RUN/train.jsonl data.val_files=$RUN/val.jsonl
    data.train_batch_size=128 actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.model.path=$RUN/model
    actor_rollout_ref.rollout.name=hf actor_rollout_ref.actor.use_dynamic_bsz=True trainer.logger=[console]
    distillation.enabled=True distillation.nnodes=1 distillation.n_gpus_per_node=4
    distillation.distillation_loss.topk=64 distillation.distillation_loss.use_task_rewards=False
    distillation.distillation_loss.loss_max_clamp=10.0 distillation.distillation_loss.log_prob_min_clamp=-10.0
"""
ONE = """
    distillation.teacher_models.teacher_model.model_path=$RUN/model
    distillation.teacher_models.teacher_model.inference.name=hf
    distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=2
    distillation.teacher_models.teacher_model.inference.expert_parallel_size=8
    distillation.teacher_models.teacher_model.inference.gpu_memory_utilization=0.4
    distillation.teacher_models.teacher_model.inference.max_model_len=3073
"""
SEVERAL = " distillation.teacher_key=data_source " + " ".join(
    f"""
    +distillation.teacher_models.{name}.key={name} +distillation.teacher_models.{name}.model_path=$RUN/model
    +distillation.teacher_models.{name}.num_replicas=1 +distillation.teacher_models.{name}.inference.name=hf
    +distillation.teacher_models.{name}.inference.tensor_model_parallel_size=1
    +distillation.teacher_models.{name}.inference.gpu_memory_utilization=0.3
    +distillation.teacher_models.{name}.inference.max_model_len=1537
    """
    for name in ("gsm8k", "geo3k")
)
POLICY_GRADIENT = " distillation.distillation_loss.loss_mode=k1 distillation.distillation_loss.use_policy_gradient=True"
LOSS = " distillation.distillation_loss.loss_mode=forward_kl_topk"


@pytest.mark.parametrize("teachers", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("loss", [POLICY_GRADIENT, LOSS], ids=["policy gradient", "loss"])
def test_settings_of_public_scripts(run: Run, teachers: str, loss: str):
    section = run.script(SCRIPT + teachers + loss).distillation
    assert list(section.teachers) == (["teacher_model"] if teachers is ONE else ["gsm8k", "geo3k"])
    assert section.ranks == 4


MODE = "distillation.distillation_loss.loss_mode"


@pytest.mark.parametrize(
    "changes, said",
    [
        ({f"{TEACHER}.model_path": None}, "this teacher has no model"),
        ({f"{TEACHER}.model_path": "/no/such/folder"}, "there is no such folder"),
        ({f"{MATH}.model_path": "MODEL", f"{MATH}.key": "math"}, "rows must say which of them scores them"),
        ({MODE: "forward_kl_topk", f"{TEACHER}.inference.name": "vllm",
          f"{TEACHER}.inference.engine_kwargs.vllm.python": sys.executable,
          f"{TEACHER}.inference.engine_kwargs.vllm.max_logprobs": 31},
         "max_logprobs=31: distillation.distillation_loss.topk=32 asks for the 32 most likely tokens"),
        ({MODE: "k4"}, "unknown distillation loss 'k4'"),
        ({MODE: "k1"}, "as a loss its gradient has the expectation zero"),
        ({MODE: "jsd", "distillation.nnodes": 1}, "is not sent from ranks of its own to the policy's"),
        ({MODE: "reverse_kl", f"{TEACHER}.inference.name": "openai",
          f"{TEACHER}.inference.base_url": "http://a/v1"}, "gives some log-probs of it"),
        ({f"{TEACHER}.inference.name": "openai"}, "this is no address of one"),
        ({"distillation.nnodes": 1, "trainer.controller": "local", "trainer.n_gpus_per_node": 1},
         "a pool of teachers needs others"),
        ({"distillation.nnodes": 1, "distillation.n_gpus_per_node": 0}, "and a node has none"),
        ({"distillation.alignment": "text", MODE: "jsd_topk"}, "distributions of tokens, which two tokenizers do not"),
        ({"distillation.alignment": "text", "actor_rollout_ref.rollout.multi_turn.enable": True,
          "actor_rollout_ref.rollout.multi_turn.function_tool_path": "MODEL"}, "template of the policy alone"),
        ({"distillation.alignment": "text", "data.truncation": "left"}, "the teacher would read the whole"),
        ({"distillation.alignment": "text", "data.return_raw_chat": False}, "prompts are made of the messages"),
    ],
)  # fmt: skip
def test_refusals(run: Run, changes: dict[str, object], said: str):
    model = str(run.folder / "model")
    given = {"distillation.enabled": True, f"{TEACHER}.model_path": model} | changes
    assert said in run.refusal({key: model if value == "MODEL" else value for key, value in given.items()})


def test_settings_that_nothing_reads_are_told(run: Run, caplog: pytest.LogCaptureFixture):
    loss, own = "distillation.distillation_loss", "distillation.self_distillation"
    taught = {"distillation.enabled": True, f"{TEACHER}.model_path": str(run.folder / "model")}
    unread = {f"{loss}.beta": 0.1, f"{loss}.topk": 8, f"{own}.ema_decay": 0.5, "distillation.teacher_key": "level"}
    run.load(taught | unread)
    for line in (
        "no effect: distillation.teacher_key (one teacher scores all rows)",
        f"no effect: {own}.ema_decay ({own}.enabled=false)",
        f"no effect: {loss}.topk, {loss}.beta ({MODE}=k3)",
    ):
        assert line in caplog.text
    caplog.clear()
    # A single teacher with a key scores the rows that have it; a policy that teaches itself has no passes of ref.
    run.load(
        taught
        | {"distillation.teacher_key": "level", f"{TEACHER}.key": "hard", MODE: "jsd_topk"}
        | {f"{loss}.beta": 0.1, f"{loss}.topk": 8}
    )
    assert "no effect" not in caplog.text
    # Its policy loss reads settings of the actor that the policy loss of the rewards may not read.
    gradient = {MODE: "k1", f"{loss}.use_policy_gradient": True, "actor_rollout_ref.actor.clip_ratio_c": 5.0}
    run.load(taught | gradient | {"actor_rollout_ref.actor.policy_loss.loss_mode": "gpg"})
    assert "no effect" not in caplog.text
    itself = {"distillation.enabled": True, f"{own}.enabled": True, f"{own}.template": "reference"}
    itself["distillation.alignment"] = "text"
    run.load(itself | {"data.return_raw_chat": True, "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1})
    assert "no effect: actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu" in caplog.text
    assert f"no effect: distillation.alignment ({own}.enabled=true)" in caplog.text


def test_sizes_of_an_engine_that_a_teacher_does_not_have_are_told(run: Run, caplog: pytest.LogCaptureFixture):
    settings = {"tensor_model_parallel_size": 4, "expert_parallel_size": 2, "name": "native"}
    changes = {f"{TEACHER}.inference.{key}": value for key, value in settings.items()} | {f"{TEACHER}.num_replicas": 3}
    changes |= {"distillation.enabled": True, f"{TEACHER}.model_path": str(run.folder / "model")}
    config = run.load(changes, explicit=list(changes))
    assert config.distillation.teachers["teacher_model"].inference.tensor_model_parallel_size == 1
    sizes = ", ".join(f"{TEACHER}.inference.{key}" for key in list(settings)[:2])
    assert f"no effect: {sizes} ({TEACHER}.inference.name=native: a forward pass is divided" in caplog.text
    assert f"no effect: {TEACHER}.num_replicas (all ranks of the teachers have engines" in caplog.text


def test_work_on_rewards_is_advised_against_where_only_the_teacher_is_learnt_from(
    run: Run, caplog: pytest.LogCaptureFixture
):
    taught = {"distillation.enabled": True, f"{TEACHER}.model_path": str(run.folder / "model")}
    taught |= {"critic.model.path": str(run.folder / "model"), "critic.ppo_micro_batch_size_per_gpu": 1}
    taught["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"] = 1
    filters = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"}

    def said(changes: dict[str, object], uses_rewards: bool) -> list[bool]:
        caplog.clear()
        run.load(taught | changes | {"distillation.distillation_loss.use_task_rewards": uses_rewards})
        texts = ("scores of the responses of a prompt make no", "without a baseline")
        return [text in caplog.text for text in texts]

    assert said(filters | {"algorithm.adv_estimator": "gae"}, True) == [False, False]
    assert said(filters, False) == [True, False]
    assert said({"actor_rollout_ref.rollout.n": 1}, True) == [False, True]
    assert said({"actor_rollout_ref.rollout.n": 1}, False) == [False, False]
    alone = taught | {"distillation.distillation_loss.use_task_rewards": False}
    for key, value in (("algorithm.adv_estimator", "gae"), ("critic.enable", "true")):
        message = only(run.refusal(alone | {key: value}))
        assert f"{key}={value}: distillation.distillation_loss.use_task_rewards=false" in message


@pytest.mark.parametrize(("of_teacher", "is_refused"), [("qwen3", True), ("qwen2_5_vl", True), ("qwen3_vl", False)])
def test_a_policy_with_images_has_a_teacher_that_reads_them_alike(run: Run, of_teacher: str, is_refused: bool):
    policy, teacher = (hollow_model_dir(run.folder / name) for name in ("policy", "teacher"))
    for path, kind in ((policy, "qwen3_vl"), (teacher, of_teacher)):
        (Path(path) / "config.json").write_text(json.dumps({"model_type": kind}))
    changes = {"actor_rollout_ref.model.path": policy, "distillation.enabled": True, f"{TEACHER}.model_path": teacher}
    changes["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"] = 1
    if is_refused:
        assert f"{TEACHER}.model_path={teacher}: it holds a {of_teacher}, and" in only(run.refusal(changes))
    else:
        run.load(changes)


def test_the_declared_teacher_counts_only_if_it_has_a_model():
    keyed = {"math": {"key": "math", "model_path": "a"}}
    assert list(DistillationConfig(teacher_models=keyed).teachers) == ["math"]
    assert list(DistillationConfig(teacher_models={**keyed, "teacher_model": {}}).teachers) == ["math"]
    both = {**keyed, "teacher_model": {"model_path": "b"}}
    assert list(DistillationConfig(teacher_models=both).teachers) == ["math", "teacher_model"]
    assert list(DistillationConfig().teachers) == ["teacher_model"]


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"name": "openai"}, "base_url=null: name=openai asks an endpoint"),
        ({"name": "openai", "base_url": "http://a/v1", "temperature": 0.7}, "temperature=0.7: an endpoint gives the"),
        (
            {"name": "vllm", "max_model_len": 1024},
            "max_model_len=1024: .* have 1024 tokens, and an engine draws one more",
        ),
        ({"name": "vllm", "engine_kwargs": {"vllm": {"python": "/no/python"}}}, "vllm.python=.*there is no such file"),
    ],
)
def test_an_engine_or_endpoint_that_cannot_be_asked_is_refused(settings: dict[str, object], said: str):
    teachers = {"teacher_model": {"model_path": "a", "inference": settings}}
    found = [str(one) for one in DistillationConfig(enabled=True, teacher_models=teachers).problems("distillation")]
    assert [one for one in found if re.search(f"teacher_model.inference.*{said}", one)], found


def test_engines_on_the_same_ranks_are_divided_alike():
    python = {"vllm": {"python": sys.executable}}
    teachers = {
        name: {
            "model_path": "a",
            "key": name,
            "inference": {"name": "vllm", "engine_kwargs": python, "tensor_model_parallel_size": size},
        }
        for name, size in (("math", 1), ("code", 2), ("text", 1))
    }
    (found,) = DistillationConfig(enabled=True, teacher_models=teachers).problems("distillation")
    assert found.key == "distillation.teacher_models.code.inference.tensor_model_parallel_size"
    assert (found.value, found.allowed) == (2, "1")


def test_the_settings_of_a_teachers_engine():
    """Room for the token that it draws, and for the most likely tokens, unless the user says otherwise."""
    inference = TeacherInferenceConfig(name="vllm", temperature=0, prompt_length=10, response_length=20)
    rollout = inference.rollout(topk=64)
    assert (rollout.max_model_len, rollout.temperature, rollout.free_cache_engine) == (31, 1.0, True)
    assert rollout.engine_kwargs["vllm"] == {"max_logprobs": 64}
    own = {"vllm": {"max_logprobs": 99, "block_size": 16}}
    kept = dataclasses.replace(inference, engine_kwargs=own, max_model_len=40).rollout(topk=5, stays_awake=True)
    assert (kept.max_model_len, kept.engine_kwargs, kept.free_cache_engine) == (40, own, False)
