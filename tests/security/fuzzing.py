"""What is fuzzed, and with what: parsers of text that models, data files and services write, and hostile texts."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
import torch
from hypothesis import strategies as st

from tests.scorers.test_hostile_text import PIECES, PURE
from verl.base.fs import name_problem
from verl.base.redact import redacted, without_secrets
from verl.checkpoint import steps
from verl.checkpoint.shards import assemble, read_shards, saved_world_size
from verl.config import PPOConfig
from verl.datasets.chat import as_messages
from verl.datasets.files import open_files
from verl.errors import CheckpointError, ConfigError, DataError, RewardError
from verl.plugins.sandbox.fusion import outcome_of, run_code_url
from verl.plugins.sandbox.prime_code.cases import ValueCase, read_cases
from verl.plugins.sandbox.prime_code.compare import same_text, same_value
from verl.plugins.sandbox.types import Limits, SandboxError
from verl.protocol import DataProto
from verl.scorers import llm_judge, math_reward
from verl.scorers.math_equality import readings
from verl.supervision.killable_pool.calls import Reply
from verl.trainer.config.overrides import force_overrides, keys_set

SAID = (RewardError, DataError, ConfigError, CheckpointError, SandboxError)
"""How a parser may refuse."""


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _reply(text: str) -> None:
    with contextlib.suppress(ValueError):  # what :class:`Reply` says
        Reply.read(text.encode(errors="surrogatepass"))


def _judged(text: str) -> None:
    try:
        choice = llm_judge._Reply.model_validate_json(text.encode(errors="surrogatepass")).choices[0]
    except pydantic.ValidationError:
        choice = llm_judge._Choice(message=llm_judge._Message(content=text))
    for read in ("regex", "json", "yes_probability"):
        with contextlib.suppress(RewardError):
            llm_judge.Judge(base_url="http://localhost:1/v1", model="m", read=read).score(choice)


def _in_a_file(name: str, read: Callable[[Path], Any]) -> Callable[[str], None]:
    def check(text: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(text.encode(errors="surrogatepass"))
            read(path)

    return check


def _fusion(text: str) -> None:
    answer = _json(text)
    outcome_of(answer if isinstance(answer, dict) else {"status": "Success", "run_result": {"stdout": text}}, Limits())


TARGETS: dict[str, Callable[[str], Any]] = {
    **PURE,
    "readings of two": lambda text: readings(text, text[: len(text) // 2]),
    "tests of a task": read_cases,
    "an assertion": lambda text: read_cases({"assert_case": [text]}),
    "arguments": lambda text: read_cases({"inputs": [text], "outputs": [text], "fn_name": text}),
    "same text": lambda text: same_text(text, text[::-1]),
    "same value": lambda text: same_value(_json(text), _json(text[::-1])),
    "an answer of a program": lambda text: ValueCase({}, (text, 1)).is_answered_by(text),
    "reply of a child": _reply,
    "reply of a judge": _judged,
    "reply of a code service": _fusion,
    "address of a code service": run_code_url,
    "command line": lambda text: (force_overrides([text, f"a={text}", f"{text}=1"], PPOConfig), keys_set([text])),
    "messages": lambda text: as_messages(_json(text), "row 0"),
    "rows": _in_a_file("rows.jsonl", lambda path: open_files(str(path), "data.train_files")),
    "rows of json": _in_a_file("rows.json", lambda path: open_files(str(path), "data.train_files")),
    "rows of parquet": _in_a_file("rows.parquet", lambda path: open_files(str(path), "data.train_files")),
    "latest step": _in_a_file(steps.LATEST, lambda path: steps.read_latest(path.parent)),
    "manifest": _in_a_file(steps.MANIFEST, lambda path: steps.read_manifest(path.parent)),
    "number of ranks": _in_a_file("fsdp_config.json", lambda path: saved_world_size(path.parent)),
    "secrets": lambda text: (redacted(text, [text[:9]]), without_secrets({"api_key": text, "x": text, text: text})),
    "names": name_problem,
}


def check(name: str, text: str) -> None:
    """One target on one text; anything but a value or a refusal is raised."""
    with contextlib.suppress(*SAID):
        TARGETS[name](text)


def check_repeated(prefix: str, piece: str, suffix: str, length: int) -> None:
    """All targets on a long text of the form ``prefix piece piece ... suffix``; for a pool of processes."""
    text = prefix + piece * (length // len(piece)) + suffix
    for name in TARGETS:
        check(name, text)


_watch: list[Any] = []


def compared_by_value(answer: str, truth: str) -> list[str]:
    """What the interpreter was made to do while an answer was compared by value; for a pool of processes.

    Sympy evaluates code of its own making (for polynomials, and for arithmetic of digits and operators alone). Code
    that names what could act must have come from the text.
    """
    if not _watch:
        math_reward.compute_score("\\boxed{1+1}", "2")  # what is imported when it is first needed
        _watch.append(Watch())
    (watch,) = _watch
    with watch.on(), contextlib.suppress(*SAID):
        math_reward.compute_score(f"\\boxed{{{answer}}}", truth)
    names = {name for code in watch.code for name in code.co_names}
    return watch.seen + sorted(name for name in names if name in ACTING or name.startswith("__"))


ACTING = {"os", "sys", "system", "eval", "exec", "open", "compile", "getattr", "setattr", "globals", "subprocess"}

# ---- hostile texts -------------------------------------------------------------------------------

CODE = [
    "__import__('os').system('true')", "().__class__.__bases__[0].__subclasses__()",
    "{0.__class__.__init__.__globals__}",
    "%s%n%x", "${oc.env:HOME}", "{response}", "{question}", "eval('1')", "exec('1')", "lambda: 1", "!!python/object:x",
    "$(true)", "`true`", "; true", "' or 1=1 --", "<|im_end|><|im_start|>system", "[/INST]", "</answer>", "../../x",
]  # fmt: skip
ODD = [
    "\x00", "\u202e", "\u200b", "\ufeff", "\ud800", "\udfff", "\U0001f469\u200d\U0001f52c", "e\u0301" * 3, "\r", "\t",
    "\u2028", "\x1b[2J", "\u0660\u0663", "\u4e09", "\u2460", "\u00b2", "\u216b", "\U0001d7d9", "\ufdfa", "\u0130",
]  # fmt: skip
NUMBERS = [
    "0", "-0", "1", "007", "1e400", "-1e-400", "9" * 60, "9" * 5000, "0." + "3" * 400, "1,234,567", "1.2.3", "0x1F",
    "1_000", "inf", "nan", "NaN", "Infinity", "1/0", "0/0", "9**9**9", "9^{9^{9^9}}", "10^{-10^{10}}", "(-1)^{0.5}",
    "2^{1000000007}", "100000!", "50\\%", "1\\frac12", "½", "٣", "２４",
]  # fmt: skip

atoms = st.one_of(
    st.sampled_from(NUMBERS), st.sampled_from(PIECES), st.sampled_from(CODE), st.sampled_from(ODD), st.text(max_size=8)
)


def _latex(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pair = st.tuples(inner, inner)
    return st.one_of(
        inner.map(lambda a: f"\\boxed{{{a}}}"),
        inner.map(lambda a: f"\\text{{{a}}}"),
        inner.map(lambda a: f"\\sqrt[{a}]{{{a}}}"),
        inner.map(lambda a: f"\\left({a}\\right)"),
        inner.map(lambda a: f"({a})"),
        inner.map(lambda a: f"<answer>{a}</answer>"),
        inner.map(lambda a: f"```python\n{a}\n```"),
        inner.map(lambda a: f'{{"score": {a}}}'),
        inner.map(lambda a: f"The answer is: ${a}$."),
        inner.map(lambda a: f"#### {a}"),
        inner.map(lambda a: f"\\begin{{pmatrix}}{a}&{a}\\\\{a}\\end{{pmatrix}}"),
        pair.map(lambda p: f"\\frac{{{p[0]}}}{{{p[1]}}}"),
        pair.map(lambda p: f"{p[0]}^{{{p[1]}}}"),
        pair.map(lambda p: f"\\{{{p[0]}, {p[1]}\\}}"),
        pair.map(lambda p: f"{p[0]} = {p[1]}"),
        pair.map(lambda p: f"{p[0]}, {p[1]}"),
        pair.map(lambda p: f"assert {p[0]} == {p[1]}"),
        pair.map("".join),
    )


grammar = st.recursive(atoms, _latex, max_leaves=12)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A text of the grammar, some characters of which are gone, doubled, moved or replaced."""
    text = draw(grammar)
    for _ in range(draw(st.integers(0, 3))):
        if not text:
            break
        place = draw(st.integers(0, len(text) - 1))
        length = draw(st.integers(1, 5))
        middle = text[place : place + length]
        middle = draw(st.sampled_from(["", middle * 2, middle[::-1], middle * 50, *ODD[:5]]))
        text = text[:place] + middle + text[place + length :]
    return text


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(NUMBERS), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(
                st.sampled_from(
                    ["role", "content", "status", "run_result", "stdout", "return_code", "choices", "message",
                     "logprobs",
                     "world_size", "files", "size", "inputs", "outputs", "fn_name", "assert_case", "score", "value",
                     "fatal", "pid", "memory", "execution_time", "compile_result", "prompt", "top_logprobs", "token"]
                ),
                st.text(max_size=4),
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=15,
)  # fmt: skip
hostile = st.one_of(mutated(), st.text(), json_values.map(json.dumps))
REPEATED = [*PIECES, *CODE, *ODD, *NUMBERS[:10], "[", "]", '"', ":", "```", "=", "!", "a", "|"]


# ---- files with wrong bytes ----------------------------------------------------------------------


def _batch(path: Path) -> None:
    ids = torch.arange(6).view(2, 3)
    DataProto.from_dict({"ids": ids}, non_tensors={"uid": np.array(["a", "b"], dtype=object)}).save_to_disk(path)


def _shard(path: Path) -> None:
    parts = {"tensors": {"w": torch.ones(4, 3)}, "shapes": {"w": [4, 3]}, "first_rows": {"w": 0}}
    torch.save({"format": 1, **parts}, path)


def _sum_of_shard(path: Path) -> float:
    shards = read_shards(path.parent, "model", 1)
    shapes = shards[0]["shapes"].items()  # under whatever names they have: those of the model are compared elsewhere
    return sum(assemble(shards, name, 0, shape[0] if shape else 0).sum().item() for name, shape in shapes)


def _parquet(path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "x" * n}], "extra_info": {"index": n}} for n in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), path)


def _rows(path: Path) -> None:
    for file in open_files(str(path), "data.train_files"):
        list(file.column(file.columns[0]))
        file.row(0)


FILES: dict[str, tuple[str, Callable[[Path], None], Callable[[Path], Any]]] = {
    "batch": ("batch.safetensors", _batch, lambda path: list(DataProto.load_from_disk(path).batch.values())),
    "shard": ("model_world_size_1_rank_0.pt", _shard, _sum_of_shard),
    "parquet": ("rows.parquet", _parquet, _rows),
}


def read_damaged(kind: str, seed: int) -> str:
    """Make a file, damage it, read it; for a pool of processes, as libraries in C read these files.

    Returns:
        what came of it: ``read``, or the name of the error that says what is wrong.
    """
    name, write, read = FILES[kind]
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path)
        data = bytearray(path.read_bytes())
        for _ in range(draw.randint(1, 4)):
            place, length = draw.randrange(len(data)), draw.choice([1, 1, 2, 8, 64])
            match draw.choice(["flip", "fill", "cut", "drop", "double"]):
                case "flip":
                    data[place] ^= 1 << draw.randrange(8)
                case "fill":
                    data[place : place + length] = draw.choice([b"\xff", b"\x00", b"\x7f"]) * length
                case "cut" if place:
                    del data[place:]
                case "drop":
                    del data[place : place + length]
                case "double":
                    data[place:place] = data[place : place + length]
            if not data:
                break
        path.write_bytes(data)
        try:
            read(path)
        except SAID as error:
            return type(error).__name__
        return "read"


# ---- what nobody may do meanwhile ----------------------------------------------------------------

FORBIDDEN = (
    "exec", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "subprocess.Popen",
    "pty.spawn", "socket.connect", "socket.bind", "socket.getaddrinfo", "ctypes.dlopen", "ctypes.dlsym",
    "pickle.find_class", "webbrowser.open", "shutil.unpack_archive", "os.putenv", "urllib.Request",
)  # fmt: skip


class Watch:
    """Writes down what the interpreter does while it watches, by its audit events (PEP 578)."""

    def __init__(self) -> None:
        self.active = False
        self.seen: list[str] = []
        self.code: list[CodeType] = []
        sys.addaudithook(self._hear)  # for ever: hooks cannot be taken out

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active or event not in FORBIDDEN:
            return
        if event == "exec":
            if arguments[0].co_filename[:1] == "<":  # else a module that is imported
                self.code.append(arguments[0])
        else:
            self.seen.append(f"{event} {arguments!r:.200}")

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Watch the block."""
        self.seen.clear()
        self.code.clear()
        self.active = True
        try:
            yield
        finally:
            self.active = False
