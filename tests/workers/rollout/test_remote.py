"""Engines that are killed or stopped at any moment: the responses are those of an undisturbed run.

The rollout, its HTTP and its processes are the real ones; vLLM itself is a small program with its protocol
(``small_engine.py``). The real vLLM and SGLang are killed in ``test_vllm.py`` and ``test_sglang.py``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.waiting import eventually, is_alive, meanwhile
from tests.workers.support import run_ranks
from verl.errors import EngineLostError, ProcessLostError, RolloutError
from verl.testing.models import tiny_model_dir
from verl.testing.rollout_conformance import PROMPTS, Serving, prompt_batch, shape_of, weights_of
from verl.utils import hf_tokenizer
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout import base, engine_process, remote
from verl.workers.rollout.base import NO_WEIGHTS, RolloutOutput, RolloutRequest, SamplingParams
from verl.workers.rollout.client import PartialResponse
from verl.workers.rollout.state import EngineState
from verl.workers.rollout.vllm_rollout import VLLMRollout
from verl.workers.rollout.vllm_rollout.client import VLLMClient

LAST = PROMPTS[1]
"""The prompt whose request is under way when the engine is killed; the others are answered by then."""
OTHERS = len(PROMPTS) - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", **shape_of("qwen3"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Short pauses, logs below the test's folder; and no process is left, dead or alive."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(engine_process, "_CHECK_S", 0.1)
    monkeypatch.setenv("SMALL_ENGINE_FOLDER", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(VLLMClient, "take", says_what_is_taken(tmp_path))
    before = others()
    yield
    eventually(lambda: not family(before), "the end of all processes")
    pids = [int(path.read_text()) for path in tmp_path.glob("core-*")]
    eventually(lambda: not any(map(is_alive, pids)), "the end of all cores")


def others() -> set[int]:
    """Processes that this one has started: a Ray that other files of tests share, and the like."""
    return {process.pid for process in psutil.Process().children()}


def family(but_for: set[int]) -> list[psutil.Process]:
    """What this process has started since, and all below; but for helpers of multiprocessing that stay to the end."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            helps = re.search("resource_tracker|forkserver", " ".join(process.cmdline()))
            if process.pid not in but_for and not helps:
                found += [process, *process.children(recursive=True)]
    return found


def says_what_is_taken(folder: Path) -> Callable[[VLLMClient, PartialResponse, Any], bool]:
    """``VLLMClient.take``, which leaves a file for the engine once all answers but the last are taken."""
    take, lock, ended = VLLMClient.take, threading.Lock(), []

    def wrapped(client: VLLMClient, response: PartialResponse, answer: Any) -> bool:
        done = take(client, response, answer)
        with lock:
            if answer["choices"][0]["finish_reason"]:
                ended.append(response)
            if len(ended) == OTHERS:
                (folder / "others-taken").touch()
        return done

    return wrapped


def rollout(model: str, folder: Path, plan: dict[str, Any], device: str = "cpu", **settings: Any) -> VLLMRollout:
    """The vLLM engine, whose interpreter is the small engine."""
    (folder / "plan.json").write_text(json.dumps({"last": LAST, **plan}))
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\n{(Path(__file__).parent / 'small_engine.py').read_text()}")
    python.chmod(0o700)
    kwargs = {"python": str(python)} | settings.pop("kwargs", {})
    config = RolloutConfig(
        name="vllm",
        **(
            {
                "tensor_model_parallel_size": 1,
                "dtype": "float32",
                "prompt_length": 8,
                "response_length": 12,
                "engine_kwargs": {"vllm": kwargs},
                "free_cache_engine": device == "cuda",
            }
            | settings
        ),
    )
    return VLLMRollout(config, HFModelConfig(path=model), hf_tokenizer(model), device)


def requests(**sampling: Any) -> list[RolloutRequest]:
    return [
        RolloutRequest(prompt, SamplingParams(max_tokens=6, seed=number, ignore_eos=True, **sampling))
        for number, prompt in enumerate(PROMPTS)
    ]


def weights(seed: int = 0) -> Any:
    return lambda: weights_of("qwen3", seed)


def generated(engine: VLLMRollout, **sampling: Any) -> list[list[RolloutOutput]]:
    """Two steps, with the weights of two seeds."""
    steps = []
    for version in (0, 1):
        with engine.awake(weights(version), version):
            steps.append(engine.generate(requests(**sampling)))
    assert engine._engine is not None
    engine._engine.kill()
    return steps


@pytest.fixture(scope="module")
def undisturbed(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[RolloutOutput]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMALL_ENGINE_FOLDER", str(folder))
        patch.setattr(VLLMClient, "take", says_what_is_taken(folder))
        engine = rollout(model, folder, {})
        steps = generated(engine)
    assert engine.restarts == 0
    assert [output.finish_reason for output in steps[0]] == ["length"] * len(PROMPTS)
    assert steps[0][0].token_ids != steps[1][0].token_ids  # other weights, other tokens
    return steps


def pids_at(folder: Path, moment: str) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob(f"{moment}-*"))


def victim(folder: Path, pid: int, which: str) -> int:
    if which == "core":
        return int((folder / f"core-{pid}").read_text())
    return pid if which == "server" else psutil.Process(pid).ppid()


@contextmanager
def killer(
    folder: Path, moment: str, which: str = "server", number: int = signal.SIGKILL, most: int = 99
) -> Iterator[list[int]]:
    """Kills whoever comes to the moment, ``most`` times."""
    killed: list[int] = []

    def act() -> None:
        for pid in pids_at(folder, moment):
            if pid not in killed and len(killed) < most:
                killed.append(pid)
                with suppress(ProcessLookupError, psutil.Error):
                    os.kill(victim(folder, pid, which), number)

    with meanwhile(act):
        yield killed


@pytest.mark.parametrize(
    ("moment", "which"),
    [
        ("start", "guard"),
        ("load", "server"),
        ("generate", "core"),
        *(
            pytest.param(moment, which, marks=pytest.mark.slow)
            for moment, which in (
                ("start", "server"),
                ("load", "core"),
                ("reset", "guard"),
                ("generate", "server"),
                ("generate", "guard"),
            )
        ),
    ],
)
def test_killed_at_any_moment(moment: str, which: str, model: str, tmp_path: Path, undisturbed: Any) -> None:
    with killer(tmp_path, moment, which, most=2) as killed:
        engine = rollout(model, tmp_path, {moment: 2})
        assert generated(engine) == undisturbed
    assert len(killed) == 2
    assert engine.restarts == 2


def test_an_engine_wakes_after_the_trainer_has_released_its_memory_and_finds_programs_of_its_environment(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep: list[set[str]] = []
    before = others()
    released: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(not family(before)))
    engine = rollout(model, tmp_path, {"busy_resets": 2}, device="cuda")  # which are asked for again
    assert released == [True]  # before the engine starts
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asleep.append(set(engine._asleep)))
    for version in (0, 1):
        with engine.awake(weights(version), version):
            assert not engine._asleep
    assert asleep == [{"weights", "kv_cache"}] * 2
    paths = {process.environ()["PATH"].split(os.pathsep)[0] for process in family(before)}
    assert paths == {str(tmp_path)}
    assert engine._engine is not None
    engine._engine.kill()


@pytest.mark.parametrize("moment", ["wake_up", "sleep", "load"])
def test_killed_where_memory_is_given_back(moment: str, model: str, tmp_path: Path, undisturbed: Any) -> None:
    """As on a GPU, where an engine sleeps between its uses."""
    with killer(tmp_path, moment, most=1) as killed:
        engine = rollout(model, tmp_path, {moment: 1}, device="cuda")
        assert generated(engine) == undisturbed
    assert len(killed) == 1
    assert engine.restarts == 1


def asked(folder: Path) -> list[list[str]]:
    """The prompts of each engine, in the order in which the engines lived."""
    files = sorted(folder.glob("asked-*"), key=lambda path: path.stat().st_ctime_ns)
    return [path.read_text().splitlines() for path in files]


@pytest.mark.parametrize("streams", [False, True])
def test_only_what_was_not_answered_is_asked_again(
    streams: bool, model: str, tmp_path: Path, undisturbed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A response that was half streamed is asked again as a whole."""
    stop = {"stop": ("no such text",)} if streams else {}
    with killer(tmp_path, "generate", most=1):
        engine = rollout(model, tmp_path, {"generate": 1})
        assert generated(engine, **stop) == undisturbed
    first, second = asked(tmp_path)
    everything = sorted(map(str, PROMPTS))
    assert sorted(first) == everything
    assert sorted(second) == sorted([str(LAST), *everything])  # the rest of one step, and the next step
    (said,) = [record.getMessage() for record in caplog.records if "engine lost" in record.getMessage()]
    assert re.match(r"vllm engine lost; restart 1 of 3 in 0.05 s. the vllm server (broke a connection|has ended)", said)
    kept = Path(said.rpartition("The whole log: ")[2].rstrip("."))
    assert kept.read_text().startswith("the small engine begins")
    assert kept.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("lingers_s", [0.5, 600])
def test_a_server_that_outlives_its_core_and_answers_with_errors(
    lingers_s: float, model: str, tmp_path: Path, undisturbed: Any
) -> None:
    """Status 500 is an error of the server's own where it is well, and a loss where it ends or says that it is not."""
    with killer(tmp_path, "generate", "core", most=1) as killed:
        engine = rollout(model, tmp_path, {"generate": 1, "lingers_s": lingers_s})
        assert generated(engine) == undisturbed
    assert (len(killed), engine.restarts) == (1, 1)


def test_killed_while_idle(model: str, tmp_path: Path, undisturbed: Any) -> None:
    """Between two uses that have the same weights: the engine that takes its place is given them."""
    engine = rollout(model, tmp_path, {})
    with engine.awake(weights(), 0):
        assert engine.generate(requests()) == undisturbed[0]
    os.kill(pids_at(tmp_path, "core")[0], signal.SIGKILL)
    with engine.awake(weights(), 0):
        assert engine.generate(requests()) == undisturbed[0]
    assert engine.restarts == 1
    assert engine._engine is not None
    engine._engine.kill()


@pytest.mark.parametrize("which", ["core", *(pytest.param(one, marks=pytest.mark.slow) for one in ("server", "guard"))])
def test_a_stopped_process_is_found(which: str, model: str, tmp_path: Path, undisturbed: Any) -> None:
    """SIGSTOP: the connection stays open and nothing is ever answered."""
    with killer(tmp_path, "generate", which, signal.SIGSTOP, most=1) as stopped:
        engine = rollout(model, tmp_path, {"generate": 1}, kwargs={"hang_timeout_s": 0.5})
        assert generated(engine) == undisturbed
    assert len(stopped) == 1
    assert engine.restarts == 1


def test_a_server_that_is_stopped_while_it_starts_is_found(model: str, tmp_path: Path, undisturbed: Any) -> None:
    with killer(tmp_path, "start", number=signal.SIGSTOP, most=1) as stopped:
        engine = rollout(model, tmp_path, {"start": 1}, kwargs={"start_timeout_s": 4})
        assert generated(engine) == undisturbed
    assert len(stopped) == 1
    assert engine.restarts >= 1  # one that is late to start is replaced as well


@pytest.mark.parametrize("moment", ["generate", pytest.param("load", marks=pytest.mark.slow)])
def test_a_server_that_says_nothing_is_found(moment: str, model: str, tmp_path: Path, undisturbed: Any) -> None:
    """It lives, it answers its health check, and nothing else."""
    engine = rollout(model, tmp_path, {moment: 1}, kwargs={"answer_timeout_s": 2})
    assert generated(engine) == undisturbed
    assert engine.restarts >= 1  # one that is late to answer is replaced as well


def test_after_the_last_restart_the_first_error_is_first(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_RESTARTS", 1)
    engine = rollout(model, tmp_path, {"load": 9})
    with killer(tmp_path, "load"), pytest.raises(ProcessLostError) as lost, engine.awake(weights(), 0):
        pytest.fail("there is no engine")
    text = str(lost.value)
    assert re.match(
        "the vllm engine was lost 2 times without a finished generation; the first time: the vllm server "
        r"(broke a connection \(\w+\)|has ended)\. The end of its log:\n    the small engine begins",
        text,
    )
    assert "ended with status -9." in text
    logs = [word.rstrip(".") for word in text.split() if word.rstrip(".").endswith("server.log")]
    assert len(set(logs)) == 2
    assert all(Path(log).is_file() for log in logs)
    assert engine.weight_version == NO_WEIGHTS


def test_a_finished_generation_forgives(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One loss in each of three steps, with one restart allowed."""
    monkeypatch.setattr(remote, "MAX_RESTARTS", 1)
    engine = rollout(model, tmp_path, {})
    for version in range(3):
        with engine.awake(weights(), version):
            os.kill(pids_at(tmp_path, "core")[version] if version == 0 else newest(tmp_path), signal.SIGKILL)
            assert len(engine.generate(requests())) == len(PROMPTS)
    assert engine.restarts == 3
    assert engine._engine is not None
    engine._engine.kill()


def newest(folder: Path) -> int:
    """Process id of the engine that started last."""
    last = max(folder.glob("core-*"), key=lambda path: path.stat().st_ctime_ns)
    return int(last.name.rpartition("-")[2])


def test_outside_of_awake_the_loss_is_an_error_and_the_next_use_repairs_it(
    model: str, tmp_path: Path, undisturbed: Any
) -> None:
    """Nobody can give the weights again: the trainer's are at hand inside of ``awake`` alone."""
    engine = rollout(model, tmp_path, {})
    engine.load_weights(weights()(), 0)
    os.kill(newest(tmp_path), signal.SIGKILL)
    with pytest.raises(EngineLostError, match=r"the vllm server (does not run|broke a connection)"):
        engine.generate(requests())
    with pytest.raises(RolloutError, match="no weights"):
        engine.generate(requests())
    assert generated(engine) == undisturbed
    assert engine.restarts == 0


def test_an_engine_that_is_wrong_is_not_started_again(model: str, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="an argument makes no sense") as error:
        rollout(model, tmp_path, {"wrong": True})
    assert not isinstance(error.value, ProcessLostError)


def test_states_while_it_draws(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five requests are answered and the sixth is drawn until it is aborted; three wait, says the engine."""
    monkeypatch.setattr(base, "_REPORT_EVERY_S", 0)
    engine = rollout(model, tmp_path, {"slow": True})
    told: list[EngineState] = []
    engine.on_state = told.append

    def generate() -> None:
        with engine.awake(weights(), 7):
            engine.generate(requests())
        engine._end_engine()
        engine.report_state()

    thread = threading.Thread(target=generate)
    thread.start()
    drawing = EngineState(weight_version=7, requests_running=1, requests_waiting=3, response_tokens=36)
    eventually(lambda: drawing in told, lambda: f"{drawing} in {told[-3:]}")
    engine.abort()
    thread.join(timeout=60)
    at_rest = EngineState(weight_version=7, requests_running=0, requests_waiting=0, response_tokens=0)
    assert told[0] == at_rest
    assert told[-2:] == [replace(at_rest, response_tokens=36), EngineState(weight_version=7)]
    assert not [thread for thread in threading.enumerate() if thread.name == "engine-state"]


def test_a_server_that_counts_nothing_or_ends(model: str, tmp_path: Path) -> None:
    engine = rollout(model, tmp_path, {})
    with pytest.raises(RolloutError, match="the vllm server refused GET /nothing with status 404"):
        engine._engine.server.text("/nothing")
    os.kill(newest(tmp_path), signal.SIGKILL)
    assert engine.state() == EngineState(weight_version=NO_WEIGHTS)
    engine._engine.kill()


def test_aborted_and_killed(model: str, tmp_path: Path, undisturbed: Any) -> None:
    """The engine is killed when it is asked to abort: what was answered is kept, and the rest is not asked again."""
    engine = rollout(model, tmp_path, {"abort": 1, "slow": True})
    found = []

    def generate() -> None:
        with engine.awake(weights(), 0):
            found.append(engine.generate(requests()))

    thread = threading.Thread(target=generate)
    with killer(tmp_path, "abort", most=1) as killed:
        thread.start()
        eventually(lambda: pids_at(tmp_path, "generate"), "the last request under way")
        engine.abort()
        thread.join(timeout=60)
    (outputs,) = found
    assert len(killed) == 1
    assert [output.finish_reason for output in outputs] == ["length", "abort", "length", "length", "length", "length"]
    assert outputs[1].token_ids == []
    assert [o.token_ids for i, o in enumerate(outputs) if i != 1] == [
        o.token_ids for i, o in enumerate(undisturbed[0]) if i != 1
    ]
    assert engine._engine is not None
    engine._engine.kill()


# ---- requests that come one by one


def test_served_requests_of_a_lost_engine_are_repeated(model: str, tmp_path: Path, undisturbed: Any) -> None:
    """The first engine is killed when it works on the last request; what comes later, the second engine answers."""
    engine = rollout(model, tmp_path, {"generate": 1})
    asked_for = requests()
    with killer(tmp_path, "generate", most=1) as killed, engine.awake(weights(), 0), Serving(engine) as serving:
        outputs = serving.answered(serving.put(asked_for))
        assert serving.answered(serving.put(asked_for[:1], first=50)) == undisturbed[0][:1]
        with pytest.raises(AssertionError, match="there is room for 20"):
            serving.answered(serving.put([RolloutRequest([5], SamplingParams(max_tokens=99, seed=0))], first=60))
    assert outputs == undisturbed[0]
    assert (len(killed), engine.restarts) == (1, 1)
    first, second = asked(tmp_path)
    assert sorted(first) == sorted(map(str, PROMPTS))
    assert second == [str(LAST), str(PROMPTS[0])]
    with engine.awake(weights(1), 1):
        assert engine.generate(requests()) == undisturbed[1]
    assert engine._engine is not None
    engine._engine.kill()


def test_a_request_that_ends_every_engine_ends_the_serving(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_RESTARTS", 1)
    engine = rollout(model, tmp_path, {"generate": 9})
    serving = Serving(engine)
    loss = pytest.raises(EngineLostError, match="lost 2 times")
    with killer(tmp_path, "generate"), loss, engine.awake(weights(), 0), serving:
        serving.answered(serving.put(requests()))
    assert set(serving.answers) == {0, 2, 3, 4, 5}


def prepare_rank(rank: int, folder: Path) -> tuple[Path, list[int], Callable[[], Iterator[tuple[str, torch.Tensor]]]]:
    """The folder of a rank of two; weights that both divide, and the list of the calls of that function."""
    own = folder / str(rank)
    own.mkdir()
    os.environ["SMALL_ENGINE_FOLDER"] = str(own)
    tempfile.tempdir = str(own)
    VLLMClient.take = says_what_is_taken(own)
    calls: list[int] = []
    mesh = init_device_mesh("cpu", (2,))

    def divided() -> Iterator[tuple[str, torch.Tensor]]:
        calls.append(rank)
        for name, tensor in weights_of("qwen3"):
            yield name, distribute_tensor(tensor, mesh, [Shard(0)])

    return own, calls, divided


def serve_on_each_rank(rank: int, world_size: int, folder: Path, model: str) -> None:
    """The engine of the second rank is killed while it serves; the first one takes its requests."""
    own, calls, divided = prepare_rank(rank, folder)
    with killer(own, "generate", most=rank):
        engine = rollout(model, own, {"generate": rank})
        with engine.awake(divided, 0):
            with Serving(engine) as serving:
                numbers = serving.put(requests())
                eventually(lambda: len(serving.answers) == len(numbers), "all answers")
                serving.put(requests()[:1], first=70)
                eventually(lambda: 70 in serving.answers, "another answer")
            lost = {n for n, answer in serving.answers.items() if isinstance(answer, EngineLostError)}
            assert lost == ({1, 70} if rank else set())
            assert engine.restarts == rank
            rows = engine.generate_sequences(prompt_batch(PROMPTS))
            with Serving(engine) as serving:
                again = serving.answered(serving.put(requests()))
    torch.save((rows, again), folder / f"rows-{rank}.pt")
    assert len(calls) == 2
    assert engine.restarts == rank
    assert engine._engine is not None
    engine._engine.kill()


def test_a_lost_engine_of_several_hands_its_requests_back(model: str, tmp_path: Path, undisturbed: Any) -> None:
    run_ranks(serve_on_each_rank, 2, tmp_path, model)
    found = [torch.load(tmp_path / f"rows-{rank}.pt", weights_only=False) for rank in range(2)]
    assert torch.equal(found[0][0].batch["responses"], found[1][0].batch["responses"])
    assert found[0][1] == found[1][1] == undisturbed[0]


# ---- several ranks


def on_each_rank(rank: int, world_size: int, folder: Path, model: str, moment: str) -> None:
    """Weights are written by all ranks together, each its rows; the engine of the second is killed at some moment."""
    own, calls, divided = prepare_rank(rank, folder)
    with killer(own, moment, most=rank):
        engine = rollout(model, own, {moment: rank})
        with engine.awake(divided, 0):
            rows = engine.generate_sequences(prompt_batch(PROMPTS))
    assert len(calls) == 2
    assert engine.restarts == rank
    assert engine._buffer is None  # one file for both engines
    torch.save(rows, folder / f"rows-{rank}.pt")
    assert engine._engine is not None
    engine._engine.kill()


@pytest.mark.slow  # one that is lost while it serves is in the test of requests that are handed back
@pytest.mark.parametrize("moment", ["generate", "load"])
def test_ranks_write_the_weights_together_again(moment: str, model: str, tmp_path: Path) -> None:
    run_ranks(on_each_rank, 2, tmp_path, model, moment)
    first, second = (torch.load(tmp_path / f"rows-{rank}.pt", weights_only=False) for rank in range(2))
    assert torch.equal(first.batch["responses"], second.batch["responses"])
    assert first.batch["response_mask"].sum() > 0
