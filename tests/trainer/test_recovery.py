"""Runs on Ray whose ranks die: they go on by themselves, and nothing in them shows it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from tests.support.tiny_run import make_tiny_run, overrides, same
from verl.errors import ProcessLostError
from verl.supervision.termination import EXIT_CODE
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.trainer import PPOTrainer

STEPS = 3
NOT_COMPARED = ("timing", "perf/", "recovery/")


class FragileTrainer(PPOTrainer):
    """Kills a rank when it enters a stage; ``deaths`` says in which step and stage, and which rank."""

    deaths: list[tuple[int, str, Any]]

    def _strike(self, stage: str) -> None:
        for death in [d for d in self.deaths if d[:2] == (self.global_steps, stage)][:1]:
            self.deaths.remove(death)
            self._harm(death[2])

    def _harm(self, rank: int) -> None:
        os.kill(pid_of(self.policy_workers, rank), signal.SIGKILL)

    def step(self, context: Any) -> Any:
        self._strike("gen")  # the first stage
        return super().step(context)

    def update_actor(self, *args: Any, **kwargs: Any) -> Any:
        self._strike("update_actor")
        return super().update_actor(*args, **kwargs)

    def _validate(self) -> Any:
        self._strike("testing")
        return super()._validate()

    def _begin_save(self) -> None:
        self._strike("save_checkpoint")
        super()._begin_save()


def pid_of(group: Any, rank: int) -> int:
    return ray.get(group.workers[rank].__ray_call__.remote(lambda _: os.getpid()))


class FragileRunner(TaskRunner):
    def trainer_class(self) -> type[PPOTrainer]:
        return FragileTrainer


Outcome = tuple[dict[int, dict], dict[str, Any]]
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recovery")


@pytest.fixture(scope="module")
def run(root: Path, ray_cluster: None) -> Run:
    """Train on two ranks while ranks die; the metrics of every step, and what the last checkpoint holds."""
    paths = make_tiny_run(root)

    def train(
        name: str, deaths: list[tuple[int, str, int]], runner: type[TaskRunner] = FragileRunner, **changes: object
    ) -> Outcome:
        folder, log = root / name, root / f"{name}.jsonl"
        FragileTrainer.deaths = list(deaths)
        settings = {
            "trainer__controller": "ray",
            "trainer__n_gpus_per_node": 2,
            "trainer__total_training_steps": STEPS,
            "trainer__save_freq": 2,
            "trainer__test_freq": 2,
            "trainer__recovery__backoff_s": 0,
            "trainer__recovery__snapshot_freq": 1,  # steps this short would not have one each
            "actor_rollout_ref__rollout__name": "native",
        } | changes
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VERL_FILE_LOGGER_PATH", str(log))
            run_ppo(compose(overrides(paths, folder, **settings)), runner)
        assert not FragileTrainer.deaths, "a rank was to die and did not"
        records = [json.loads(line) for line in log.read_text().splitlines()]
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        last = folder / "checkpoints" / f"global_step_{STEPS}"
        files = {str(p.relative_to(last)): torch.load(p, weights_only=True) for p in sorted(last.rglob("*.pt"))}
        return {record["step"]: record["data"] for record in records}, files

    return train


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> Outcome:
    outcome = run("undisturbed", [])
    assert "recovery/restarts" not in outcome[0][STEPS]
    return outcome


def assert_same_run(disturbed: Outcome, undisturbed: Outcome) -> None:
    for step, expected in undisturbed[0].items():
        found = disturbed[0][step]
        names = {name for name in found.keys() | expected.keys() if not name.startswith(NOT_COMPARED)}
        assert [n for n in sorted(names) if not same(found.get(n), expected.get(n))] == [], f"step {step}"
    assert disturbed[1].keys() == undisturbed[1].keys()
    for name, state in undisturbed[1].items():
        assert same(disturbed[1][name], state), name


@pytest.mark.parametrize(
    ("deaths", "restarts"),
    [
        # Rank 0 in the second update; and rank 1 in the first rollout, and in the validation after that update.
        ([(2, "update_actor", 0)], [0, 1, 1]),
        pytest.param(
            [(1, "gen", 1), (2, "update_actor", 0), (2, "testing", 1)], [1, 3, 3], marks=pytest.mark.slow, id="three"
        ),
    ],
)
def test_ranks_that_die_leave_no_trace_in_the_run(
    run: Run, undisturbed: Outcome, deaths: list[tuple[int, str, int]], restarts: list[int]
) -> None:
    disturbed = run(f"disturbed {len(deaths)} times", deaths)
    assert_same_run(disturbed, undisturbed)
    assert [disturbed[0][step].get("recovery/restarts", 0) for step in (1, 2, 3)] == restarts
    assert disturbed[0][3]["recovery/redone_steps"] == 0  # the state of every step is held in memory
    assert disturbed[0][3]["recovery/lost_s"] > 0


@pytest.mark.slow
def test_what_was_sampled_ahead_survives_ranks_that_die(run: Run) -> None:
    """The responses of the next step are those that weights drew which no rank has any more."""
    ahead = {"trainer__async__lag": 1}
    disturbed = run("ahead disturbed", [(2, "gen", 1), (3, "update_actor", 0)], **ahead)
    assert_same_run(disturbed, run("ahead", [], **ahead))
    assert disturbed[0][3]["recovery/restarts"] == 2


@pytest.mark.slow
def test_ranks_that_divide_matrices_die_and_leave_no_trace(run: Run) -> None:
    """Once restored from memory, once from the checkpoint of step 2."""
    divided = {"actor_rollout_ref__actor__fsdp_config__tensor_parallel_size": 2}
    straight = run("divided", [], **divided)
    for name, changes in (("memory", {}), ("disk", {"trainer__recovery__snapshot_freq": 0})):
        disturbed = run(f"divided {name}", [(3, "update_actor", 1)], **divided, **changes)
        assert_same_run(disturbed, straight)
        assert disturbed[0][3]["recovery/restarts"] == 1


@pytest.mark.slow
def test_without_states_in_memory_the_run_goes_back_to_its_newest_checkpoint_or_the_beginning(
    run: Run, undisturbed: Outcome
) -> None:
    """A death in step 2, before anything is saved, redoes step 1; one in step 3 goes back to the save of step 2."""
    disturbed = run("without states", [(2, "gen", 0), (3, "update_actor", 1)], trainer__recovery__snapshot_freq=0)
    assert_same_run(disturbed, undisturbed)
    assert disturbed[0][3]["recovery/restarts"] == 2
    assert disturbed[0][3]["recovery/redone_steps"] == 1


@pytest.mark.slow
def test_a_run_goes_back_to_a_checkpoint_that_is_newer_than_the_state_in_memory(run: Run, undisturbed: Outcome) -> None:
    """Of steps 0 to 3 the first is held in memory, and the second is saved."""
    disturbed = run("older state", [(3, "gen", 0)], trainer__recovery__snapshot_freq=3)
    assert_same_run(disturbed, undisturbed)
    assert disturbed[0][3]["recovery/restarts"] == 1
    assert disturbed[0][3]["recovery/redone_steps"] == 0


@pytest.mark.slow
def test_too_many_losses_stop_the_run_with_the_first_of_them_first(run: Run) -> None:
    """On one rank, because nothing here depends on the number of them."""
    alone = {"trainer__n_gpus_per_node": 1}
    with pytest.raises(ProcessLostError) as raised:
        run("hopeless", [(2, "gen", 0), (2, "update_actor", 0)], trainer__recovery__max_restarts=1, **alone)
    first, *rest = str(raised.value).splitlines()
    assert first.startswith("rank 0 of 1 died in ActorRolloutRefWorker.generate")
    assert any("restarted 1 times without finishing a step" in line for line in rest)
    last = "The last loss: rank 0 of 1 died in ActorRolloutRefWorker.update_actor"
    assert any(line.startswith(last) for line in rest)
    with pytest.raises(ProcessLostError, match=r"^rank 0 of 1 died") as raised:
        run("not at all", [(1, "gen", 0)], trainer__recovery__max_restarts=0, **alone)
    assert "restarted" not in str(raised.value)


@pytest.mark.slow
def test_a_loss_while_saving_is_survived(run: Run, undisturbed: Outcome) -> None:
    assert_same_run(run("saving", [(2, "save_checkpoint", 1)]), undisturbed)


class PreemptedTrainer(FragileTrainer):
    """Gets SIGTERM after its second step, and loses a rank while it saves because of that."""

    def _report(self, *args: Any) -> None:
        super()._report(*args)
        if self.deaths and self.global_steps == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class PreemptedRunner(TaskRunner):
    def trainer_class(self) -> type[PPOTrainer]:
        return PreemptedTrainer


@pytest.mark.slow
def test_a_machine_that_is_taken_away_rank_by_rank_leaves_the_state_in_memory_on_disk(
    run: Run, undisturbed: Outcome, root: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        run("taken_away", [(2, "save_checkpoint", 1)], runner=PreemptedRunner, trainer__save_freq=STEPS)
    assert ended.value.code == EXIT_CODE
    assert (root / "taken_away" / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() in "12"
    assert_same_run(run("taken_away", []), undisturbed)
