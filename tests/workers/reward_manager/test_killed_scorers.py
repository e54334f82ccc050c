"""Scoring while processes are killed and services die: the scores are those of an undisturbed run, none a silent 0."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.support.ports import reserved_port
from tests.support.waiting import eventually
from tests.workers.reward_manager.batches import TOKENIZER, batch_of
from tests.workers.reward_manager.hostile import lengths, slow_length
from verl.errors import ProcessLostError
from verl.experience.rewards import status_metrics
from verl.experience.scoring import submit_scores
from verl.trainer.ppo.reward import compute_reward
from verl.workers.reward_manager import NaiveRewardManager, RemoteRewardManager

SERVICE = """
import json, os, struct, socket, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

drops, seen, lock = int(sys.argv[2]), {}, threading.Lock()

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_POST(self):
        sample = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            tries = seen[sample["solution_str"]] = seen.get(sample["solution_str"], 0) + 1
        if tries <= drops:  # no answer, then a reset connection
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        time.sleep(0.05)
        data = json.dumps(len(sample["solution_str"]) / 8).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

ThreadingHTTPServer.allow_reuse_address = True
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def kill_scorers():
    """All processes that score, with what they have started."""
    count = 0
    for child in psutil.Process().children():
        with suppress(psutil.Error, ProcessLookupError):
            if "killable_pool" in " ".join(child.cmdline()):
                for process in (child, *child.children(recursive=True)):
                    os.kill(process.pid, signal.SIGKILL)
                    count += 1
    return count


@contextmanager
def massacres(rounds, every_s):
    """All scorers are killed, so many times; yields how many processes each round ended."""
    killed, done = [], threading.Event()

    def run():
        while len(killed) < rounds and not done.wait(every_s):
            if count := kill_scorers():
                killed.append(count)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()


def texts(count):
    return ["abcdef"[: n % 6 + 1] for n in range(count)]


@pytest.mark.parametrize("function", [slow_length, pytest.param(lengths, marks=pytest.mark.slow)])
def test_the_scores_are_those_of_an_undisturbed_run(function):
    manager = NaiveRewardManager(TOKENIZER, 0, function, num_workers=2, kill_retries=50, timeout_s=20.0)
    data = batch_of(texts(24), [0.0] * 24)
    expected, _ = compute_reward(data, manager)
    with massacres(rounds=4, every_s=0.3) as killed:
        pending = submit_scores(data, manager)  # as with reward_model.launch_reward_fn_async
        scores, extra = pending.result()
        while len(killed) < 4:
            again, _ = compute_reward(data, manager)
            assert again.tolist() == expected.tolist()
    assert extra["reward_status"] == ["ok"] * 24
    assert scores.tolist() == expected.tolist()
    manager.function.close()


def test_a_sample_that_is_killed_every_time_is_a_failure_and_says_so(caplog):
    manager = NaiveRewardManager(TOKENIZER, 0, slow_length, num_workers=1, kill_retries=0, max_error_rate=1.0)
    data = batch_of(["ab"], [0.0])
    compute_reward(data, manager)
    statuses = []
    while "killed" not in statuses:  # one that is killed between two samples has none to lose
        with massacres(rounds=1, every_s=0.05):
            _, extra = compute_reward(data, manager)
        statuses += extra["reward_status"]
    assert set(statuses) <= {"ok", "killed"}
    assert status_metrics(["killed", "ok"])["reward/status/killed"] == 0.5
    assert "killed:\nthe process was killed by SIGKILL, in each of 1 attempts" in caplog.text
    manager.function.close()


def never(data_source, solution_str, ground_truth, extra_info):
    time.sleep(600)  # so no killer comes too late


def test_scorers_that_nobody_lets_live_are_an_error():
    manager = NaiveRewardManager(TOKENIZER, 0, never, num_workers=1, kill_retries=10**9, timeout_s=600.0)
    lost = pytest.raises(ProcessLostError, match="cannot be kept alive")
    with massacres(rounds=1000, every_s=0.001), lost:
        compute_reward(batch_of(["ab"], [0.0]), manager)
    manager.function.close()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def serve(port, drops):
    service = subprocess.Popen([sys.executable, "-c", SERVICE, str(port), str(drops)])
    eventually(lambda: listens(port), "the service")
    return service


def test_a_service_that_resets_connections_is_asked_again():
    port = reserved_port()
    service = serve(port, drops=2)
    manager = RemoteRewardManager(TOKENIZER, 0, url=f"http://127.0.0.1:{port}/", max_retries=3, timeout_s=60.0)
    scores, extra = compute_reward(batch_of(texts(8), [0.0] * 8), manager)
    assert extra["reward_status"] == ["ok"] * 8
    assert scores.sum(-1).tolist() == [len(text) / 8 for text in texts(8)]
    service.kill()
    service.wait()
    manager.function.close()


def test_a_service_that_is_killed_and_comes_back():
    port = reserved_port()
    services = [serve(port, drops=0)]

    def replace():
        for _ in range(2):
            time.sleep(0.3)
            services[-1].kill()
            services[-1].wait()
            time.sleep(0.2)
            services.append(serve(port, drops=0))

    manager = RemoteRewardManager(
        TOKENIZER, 0, url=f"http://127.0.0.1:{port}/", max_retries=20, timeout_s=100.0, max_concurrent=2
    )
    replacing = threading.Thread(target=replace)
    replacing.start()
    scores, extra = compute_reward(batch_of(texts(40), [0.0] * 40), manager)
    replacing.join()
    assert extra["reward_status"] == ["ok"] * 40
    assert scores.sum(-1).tolist() == [len(text) / 8 for text in texts(40)]
    services[-1].kill()
    services[-1].wait()
    manager.function.close()
