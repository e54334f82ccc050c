"""Schedules of sampling and training on 64, 256 and 1,024 ranks, simulated: speed, idle ranks, ages of responses.

A discrete-event simulation. Responses have log-normal lengths, cut at a limit, that correlate within a group. An engine
generates a token for each of its n responses, with c tokens of context in all, in ``read + context * c + row * n``
seconds. A step trains in ``fixed + work / ranks`` seconds. Which groups start, and which a step takes, is decided by
``verl/experience/admission.py``. For each schedule on two pools several splits of the ranks are tried. ::

    python -m benchmarks.asynchronous_schedules [--traces short reasoning] [--ranks 64 256 1024] [--json schedules.json]
    python -m benchmarks.asynchronous_schedules --published
    python -m benchmarks.asynchronous_schedules --traces reasoning --ranks 256 --sigmas 0.4 0.8 1.2
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from verl.experience.admission import Admission


@dataclass(frozen=True)
class Trace:
    """Work of a step and speeds of a rank."""

    prompts: int
    responses: int
    """Of each prompt."""
    mean: float
    """Tokens of a response before the cut."""
    sigma: float
    """Standard deviation of the logarithm of the length."""
    limit: int
    read_s: float
    """Of an engine, for one token of all its responses: reading the weights, starting kernels."""
    context_s: float
    """Added for each token of context."""
    row_s: float
    """Added for each response; also the time of a prefill per token."""
    slots: int
    """Responses that an engine generates at the same time."""
    engine_ranks: int
    train_fixed_s: float
    train_rank_s: float
    """Seconds of one rank for the update of a step, if it could do it alone."""
    old_log_probs: float
    """Time of the pass for old log-probs, as a part of the update's."""
    transfer_s: float
    """Weights from trainer to engines on other ranks."""
    switch_s: float
    """On shared ranks: engines to sleep, and awake with new weights."""
    correlation: float = 0.5
    """Of the logarithms of lengths within a group."""

    @property
    def cut_mean(self) -> float:
        """Mean tokens of a response: E min(X, limit) of the log-normal X."""
        center, normal = math.log(self.mean) - self.sigma**2 / 2, NormalDist()
        cut = (math.log(self.limit) - center) / self.sigma
        return self.mean * normal.cdf(cut - self.sigma) + self.limit * (1 - normal.cdf(cut))

    def train_s(self, ranks: int, bypass: bool) -> float:
        """Seconds to train on responses of mean length, without the pass for old log-probs if ``bypass``."""
        return (1.0 if bypass else 1 + self.old_log_probs) * (self.train_fixed_s + self.train_rank_s / ranks)

    def lengths(self, seed: int) -> Iterator[list[int]]:
        """Lengths of the responses of one group after the other."""
        draw = np.random.default_rng(seed)
        within, between = math.sqrt(1 - self.correlation), math.sqrt(self.correlation)
        center = math.log(self.mean) - self.sigma**2 / 2
        while True:
            of_group, of_responses = draw.standard_normal(), draw.standard_normal(self.responses)
            drawn = np.exp(center + self.sigma * (between * of_group + within * of_responses))
            yield drawn.round().clip(1, self.limit).astype(int).tolist()


TRACES = {
    # verl, docs/advance/fully_async.md: Qwen2.5-Math-7B, DAPO, 28k, H20; 512 prompts with 16 responses. Sync on 32, 64,
    # 128 ranks: gen 357, 151, 178 s, old_log_prob 108, 70, 54 s, update_actor 270, 133, 114 s; update_actor of the
    # trainer's 16, 32, 64 ranks 314, 157, 113 s. The mean length is not published.
    "short": Trace(
        prompts=512, responses=16, mean=1150, sigma=1.1, limit=28672,
        read_s=0.0055, context_s=2.4e-8, row_s=1.5e-4, slots=256, engine_ranks=1,
        train_fixed_s=60, train_rank_s=4000, old_log_probs=0.5, transfer_s=6, switch_s=10,
    ),
    # verl, docs/advance/v1_async_trainer.md: Qwen3.5-35B-A3B, 32 ranks, TP 4, 64 prompts; about 518 responses a step
    # (tokens per second times seconds over mean length), so 8 for each prompt; mean 12.7k, limit 32k.
    "moe": Trace(
        prompts=64, responses=8, mean=14500, sigma=0.8, limit=32768,
        read_s=0.0100, context_s=3e-9, row_s=2e-5, slots=256, engine_ranks=4,
        train_fixed_s=10, train_rank_s=3600, old_log_probs=0.45, transfer_s=10, switch_s=15,
    ),
    # AReaL, arXiv:2505.24298, table 1 and section 7.1: R1-distilled 1.5B, 128 H800, 512 prompts with 16 responses, 32k,
    # a quarter of the ranks trains; sync 41.0 h, asynchronous 14.8 h for 250 steps. Stage times and lengths are not
    # published: the lengths are those of the trace above, the speeds fit these two times.
    "reasoning": Trace(
        prompts=512, responses=16, mean=14500, sigma=0.8, limit=32768,
        read_s=0.0118, context_s=1.1e-8, row_s=1e-5, slots=256, engine_ranks=1,
        train_fixed_s=10, train_rank_s=4300, old_log_probs=0.3, transfer_s=3, switch_s=10,
    ),
}  # fmt: skip
"""What is published about stages, and what is assumed so that the simulation of sync meets it."""


@dataclass(frozen=True)
class Schedule:
    """When groups start, and when a step trains."""

    name: str
    is_shared: bool = False
    """Engines and trainer take turns on the same ranks."""
    staleness: int | None = 0
    """Bound on ages; none with None."""
    ahead: float = 0.0
    """Batches that may start before the version whose batch they complete."""
    by_batch: bool = False
    """A batch has one version of the weights, that of ``staleness`` steps before, and steps take batches in order."""
    pools: int = 1
    """Parts of the rollout ranks, which take batches in turns."""
    drops: bool = False
    """Discard groups older than ``staleness`` instead of waiting for them."""
    chunks: int = 1
    """Parts of a batch that are trained on as soon as they are complete; one version of weights for all."""
    keeps_kv: bool = False
    """Responses under way keep their keys and values when the weights change."""
    bypass: bool = False
    """No pass for old log-probs."""


SYNC = Schedule("sync, shared ranks", is_shared=True)
LAG_2 = Schedule("lag 2, batches on 2 halves", by_batch=True, staleness=2, ahead=2, pools=2)
LAG_4 = Schedule("lag 4, batches on 4 quarters", by_batch=True, staleness=4, ahead=4, pools=4)
LAG_8 = Schedule("lag 8, batches on 8 eighths", by_batch=True, staleness=8, ahead=8, pools=8)
FREE_8 = Schedule("free-running, age ≤ 8", staleness=8, ahead=8)
FREE_8_KV = replace(FREE_8, name="free-running, age ≤ 8, keys and values kept", keeps_kv=True)
FREE = Schedule("free-running, age ≤ 8, 2 batches ahead", staleness=8, ahead=2)
SCHEDULES = (
    SYNC,
    Schedule("sync, two pools"),
    Schedule("colocate_async, age ≤ 1", is_shared=True, staleness=1, ahead=1),
    Schedule("colocate_async, age ≤ 8", is_shared=True, staleness=8, ahead=1),
    Schedule("lag 1", by_batch=True, staleness=1, ahead=1),
    Schedule("lag 2", by_batch=True, staleness=2, ahead=2),
    Schedule("lag 4", by_batch=True, staleness=4, ahead=4),
    LAG_2,
    LAG_4,
    LAG_8,
    Schedule("free-running, age ≤ 1", staleness=1, ahead=1),
    Schedule("free-running, age ≤ 4", staleness=4, ahead=4),
    FREE_8,
    FREE_8_KV,
    FREE,
    Schedule("dropping, age ≤ 1", staleness=1, ahead=1, drops=True),
)
STREAM = Schedule("fully_async, staleness_threshold 0", staleness=None, chunks=4, bypass=True)
FULLY_ASYNC = Schedule("fully_async, staleness_threshold 0.5", staleness=None, ahead=0.5, chunks=4, bypass=True)
COLOCATE = Schedule("colocate_async", is_shared=True, staleness=None, ahead=1)
SEPARATE = Schedule("separate_async", staleness=None, ahead=1, chunks=4)
AREAL = Schedule("AReaL, max_head_offpolicyness 8", staleness=None, ahead=8)


@dataclass(eq=False)
class Group:
    """A prompt with its responses."""

    lengths: list[int]
    started_at: int
    left: int
    """Responses that are not finished."""


class Engine:
    """Generates a token for each of its responses at a time."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.now = self.done = self.context = 0.0
        """Time, tokens generated so far for a response that was there from the beginning, tokens of all responses."""
        self.ends: list[tuple[float, int, int, Group]] = []
        self.busy_s = self.response_s = 0.0
        self.events = 0

    def seconds(self, tokens: float) -> float:
        """Seconds until that many more tokens of each response are generated."""
        rows, trace = len(self.ends), self.trace
        first = trace.read_s + trace.row_s * rows + trace.context_s * self.context
        return tokens * (first + trace.context_s * rows * tokens / 2)

    def advance(self, now: float) -> None:
        """Generate until ``now``."""
        elapsed = now - self.now
        if elapsed <= 0:
            return
        self.now = now
        rows = len(self.ends)
        if rows:
            trace = self.trace
            first = trace.read_s + trace.row_s * rows + trace.context_s * self.context
            growth = trace.context_s * rows
            tokens = 2 * elapsed / (first + math.sqrt(first * first + 2 * growth * elapsed))
            self.done += tokens
            self.context += rows * tokens
            self.busy_s += elapsed
            self.response_s += rows * elapsed

    def pause(self, now: float, seconds: float, keeps_kv: bool) -> None:
        """Stop from ``now`` on; afterwards compute the keys and values of all context again, unless they are kept."""
        self.advance(now)
        self.now += seconds + (0.0 if keeps_kv else self.context * self.trace.row_s)


class Pool:
    """Engines with a queue of responses; new ones go to the engine that has the fewest."""

    def __init__(self, trace: Trace, ranks: int) -> None:
        self.engines = [Engine(trace) for _ in range(ranks // trace.engine_ranks)]
        self.queue: deque[tuple[int, Group]] = deque()
        self.slots = trace.slots
        self.counts = [(0, index) for index in range(len(self.engines))]
        self.events: list[tuple[float, int, int]] = []
        self.changed: set[int] = set()
        self.total = 0
        self.serial = 0

    @property
    def free(self) -> int:
        """Responses that could begin now."""
        return len(self.engines) * self.slots - self.total - len(self.queue)

    def start(self, group: Group, now: float) -> None:
        """Begin with the responses of a group, or queue them."""
        self.queue.extend((length, group) for length in group.lengths)
        self._fill(now)

    def _fill(self, now: float) -> None:
        while self.queue and self.total < len(self.engines) * self.slots:
            rows, index = heapq.heappop(self.counts)
            engine = self.engines[index]
            if rows != len(engine.ends):
                continue
            length, group = self.queue.popleft()
            engine.advance(now)
            self.serial += 1
            heapq.heappush(engine.ends, (engine.done + length, self.serial, length, group))
            heapq.heappush(self.counts, (len(engine.ends), index))
            self.total += 1
            self.changed.add(index)

    def next_end(self) -> float:
        """Time at which the next response ends."""
        for index in self.changed:
            engine = self.engines[index]
            engine.events += 1
            if engine.ends:
                end = engine.now + engine.seconds(engine.ends[0][0] - engine.done)
                heapq.heappush(self.events, (end, index, engine.events))
        self.changed.clear()
        while self.events and self.events[0][2] != self.engines[self.events[0][1]].events:
            heapq.heappop(self.events)
        return self.events[0][0] if self.events else math.inf

    def end_one(self) -> Group:
        """Go to that time, and return the group of the response."""
        now, index, _ = heapq.heappop(self.events)
        engine = self.engines[index]
        engine.advance(now)
        end, _, length, group = heapq.heappop(engine.ends)
        engine.done = end
        engine.context -= length
        if not engine.ends:
            engine.context = engine.done = 0.0
        heapq.heappush(self.counts, (len(engine.ends), index))
        self.total -= 1
        self.changed.add(index)
        if self.queue:
            self._fill(now)
        return group

    def pause(self, now: float, seconds: float, keeps_kv: bool = False) -> None:
        """Pause all engines."""
        for index, engine in enumerate(self.engines):
            engine.pause(now, seconds, keeps_kv)
            self.changed.add(index)


@dataclass
class Result:
    """Means over the counted steps of one schedule on one cluster."""

    trainer_ranks: int
    rollout_ranks: int
    step_s: float
    training: float
    """Part of the time in which the trainer's ranks train."""
    generating: float
    """Part of the time in which an engine generates: not while it is paused or has no response."""
    responses_at_once: float
    """Of an engine that generates."""
    age: float
    oldest: int
    length: float
    """Mean length of groups trained on, against all that started with versions early enough to be trained on."""
    discarded: float
    """Tokens of discarded groups, as a part of all."""

    def idle(self, is_shared: bool) -> float:
        """Part of the time in which a rank, of all, neither trains nor generates."""
        if is_shared:
            return 1 - self.training - self.generating
        used = self.training * self.trainer_ranks + self.generating * self.rollout_ranks
        return 1 - used / (self.trainer_ranks + self.rollout_ranks)


class Run:
    """One schedule, with the trainer on ``trainer_ranks`` and engines on ``rollout_ranks``, which may be the same."""

    def __init__(self, schedule: Schedule, trace: Trace, trainer_ranks: int, rollout_ranks: int, seed: int = 0) -> None:
        self.schedule, self.trace = schedule, trace
        self.trainer_ranks, self.rollout_ranks = trainer_ranks, rollout_ranks
        bound = None if schedule.drops else schedule.staleness
        self.admission = Admission(trace.prompts, int(schedule.ahead * trace.prompts), bound)
        self.chunk = trace.prompts // schedule.chunks
        self.chunk_admission = self.admission if schedule.chunks == 1 else Admission(self.chunk, 0, None)
        self.pools = [Pool(trace, rollout_ranks // schedule.pools) for _ in range(schedule.pools)]
        self.lengths = trace.lengths(seed)
        self.now = 0.0
        self.version = self.chunks = self.discarded_groups = 0
        self.started: list[Group] = []
        self.finished: list[Group] = []
        self.under_way: Counter[int] = Counter()
        self.trained: list[tuple[int, Group]] = []
        """With the version that they were trained on."""
        self.trainer_at = 0.0
        """When the trainer ends what it does."""
        self.trains = False
        self.training_s = 0.0

    def simulate(self, steps: int, warm_up: int) -> Result:
        """Run ``steps`` steps, and count those after ``warm_up``."""
        before, may_train = self._totals(), True
        while self.version < steps:
            self._start_groups()
            if may_train and self.now >= self.trainer_at and not self.trains:
                self._train()
                may_train = False
            ends = [pool.next_end() for pool in self.pools]
            end = min(ends)
            trainer_at = self.trainer_at if self.trains or self.trainer_at > self.now else math.inf
            if trainer_at <= end:
                self.now, may_train = trainer_at, True
                if self.trains:
                    self._update()
                    if self.version == warm_up and not self.chunks:
                        before = self._totals()
            else:
                self.now = end
                may_train |= self._end_response(self.pools[ends.index(end)])
        elapsed, training_s, busy_s, response_s = (
            after - first for after, first in zip(self._totals(), before, strict=True)
        )
        counted = [(version, group) for version, group in self.trained if version >= warm_up]
        ages = [version - group.started_at for version, group in counted]
        margin = warm_up if self.schedule.drops else self.schedule.staleness or 0
        early = [group for group in self.started if group.started_at < steps - margin]
        used = {group for _, group in self.trained}
        kept = [group for group in early if group in used]
        tokens = sum(sum(group.lengths) for group in early)
        kept_tokens = sum(sum(group.lengths) for group in kept)
        return Result(
            trainer_ranks=self.trainer_ranks,
            rollout_ranks=self.rollout_ranks,
            step_s=elapsed / (steps - warm_up),
            training=training_s / elapsed,
            generating=busy_s / elapsed / sum(len(pool.engines) for pool in self.pools),
            responses_at_once=response_s / busy_s,
            age=sum(ages) / len(ages),
            oldest=max(ages),
            length=kept_tokens / len(kept) / (tokens / len(early)),
            discarded=1 - kept_tokens / tokens if self.schedule.drops else 0.0,
        )

    def _start_groups(self) -> None:
        if not self.schedule.by_batch and self.pools[0].free < self.trace.responses:
            return
        version = self.version
        capacity = self.admission.capacity(version, len(self.started) - self.discarded_groups)
        if self.schedule.by_batch:
            pool = self.pools[len(self.started) // self.trace.prompts % len(self.pools)]
            if capacity < self.trace.prompts or pool.total:
                return
            pool.pause(self.now, self.trace.transfer_s)
            groups = self.trace.prompts
            version = max(0, len(self.started) // groups - (self.schedule.staleness or 0))
        elif self.schedule.is_shared and self.trains:
            return
        else:
            pool = self.pools[0]
            groups = min(capacity, pool.free // self.trace.responses)
        for _ in range(groups):
            group = Group(next(self.lengths), version, self.trace.responses)
            self.started.append(group)
            self.under_way[version] += 1
            pool.start(group, self.now)

    def _train(self) -> None:
        """Begin to train, if the groups for it are there."""
        schedule, trace = self.schedule, self.trace
        if schedule.by_batch:
            first = self.version * trace.prompts
            chosen = self.started[first : first + trace.prompts]
            if len(chosen) < trace.prompts or any(group.left for group in chosen):
                return
        else:
            if schedule.drops and schedule.staleness is not None:
                fresh = [group for group in self.finished if self.version - group.started_at <= schedule.staleness]
                self.discarded_groups += len(self.finished) - len(fresh)
                self.finished = fresh
            positions = self.chunk_admission.next_batch(
                self.version, self.under_way, [group.started_at for group in self.finished]
            )
            if positions is None:
                return
            chosen = [self.finished[position] for position in positions]
            gone = set(positions)
            self.finished = [group for position, group in enumerate(self.finished) if position not in gone]
        self.trained += [(self.version, group) for group in chosen]
        tokens = sum(sum(group.lengths) for group in chosen) / (len(chosen) * trace.responses)
        seconds = trace.train_s(self.trainer_ranks, schedule.bypass) / schedule.chunks * tokens / trace.cut_mean
        self.training_s += seconds
        self.trains, self.trainer_at = True, self.now + seconds
        if schedule.is_shared:
            self.pools[0].pause(self.now, seconds + trace.switch_s)

    def _update(self) -> None:
        """End an update; after the last one of a version the engines get the weights."""
        self.trains = False
        self.chunks = (self.chunks + 1) % self.schedule.chunks
        if self.chunks:
            return
        self.version += 1
        self.trainer_at += self.trace.switch_s if self.schedule.is_shared else self.trace.transfer_s
        if not self.schedule.is_shared and not self.schedule.by_batch:
            self.pools[0].pause(self.now, self.trace.transfer_s, self.schedule.keeps_kv)

    def _end_response(self, pool: Pool) -> bool:
        """End the next response, and return whether it was the last one of its group."""
        group = pool.end_one()
        group.left -= 1
        if group.left:
            return False
        self.under_way[group.started_at] -= 1
        if not self.under_way[group.started_at]:
            del self.under_way[group.started_at]
        self.finished.append(group)
        return True

    def _totals(self) -> tuple[float, float, float, float]:
        engines = [engine for pool in self.pools for engine in pool.engines]
        for engine in engines:
            engine.advance(self.now)
        for pool in self.pools:
            pool.changed.update(range(len(pool.engines)))
        busy_s, response_s = sum(engine.busy_s for engine in engines), sum(engine.response_s for engine in engines)
        return self.now, self.training_s, busy_s, response_s


COUNTED = 8
"""Steps that are counted."""
TRAINER_IS_BUSY = 0.9


def simulate(schedule: Schedule, trace: Trace, trainer_ranks: int, rollout_ranks: int) -> Result:
    """Simulate one split. The batches that start together at the beginning are over before counting starts."""
    warm_up = 2 * math.ceil(schedule.ahead) + 3
    return Run(schedule, trace, trainer_ranks, rollout_ranks).simulate(warm_up + COUNTED, warm_up)


def best(job: tuple[Schedule, Trace, int]) -> Result:
    """Return the fastest of several splits of the ranks; on shared ranks there is none to choose.

    The splits, in sixteenths, are those of a bisection: if the trainer is busy nearly all the time, it gets more ranks.
    """
    schedule, trace, ranks = job
    if schedule.is_shared:
        return simulate(schedule, trace, ranks, ranks)
    results: list[Result] = []
    low, high = 1, min(13, 16 - math.ceil(16 * schedule.pools * trace.engine_ranks / ranks))
    while low <= high:
        sixteenths = (low + high) // 2
        trainer = ranks * sixteenths // 16
        results.append(simulate(schedule, trace, trainer, ranks - trainer))
        if results[-1].training > TRAINER_IS_BUSY:
            low = sixteenths + 1
        else:
            high = sixteenths - 1
    return min(results, key=lambda result: result.step_s)


PUBLISHED: tuple[tuple[str, Schedule, int | tuple[int, int], str], ...] = (
    ("short", SYNC, (32, 32), "790"),
    ("short", FULLY_ASYNC, (16, 16), "295; 1.70 to 2.66"),
    ("short", SYNC, (64, 64), "365"),
    ("short", FULLY_ASYNC, (32, 32), "189; 1.83 to 2.09"),
    ("short", SYNC, (128, 128), "356"),
    ("short", STREAM, (64, 64), "231; 1.6"),
    ("short", FULLY_ASYNC, (64, 64), "151; 2.35 to 2.67"),
    ("short", replace(LAG_4, bypass=True), 128, ""),
    ("short", replace(FREE, bypass=True), 128, ""),
    ("moe", SYNC, (32, 32), "547"),
    ("moe", COLOCATE, (32, 32), "353; 1.55"),
    ("moe", SEPARATE, (16, 16), "338; 1.62"),
    ("moe", LAG_2, 32, ""),
    ("moe", FREE, 32, ""),
    ("reasoning", SYNC, (128, 128), "590"),
    ("reasoning", AREAL, (32, 96), "213; 2.77"),
    ("reasoning", LAG_4, 128, ""),
    ("reasoning", LAG_8, 128, ""),
    ("reasoning", FREE_8, 128, ""),
    ("reasoning", FREE_8_KV, 128, ""),
)
"""Trace, schedule, ranks of trainer and rollout, published seconds of a step and speed against sync. With one number of
ranks the best split is searched."""


def table(results: list[tuple[Schedule, Result]]) -> str:
    """One row for each schedule; the first is the baseline."""
    heads = "steps per hour | trainer : rollout | trainer idle | rollout idle | all idle | at once | age | length"
    lines = [f"| schedule | {heads} |", f"|{'---|' * 9}"]
    for schedule, result in results:
        cells = [
            schedule.name,
            f"{results[0][1].step_s / result.step_s:.2f}",
            "all" if schedule.is_shared else f"{result.trainer_ranks} : {result.rollout_ranks}",
            "" if schedule.is_shared else f"{1 - result.training:.0%}",
            "" if schedule.is_shared else f"{1 - result.generating:.0%}",
            f"{result.idle(schedule.is_shared):.0%}",
            f"{result.responses_at_once:.0f}",
            f"{result.age:.1f} ({result.oldest})",
            f"{result.length:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def published() -> str:
    """Simulate what others have published."""
    lines = ["| trace | schedule | trainer : rollout | published s per step; speed | simulated |", f"|{'---|' * 5}"]
    sync_s = 0.0
    for name, schedule, split, figures in PUBLISHED:
        if isinstance(split, int):
            result = best((schedule, TRACES[name], split))
        else:
            result = simulate(schedule, TRACES[name], *split)
        sync_s = result.step_s if schedule is SYNC else sync_s
        speed = "" if schedule is SYNC else f"; {sync_s / result.step_s:.2f}"
        both = f"{result.trainer_ranks} : {result.rollout_ranks}"
        ranks = str(result.trainer_ranks) if schedule.is_shared else both
        lines.append(f"| {name} | {schedule.name} | {ranks} | {figures} | {result.step_s:.0f}{speed} |")
    return "\n".join(lines)


def with_sigma(trace: Trace, sigma: float) -> Trace:
    """Return the trace with another tail and the same mean length after the cut."""
    low, high = 1.0, 100.0 * trace.cut_mean
    for _ in range(60):
        mean = (low + high) / 2
        is_low = replace(trace, sigma=sigma, mean=mean).cut_mean < trace.cut_mean
        low, high = (mean, high) if is_low else (low, mean)
    return replace(trace, sigma=sigma, mean=low)


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", default=["short", "reasoning"], choices=list(TRACES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024], help="ranks of both pools together")
    parser.add_argument("--published", action="store_true", help="only compare with published times")
    parser.add_argument("--sigmas", type=float, nargs="+", default=[], help="only other tails, on the second cluster")
    parser.add_argument("--json", type=Path, help="write all results there")
    args = parser.parse_args()
    if args.published:
        print(published())
        return
    cases = [(f"{name}, {ranks} ranks", TRACES[name], ranks) for name in args.traces for ranks in args.ranks]
    if args.sigmas:
        cases = [
            (f"{name}, sigma {sigma}, {args.ranks[-1]} ranks", with_sigma(TRACES[name], sigma), args.ranks[-1])
            for name in args.traces
            for sigma in args.sigmas
        ]
    jobs = [(schedule, trace, ranks) for _, trace, ranks in cases for schedule in SCHEDULES]
    everything: dict[str, dict[str, dict[str, float]]] = {}
    with ProcessPoolExecutor() as processes:
        results = processes.map(best, jobs)
        for title, _, _ in cases:
            rows = [(schedule, next(results)) for schedule in SCHEDULES]
            everything[title] = {schedule.name: asdict(result) for schedule, result in rows}
            print(f"\n{title}; a step of sync takes {rows[0][1].step_s:.0f} s\n\n{table(rows)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
