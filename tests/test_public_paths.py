"""Every public path that users' code imports exists, with the signature that they call."""

from __future__ import annotations

import importlib
import inspect

import pytest

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
    "verl.trainer.rm_trainer": ["main"],
    "verl.trainer.dpo_trainer": ["main"],
    "verl.trainer.inspect_data": ["main"],
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
        "PolicyLossConfig",
        "RolloutConfig",
        "SamplingConfig",
    ],
    "verl.workers.fsdp_workers": ["ActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"],
    "verl.workers.rollout.hf_rollout": ["HFRollout"],
    "verl.workers.reward_manager": ["register", "get_reward_manager_cls", "NaiveRewardManager"],
    "verl.utils": ["hf_tokenizer", "hf_processor"],
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
    "verl.utils.seqlen_balancing": ["get_seqlen_balanced_partitions", "get_reverse_idx", "log_seqlen_unbalance"],
    "verl.utils.fs": ["copy_to_local"],
    "verl.model_merger": [],
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_public_name_exists(module: str, name: str):
    assert hasattr(importlib.import_module(module), name)


SIGNATURES = {
    "verl.single_controller.base.decorator:register": [
        "dispatch_mode", "execute_mode", "blocking", "materialize_futures",
    ],
    "verl.single_controller.base:ResourcePool": ["process_on_nodes", "max_colocate_count", "n_gpus_per_node"],
    "verl.single_controller.base.decorator:make_nd_compute_dataproto_dispatch_fn": ["mesh_name"],
    "verl.protocol:DataProto": ["batch", "non_tensor_batch", "meta_info"],
    "verl.protocol:pad_dataproto_to_divisor": ["data", "size_divisor"],
    "verl.trainer.main_ppo:create_rl_dataset": ["data_paths", "data_config", "tokenizer", "processor"],
    "verl.trainer.main_ppo:create_rl_sampler": ["data_config", "dataset"],
    "verl.trainer.main_ppo:run_ppo": ["config", "task_runner_class"],
    "verl.trainer.ppo.reward:load_reward_manager": ["config", "tokenizer", "num_examine"],
    "verl.utils.dataset.multiturn_sft_dataset:MultiTurnSFTDataset": ["data_files", "tokenizer", "config"],
    "verl.utils.dataset.rm_dataset:RMDataset": ["parquet_files", "tokenizer", "config"],
    "verl.utils.dataset.rl_dataset:RLHFDataset": ["data_files", "tokenizer", "config", "processor", "max_samples"],
    "verl.utils.tracking:Tracking": ["project_name", "experiment_name", "default_backend", "config"],
    "verl.utils.reward_score:default_compute_score": ["data_source", "solution_str", "ground_truth", "extra_info"],
    "verl.workers.reward_manager:NaiveRewardManager": ["tokenizer", "num_examine", "compute_score", "reward_fn_key"],
    "verl.trainer.ppo.core_algos:agg_loss": ["loss_mat", "loss_mask", "loss_agg_mode"],
    "verl.trainer.ppo.core_algos:compute_policy_loss_vanilla": [
        "old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights",
    ],
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer": [
        "config", "tokenizer", "role_worker_mapping", "resource_pool_manager", "ray_worker_group_cls", "processor",
        "reward_fn", "val_reward_fn", "train_dataset", "val_dataset", "collate_fn", "train_sampler", "device_name",
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", SIGNATURES)
def test_public_signature_starts_as_users_call_it(path: str):
    module, name = path.split(":")
    parameters = list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)
    assert parameters[: len(SIGNATURES[path])] == SIGNATURES[path]


def test_worker_rpcs_are_registered():
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

    rpcs = {
        ActorRolloutRefWorker: [
            "init_model", "update_actor", "generate_sequences", "compute_log_prob", "compute_ref_log_prob",
            "save_checkpoint", "load_checkpoint",
        ],
        CriticWorker: ["init_model", "compute_values", "update_critic", "save_checkpoint", "load_checkpoint"],
        RewardModelWorker: ["init_model", "compute_rm_score"],
    }  # fmt: skip
    for worker, methods in rpcs.items():
        for method in methods:
            assert hasattr(getattr(worker, method), MAGIC_ATTR), f"{worker.__name__}.{method} is no RPC"
