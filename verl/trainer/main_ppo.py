"""``python -m verl.trainer.main_ppo``: configuration in, trained policy out.

::

    main ──► run_ppo ──► TaskRunner.run ──► RayPPOTrainer.init_workers, .fit
    (Hydra)  (Ray or     (who works where,
              local)      data, rewards)
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from verl.trainer.config import PPOConfig
from verl.trainer.config.load import hydra_entry, load_config
from verl.trainer.config.sizes import derived_sizes, resolve_device, sizes_table
from verl.trainer.controller import load_controller, run_under_controller
from verl.trainer.ppo.utils import Needs, Role
from verl.trainer.supervisor import supervised
from verl.utils.console import show
from verl.utils.dataset import collate_fn, create_rl_dataset, create_rl_sampler

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

__all__ = ["TaskRunner", "create_rl_dataset", "create_rl_sampler", "main", "run_ppo"]


class TaskRunner:
    """Assembles a run from its configuration and drives it, in a process of its own or in this one.

    The ``add_*`` methods say which worker class plays which role in which pool; override one in a
    subclass, and hand the subclass to :func:`run_ppo`, to use workers of your own.
    """

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, type] = {}
        self.mapping: dict[Role, str] = {}

    def add_actor_rollout_worker(self, config: PPOConfig) -> None:
        """Actor and rollout engine share processes and weights."""
        from verl.workers.fsdp_workers import ActorRolloutRefWorker

        self.role_worker_mapping[Role.ActorRollout] = ActorRolloutRefWorker
        self.mapping[Role.ActorRollout] = "global_pool"

    def add_critic_worker(self, config: PPOConfig) -> None:
        """The value model, where the estimator reads values."""
        from verl.workers.fsdp_workers import CriticWorker

        self.role_worker_mapping[Role.Critic] = CriticWorker
        self.mapping[Role.Critic] = "global_pool"

    def add_reward_model_worker(self, config: PPOConfig) -> None:
        """The discriminative reward model, in a pool of its own if ``reward_model.enable_resource_pool``."""
        from verl.workers.fsdp_workers import RewardModelWorker

        self.role_worker_mapping[Role.RewardModel] = RewardModelWorker
        own_pool = config.reward_model.enable_resource_pool
        self.mapping[Role.RewardModel] = "reward_pool" if own_pool else "global_pool"

    def add_ref_policy_worker(self, config: PPOConfig, ref_policy_cls: type | None = None) -> None:
        """The frozen reference policy."""
        from verl.workers.fsdp_workers import ActorRolloutRefWorker

        self.role_worker_mapping[Role.RefPolicy] = ref_policy_cls or ActorRolloutRefWorker
        self.mapping[Role.RefPolicy] = "global_pool"

    def init_resource_pool_mgr(self, config: PPOConfig, controller: Any) -> Any:
        """The pools: ranks per node, for the whole run and for a reward model apart."""
        pools = {"global_pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
        if "reward_pool" in self.mapping.values():
            pools["reward_pool"] = [config.reward_model.n_gpus_per_node] * config.reward_model.nnodes
        return controller.pool_manager(pools, self.mapping, resolve_device(config))

    def trainer_class(self) -> type[RayPPOTrainer]:
        """The trainer; imported here, so that a refused configuration is answered before the engines are loaded."""
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        return RayPPOTrainer

    def run(self, config: PPOConfig) -> None:
        """Load what the driver needs, start the workers, train.

        Raises:
            DataError: a data file or the tokenizer is unusable.
            ResourceError: there are fewer processes or devices than asked for.
        """
        from verl.trainer.ppo.reward import check_reward_data, load_reward_manager
        from verl.utils import hf_processor, hf_tokenizer
        from verl.utils.model import check_tokenizer_fits, hf_config_of
        from verl.workers.reward_manager import AbstractRewardManager

        needs = Needs.of(config)
        self.add_actor_rollout_worker(config)
        if needs.critic:
            self.add_critic_worker(config)
        if needs.reward_model:
            self.add_reward_model_worker(config)
        if needs.reference:
            self.add_ref_policy_worker(config)

        model = config.actor_rollout_ref.model
        path = model.tokenizer_path or model.path
        tokenizer = hf_tokenizer(
            path, trust_remote_code=model.trust_remote_code, chat_template=model.custom_chat_template
        )
        check_tokenizer_fits(tokenizer, hf_config_of(model))
        processor = hf_processor(path, trust_remote_code=model.trust_remote_code)
        # One seed for a run: the order of the prompts follows trainer.seed unless it has a seed of its own.
        data = config.data if config.data.seed is not None else replace(config.data, seed=config.trainer.seed)
        train = create_rl_dataset(
            data.train_files, data, tokenizer, processor, is_train=True, max_samples=data.train_max_samples
        )
        val = create_rl_dataset(
            data.val_files, data, tokenizer, processor, is_train=False, max_samples=data.val_max_samples
        )
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0)
        val_reward_fn = load_reward_manager(config, tokenizer, num_examine=1)
        for dataset in (train, val):
            check_reward_data(config, reward_fn, dataset)
        for manager in (reward_fn, val_reward_fn):
            if isinstance(manager, AbstractRewardManager):
                manager.warm_up()  # its processes start while the models load
        show(sizes_table(derived_sizes(config, len(cast(Sized, train)))))

        controller = load_controller(config.trainer.controller)
        pools = self.init_resource_pool_mgr(config, controller)
        trainer = self.trainer_class()(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=pools,
            ray_worker_group_cls=controller.WorkerGroup,
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=train,
            val_dataset=val,
            collate_fn=collate_fn,
            train_sampler=create_rl_sampler(data, train),
            device_name=resolve_device(config),
        )
        try:
            trainer.init_workers()
            trainer.fit()
            trainer.shutdown()
        finally:
            pools.release()  # a Ray cluster that goes on may have another run to place


def run_ppo(config: PPOConfig, task_runner_class: type[TaskRunner] | None = None) -> None:
    """Run one training, on Ray or in this process (``trainer.controller``).

    Args:
        config: typed configuration, or a composed Hydra config, which is validated here.
        task_runner_class: a subclass of TaskRunner that assembles the run differently.
    """
    config = config if isinstance(config, PPOConfig) else load_config(config)
    run_under_controller(task_runner_class or TaskRunner, config)


def main() -> None:
    """The command line."""
    hydra_entry(supervised(run_ppo), config_name="ppo_trainer", root=PPOConfig)


if __name__ == "__main__":
    main()
