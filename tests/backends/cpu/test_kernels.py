"""The C kernels against plain formulas in float64."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cpu import normal, threads_fixture
from verl.backends.cpu import kernels as package
from verl.backends.cpu.kernels import CPUKernels, Norm, RowsOfMemory, cpu_kernels

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def kernels() -> CPUKernels:
    found = cpu_kernels()
    assert found is not None, "a C compiler is needed for these tests"
    return found


threads = threads_fixture(1, 2, 5)


def rms_normed(x: Tensor, norm: Norm) -> Tensor:
    x = x.double()
    return (norm.offset + norm.weight.double()) * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()


# ---- RMS norm


@pytest.mark.parametrize("width", [1, 7, 64, 1000])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(kernels: CPUKernels, threads: int, width: int, offset: float) -> None:
    x, norm = normal(3, 40, width), Norm(normal(width, seed=1), 1e-3, offset)
    kept = x.clone()
    torch.testing.assert_close(kernels.rms_norm(x, norm).double(), rms_normed(x, norm), atol=1e-6, rtol=2e-6)
    assert x.equal(kept)


def test_eps_is_inside_of_the_root(kernels: CPUKernels) -> None:
    """mean(x²) = 9 and eps = 16 give 3 / 5; of zeros only eps is left."""
    norm = Norm(torch.ones(4), 16.0)
    assert kernels.rms_norm(torch.tensor([[3.0, -3.0, 3.0, 3.0], [0.0] * 4]), norm).tolist() == [
        pytest.approx([0.6, -0.6, 0.6, 0.6]),
        [0.0] * 4,
    ]


def test_a_bad_row_is_the_only_bad_row(kernels: CPUKernels) -> None:
    x = normal(5, 64)
    expected = kernels.rms_norm(x, Norm(torch.ones(64), 1e-6))
    x[1, 3], x[3, 0] = NAN, INF
    out = kernels.rms_norm(x, Norm(torch.ones(64), 1e-6))
    assert out[1].isnan().all()
    assert out[3, 0].isnan()
    assert out[[0, 2, 4]].equal(expected[[0, 2, 4]])


def test_nothing_to_do(kernels: CPUKernels) -> None:
    nothing = torch.empty(0, 64)
    assert kernels.rms_norm(nothing, Norm(torch.ones(64), 1e-6)).shape == (0, 64)
    assert kernels.silu_mul(nothing, nothing).shape == (0, 64)


# ---- silu(gate) · up


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, (1 << 16) - 1, 1 << 16, (1 << 16) + 1])
def test_silu_mul(kernels: CPUKernels, threads: int, size: int) -> None:
    gate, up = normal(size) * 20, normal(size, seed=1)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    out = kernels.silu_mul(gate, up)
    assert out.data_ptr() == gate.data_ptr()
    torch.testing.assert_close(out.double(), expected, atol=1e-35, rtol=2e-6)


def test_silu_mul_at_the_ends_of_the_numbers(kernels: CPUKernels) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 87.0, -87.0, 88.8, -88.8, 100.0, -100.0, 3e38, -3e38, INF, NAN])
    expected = torch.nn.functional.silu(gate.double())
    out = kernels.silu_mul(gate.clone(), torch.ones_like(gate))
    # e^x ends at e^-87, or 1.6e-38: the error is so small a share of x.
    largest = (gate.abs() * 1.7e-38).nan_to_num(0, 0)
    assert ((out.double() - expected).abs() <= largest.double() + 2e-6 * expected.abs())[:-2].all()
    assert out[-2] == INF
    assert out[-1].isnan()
    assert kernels.silu_mul(torch.ones(3), torch.tensor([INF, -INF, NAN])).tolist()[:2] == [INF, -INF]


# ---- attention


@dataclasses.dataclass(frozen=True)
class Case:
    """One decoding step."""

    head_dim: int = 8
    group: int = 2
    kv_heads: int = 2
    own_lengths: tuple[int, ...] = (0, 3, 70, 1, 129)
    prompts: tuple[int, ...] = (2, 0, 0, 1, 2)
    prompt_lengths: tuple[int, ...] = (1, 65, 7)
    window: int | None = None
    size: float = 1.0

    def arguments(self) -> dict[str, Any]:
        """Memory is filled with NaN wherever nothing was kept yet: whoever reads it shows."""
        rows, heads = len(self.own_lengths), self.group * self.kv_heads
        room, prompt_room = max(self.own_lengths) + 2, max(self.prompt_lengths) + 1
        slots = torch.randperm(rows + 2, generator=torch.Generator().manual_seed(9))[:rows]
        own = [normal(rows + 2, self.kv_heads, room, self.head_dim, seed=seed) for seed in (1, 2)]
        shared = [
            normal(len(self.prompt_lengths), self.kv_heads, prompt_room, self.head_dim, seed=seed) for seed in (3, 4)
        ]
        unused = set(range(rows + 2)) - set(slots.tolist())
        for memory in own:
            memory[sorted(unused)] = NAN
            for slot, length in zip(slots.tolist(), self.own_lengths, strict=True):
                memory[slot, :, length:] = NAN
        for memory in shared:
            for prompt, length in enumerate(self.prompt_lengths):
                memory[prompt, :, length:] = NAN
        prompts = torch.tensor(self.prompts)
        lengths = torch.tensor(self.own_lengths)
        return {
            "query": normal(rows, heads, self.head_dim, seed=8) * self.size,
            "key": normal(rows, self.kv_heads, self.head_dim, seed=10),
            "value": normal(rows, self.kv_heads, self.head_dim, seed=11),
            "responses": tuple(own),
            "shared": tuple(shared),
            "rows": RowsOfMemory(slots, lengths, prompts, torch.tensor(self.prompt_lengths)[prompts]),
            "scale": 0.3,
            "window": self.window,
        }


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    responses: tuple[Tensor, Tensor],
    shared: tuple[Tensor, Tensor],
    rows: RowsOfMemory,
    scale: float,
    window: int | None,
) -> Tensor:
    """What the kernel gives, row by row and head by head."""
    query, key = query.double(), key.double()
    out, group = torch.empty_like(query), query.shape[1] // key.shape[1]
    for row, (slot, length, prompt, prompt_length) in enumerate(zip(*map(Tensor.tolist, rows), strict=True)):
        for head in range(query.shape[1]):
            kv = head // group
            keys, values = (
                torch.cat([s[prompt, kv, :prompt_length].double(), o[slot, kv, :length].double(), new[row, kv, None]])
                for s, o, new in zip(shared, responses, (key, value.double()), strict=True)
            )
            scores = (keys @ query[row, head] * scale)[-window if window else 0 :]
            out[row, head] = scores.softmax(0) @ values[-window if window else 0 :]
    return out


def check(kernels: CPUKernels, case: Case, atol: float = 2e-6) -> None:
    # A score is a sum of head_dim products: its rounding, which depends on the CPU's vectors, grows with them.
    atol *= max(1.0, case.head_dim / 64)
    arguments = case.arguments()
    before = [memory.clone() for memory in (*arguments["responses"], *arguments["shared"])]
    expected = attended(**arguments)
    torch.testing.assert_close(kernels.decode_attention(**arguments).double(), expected, atol=atol, rtol=2e-6)
    slots, lengths = arguments["rows"].slots, arguments["rows"].lengths
    before[0][slots, :, lengths] = arguments["key"]
    before[1][slots, :, lengths] = arguments["value"]
    for memory, kept in zip((*arguments["responses"], *arguments["shared"]), before, strict=True):
        assert memory.equal(kept) or memory.nan_to_num(7e7).equal(kept.nan_to_num(7e7))  # nothing else was written


@pytest.mark.parametrize("head_dim", [4, 8, 20, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_attention_reads_the_prompt_and_all_own_tokens(
    kernels: CPUKernels, threads: int, head_dim: int, group: int
) -> None:
    check(kernels, Case(head_dim=head_dim, group=group))


@pytest.mark.parametrize("window", [1, 2, 4, 8, 9, 64, 66, 69, 71, 1000])
def test_a_window_ends_anywhere(kernels: CPUKernels, window: int) -> None:
    """After the prompt, in it, before it; the rows have 2, 69, 136, 3 and 137 tokens."""
    check(kernels, Case(window=window))


@pytest.mark.parametrize("size", [0.0, 30.0, 1e4, 1e18])
def test_scores_of_any_size(kernels: CPUKernels, size: float) -> None:
    """Rounding of a score of s is s · 2^-24 per addition, and comes back as a relative error of its weight."""
    check(kernels, Case(size=size, head_dim=64), atol=2e-6 + (1e-4 if size == 30.0 else 0))


def test_more_threads_than_work(kernels: CPUKernels, threads: int) -> None:
    check(kernels, Case(kv_heads=1, own_lengths=(4,), prompts=(0,), prompt_lengths=(9,)))


def test_no_rows(kernels: CPUKernels) -> None:
    arguments = Case().arguments()
    none = torch.zeros(0, dtype=torch.long)
    arguments |= {name: arguments[name][:0] for name in ("query", "key", "value")}
    arguments["rows"] = RowsOfMemory(none, none, none, none)
    assert kernels.decode_attention(**arguments).shape == (0, 4, 8)


def test_the_number_of_threads_changes_no_bit(kernels: CPUKernels) -> None:
    case = Case(head_dim=64, group=3)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(kernels.decode_attention(**case.arguments()))
    torch.set_num_threads(1)
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


@pytest.mark.parametrize("bad", [NAN, INF])
def test_what_is_not_finite_stays_in_its_row(kernels: CPUKernels, bad: float) -> None:
    case = Case()
    good = kernels.decode_attention(**case.arguments())
    for name, row in itertools.product(("query", "key", "value"), (0, 2)):
        arguments = case.arguments()
        arguments[name][row, :, 3] = bad
        out = kernels.decode_attention(**arguments)
        others = [other for other in range(len(good)) if other != row]
        assert out[others].equal(good[others])
        assert not out[row].isfinite().all()


# ---- where the library comes from


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    """A cache folder without a library; what is compiled, in a second instead of ten, is forgotten afterwards."""
    monkeypatch.setattr(package, "_FLAGS", ["-O0" if flag == "-O3" else flag for flag in package._FLAGS])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    caplog.set_level(logging.WARNING)
    cpu_kernels.cache_clear()
    yield tmp_path / "verl"
    cpu_kernels.cache_clear()


def test_it_is_compiled_once_and_leaves_nothing_else(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    umask = os.umask(0o002)
    try:
        assert cpu_kernels() is not None
    finally:
        os.umask(umask)
    (library,) = fresh.iterdir()
    before = library.stat()
    cpu_kernels.cache_clear()
    assert cpu_kernels() is not None
    assert library.stat().st_mtime_ns == before.st_mtime_ns
    assert (fresh.stat().st_mode | before.st_mode) & 0o022 == 0
    assert caplog.text == ""


def test_a_folder_that_others_write_is_not_trusted(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cpu_kernels() is not None
    cpu_kernels.cache_clear()
    fresh.chmod(0o777)
    assert cpu_kernels() is None
    assert f"{fresh} belongs to" in caplog.text
    assert "drwxrwxrwx" in caplog.text


def test_a_library_that_others_write_is_not_loaded(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert cpu_kernels() is not None
    cpu_kernels.cache_clear()
    (library,) = fresh.iterdir()
    library.chmod(0o775)
    assert cpu_kernels() is None
    assert f"{library} belongs to" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_folder_of_another_user_is_not_trusted(fresh: Path, caplog: pytest.LogCaptureFixture) -> None:
    fresh.mkdir(mode=0o700)
    os.chown(fresh, 12345, 12345)
    assert cpu_kernels() is None
    assert "belongs to user 12345" in caplog.text


@pytest.mark.parametrize("left", [0, 0.1, 0.9])
def test_a_library_that_lost_bytes_is_made_again(
    fresh: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, left: float
) -> None:
    assert cpu_kernels() is not None
    cpu_kernels.cache_clear()
    (library,) = fresh.iterdir()
    elsewhere = tmp_path / "elsewhere" / "verl"  # the system would give back what it has loaded from a path before
    elsewhere.mkdir(parents=True, mode=0o700)
    whole = library.read_bytes()
    damaged = elsewhere / library.name
    damaged.write_bytes(whole[: int(left * len(whole))])  # as a crash of the machine leaves it
    damaged.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere.parent))
    assert cpu_kernels() is not None
    made = max(elsewhere.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert len(made.read_bytes()) == len(whole)
    assert caplog.text == ""


def test_cc_may_have_arguments(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{shutil.which('env')} cc")
    assert cpu_kernels() is not None


@pytest.mark.parametrize(
    ("cc", "told"),
    [
        ("no-such-compiler -m64", "no C compiler (no-such-compiler -m64)"),
        ("false", "no CPU kernels with"),
        ('cc "-m64', 'CC=cc "-m64 is no command'),
    ],
)
def test_what_cc_says_is_used_or_the_log_says_why_not(
    fresh: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, cc: str, told: str
) -> None:
    monkeypatch.setenv("CC", cc)
    assert cpu_kernels() is None
    assert told in caplog.text


def test_a_cache_that_cannot_be_made(
    fresh: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cpu_kernels() is None
    assert "XDG_CACHE_HOME" in caplog.text
