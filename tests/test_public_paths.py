"""Every public path that users' code imports exists, with the signature that they call."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
from pathlib import Path

import pytest

import verl
from docs.generate.stubs import stubs
from verl.compat.absent_names import ABSENT, why_absent
from verl.compat.import_hooks import MOVED, load
from verl.compat.reexports import REEXPORTS
from verl.workers.rollout.hf_rollout import HFRollout

NAMES = {
    "verl": ["DataProto", "__version__"],
    "verl.protocol": [
        "DataProto",
        "DataProtoItem",
        "DataProtoFuture",
        "DataProtoConfig",
        "pad_dataproto_to_divisor",
        "unpad_dataproto",
        "union_tensor_dict",
        "union_numpy_dict",
        "list_of_dict_to_dict_of_list",
        "fold_batch_dim",
        "unfold_batch_dim",
        "collate_fn",
        "serialize_single_tensor",
        "deserialize_single_tensor",
        "serialize_tensordict",
        "deserialize_tensordict",
        "all_gather_data_proto",
    ],
    "verl.single_controller.base": ["Worker", "WorkerGroup", "ResourcePool", "ClassWithInitArgs"],
    "verl.single_controller.base.decorator": [
        "register",
        "Dispatch",
        "Execute",
        "make_nd_compute_dataproto_dispatch_fn",
        "register_dispatch_mode",
        "update_dispatch_mode",
        "DISPATCH_MODE_FN_REGISTRY",
        "get_predefined_dispatch_fn",
        "collect_all_to_all",
    ],
    "verl.single_controller.ray": [
        "RayWorkerGroup",
        "RayResourcePool",
        "RayClassWithInitArgs",
        "ResourcePoolManager",
        "SubRayResourcePool",
        "create_colocated_worker_cls",
        "create_colocated_worker_cls_fused",
    ],
    "verl.trainer.ppo.core_algos": [
        "AdvantageEstimator",
        "register_adv_est",
        "get_adv_estimator_fn",
        "register_policy_loss",
        "get_policy_loss_fn",
        "agg_loss",
        "kl_penalty",
        "compute_value_loss",
        "compute_entropy_loss",
        "get_kl_controller",
        "FixedKLController",
        "AdaptiveKLController",
        "compute_gae_advantage_return",
        "compute_grpo_outcome_advantage",
        "compute_rloo_outcome_advantage",
        "compute_remax_outcome_advantage",
        "compute_reinforce_plus_plus_outcome_advantage",
        "compute_policy_loss_vanilla",
        "compute_rewards",
        "compute_grpo_passk_outcome_advantage",
        "compute_grpo_vectorized_outcome_advantage",
        "compute_rloo_vectorized_outcome_advantage",
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        "compute_opo_outcome_advantage",
        "compute_gpg_outcome_advantage",
        "compute_gdpo_outcome_advantage",
        "compute_optimal_token_baseline_advantage",
        "compute_multi_turn_optimal_token_baseline_advantage",
        "compute_pf_ppo_reweight_data",
        "compute_policy_loss",
        "compute_policy_loss_gspo",
        "compute_policy_loss_gpg",
        "compute_policy_loss_clip_cov",
        "compute_policy_loss_kl_cov",
        "compute_policy_loss_geo_mean",
        "compute_policy_loss_sapo",
        "compute_policy_loss_cispo",
        "compute_policy_loss_bypass_mode",
    ],
    "verl.trainer.ppo.rollout_corr_helper": [
        "SUPPORTED_ROLLOUT_RS_OPTIONS",
        "apply_bypass_mode",
        "apply_rollout_correction",
        "compute_offpolicy_metrics",
        "compute_rollout_correction_and_add_to_batch",
        "compute_rollout_correction_and_rejection_mask",
        "compute_rollout_correction_weights",
        "compute_rollout_rejection_mask",
    ],
    "verl.experimental.dataset.sampler": ["AbstractSampler", "AbstractCurriculumSampler"],
    "verl.experimental.reward_loop.reward_manager": [
        "register",
        "get_reward_manager_cls",
        "NaiveRewardManager",
        "DAPORewardManager",
        "RateLimitedRewardManager",
        "RemoteRewardManager",
    ],
    "verl.utils.dataset.dynamicgen_dataset": ["AbstractDataGenerator", "DynamicGenDataset"],
    "verl.utils.dataset.rm_dataset": ["RMDataset"],
    "verl.utils.dataset.sft_dataset": ["SFTDataset"],
    "verl.tools.base_tool": ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse"],
    "verl.tools.gsm8k_tool": ["Gsm8kTool"],
    "verl.tools.sandbox_fusion_tools": ["SandboxFusionTool"],
    "verl.tools.schemas": [
        "OpenAIFunctionCallSchema",
        "OpenAIFunctionParametersSchema",
        "OpenAIFunctionParsedSchema",
        "OpenAIFunctionPropertySchema",
        "OpenAIFunctionSchema",
        "OpenAIFunctionToolCall",
        "OpenAIFunctionToolSchema",
        "ToolResponse",
    ],
    "verl.tools.utils.tool_registry": ["initialize_tools_from_config"],
    "verl.trainer.rm_trainer": ["main"],
    "verl.trainer.dpo_trainer": ["main"],
    "verl.trainer.inspect_data": ["main"],
    "verl.trainer.inspect_rollouts": ["main"],
    "verl.trainer.ppo.ray_trainer": [
        "RayPPOTrainer",
        "Role",
        "apply_kl_penalty",
        "compute_response_mask",
        "compute_advantage",
    ],
    "verl.trainer.ppo.reward": ["get_custom_reward_fn", "load_reward_manager", "compute_reward"],
    "verl.trainer.ppo.metric_utils": [
        "compute_data_metrics",
        "compute_timing_metrics",
        "compute_throughout_metrics",
        "process_validation_metrics",
        "reduce_metrics",
        "bootstrap_metric",
        "calc_maj_val",
    ],
    "verl.trainer.ppo.utils": ["Role", "need_critic", "need_reference_policy", "need_reward_model"],
    "verl.trainer.main_ppo": ["main", "run_ppo", "TaskRunner", "create_rl_dataset", "create_rl_sampler"],
    "verl.trainer.main_eval": ["main"],
    "verl.trainer.main_generation": ["main"],
    "verl.trainer.sft_trainer": ["main"],
    "verl.trainer.fsdp_sft_trainer": ["main"],
    "verl.trainer.config": ["AlgoConfig", "KLControlConfig", "CheckpointConfig"],
    "verl.workers.config": [
        "FSDPActorConfig",
        "FSDPCriticConfig",
        "FSDPCriticModelCfg",
        "FSDPEngineConfig",
        "FSDPOptimizerConfig",
        "HFModelConfig",
        "McoreActorConfig",
        "PolicyLossConfig",
        "RolloutConfig",
        "SamplingConfig",
    ],
    "verl.workers.fsdp_workers": ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"],
    "verl.workers.rollout.hf_rollout": ["HFRollout"],
    "verl.workers.reward_manager": ["register", "get_reward_manager_cls", "NaiveRewardManager"],
    "verl.utils": ["hf_tokenizer", "hf_processor", "omega_conf_to_dataclass"],
    "verl.utils.dataset.rl_dataset": ["RLHFDataset", "collate_fn"],
    "verl.utils.dataset": ["RLHFDataset", "SFTDataset"],
    "verl.utils.dataset.multiturn_sft_dataset": ["MultiTurnSFTDataset"],
    "verl.utils.reward_score": ["default_compute_score"],
    "verl.utils.reward_score.gsm8k": ["compute_score"],
    "verl.utils.reward_score.math_reward": ["compute_score"],
    "verl.utils.reward_score.countdown": ["compute_score"],
    "verl.utils.reward_score.geo3k": ["compute_score"],
    "verl.utils.reward_score.math_dapo": ["compute_score"],
    "verl.utils.reward_score.math_batch": ["compute_score_batched"],
    "verl.utils.reward_score.math_verify": ["compute_score"],
    "verl.utils.reward_score.prime_code": ["compute_score"],
    "verl.utils.reward_score.prime_math": ["compute_score"],
    "verl.utils.reward_score.sandbox_fusion": ["compute_score"],
    "verl.utils.reward_score.search_r1_like_qa_em": ["compute_score"],
    "verl.utils.tracking": ["Tracking", "ValidationGenerationsLogger"],
    "verl.utils.torch_functional": ["masked_mean", "masked_sum", "masked_var", "masked_whiten", "logprobs_from_logits"],
    "verl.utils.seqlen_balancing": [
        "get_seqlen_balanced_partitions",
        "get_reverse_idx",
        "log_seqlen_unbalance",
        "ceildiv",
    ],
    "verl.utils.fs": ["copy_to_local"],
    "verl.model_merger": [],
    # What public tests import besides.
    "verl.experimental.reward_loop.reward_manager.limited": ["AsyncTokenBucket", "RateLimitedRewardManager"],
    "verl.interactions.utils.interaction_registry": ["get_interaction_class", "initialize_interactions_from_config"],
    "verl.single_controller.ray.base": ["create_colocated_worker_raw_cls"],
    "verl.trainer.config.algorithm": ["RolloutCorrectionConfig"],
    "verl.utils.checkpoint.checkpoint_manager": ["BaseCheckpointManager"],
    "verl.utils.metric.utils": ["AggregationType", "Metric", "reduce_metrics"],
    "verl.utils.model": ["create_random_mask"],
    "verl.utils.py_functional": ["temp_env_var"],
    "verl.utils.ray_utils": ["parallel_put"],
    "verl.utils.rollout_skip": ["RolloutSkip"],
    "verl.utils.rollout_trace": ["RolloutTraceConfig", "rollout_trace_attr", "rollout_trace_op"],
    "verl.workers.reward_manager.registry": ["REWARD_MANAGER_REGISTRY"],
}


@pytest.mark.parametrize("module", NAMES)
def test_public_names_exist(module: str):
    assert [name for name in NAMES[module] if not hasattr(importlib.import_module(module), name)] == []


DOORS = {"verl.trainer.ppo.core_algos": "verl.algorithms"}
"""Public address to the room where its objects live; every name of the room is behind the door."""


@pytest.mark.parametrize("address", DOORS)
def test_an_old_address_and_the_new_one_give_the_same_objects(address: str):
    door, room = importlib.import_module(address), importlib.import_module(DOORS[address])
    assert set(room.__all__) <= set(vars(door))
    for name in room.__all__:
        assert getattr(door, name) is getattr(room, name), name


def test_sections_at_their_old_address_are_those_of_the_house():
    door, room = importlib.import_module("verl.trainer.config"), importlib.import_module("verl.config")
    for name in set(door.__all__) - {"load_config"}:
        assert getattr(door, name) is getattr(room, name), name


COMPAT = Path(verl.__path__[0]) / "compat" / "old_paths"


def old_paths() -> dict[str, Path]:
    """The modules that verl/compat/old_paths gives to old import paths, with their files."""
    paths = {}
    for file in sorted(COMPAT.rglob("*.py")):
        parts = file.relative_to(COMPAT).with_suffix("").parts
        paths[".".join(("verl", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = file
    return paths


@pytest.mark.parametrize("address", old_paths())
def test_an_old_path_gives_the_objects_of_their_home(address: str):
    module, file = importlib.import_module(address), old_paths()[address]
    assert (module.__name__, module.__file__) == (address, str(file))
    assert inspect.getsource(module) == file.read_text()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            home = importlib.import_module(node.module or "")
            names = [(alias.name, alias.asname) for alias in node.names]
            for name, here in [(name, name) for name in home.__all__] if names == [("*", None)] else names:
                assert here is not None, f"{file}: write `{name} as {name}`"
                assert getattr(module, here) is getattr(home, name), name
        else:
            assert ast.unparse(node).startswith(REST_OF_A_DOOR), f"{file}:{node.lineno} is no re-export"


def moved_modules() -> dict[str, str]:
    """The public names of the modules of moved packages, and their names here."""
    modules = {}
    for public, home in MOVED.items():
        root = Path(verl.__path__[0]).parent
        folder = root.joinpath(*home.split("."))
        for file in sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")]:
            module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            modules[public + module.removeprefix(home)] = module
    return modules


def test_a_moved_module_is_the_same_under_both_names():
    for public, home in moved_modules().items():
        module = importlib.import_module(public)
        assert module is importlib.import_module(home)
        assert module.__spec__ is not None
        assert module.__name__ == module.__spec__.name == home
        assert getattr(importlib.import_module(public.rpartition(".")[0]), public.rpartition(".")[2]) is module


REST_OF_A_DOOR = (
    "'",
    '"',
    "if __name__ == '__main__':",
)


@pytest.mark.parametrize("module", REEXPORTS)
def test_names_that_a_module_only_shows_are_the_objects_of_their_home(module: str):
    for home, names in REEXPORTS[module].items():
        for entry in names.split():
            shown, _, there = entry.partition("=")
            namespace: dict[str, object] = {}
            exec(f"from {module} import {shown}", namespace)
            assert namespace[shown] is load(home, there or shown), entry


def refusal(module: str, name: str) -> str:
    """What a script reads that imports a name which is not here."""
    with pytest.raises(ImportError) as error:
        exec(f"from {module} import {name}")
    return error.value.msg


CLASSES = ("ActorRolloutRefWorker", "RayPPOTrainer", "RLHFDataset", "RolloutSkip", "TrainingWorker", "BaseRollout")
ABSENT_ATTRIBUTES = [address for address in ABSENT if address.split(".")[-2] in CLASSES]


@pytest.mark.parametrize("address", ABSENT_ATTRIBUTES)
def test_what_public_classes_have_and_ours_lack_says_what_to_use(address: str):
    path, name = address.rsplit(".", 1)
    module, cls = path.rsplit(".", 1)
    made = object.__new__(HFRollout if cls == "BaseRollout" else getattr(importlib.import_module(module), cls))
    with pytest.raises(AttributeError) as error:
        getattr(made, name)
    assert ABSENT[address].sentence in str(error.value)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        made.nothing  # noqa: B018


@pytest.mark.parametrize("address", [address for address in ABSENT if address not in ABSENT_ATTRIBUTES])
def test_an_absent_name_says_what_to_use(address: str):
    package, _, name = address.rpartition(".")
    if address in old_paths():  # a package that other rows are below
        package, name = address, "anything"
    assert ABSENT[address].sentence in refusal(package, name)
    with pytest.raises(ImportError):
        importlib.import_module(f"{address}.anything")


PATHS_OF_GUIDES = [
    "verl.distributed_engine.ray_orchestrator",
    "verl.experimental.reward.reward_loop.limited",
    "verl.interactions",
    "verl.llm_backends.base_llm_interface",
    "verl.llm_backends.huggingface_adapter",
    "verl.llm_backends.vllm_adapter",
    "verl.model_merger.lora_adapter",
    "verl.models",
    "verl.protocol",
    "verl.rl_algorithms.base_algorithm",
    "verl.single_controller.base.decorator",
    "verl.single_controller.ray",
    "verl.trainer.config.config",
    "verl.trainer.grpo.ray_trainer",
    "verl.trainer.ppo.core_algos",
    "verl.utils.dataset.dynamicgen_dataset",
    "verl.utils.reward_score.sandbox_fusion",
    "verl.workers.actor.dp_actor",
    "verl.workers.actor.megatron_actor",
    "verl.workers.critic.dp_critic",
    "verl.workers.critic.megatron_critic",
    "verl.workers.megatron_workers",
    "verl.workers.reward_manager.batch",
    "verl.workers.rollout.hf_rollout",
    "verl.workers.rollout.sglang_rollout.sglang_rollout",
    "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd",
]
"""Modules that guides to verl name."""


@pytest.mark.parametrize("path", PATHS_OF_GUIDES)
def test_a_module_that_guides_name_is_here_or_says_why_not(path: str):
    why = why_absent(f"{path}.anything")
    if why is None or path in old_paths():
        assert importlib.import_module(path).__name__ == moved_modules().get(path, path)
    else:
        assert refusal(path, "anything").endswith(why.split(" is not in this version of verl ")[1])


def test_type_checkers_see_the_same_old_paths():
    texts = stubs()
    assert len(texts) == len(old_paths()) + len(moved_modules()) + 1
    assert texts["trainer/main_ppo_v0/__init__.pyi"].splitlines() == [
        "from verl.trainer.main_ppo import TaskRunner as BaseTaskRunner",
        "from verl.trainer.main_ppo import TaskRunner as TaskRunner",
        "from verl.trainer.main_ppo import main as main",
        "from verl.trainer.main_ppo import run_ppo as run_ppo",
        "__all__ = ['BaseTaskRunner', 'TaskRunner', 'main', 'run_ppo']",
    ]


PICKLED = ["verl.protocol.data_proto:DataProto", "verl.protocol.data_proto:DataProtoItem"]
"""Classes that stand in files which users have written, by the module that the files name."""


@pytest.mark.parametrize("path", PICKLED)
def test_pickled_classes_keep_the_name_of_their_module(path: str):
    module, name = path.split(":")
    found = getattr(importlib.import_module(module), name)
    assert (found.__module__, found.__qualname__) == (module, name)


@pytest.mark.parametrize("name", [name for name in NAMES["verl.trainer.ppo.core_algos"] if name.startswith("compute_")])
def test_functions_are_pickled_by_name(name: str):
    function = getattr(importlib.import_module("verl.trainer.ppo.core_algos"), name)
    assert pickle.loads(pickle.dumps(function)) is function


SIGNATURES = {
    "verl.single_controller.base:ResourcePool": ["process_on_nodes", "max_colocate_count", "n_gpus_per_node"],
    "verl.utils.dataset.rm_dataset:RMDataset": ["parquet_files", "tokenizer", "config"],
}
"""Signatures that ``tests/public_names.txt`` lacks, by which ``test_public_calls.py`` goes."""


@pytest.mark.parametrize("path", SIGNATURES)
def test_public_signature_starts_as_users_call_it(path: str):
    module, name = path.split(":")
    parameters = list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    assert parameters[: len(SIGNATURES[path])] == SIGNATURES[path]


def test_worker_rpcs_are_registered():
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

    rpcs = {
        ActorRolloutRefWorker: [
            "init_model", "update_actor", "generate_sequences", "compute_log_prob", "compute_ref_log_prob",
            "save_checkpoint", "load_checkpoint",
        ],
        CriticWorker: ["init_model", "compute_values", "update_critic", "save_checkpoint", "load_checkpoint"],
        RewardModelWorker: ["init_model", "compute_rm_score"],
        TrainingWorker: ["reset", "set_loss_fn", "train_batch", "infer_batch", "to", "save_checkpoint"],
    }  # fmt: skip
    for worker, methods in rpcs.items():
        for method in methods:
            rpc = getattr(worker, method)
            assert hasattr(rpc, MAGIC_ATTR), f"{worker.__name__}.{method} is no RPC"
            if method.startswith(("update", "compute")):
                assert list(inspect.signature(rpc).parameters)[1] == "data"
