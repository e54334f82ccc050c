"""Treatment of agent-loop trajectories by the trainer: which are scored, left out, or given the score 0."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch

from verl.agents.manager import LEFT_OUT
from verl.agents.rendering_check import KINDS
from verl.agents.tool_calls import CallFailure
from verl.config import AgentLoopConfig, RolloutConfig
from verl.config.agent import ENVIRONMENT_AGENT, SINGLE_TURN, TrajectoryStatus
from verl.datasets.rl_dataset import FOR_AGENTS, RLHFDataset
from verl.errors import ConfigError, DataError
from verl.experience.rewards import TRAJECTORY_PREFIX, Scored
from verl.experience.sequences import Trajectories
from verl.protocol import DataProto, prompt_lengths, response_lengths
from verl.utils.metric import Metrics, distribution
from verl.workers.reward_manager.scores import Score, Scores, checked_score, place_scores

logger = logging.getLogger(__name__)

NO_SCORES: Scored = (torch.zeros(0), {})
"""Scores of no rows."""
SHOW_OTHER_TOOLS = {"tool_agent": "run (multi_turn.tool_config_path)", ENVIRONMENT_AGENT: "environment"}
"""Agent loops that do not read the tools of a row, and whose tools they show."""
TIMES = ("generate_sequences", "tool_calls", "compute_score")
"""Fields of :class:`verl.agents.loop.AgentLoopMetrics` in seconds."""


def wants_agents(prompts: DataProto, rollout: RolloutConfig) -> bool:
    """Return whether some prompt is answered by an agent loop rather than by one response of the engines."""
    names = prompts.non_tensor_batch.get("agent_name")
    default = rollout.default_agent_loop
    return default != SINGLE_TURN if names is None else any((name or default) != SINGLE_TURN for name in names)


def wanted_agents(datasets: Iterable[object], rollout: RolloutConfig) -> list[str]:
    """Return the names of the agent loops that the prompts of data sets want; of custom data sets, the default's."""
    agents = {rollout.default_agent_loop: None}
    for dataset in datasets:
        if isinstance(dataset, RLHFDataset):
            agents |= dict.fromkeys(filter(None, dataset.source_column("agent_name")))
    return list(agents)


def check_tools(datasets: Sequence[object], rollout: RolloutConfig, tools: Sequence[object]) -> None:
    """Check that the tools of a run, and those of rows, reach the policy.

    Args:
        datasets: of training and validation; those of a class of the user's own are not looked at.
        rollout: the section of the configuration.
        tools: descriptions of the run's tools.

    Raises:
        ConfigError: the run has tools, and all its prompts are answered in one turn, in which none is called.
        DataError: a row has tools, and its agent loop shows those of the run or of the environment.
    """
    turns, readable = rollout.multi_turn, [data for data in datasets if isinstance(data, RLHFDataset)]
    if tools and len(readable) == len(datasets) and set(wanted_agents(readable, rollout)) == {SINGLE_TURN}:
        key = "function_tool_path" if turns.function_tool_path else "tool_config_path"
        raise ConfigError(
            f"actor_rollout_ref.rollout.multi_turn.{key}={turns[key]!r:.100} gives the model tools, and every prompt "
            "is answered in one turn, in which none is called. Set actor_rollout_ref.rollout.multi_turn.enable=true, "
            f"give rows the agent_name tool_agent, or leave {key} out."
        )
    for data in readable:
        key = data.config.tools_key or ""
        names, row_tools = data.source_column("agent_name"), data.source_column(key)
        for item, (name, tools_of_row) in enumerate(zip(names, row_tools, strict=True)):
            agent = name or rollout.default_agent_loop
            if tools_of_row and agent in SHOW_OTHER_TOOLS:
                raise DataError(
                    f"{data.place(item)} has {key}, and the agent loop {agent} answers it, which shows the tools of "
                    f"the {SHOW_OTHER_TOOLS[agent]} instead. Set data.tools_key=null to leave the column unread, or "
                    "let single_turn_agent answer such rows."
                )


def unused_arguments(prompts: DataProto) -> list[str]:
    """Return the columns that hold something for agent loops, for prompts that none answers."""
    columns = prompts.non_tensor_batch
    return [name for name in FOR_AGENTS if name in columns and any(columns[name])]


def rows_to_score(batch: DataProto, agent: AgentLoopConfig) -> list[int]:
    """Return the rows that the reward function scores: one of each trajectory to train on that has no score yet."""
    scores, _ = _own_scores(batch)
    statuses = batch.non_tensor_batch["trajectory_status"]
    rows = zip(Trajectories.from_batch(batch).scored_rows, scores, strict=True)
    return [row for row, score in rows if score is None and agent.treatment_of(statuses[row]) == "train"]


def complete_scores(batch: DataProto, scored: Scored, rows: list[int], agent: AgentLoopConfig) -> Scored:
    """Complete the scores of some rows to those of the whole batch.

    Each sequence of a trajectory gets its score, on the last token; sequences with ``turn_scores`` get those instead.
    ``turn_rewards`` are added on their turns, and are not part of the reported ``score``.

    Args:
        batch: the sequences of the trajectories.
        scored: scores (len(rows), response_length) and further values of the rows that the reward function scored.
        rows: which rows these are.
        agent: says by status what becomes of a trajectory.

    Returns:
        the same for all rows. ``reward_status`` of trajectories to leave out is not ``ok``; it names their status.
        Trajectories whose score is to be 0 have 0 for every number that the reward function returns for the others.
    """
    scores, extra = scored
    trajectories, statuses = Trajectories.from_batch(batch), batch.non_tensor_batch["trajectory_status"]
    treatments = [agent.treatment_of(status) for status in statuses]
    trajectory_values, turn_values = _own_scores(batch)
    shared = [score or Score(0.0) for score in trajectory_values]
    for row, value in zip(rows, map(float, scores.sum(-1, dtype=torch.float64) if rows else []), strict=True):
        shared[trajectories.indices[row]] = Score(value)
    row_values = [
        Score(0.0)
        if treatment != "train"
        else shared[trajectory]
        if shared[trajectory].error
        else turns or shared[trajectory]
        for trajectory, treatment, turns in zip(trajectories.indices, treatments, turn_values, strict=True)
    ]
    on_tokens = place_scores(Scores(row_values), batch.batch["response_mask"])
    assert on_tokens.tokens is not None
    all_scores = on_tokens.tokens
    if rows:
        all_scores[rows] = scores.to(all_scores)
    beside = batch.non_tensor_batch.get("turn_rewards", [None] * len(batch))
    to_add = [
        Score(0.0) if turn_scores is None or treatment != "train" else checked_score({"turn_scores": turn_scores})
        for turn_scores, treatment in zip(beside, treatments, strict=True)
    ]
    added = place_scores(Scores(to_add), batch.batch["response_mask"])
    assert added.tokens is not None
    all_scores += added.tokens
    both = zip(trajectories.indices * 2, [*on_tokens.samples, *added.samples], strict=True)
    failed = {trajectory: score for trajectory, score in both if score.error}
    for message in dict.fromkeys(score.error for score in failed.values()):
        logger.warning("the score of an agent loop cannot be used: %s", message)
    all_scores[[row for row, trajectory in enumerate(trajectories.indices) if trajectory in failed]] = 0.0
    columns: dict[str, list[object]] = {name: [None] * len(batch) for name in ("score", "reward_status", *extra)}
    for row, (trajectory, treatment) in enumerate(zip(trajectories.indices, treatments, strict=True)):
        score = failed.get(trajectory) or (shared[trajectory] if treatment == "train" else Score(0.0))
        columns["score"][row] = score.value
        columns["reward_status"][row] = f"{TRAJECTORY_PREFIX}{statuses[row]}" if treatment in LEFT_OUT else score.status
    members = trajectories.members()
    for name, values in extra.items():
        for row, value in zip(rows, values, strict=True):
            for sibling in members[trajectories.indices[row]]:
                columns[name][sibling] = value
        are_numbers = all(isinstance(value, int | float | None) for value in values) and values.count(None) < len(
            values
        )
        if name not in ("score", "reward_status") and are_numbers:
            for row, treatment in enumerate(treatments):
                if treatment == "zero":
                    columns[name][row] = 0.0
    return all_scores, columns


def trajectory_metrics(batches: Sequence[DataProto]) -> Metrics:
    """Describe all trajectories of a step, those that dynamic sampling dropped among them.

    Returns:
        ``agent/status/{status}``, shares; ``agent/num_sequences/...``; ``agent/tool_failures/{failure}``
        (:class:`verl.agents.tool_calls.CallFailure`) and ``agent/rendering_differences/{kind}``
        (:data:`verl.agents.rendering_check.KINDS`), numbers per trajectory; and ``timing_s/agent_loop/...``, seconds of
        ``generate_sequences``, ``tool_calls`` and ``compute_score``, and as ``slowest/...`` those of the trajectory
        with the largest sum, with the numbers of tokens of its last sequence. Nothing without agent loops.
    """
    trajectories = [trajectory for batch in batches for trajectory in _trajectories(batch)]
    if not trajectories:
        return {}
    metrics = _shares(trajectories)
    metrics |= distribution([float(len(rows)) for _, rows in trajectories], "agent/num_sequences")
    counted = {"tool_failures": [failure.value for failure in CallFailure], "rendering_differences": list(KINDS)}
    for column, kinds in counted.items():
        if counts := [value for trajectory in trajectories if (value := _summed(trajectory, column)) is not None]:
            metrics |= {f"agent/{column}/{kind}": sum(count[kind] for count in counts) / len(counts) for kind in kinds}
    return metrics | _timing(trajectories)


def how_trajectories_ended(batch: DataProto) -> DataProto:
    """Select the columns that :func:`validation_trajectory_metrics` reads."""
    names = ("trajectory_id", "agent", "trajectory_status", "__num_turns__")
    there = [name for name in names if name in batch.non_tensor_batch]
    return batch.select(batch_keys=[], non_tensor_batch_keys=there)


def validation_trajectory_metrics(batches: Sequence[DataProto]) -> Metrics:
    """Return ``val-aux/agent/status/{status}``, shares, and ``val-aux/num_turns/...``; nothing without agent loops."""
    trajectories = [trajectory for batch in batches for trajectory in _trajectories(batch)]
    if not trajectories:
        return {}
    answered = [batch for batch in batches if "__num_turns__" in batch.non_tensor_batch]
    scored = [(batch, row) for batch in answered for row in Trajectories.from_batch(batch).scored_rows]
    turns = [float(batch.non_tensor_batch["__num_turns__"][row]) for batch, row in scored]
    metrics = _shares(trajectories) | distribution(turns, "num_turns")
    return {f"val-aux/{name}": value for name, value in metrics.items()}


def _shares(trajectories: Sequence[Trajectory]) -> Metrics:
    counts = Counter(batch.non_tensor_batch["trajectory_status"][rows[0]] for batch, rows in trajectories)
    return {f"agent/status/{status}": counts[status] / len(trajectories) for status in get_args(TrajectoryStatus)}


Trajectory = tuple[DataProto, list[int]]
"""A batch, and the rows of it that are one trajectory."""


def _trajectories(batch: DataProto) -> list[Trajectory]:
    if "trajectory_status" not in batch.non_tensor_batch:
        return []
    return [(batch, rows) for rows in Trajectories.from_batch(batch).members()]


def _summed(trajectory: Trajectory, column: str) -> Counter[str] | None:
    """The sum of a column of numbers by name over the sequences of a trajectory; None if none has it."""
    batch, rows = trajectory
    row_numbers = [batch.non_tensor_batch[column][row] for row in rows if column in batch.non_tensor_batch]
    row_numbers = [numbers for numbers in row_numbers if numbers is not None]
    total: Counter[str] = Counter()
    for numbers in row_numbers:
        total.update(numbers)
    return total if row_numbers else None


def _timing(trajectories: Sequence[Trajectory]) -> Metrics:
    prefix = "timing_s/agent_loop"
    seconds = [_summed(trajectory, "agent_loop_metrics") or Counter() for trajectory in trajectories]
    metrics: Metrics = {}
    for name in TIMES:
        metrics |= distribution([times[name] for times in seconds], f"{prefix}/{name}")
    slowest = max(range(len(seconds)), key=lambda index: sum(seconds[index][name] for name in TIMES))
    metrics |= {f"{prefix}/slowest/{name}": seconds[slowest][name] for name in TIMES}
    batch, rows = trajectories[slowest]
    for name, lengths in (("prompt_length", prompt_lengths(batch)), ("response_length", response_lengths(batch))):
        metrics[f"{prefix}/slowest/{name}"] = float(lengths[rows[-1]])
    recorded = [batch.non_tensor_batch["agent_loop_metrics"][row] for batch, rows in trajectories for row in rows]
    if preempted := [float(times["num_preempted"]) for times in recorded if times["num_preempted"] >= 0]:
        metrics |= distribution(preempted, f"{prefix}/num_preempted")
    return metrics


def _own_scores(batch: DataProto) -> tuple[list[Score | None], list[Score | None]]:
    """Scores that agent loops gave: of each trajectory, and of each sequence of an agent with ``turn_scores``."""
    wholes, turns = (batch.non_tensor_batch.get(name, [None] * len(batch)) for name in ("reward_score", "turn_scores"))
    trajectories = Trajectories.from_batch(batch)
    by_agent: dict[int, list[object]] = {}
    for unit, turn_scores in zip(trajectories.agent_indices, turns, strict=True):
        by_agent.setdefault(unit, []).extend([] if turn_scores is None else [turn_scores])
    turn_values = [
        (Score(0.0) if turn_scores is None else _score_of_turns([turn_scores])) if by_agent[unit] else None
        for unit, turn_scores in zip(trajectories.agent_indices, turns, strict=True)
    ]
    trajectory_values: list[Score | None] = []
    for rows, scored in zip(trajectories.members(), trajectories.scored_rows, strict=True):
        trajectory_score = next((wholes[row] for row in rows if wholes[row] is not None), None)
        if turn_scores := by_agent[trajectories.agent_indices[scored]]:
            trajectory_values.append(replace(_score_of_turns(turn_scores, trajectory_score), turn_scores=None))
        else:
            trajectory_values.append(None if trajectory_score is None else checked_score(trajectory_score))
    return trajectory_values, turn_values


def _score_of_turns(turn_scores: list[Any], total: object = None) -> Score:
    """Return the score of the turns of some sequences; ``total``, if given, has to be their sum."""
    not_lists = [turns for turns in turn_scores if not isinstance(turns, list)]
    turns = not_lists[0] if not_lists else [turn for turns in turn_scores for turn in turns]
    return checked_score({"turn_scores": turns} | ({} if total is None else {"score": total}))
