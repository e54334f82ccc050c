"""``python -m verl.trainer.main_ppo``: train a policy by reinforcement learning.

::

    main ──► run_ppo ──► TaskRunner.run ──► PPOTrainer.init_workers, .fit
    (Hydra)  (Ray or     (workers, pools,
              local)      data, rewards)
"""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any, cast

from verl.base.lazy import importing, on_first_use
from verl.base.plugins import load as load_plugin
from verl.config import PPOConfig, local_copies
from verl.trainer.config.command_line import command
from verl.trainer.config.sizes import derived_sizes, resolve_device, sizes_table
from verl.trainer.driver import driving, load_controller
from verl.trainer.roles import Role, need_critic, need_reference_policy, need_teacher_policy, teachers_share_actor_ranks

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.datasets import create_rl_dataset, create_rl_sampler
    from verl.single_controller.base.resource_pool import PoolManager
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.trainer.ppo.trainer import PPOTrainer

__all__ = [
    "TaskRunner",
    "create_rl_dataset",
    "create_rl_sampler",
    "get_ppo_ray_runtime_env",
    "load_reward_manager",
    "main",
    "need_critic",
    "need_reference_policy",
    "run_ppo",
]

# `--help` and `--cfg job` answer at once: what needs torch or transformers is imported where it is used.
__getattr__ = on_first_use(
    __name__,
    {
        "create_rl_dataset": "verl.datasets",
        "create_rl_sampler": "verl.datasets",
        "get_ppo_ray_runtime_env": "verl.trainer.constants_ppo",
        "load_reward_manager": "verl.trainer.ppo.reward",
        "migrate_legacy_reward_impl": "verl.trainer.config.reward_section",
    },
)


ROLLOUT_POOL = "rollout_pool"
TEACHER_POOL = "teacher_pool"
_IMPORTED_BY_RUN = ("verl.trainer.ppo.trainer", "verl.workers.fsdp_workers", "verl.datasets")


def _typed(config: PPOConfig | DictConfig) -> PPOConfig:
    """Read what a method of TaskRunner needs; the whole configuration is checked by :meth:`TaskRunner.run`."""
    from verl.trainer.config.load import load_config

    return config if isinstance(config, PPOConfig) else load_config(config, with_rules=False, for_program=True)


class TaskRunner:
    """Assemble a run from its configuration and drive it.

    The ``add_*`` methods choose the worker class and the pool of each role. To use your own workers, override them in
    a subclass and pass the subclass to :func:`run_ppo`.
    """

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, type] = {}
        self.mapping: dict[Role, str] = {}

    def add_actor_rollout_worker(self, config: PPOConfig | DictConfig) -> tuple[type, type]:
        """Add the actor and the rollout engine; return their class and the controller's.

        They share processes, unless the rollout engines have a pool (``actor_rollout_ref.hybrid_engine=false``).
        """
        config = _typed(config)
        from verl.workers.fsdp_workers import ActorRolloutRefWorker

        shares = config.actor_rollout_ref.hybrid_engine
        pools = (
            {Role.ActorRollout: "global_pool"} if shares else {Role.Actor: "global_pool", Role.Rollout: ROLLOUT_POOL}
        )
        self.role_worker_mapping |= dict.fromkeys(pools, ActorRolloutRefWorker)
        self.mapping |= pools
        return ActorRolloutRefWorker, load_controller(config.trainer.controller).WorkerGroup

    def add_critic_worker(self, config: PPOConfig | DictConfig) -> None:
        """Add the critic (value model)."""
        from verl.workers.fsdp_workers import CriticWorker

        self.role_worker_mapping[Role.Critic] = CriticWorker
        self.mapping[Role.Critic] = "global_pool"

    def add_reward_model_worker(self, config: PPOConfig | DictConfig) -> None:
        """Add the reward model, if any, in its own pool if ``reward_model.enable_resource_pool``."""
        config = _typed(config)
        if not config.reward_model.enable:
            return
        from verl.workers.fsdp_workers import ActorRolloutRefWorker, RewardModelWorker

        self.role_worker_mapping[Role.RewardModel] = ActorRolloutRefWorker if config.judge else RewardModelWorker
        own_pool = config.reward_model.enable_resource_pool
        self.mapping[Role.RewardModel] = "reward_pool" if own_pool else "global_pool"

    def add_reward_model_resource_pool(self, config: PPOConfig | DictConfig) -> None:
        """Add the reward model, if any, and its pool; see :meth:`add_reward_model_worker`."""
        self.add_reward_model_worker(config)

    def add_teacher_model_resource_pool(self, config: PPOConfig | DictConfig) -> None:
        """Add the teachers, if any, in their own pool if ``distillation.nnodes`` is not 0."""
        config = _typed(config)
        if not need_teacher_policy(config) or teachers_share_actor_ranks(config):
            return
        if config.distillation.has_forward_passes:
            from verl.workers.teacher.worker import ForwardTeacherWorker as TeacherWorker
        else:
            from verl.workers.teacher.engine import TeacherEngineWorker as TeacherWorker

        self.role_worker_mapping[Role.TeacherModel] = TeacherWorker
        self.mapping[Role.TeacherModel] = TEACHER_POOL if config.distillation.ranks else "global_pool"

    def add_ref_policy_worker(self, config: PPOConfig | DictConfig, ref_policy_cls: type | None = None) -> None:
        """Add the frozen reference policy, if the configuration needs one that is not the actor without adapters."""
        config = _typed(config)
        if not need_reference_policy(config) or config.actor_rollout_ref.model.has_adapters:
            return
        from verl.workers.fsdp_workers import ActorRolloutRefWorker

        self.role_worker_mapping[Role.RefPolicy] = ref_policy_cls or ActorRolloutRefWorker
        self.mapping[Role.RefPolicy] = "global_pool"

    def init_resource_pool_mgr(self, config: PPOConfig | DictConfig) -> PoolManager:
        """Create the pools of processes: that of the run, own ones of rollout, reward model and teachers."""
        config = _typed(config)
        sections = {
            "global_pool": ("trainer", config.trainer),
            ROLLOUT_POOL: ("actor_rollout_ref.rollout", config.actor_rollout_ref.rollout),
            "reward_pool": ("reward_model", config.reward_model),
            TEACHER_POOL: ("distillation", config.distillation),
        }
        sizes = {
            name: [section.n_gpus_per_node] * section.nnodes
            for name, (_, section) in sections.items()
            if name == "global_pool" or name in self.mapping.values()
        }
        names = {name: path for name, (path, _) in sections.items()}
        controller = load_controller(config.trainer.controller)
        pools = controller.ResourcePoolManager(sizes, self.mapping, resolve_device(config), sections=names)
        pools.replacement_timeout_s = config.trainer.recovery.replacement_timeout_s
        return pools

    def trainer_class(self) -> type[PPOTrainer]:
        """The trainer class; imported inside, so that an invalid configuration fails before the slow engine imports."""
        from verl.trainer.ppo.trainer import PPOTrainer

        return PPOTrainer.default

    def run(self, config: PPOConfig | DictConfig) -> None:
        """Load tokenizer, data and reward functions, start the workers and train.

        Args:
            config: typed configuration, or a composed Hydra config, which is validated first.

        Raises:
            DataError: a data file or the tokenizer is unusable.
            ResourceError: fewer processes or devices are available than configured.
        """
        with importing():
            from verl.agents.tool_agent import described_tools
            from verl.agents.worker import check_agent_loops
            from verl.datasets import collate_fn
            from verl.environments.registry import read_environments
            from verl.experience.trajectories import check_tools, wanted_agents
            from verl.trainer.config.load import load_config
            from verl.trainer.ppo.distillation import check_teacher_data
            from verl.trainer.ppo.reward import check_reward_data, load_reward_manager
            from verl.trainer.ppo.rows import rl_datasets
            from verl.utils.console import show, status
            from verl.utils.model import check_has_experts, check_tokenizer_fits, hf_config_of
            from verl.utils.tokenizer import hf_processor, tokenizer_of
            from verl.workers.reward_input import RewardInput
            from verl.workers.reward_manager import AbstractRewardManager
            from verl.workers.teacher.alignment import TextAlignment
            from verl.workers.teacher.tokenizers import check_teacher_tokenizers

        config = config if isinstance(config, PPOConfig) else load_config(config, for_program=True)
        self.add_actor_rollout_worker(config)
        if need_critic(config):
            self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_ref_policy_worker(config)
        self.add_teacher_model_resource_pool(config)

        status("reading the tokenizer and the data")
        here = local_copies(config)  # the ranks, perhaps on other machines, make copies of their own
        model = here.actor_rollout_ref.model
        tokenizer = tokenizer_of(model)
        check_tokenizer_fits(tokenizer, hf_config_of(model))
        if config.trainer.log_expert_counts:
            check_has_experts(hf_config_of(model), "trainer.log_expert_counts")
        processor = hf_processor(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
        if config.reward_model.enable and config.judge is None:
            RewardInput.from_config(
                here.reward_model.model
            )  # the workers make theirs; here it is refused before a model loads
        if environments := config.actor_rollout_ref.rollout.multi_turn.environment_config_path:
            read_environments(environments)
        tools = described_tools(config.actor_rollout_ref.rollout)
        train, val, sampler = rl_datasets(config, tokenizer, processor)
        judge, arguments = None, {}
        if config.judge is not None:
            judge = load_plugin("endpoint.judge:JudgeService")(config)
            arguments = judge.arguments
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0, **arguments)
        val_reward_fn = load_reward_manager(config, tokenizer, num_examine=1, **arguments)
        datasets = [train] if val is None else [train, val]
        for dataset in datasets:
            check_reward_data(config, reward_fn, dataset)
        if need_teacher_policy(config):
            check_teacher_tokenizers(config.distillation, config.actor_rollout_ref.model)
            aligned = TextAlignment.for_teachers(config.distillation, model)  # refuses what workers could not align
            check_teacher_data(config.distillation, train, aligned)
        check_tools(datasets, config.actor_rollout_ref.rollout, tools)
        check_agent_loops(config, tokenizer, wanted_agents(datasets, config.actor_rollout_ref.rollout))
        for manager in (reward_fn, val_reward_fn):
            if isinstance(manager, AbstractRewardManager):
                manager.warm_up()  # its processes start while the models load
        show(sizes_table(derived_sizes(config, len(cast(Sized, train)))))

        pools = self.init_resource_pool_mgr(config)
        trainer = self.trainer_class()(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=pools,
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=train,
            val_dataset=val,
            collate_fn=collate_fn,
            train_sampler=sampler,
            device_name=resolve_device(config),
            judge=judge,
        )
        try:
            trainer.init_workers()
            trainer.fit()
            trainer.shutdown()
        finally:
            trainer.response_source.end_agent_loops()
            trainer.observers.close()
            if judge is not None:
                judge.close()
            trainer.worker_groups.end()  # the Ray cluster may outlive this run and place another one


def run_ppo(config: PPOConfig | DictConfig, task_runner_class: Any = None) -> None:
    """Run one training, on Ray or in this process (``trainer.controller``).

    Args:
        config: typed configuration, or a composed Hydra config, which is validated first.
        task_runner_class: a class that assembles the run differently, such as a subclass of TaskRunner, plain or
            wrapped by ``ray.remote``; it runs in this process. Its ``run`` gets the configuration as it was given here.
    """
    from verl.trainer.config.load import load_config

    runner_class = task_runner_class or TaskRunner
    if not isinstance(runner_class, type):
        from verl.single_controller.ray import RayClassWithInitArgs

        runner_class = RayClassWithInitArgs(runner_class).cls
    checked = config if isinstance(config, PPOConfig) else load_config(config, for_program=True)
    with driving(checked, _IMPORTED_BY_RUN):
        runner_class().run(config if task_runner_class else checked)


FIRST_WORDS = """no setting was given. A run needs at least

  actor_rollout_ref.model.path      a folder with a model, or its name on the Hugging Face hub
  data.train_files, data.val_files  files of prompts: docs/data.md
  a reward                          rows whose data_source has a scorer, such as gsm8k's, or a function of yours

For example, with two files of yours, train.jsonl and test.jsonl, of rows like

  {"prompt": [{"role": "user", "content": "What is 2 + 3?"}], "reward_model": {"ground_truth": "5"}}

and a file my_reward.py

  def compute_score(solution_str, ground_truth, **others):
      return 1.0 if ground_truth in solution_str else 0.0

the command is

  verl train algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 \\
      actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \\
      data.train_files=train.jsonl data.val_files=test.jsonl \\
      custom_reward_function.path=my_reward.py \\
      data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 \\
      actor_rollout_ref.actor.use_dynamic_bsz=true trainer.experiment_name=my_first_run

Curves, samples and answers of the run are then shown by `verl view .`; its model is saved at the end. What is wrong or
missing is told all together, before a model loads. `verl train --help` lists the usual settings, `verl explain KEY`
explains one, and `verl quickstart` trains a tiny model without any."""

main = command(run_ppo, config_name="ppo_trainer", root=PPOConfig, restarts=True, first_words=FIRST_WORDS)


if __name__ == "__main__":
    main()
