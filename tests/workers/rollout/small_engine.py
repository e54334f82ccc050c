"""A small engine with vLLM's protocol, as a program: what it draws depends on seed, prompt and weights alone.

Its folder, ``SMALL_ENGINE_FOLDER``, has a ``plan.json``: at which moments it waits to be killed, and how often. At each
moment it leaves a file ``<moment>-<pid>``; requests that it is asked are lines of ``asked-<pid>``.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

FOLDER, TOKEN = Path(os.environ["SMALL_ENGINE_FOLDER"]), f"Bearer {os.environ['VERL_ENGINE_TOKEN']}"
PLAN = json.loads((FOLDER / "plan.json").read_text())
ROW = 4096
lock, aborted, broken = threading.Lock(), threading.Event(), threading.Event()
weights = ""
arriving = {}
running = tokens = 0
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="small"}} {running}.0
vllm:num_requests_waiting{{engine="0",model_name="small"}} 3.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="small",reason="capacity"}} 2.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0",model_name="small"}} {tokens}.0
vllm:generation_tokens_created{{engine="0",model_name="small"}} 1.7e+09
"""


class EngineDeadError(Exception):
    """The core has died."""


def moment(name):
    with lock:
        (FOLDER / f"{name}-{os.getpid()}").touch()
        waits = len(list(FOLDER.glob(f"{name}-*"))) <= PLAN.get(name, 0)
    if waits and broken.wait(600):
        raise EngineDeadError


def checksum(data):
    """As the documentation of verl.workers.rollout.engine_side.verl_engine has it, in NumPy."""
    whole = len(data) // 8 * 8
    words = np.frombuffer(data[:whole], np.uint64)
    rows = len(words) // ROW
    with np.errstate(over="ignore"):
        sums = [int(row.sum(dtype=np.uint64)) for row in words[: rows * ROW].reshape(rows, ROW)]
        sums.append(int(words[rows * ROW :].sum(dtype=np.uint64)))
    rest = int.from_bytes(data[whole:], "little") * (2 * rows + 3)
    return sum(row * (2 * j + 1) for j, row in enumerate(sums)) + rest


def load(part, is_first):
    """Take a part of the weights, of 4 bytes each, from the file of FileBuffer."""
    if is_first:
        arriving.clear()
    data, found = Path(part["path"]).read_bytes(), {}
    for name, _, shape, start in part["tensors"]:
        count = math.prod(shape)
        found[name] = str((checksum(data[start : start + 4 * count]) + count) % 2**64)
    arriving.update(found)
    return found


def draw(body, step):
    seen = json.dumps([weights, body["sampling_params"]["seed"], body["token_ids"], step])
    number = int.from_bytes(hashlib.sha256(seen.encode()).digest()[:8], "big")
    return 2 + number % 100, -(number % 997) / 997


def choice(drawn, reason):
    tokens = [token for token, _ in drawn]
    return {
        "choices": [
            {
                "token_ids": tokens,
                "logprobs": {"content": [{"logprob": value} for _, value in drawn]},
                "finish_reason": reason,
            }
        ]
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, body, status=200):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        if self.path == "/metrics":
            assert self.headers["Authorization"] == TOKEN
            data = METRICS.format(running=running, tokens=tokens).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        else:
            status = 200 if self.path == "/health" else 404
            self.reply({}, 503 if broken.is_set() else status)

    def do_POST(self):
        try:
            self.answer()
        except EngineDeadError:
            self.reply({"error": {"message": "EngineDeadError"}}, 500)

    def answer(self):
        assert self.headers["Authorization"] == TOKEN
        length = int(self.headers["Content-Length"] or 0)
        body = json.loads(self.rfile.read(length) or b"null")
        path = self.path.partition("?")[0]
        if path == "/inference/v1/generate":
            self.generate(body)
        elif path == "/collective_rpc":
            global weights
            if body["method"] == "end_weights":
                weights = json.dumps(arriving, sort_keys=True)
                self.reply({"results": [None]})
            elif body["method"] == "weights_device":
                self.reply({"results": [None]})
            else:
                moment("load")
                self.reply({"results": [{"checksums": load(*body["args"])}]})
        elif path == "/reset_prefix_cache":
            moment("reset")
            PLAN["busy_resets"] = PLAN.get("busy_resets", 0) - 1  # blocks of requests that are not yet given back
            self.reply({"success": PLAN["busy_resets"] < 0})
        elif path == "/abort_requests":
            moment("abort")
            aborted.set()
            self.reply({})
        else:
            moment(path.strip("/"))  # sleep, wake_up
            self.reply({})

    def generate(self, body):
        global running
        with lock:
            running += 1
        try:
            self.draw_all(body)
        finally:
            with lock:
                running -= 1

    def draw_all(self, body):
        global tokens
        with lock, (FOLDER / f"asked-{os.getpid()}").open("a") as asked:
            asked.write(f"{body['token_ids']}\n")
        most = body["sampling_params"]["max_tokens"]
        drawn = [draw(body, step) for step in range(most)]
        with lock:
            tokens += most
        last = body["token_ids"] == PLAN.get("last")
        while last and not (FOLDER / "others-taken").exists():  # is under way when all others have their answers
            time.sleep(0.01)
        if body.get("stream"):
            self.stream(drawn, last)
        else:
            if last:
                moment("generate")
            if last and PLAN.get("slow") and aborted.wait(600):
                self.reply(choice(drawn[:1], "abort"))
                return
            self.reply(choice(drawn, "length"))

    def stream(self, drawn, last):
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        for number, one in enumerate(drawn):
            if last and number == len(drawn) // 2:
                self.wfile.flush()
                moment("generate")
            event = choice([one], "length" if number == len(drawn) - 1 else None)
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")


def watch(core):
    core.wait()
    print("EngineDeadError: the core of the engine died", flush=True)
    if "lingers_s" in PLAN:  # and answers everything with an error
        broken.set()
        time.sleep(PLAN["lingers_s"])
    os._exit(1)


if __name__ == "__main__":
    print("the small engine begins", flush=True)
    if PLAN.get("wrong"):
        sys.exit("ValueError: an argument makes no sense")
    moment("start")
    core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (FOLDER / f"core-{os.getpid()}").write_text(str(core.pid))
    threading.Thread(target=watch, args=(core,), daemon=True).start()
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
