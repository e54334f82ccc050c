"""A trainer in the public style: its own ``__init__``, methods that verl's ``fit`` calls, and a key of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import open_dict
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.tiny_run import make_tiny_run, overrides
from verl import DataProto
from verl.compat.own_fit.ordered_group import OrderedGroup
from verl.datasets import collate_fn as default_collate_fn
from verl.errors import ConfigError
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import need_critic, need_reference_policy, need_reward_model


class ProgramTrainer(RayPPOTrainer):
    """It calls no ``__init__`` of verl's, and keeps verl's ``fit``."""

    calls: list[str]

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        role_worker_mapping: Any,
        resource_pool_manager: Any,
        ray_worker_group_cls: Any = None,
        processor: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: Any = None,
    ) -> None:
        self.tokenizer, self.processor, self.config = tokenizer, processor, config
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn
        self.hybrid_engine = config.actor_rollout_ref.hybrid_engine
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.use_reference_policy = need_reference_policy(config)
        self.use_critic, self.use_rm = need_critic(config), need_reward_model(config)
        self.ref_in_actor = config.actor_rollout_ref.model.get("lora_rank", 0) > 0
        self.async_rollout_mode = False
        self.ray_worker_group_cls, self.device_name = ray_worker_group_cls, device_name
        self.calls = [config.trainer.get("my_switch", "default")]
        self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)

    def _load_checkpoint(self) -> None:
        self.calls.append("_load_checkpoint")
        super()._load_checkpoint()

    def _save_checkpoint(self) -> None:
        self.calls.append("_save_checkpoint")
        super()._save_checkpoint()

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        self.calls.append("_compute_old_log_prob")
        return super()._compute_old_log_prob(batch)

    def _update_actor(self, batch: DataProto) -> DataProto:
        self.calls.append("_update_actor")
        output = super()._update_actor(batch)
        output.meta_info["metrics"]["actor/of_the_program"] = [1.0, 3.0]
        return output

    def _dump_generations(
        self, inputs: Any, outputs: Any, gts: Any, scores: Any, reward_extra_infos_dict: Any, dump_path: str
    ) -> None:
        self.calls.append("_dump_generations")
        assert len(inputs) == len(outputs) == len(gts) == len(scores) == len(reward_extra_infos_dict["uid"])
        super()._dump_generations(inputs, outputs, gts, scores, reward_extra_infos_dict, dump_path)


class LoaderTrainer(RayPPOTrainer):
    """It makes the loader of training rows by itself, and shows what it generates."""

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        self.train_dataset = train_dataset
        self.train_dataloader = StatefulDataLoader(train_dataset, 4, sampler=train_sampler, collate_fn=collate_fn)
        self.total_training_steps = 1
        with open_dict(self.config):
            self.config.actor_rollout_ref.actor.optim.total_training_steps = 1


def runner_of(trainer_class: type[RayPPOTrainer], made: list[Any], **changes: object) -> type[TaskRunner]:
    """A runner whose trainer gets the configuration as Hydra composed it, and joins ``made``."""

    class Runner(TaskRunner):
        def trainer_class(self) -> Any:
            def create(config: Any, **arguments: Any) -> Any:
                arguments.pop("judge", None)
                made.append(trainer_class(config=composed(config), **(arguments | changes)))
                return made[-1]

            return create

    def composed(config: Any) -> Any:
        from verl.trainer.config.load import as_composed

        return as_composed(config)

    return Runner


Train = Callable[..., Any]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train with a class; return its trainer."""
    paths = make_tiny_run(tmp_path)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))

    def run(trainer_class: type[RayPPOTrainer], *further: str, **changes: object) -> Any:
        made: list[Any] = []
        settings = {"trainer__total_training_steps": 1, "actor_rollout_ref__actor__ppo_mini_batch_size": 4}
        config = compose(overrides(paths, tmp_path / "run", **settings) + list(further))
        with open_dict(config):
            config.trainer.my_switch = "on"
        run_ppo(config, runner_of(trainer_class, made, **changes))
        return made[0]

    return run


def test_an_init_and_methods_of_a_program_are_called_by_verls_fit(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    trainer = train(ProgramTrainer, "trainer.save_freq=1", f"trainer.rollout_data_dir={folder}")
    assert trainer.calls == [
        "on",
        "_load_checkpoint",
        "_dump_generations",
        "_compute_old_log_prob",
        "_update_actor",
        "_save_checkpoint",
    ]
    assert len((folder / "1.jsonl").read_text().splitlines()) == 16
    metrics = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["data"]
    assert metrics["actor/of_the_program"] == 2.0
    assert "actor/grad_norm" in metrics
    assert metrics["timing_s/old_log_prob"] > 0  # the update's own forward pass would give them else
    assert not trainer.use_critic
    assert not trainer.needs.critic


@pytest.mark.slow
def test_a_loader_of_a_program(train: Train) -> None:
    trainer = train(LoaderTrainer, collate_fn=default_collate_fn)
    assert trainer.global_steps == trainer.total_training_steps == 1
    assert trainer.val_dataloader is None

    class Forgets(RayPPOTrainer):
        def _create_dataloader(self, *arguments: object) -> None:
            pass

    with pytest.raises(ConfigError, match=r"Forgets\._create_dataloader .* sets no self\.train_dataloader"):
        train(Forgets)


def test_a_manager_that_verls_fit_would_not_use() -> None:
    trainer: Any = object.__new__(RayPPOTrainer)
    trainer.async_rollout_manager = trainer.checkpoint_manager = pytest
    assert trainer.async_rollout_manager is trainer.checkpoint_manager is pytest
    with pytest.raises(ConfigError, match=r"async_rollout_manager is builtins\.module, which verl's own fit would not"):
        trainer.resume()


def test_a_manager_of_agent_loops_generates_with_the_trainers_engines() -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager

    class Group:
        wake = "of the workers"

    calls = {"generate_sequences": lambda prompts: (prompts, "generated")}
    manager = AgentLoopManager(config=None, worker_group=OrderedGroup(Group(), True, calls), rollout_resource_pool=None)
    assert manager.generate_sequences("prompts") == ("prompts", "generated")
    manager.wake_up()
    manager.sleep()
    with pytest.raises(ConfigError, match=r"no engine \(native, hf, vllm, sglang\) serves programs.*program_agent"):
        _ = manager.server_addresses
    with pytest.raises(ConfigError, match=r"worker_group is Group. Pass worker_group=trainer.actor_rollout_wg"):
        AgentLoopManager(config=None, worker_group=Group())
    with pytest.raises(ConfigError, match=r"llm_client belong to servers on Ray"):
        AgentLoopManager.create(config=None, llm_client=Group())
    with pytest.raises(ConfigError, match=r"Mine\._init_agent_loop_workers would never be called"):
        type("Mine", (AgentLoopManager,), {"_init_agent_loop_workers": print})


def test_assigned_attributes_decide_what_a_step_computes() -> None:
    from verl.trainer.roles import Needs

    trainer: Any = object.__new__(RayPPOTrainer)
    trainer.use_critic = True
    trainer.needs = Needs(**dict.fromkeys(Needs.__dataclass_fields__, False))
    assert trainer.needs.critic
    assert not trainer.needs.reference
    trainer.use_reference_policy = trainer.use_rm = True
    trainer.use_critic = False
    assert (trainer.needs.critic, trainer.needs.reference, trainer.needs.reward_model) == (False, True, True)


def test_methods_that_nothing_would_call_are_refused() -> None:
    def method(self: Any, *arguments: object) -> None: ...

    with pytest.raises(ConfigError, match=r"Mine\._get_gen_batch would never be called: verl's own fit does not use"):
        type("Mine", (RayPPOTrainer,), {"_get_gen_batch": method})
    with pytest.raises(ConfigError, match=r"_merge_validation_results .* Replace _validate too"):
        type("Mine", (RayPPOTrainer,), {"_merge_validation_results": method})
    type("Mine", (RayPPOTrainer,), {"_get_gen_batch": method, "fit": method})
