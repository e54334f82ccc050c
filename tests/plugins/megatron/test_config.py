"""Keys of strategy=megatron: what is refused, what follows what, and how batches are shared."""

import importlib.util
import itertools
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.trainer.config.conftest import Run
from verl.config import DPOConfig, McoreEngineConfig, RMConfig, SFTConfig
from verl.config.megatron import CHECKPOINT, with_own_files
from verl.config.megatron_flags import _REFUSED, IDLE, PASSED, PIPELINE_LAYOUT, RECOMPUTE, ROUTERS
from verl.config.pipeline_layout import division_problem, layers_of_chunks
from verl.testing.models import hollow_model_dir, tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.trainer.config.megatron_lora import settings_of
from verl.utils.model_facts.megatron_fit import misfits

ACTOR = "actor_rollout_ref.actor"
TWO = {
    f"{ACTOR}.strategy": "megatron",
    "critic.strategy": "megatron",
    f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
    "trainer.n_gpus_per_node": 4,
}
installed = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


@installed
def test_other_models_follow_the_actors_sizes(run: Run):
    config = run.load(TWO)
    roles = config.actor_rollout_ref
    assert [part.shared_by for part in (roles.actor, roles.ref, config.critic)] == [2, 2, 2]
    assert roles.ref.placement is roles.ref.megatron
    assert roles.ref.megatron.forward_only
    stages = {f"{ACTOR}.megatron.{kind}pipeline_model_parallel_size": 2 for kind in ("", "virtual_")}
    config = run.load(TWO | stages)
    models = (config.actor_rollout_ref.ref.megatron, config.critic.megatron)
    assert [model.virtual_pipeline_model_parallel_size for model in models] == [2, 2]
    # as text, which a variable of the environment gives; 8 rows of a pass of all 4 ranks, in two copies
    text = {f"{ACTOR}.megatron.tensor_model_parallel_size": "2", f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}
    config = run.load(TWO | text | {f"{ACTOR}.ppo_micro_batch_size": 8})
    roles = config.actor_rollout_ref
    assert [part.shared_by for part in (roles.actor, roles.ref, config.critic)] == [2, 2, 2]
    assert roles.actor.ppo_micro_batch_size_per_gpu == 4


@installed
def test_sizes_of_passes_are_for_the_ranks_that_share_a_copy(run: Run):
    """8 rows of a pass of all 4 ranks, in two copies: each copy computes 4 of them, on both of its ranks."""
    sizes = {f"{ACTOR}.ppo_micro_batch_size": 8, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}
    assert run.load(TWO | sizes).actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4


@installed
def test_a_megatron_script_composes_and_loads(run: Run):
    config = load_config(compose([f"{key}={value}" for key, value in run.ppo.items()], "ppo_megatron_trainer"))
    assert (config.actor_rollout_ref.ref.strategy, config.critic.strategy) == ("megatron", "megatron")


@installed
def test_sizes_must_divide_the_ranks_and_may_differ(run: Run):
    message = run.refusal(
        TWO | {"trainer.n_gpus_per_node": 3, "data.train_batch_size": 12, f"{ACTOR}.ppo_mini_batch_size": 12}
    )
    sizes = "{tensor_model_parallel_size: 2}"
    assert f"{ACTOR}.megatron={sizes}: 2 ranks share the model, which does not divide 3 ranks" in message
    config = run.load(TWO | {"critic.megatron.pipeline_model_parallel_size": 2})
    roles = config.actor_rollout_ref
    assert [one.shared_by for one in (roles.actor, roles.ref, config.critic)] == [2, 2, 4]


def test_models_of_one_path_have_problems_of_their_own(run: Run, tmp_path):
    mixture = tiny_model_dir(tmp_path / "mixture", "qwen3_moe")
    both = {"actor_rollout_ref.model.path": mixture, "critic.model.path": mixture, "algorithm.adv_estimator": "gae"}
    message = run.refusal(TWO | both | {"critic.megatron.sequence_parallel": False})
    assert "critic.megatron.sequence_parallel=false: every one of the ranks" in message
    assert f"{ACTOR}.megatron.sequence_parallel" not in message
    flags = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0, "moe_z_loss_coeff": 0.1}
    message = run.refusal(TWO | both | {"critic.megatron.override_transformer_config": flags})
    assert "transformer_config.moe_z_loss_coeff=0.1: routers of a model with values or scores have no such" in message
    assert "moe_aux_loss_coeff" not in message
    of_actor = {f"{ACTOR}.megatron.override_transformer_config": flags, "algorithm.adv_estimator": "grpo"}
    config = run.load(TWO | both | of_actor)
    assert config.actor_rollout_ref.actor.megatron.override_transformer_config == flags
    # The frozen reference comes first, and may have dropout.
    noisy = {
        f"{part}.override_config": {"attention_dropout": 0.1} for part in ("actor_rollout_ref.model", "critic.model")
    }
    strategies = {"actor_rollout_ref.ref.strategy": "megatron", "critic.strategy": "megatron"}
    message = run.refusal(both | noisy | strategies | {f"{ACTOR}.use_kl_loss": True})
    assert "critic.strategy=megatron: it trains without noise" in message
    assert "ref.strategy=megatron: it trains" not in message


def test_sizes_must_divide_the_model_before_it_loads(run: Run, tmp_path):
    wide = {"num_hidden_layers": 4, "intermediate_size": 90}  # with 4 heads and 2 key/value heads
    model = tiny_model_dir(tmp_path / "four", **wide)
    sizes = {"actor_rollout_ref.model.path": model, f"{ACTOR}.strategy": "megatron", "trainer.n_gpus_per_node": 4}
    four = {f"{ACTOR}.megatron.tensor_model_parallel_size": 4}
    message = run.refusal(sizes | four)
    assert "it does not divide the model's 2 key/value heads" in message
    assert "it does not divide the model's 90 feed-forward columns" in message
    context = {f"{ACTOR}.megatron.{key}_parallel_size": n for key, n in (("context", 2), ("tensor_model", 4))}
    message = run.refusal(sizes | context | {"trainer.n_gpus_per_node": 8})
    assert "tensor_model_parallel_size × context_parallel_size=8 does not divide the model's 4 heads" in message
    pieces = {f"{ACTOR}.megatron.{kind}pipeline_model_parallel_size": n for kind, n in (("", 2), ("virtual_", 4))}
    message = run.refusal(sizes | pieces)
    assert "virtual_pipeline_model_parallel_size=8 does not divide the model's 4 layers" in message


def test_experts_and_their_columns_must_divide_before_a_model_loads(run: Run, tmp_path):
    mixture = tiny_model_dir(tmp_path / "mixture", "qwen3_moe", num_experts=6, moe_intermediate_size=30)
    base = {"actor_rollout_ref.model.path": mixture, f"{ACTOR}.strategy": "megatron", "trainer.n_gpus_per_node": 4}
    megatron = f"{ACTOR}.megatron"

    def refused(**sizes):
        return run.refusal(base | {f"{megatron}.{key}": value for key, value in sizes.items()})

    assert "it does not divide the model's 6 experts" in refused(expert_model_parallel_size=4)
    two = {"tensor_model_parallel_size": 2}
    assert f"{megatron}.sequence_parallel=false: every one of the ranks" in refused(sequence_parallel=False, **two)
    assert "it does not divide the model's 30 columns of each expert" in refused(expert_tensor_parallel_size=4, **two)
    message = refused(tensor_model_parallel_size=4)
    assert (
        f"{megatron}.tensor_model_parallel_size=4: it does not divide the model's 30 columns of each expert" in message
    )
    assert "feed-forward" not in message  # no layer is dense


@installed
def test_experts_must_be_there_and_their_ranks_divide_all(run: Run, tmp_path):
    experts = {f"{ACTOR}.megatron.expert_model_parallel_size": 2}
    assert "no model of this run has experts (qwen3)" in run.refusal(
        TWO | experts | {"actor_rollout_ref.model.path": tiny_model_dir(tmp_path / "dense"), "critic.strategy": "fsdp"}
    )
    four = TWO | {f"{ACTOR}.megatron.expert_model_parallel_size": 4}
    assert "8 ranks share the experts, which does not divide 4 ranks" in run.refusal(four)


def test_what_is_refused(run: Run):
    for key, more in (("actor_rollout_ref.model", {}), ("critic.model", {"algorithm.adv_estimator": "gae"})):
        message = run.refusal(TWO | {f"{key}.enable_activation_offload": True} | more)
        assert f"{key}.enable_activation_offload=true: activations stay on the device under megatron" in message
    assert run.refusal(TWO | {f"{ACTOR}.megatron.tensor_model_parallel_size": 0}).count("parallel_size=0") == 1
    message = run.refusal(TWO | {f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": 2})
    assert message.count("there is no pipeline to interleave with pipeline_model_parallel_size=1") == 1
    override = {"recompute_granularity": "full", "num_layers": 3}
    message = run.refusal({f"{ACTOR}.megatron.override_transformer_config": override})
    assert "num_layers=3: it changes the model, which is built as its Hugging Face config says" in message


@installed
def test_checkpoints_of_megatron_core_are_there_and_the_reference_has_the_actors(run: Run, tmp_path):
    keys = {name: f"{ACTOR}.megatron.{name}" for name in CHECKPOINT}
    on = TWO | {keys["use_dist_checkpointing"]: True}
    message = run.refusal(on)
    assert f"{keys['dist_checkpointing_path']}=null: use_dist_checkpointing reads the weights from it" in message
    message = run.refusal(on | {keys["dist_checkpointing_path"]: str(tmp_path)})
    assert f"{keys['dist_checkpointing_path']}={tmp_path}: the folder is no torch_dist checkpoint" in message
    (tmp_path / ".metadata").touch()
    there = on | {keys["dist_checkpointing_path"]: str(tmp_path), keys["dist_checkpointing_prefix"]: "model."}
    roles = run.load(there | {"critic.strategy": "fsdp2"}).actor_rollout_ref
    assert [roles.ref.megatron[name] for name in CHECKPOINT] == [True, str(tmp_path), "model."]
    assert with_own_files(roles.ref.megatron).use_dist_checkpointing is False
    of_reference = {f"actor_rollout_ref.ref.megatron.{name}": there[key] for name, key in keys.items()}
    assert run.load(there | of_reference).actor_rollout_ref.ref.megatron == roles.ref.megatron
    assert not run.load(there).critic.megatron.use_dist_checkpointing
    model = hollow_model_dir(tmp_path / "images")
    (tmp_path / "images" / "config.json").write_text('{"model_type": "qwen3_vl"}')
    message = run.refusal(there | {"actor_rollout_ref.model.path": model})
    assert "use_dist_checkpointing=true: weights of models with images are read from model.path" in message
    heads = {f"actor_rollout_ref.model.mtp.{key}": True for key in ("enable", "enable_train")}
    message = run.refusal(there | heads)
    assert "use_dist_checkpointing=true: actor_rollout_ref.model.mtp trains heads" in message


def test_without_megatron_core_a_run_says_how_to_install_it(run: Run, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "megatron" else found(name))
    message = run.refusal({"actor_rollout_ref.actor.strategy": "megatron"})
    assert "actor_rollout_ref.actor.strategy=megatron: megatron-core is not installed" in message
    assert re.search(r"remedy: pip install .*megatron.* on every node, or use strategy=fsdp2", message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"recompute_granularity": "all"}, "recompute_granularity=all: there is no such way"),
        ({"recompute_num_layers": 4}, "recompute_num_layers=4: recompute_granularity, which says whether"),
        ({"recompute_method": "uniform"}, "recompute_method=uniform: recompute_granularity, which"),
        ({"recompute_modules": ["mlp"]}, "recompute_modules=[mlp]: recompute_granularity, which"),
        ({"recompute_granularity": "full", "recompute_num_layers": 1}, "recompute_method=null"),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": True},
            "recompute_num_layers=true",
        ),
        ({"recompute_granularity": "full", "recompute_modules": ["mlp"]}, "recompute_modules=[mlp]: recompute_gran"),
        ({"recompute_granularity": "selective", "recompute_method": "block"}, "recompute_method=block: recompute_gran"),
        ({"recompute_granularity": "selective", "recompute_modules": "mlp"}, "recompute_modules=mlp: it is a list"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, "recompute_num_layers=null"),
        ({"recompute_granularity": "selective", "recompute_num_layers": 1}, "recompute_num_layers=1"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
            "no layernorm to recompute",
        ),
    ],
)
def test_recomputation_that_megatron_lacks_is_refused(run: Run, override, message):
    assert message in run.refusal({f"{ACTOR}.megatron.override_transformer_config": override})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"moe_permute_fusoin": True}, "no such field.*remedy: did you mean moe_permute_fusion?"),
        ({"moe_router_dtype": "bf16"}, "moe_router_dtype=bf16: .*allowed: fp32, fp64, null"),
        ({"moe_router_dtype": True}, "moe_router_dtype=true"),
        ({"microbatch_group_size_per_vp_stage": 0}, "allowed: a whole number from 1, null"),
        ({"moe_enable_deepep": True}, "set a.override_transformer_config.moe_token_dispatcher_type=flex"),
        ({"moe_z_loss_coeff": -1}, "moe_z_loss_coeff=-1: .*allowed: a number from 0, null"),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, "the balance loss is that of whole mini-batches"),
        ({"fp8_param": True}, "fp8_param=true: it needs the layers of TransformerEngine"),
        ({"mtp_num_layers": 1}, "the model's config says how many heads .*set actor_rollout_ref.model.mtp"),
        ({"num_layers_in_first_pipeline_stage": "3"}, "it is a number of layers"),
        ({"account_for_loss_in_pipeline_split": 1}, "allowed: true, false, null"),
        (
            {"num_layers_in_first_pipeline_stage": 3, "account_for_loss_in_pipeline_split": True},
            "account_for_loss.*and so does num_layers_in_first_pipeline_stage",
        ),
        ({"pipeline_model_parallel_layout": "Etx|tL"}, "made of E .embedding., t"),
        ({"pipeline_model_parallel_layout": [["embedding"], ["layer"]]}, "made of E .embedding., t"),
        ({"pipeline_model_parallel_layout": "Etm|tL"}, r"heads of multi-token prediction \(m\) are on the last stage"),
        ({"pipeline_model_parallel_layout": "tE|tL"}, "has one E, which is first"),
        ({"pipeline_model_parallel_layout": "Et|t|tL"}, "3 stages, which .*=2 does not divide"),
        (
            {"pipeline_model_parallel_layout": "Et|t|t|tL", "microbatch_group_size_per_vp_stage": 1},
            "per_vp_stage=1: .* 2 stages .*allowed: 2 or more",
        ),
    ],
)
def test_entries_of_megatron_cores_config_that_are_refused(override, message):
    engine = McoreEngineConfig(pipeline_model_parallel_size=2, override_transformer_config=override)
    problems = [*engine.problems("a"), *engine.pipeline_problems("a")]
    assert len(problems) == 1
    assert re.search(message, str(problems[0]), re.DOTALL)


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
FORM = "pipeline_model_parallel_layout"


@pytest.mark.parametrize(
    ("override", "stages", "virtual", "layers", "chunks"),
    [
        ({}, 2, None, 4, [2, 2]),
        ({FIRST: 3}, 2, None, 4, [3, 1]),
        ({LAST: 5}, 3, None, 11, [3, 3, 5]),
        ({FIRST: 4, LAST: 2}, 3, 2, 10, [2, 2, 1, 2, 2, 1]),
        ({FIRST: 3, LAST: 1}, 2, None, 4, [3, 1]),
        ({EMBEDDING: True, LOSS: True}, 2, None, 4, [2, 2]),
        ({EMBEDDING: True}, 2, None, 5, [2, 3]),
        ({LOSS: True}, 2, 2, 7, [2, 2, 2, 1]),
        ({FORM: "Et*2|(t|)*2,L"}, 2, None, 4, [2, 1, 1, 0]),
        ({FORM: [["embedding", "decoder"], ["decoder", "decoder", "loss"]]}, 2, None, 3, [1, 2]),
    ],
)
def test_layers_of_model_chunks(override, stages, virtual, layers, chunks):
    assert layers_of_chunks(override, stages, virtual, layers) == chunks
    assert division_problem(override, stages, virtual, layers, "a") is None


@pytest.mark.parametrize(
    ("override", "stages", "virtual", "layers", "message"),
    [
        ({FIRST: 4}, 3, None, 7, "stage=4: the model's 7 layers.*allowed: 1, 3, 5$"),
        ({LAST: 4}, 2, None, 4, "allowed: 1, 2, 3$"),
        ({FIRST: 3}, 2, 2, 8, "with 2 model chunks on each.*allowed: 2, 4, 6$"),
        ({LOSS: True}, 4, None, 8, "parallel_size=4: .*8 layers, its loss counted as one each.*allowed: 1, 3, 9$"),
        ({FORM: "Ett|tL"}, 2, None, 4, "it has 3 layers .t., and the model has 4"),
        ({}, 2, None, 5, "allowed: divisors of 5\nremedy: or set a.override_transformer_config.num_layers_in_first"),
    ],
)
def test_layers_that_do_not_divide_are_refused_with_the_sizes_that_fit(override, stages, virtual, layers, message):
    assert re.search(message, str(division_problem(override, stages, virtual, layers, "a")), re.DOTALL)


@installed
def test_every_field_of_megatron_cores_config_is_known():
    """Each is passed on, has no effect, or is refused with its reason."""
    from verl.plugins.megatron.library import TransformerConfig

    fields = set(TransformerConfig.__dataclass_fields__)
    lists = [RECOMPUTE, PIPELINE_LAYOUT, PASSED, ROUTERS, _REFUSED, IDLE]
    assert sum(map(len, lists)) == len({*itertools.chain(*lists)})
    assert {*RECOMPUTE, *PIPELINE_LAYOUT, *PASSED, *ROUTERS, *_REFUSED} <= fields
    speed = re.compile("fus|overlap|comm|offload|fp8|moe|pipeline|recompute|router|fp4|mtp|attention|num_|size")
    internal = {"hierarchical_context_parallel_sizes", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"}
    internal |= {"_cpu_offloading_context", "inference_fuse_tp_communication"}
    unknown = fields - {*itertools.chain(*lists)} - internal
    assert {name for name in unknown if speed.search(name)} == set()


@installed
def test_the_other_models_have_the_layers_of_stages_of_the_actor(run: Run):
    section = f"{ACTOR}.megatron.override_transformer_config"
    stages = {f"{ACTOR}.megatron.tensor_model_parallel_size": 1, f"{ACTOR}.megatron.pipeline_model_parallel_size": 2}
    flags = {f"{section}.{FORM}": "Et||t|L", f"{section}.moe_permute_fusion": True}
    hub = {"actor_rollout_ref.model.path": "org/model", "critic.model.path": "org/value"}  # of any number of layers
    config = run.load(
        TWO | hub | stages | flags | {"critic.megatron.override_transformer_config": {"bias_dropout_fusion": True}}
    )
    roles = config.actor_rollout_ref
    assert roles.ref.megatron.override_transformer_config == {FORM: "Et||t|L", "moe_permute_fusion": True}
    assert config.critic.megatron.override_transformer_config == {FORM: "Et||t|L", "bias_dropout_fusion": True}
    assert config.critic.megatron.model_chunks == 2


def test_parts_beside_no_recomputation_at_all_are_taken_as_published_configurations_have_them(run: Run):
    override = {"recompute_granularity": None, "recompute_modules": ["core_attn"], "recompute_num_layers": None}
    config = run.load(TWO | {f"{ACTOR}.megatron.override_transformer_config": override})
    assert config.actor_rollout_ref.actor.megatron.override_transformer_config == override


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        ("qwen3", {"attention_bias": True}, "it cannot build this qwen3, whose config has attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("qwen2", {"model_type": "mimo"}, "as MiMo is Qwen2 with heads of multi-token prediction"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "(dynamic)"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "scale attention (yarn"),
    ],
)
def test_models_that_megatron_cannot_build_are_refused_before_they_load(run: Run, tmp_path, family, entries, message):
    folder = Path(tiny_model_dir(tmp_path / "model", family))
    fields = json.loads((folder / "config.json").read_text())
    if "rope_scaling" in entries:  # as older files name it
        del fields["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(fields | entries))
    settings = {f"{ACTOR}.strategy": "megatron", "actor_rollout_ref.model.path": str(folder)}
    assert message in run.refusal(settings)


def test_what_changes_nothing_is_built(tmp_path):
    fields = json.loads((Path(tiny_model_dir(tmp_path / "model", "llama")) / "config.json").read_text())

    def told(**entries):
        return [problem.cause for problem in misfits(fields | entries, McoreEngineConfig(), "sizes", "strategy")]

    assert told(attention_bias=None, mlp_bias=None) == []
    # 0.1 · m · ln 4 + 1 over the same, of m = mscale and m = mscale_all_dim
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0}
    assert told(rope_parameters=yarn | {"mscale_all_dim": 1.0}) == []
    assert len(told(rope_parameters=yarn | {"mscale_all_dim": 0.5})) == 1
    assert len(told(rope_parameters=yarn)) == 1
    assert told(rope_parameters=yarn | {"attention_factor": 1.0}) == []
    assert len(told(rope_parameters=yarn | {"mscale_all_dim": 1.0, "attention_factor": 2.0})) == 1
    # Text is no size; Transformers refuses it.
    assert told(num_hidden_layers="4") == []


def test_the_decoder_of_a_model_with_images_is_what_is_divided():
    layout = McoreEngineConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=2)
    vision = {"deepstack_visual_indexes": [0, 1], "num_heads": 3}
    text = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 16}
    fields = {"model_type": "qwen3_vl", "vision_config": vision, "text_config": text | {"attention_dropout": 0.5}}
    assert {problem.cause for problem in misfits(fields, layout, "sizes", "strategy")} == {
        "it trains without noise, and the config has attention_dropout=0.5",
        "it does not divide the model's 2 key/value heads",
        "it does not divide the model's 3 layers",
        "the first 2 layers take features of images and must be on the first stage, which has 1 of the model's 3",
    }
    # Qwen2.5-VL's older files name the decoder's sizes beside the tower's section.
    older = {"model_type": "qwen2_5_vl", "vision_config": {"depth": 32}, **text, "num_hidden_layers": 4}
    assert len(list(misfits(older, layout, "sizes", "strategy"))) == 1


def test_recurrent_layers_read_whole_sequences():
    fields = {"model_type": "qwen3_next", "linear_num_key_heads": 2, "num_attention_heads": 8}
    layout = McoreEngineConfig(
        tensor_model_parallel_size=4,
        context_parallel_size=2,
        use_dist_checkpointing=True,
        dist_checkpointing_path="folder",
    )
    assert [str(problem).split(":")[0] for problem in misfits(fields, layout, "sizes", "strategy")] == [
        "sizes.context_parallel_size=2",
        "sizes.use_dist_checkpointing=true",
        "sizes.tensor_model_parallel_size=4",
    ]


def test_features_of_images_reach_layers_of_the_first_stage_alone():
    text = {"num_attention_heads": 8, "num_hidden_layers": 4}
    fields = {"model_type": "qwen3_vl", "vision_config": {"deepstack_visual_indexes": [0, 1]}, "text_config": text}

    def causes(override):
        layout = McoreEngineConfig(pipeline_model_parallel_size=2, override_transformer_config=override)
        return [problem.cause for problem in misfits(fields, layout, "sizes", "strategy")]

    assert causes({}) == causes({FIRST: 3}) == causes({FORM: "Ett|t|tL|"}) == []
    for uneven in ({FIRST: 1}, {EMBEDDING: True, LAST: 3}, {FORM: "Et|t|t|tL"}):
        (cause,) = causes(uneven)
        assert cause.endswith("on the first stage, which has 1 of the model's 4")


@installed
def test_a_layout_is_handed_on_as_megatron_core_reads_it():
    from verl.plugins.megatron.flags import transformer_fields
    from verl.plugins.megatron.groups import Layout

    for layout in ("Et*2 | tL", [["embedding", "decoder", "decoder"], ["Decoder", "loss"]]):
        engine = McoreEngineConfig(pipeline_model_parallel_size=2, override_transformer_config={FORM: layout})
        assert transformer_fields(engine, Layout.from_config(engine), torch.device("cpu"), False) == {FORM: "Ett|tL"}
    alone = McoreEngineConfig(override_transformer_config={FORM: "Ett|tL"})
    (problem,) = alone.pipeline_problems("a")
    assert problem.cause == "it has 2 stages, and pipeline_model_parallel_size=1 is no pipeline"


def test_the_model_is_looked_at_with_its_override_config(run: Run, tmp_path):
    model = tiny_model_dir(tmp_path / "dense")  # with 2 key/value heads
    changes = {"attention_dropout": 0.1, "num_key_value_heads": 4}
    settings = {f"{ACTOR}.strategy": "megatron", "actor_rollout_ref.model.path": model, "trainer.n_gpus_per_node": 4}
    settings |= {f"{ACTOR}.megatron.tensor_model_parallel_size": 4}
    message = run.refusal(settings | {"actor_rollout_ref.model.override_config": changes})
    assert "attention_dropout=0.1" in message
    assert "key/value heads" not in message


def test_models_that_have_no_megatron_are_refused(run: Run, tmp_path):
    gemma = tiny_model_dir(tmp_path / "gemma", "gemma")
    message = run.refusal({f"{ACTOR}.strategy": "megatron", "actor_rollout_ref.model.path": gemma})
    assert "it has no gemma models" in message
    for root, key in ((SFTConfig, "model.path"), (RMConfig, "model.path"), (DPOConfig, "ref.path")):
        message = run.refusal({"engine.strategy": "megatron", key: gemma}, root)
        assert "it has no gemma models" in message
        assert "engine.strategy=megatron" in message


@installed
def test_older_sizes_of_supervised_passes_are_for_the_ranks_that_share_a_copy(run: Run):
    """8 rows of a pass of all 4 ranks, in two copies."""
    megatron = {"engine.strategy": "megatron", "megatron.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 4}
    sizes = {"data.micro_batch_size": 8, "data.use_dynamic_bsz": False}
    assert run.load(megatron | sizes, SFTConfig).data.micro_batch_size_per_gpu == 4


@installed
@pytest.mark.parametrize("root", [SFTConfig, RMConfig, DPOConfig])
def test_supervised_runs_have_the_same_rules(run: Run, caplog, root):
    megatron = {"engine.strategy": "megatron", "megatron.tensor_model_parallel_size": 2, "trainer.n_gpus_per_node": 4}
    config = run.load(megatron | {"engine.fsdp_size": 2}, root)
    assert config.placement is config.megatron
    assert config.shared_by == 2
    assert "no effect: engine.fsdp_size (engine.strategy=megatron)" in caplog.text
    for change, expected in (
        ({"trainer.n_gpus_per_node": 3}, "megatron.*2 ranks share the model, which does not divide 3 ranks"),
        ({"engine.ulysses_sequence_parallel_size": 2}, "1, and megatron.context_parallel_size"),
        (
            {"model.lora_rank": 4, "model.lora.use_dora": True},
            "model.lora.use_dora=true: strategy=megatron has no DoRA",
        ),
    ):
        assert re.search(expected, run.refusal(megatron | change, root), re.DOTALL)


@installed
def test_lora_has_megatrons_names_too(run: Run):
    model, lora = "actor_rollout_ref.model", "actor_rollout_ref.model.lora"
    adapted = run.load(TWO | {f"{lora}.rank": 4, f"{lora}.merge": True, f"{lora}.lora_A_init_method": "kaiming"})
    policy = adapted.actor_rollout_ref.model
    assert (policy.lora_rank, policy.lora_alpha, policy.exclude_modules) == (4, 32, None)
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert policy.target_modules == every
    chosen = {f"{lora}.rank": 4, f"{lora}.alpha": 8, f"{lora}.target_modules": ["linear_qkv", "linear_fc2"]}
    policy = run.load(TWO | chosen | {f"{lora}.exclude_modules": ["linear_k"]}).actor_rollout_ref.model
    assert (policy.lora_alpha, policy.exclude_modules) == (8, ("k_proj",))
    assert policy.target_modules == ("q_proj", "k_proj", "v_proj", "down_proj")
    assert run.load({f"{lora}.alpha": 32, f"{lora}.merge": False}).actor_rollout_ref.model.lora_alpha == 16
    for change, expected in (
        ({f"{model}.lora_rank": 8}, "this is another spelling of actor_rollout_ref.model.lora_rank"),
        ({f"{lora}.dropout": 0.1}, "log-probs must not be random"),
        ({f"{lora}.lora_B_init_method": "xavier"}, "B begins at 0"),
        ({f"{lora}.target_modules": ["*.layers.0.*.linear_qkv"]}, "by a regular expression of Transformers' names"),
        ({f"{lora}.use_dora": True}, "strategy=megatron has no DoRA"),
    ):
        assert expected in run.refusal(TWO | {f"{lora}.rank": 4} | change)


@installed
def test_projections_to_latent_vectors_have_no_adapters(run: Run, tmp_path):
    path = tiny_model_dir(tmp_path / "latent", "deepseek_v3")
    megatron = {"engine.strategy": "megatron", "trainer.n_gpus_per_node": 1}
    megatron |= {"model.path": path, "model.lora_rank": 4}
    message = run.refusal(megatron, SFTConfig)
    assert (
        "model.target_modules=all-linear: strategy=megatron has no adapters of kv_a_proj_with_mqa, q_a_proj" in message
    )
    remedy = {"model.exclude_modules": ["kv_a_proj_with_mqa", "q_a_proj"]}
    for other in (remedy, {"model.target_modules": ["q_b_proj", "o_proj"]}):
        run.load(megatron | other, SFTConfig)


def test_megatrons_names_of_layers_of_a_mixture_are_those_of_its_experts(tmp_path):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(experts))
    settings, problems = settings_of("model", str(tmp_path), {"rank": 4})
    assert not problems
    assert settings["model.target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert settings["model.lora.target_parameters"] == ["gate_up_proj", "down_proj"]
    _, problems = settings_of("model", str(tmp_path), {"rank": 4, "target_modules": ["linear_fc1"]})
    assert "no layer of attention gets adapters" in str(problems[0])
    # Shared experts and layers without experts have them too.
    for more in ({"shared_expert_intermediate_size": 8}, {"mlp_only_layers": [0]}):
        (tmp_path / "config.json").write_text(json.dumps(experts | more))
        settings, _ = settings_of("model", str(tmp_path), {"rank": 4, "target_modules": ["linear_proj", "linear_fc1"]})
        assert settings["model.target_modules"] == ["o_proj", "gate_proj", "up_proj"]
        assert settings["model.lora.target_parameters"] == ["gate_up_proj"]


def test_megatrons_names_of_latent_attention(tmp_path):
    sizes = {"model_type": "deepseek_v3", "kv_lora_rank": 8, "q_lora_rank": 16}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    names = ["linear_q_up_proj", "linear_kv_up_proj", "linear_proj"]
    settings, problems = settings_of("model", str(tmp_path), {"rank": 4, "target_modules": names})
    assert not problems
    assert settings["model.target_modules"] == ["q_b_proj", "kv_b_proj", "o_proj"]
    _, problems = settings_of("model", str(tmp_path), {"rank": 4})  # linear_qkv by default
    assert [problem.value for problem in problems] == ["linear_qkv"]
    assert "deepseek_v3 has latent attention, without this layer" in str(problems[0])
