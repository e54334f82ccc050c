"""A decoding step in C against the same decoder in float64, and against itself in other company."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from verl.backends.cpu.kernels import CPUKernels, Decoder, DecoderLayer, Linear, RowsOfMemory, cpu_kernels

NAN = math.nan


@pytest.fixture(scope="module")
def kernels() -> CPUKernels:
    found = cpu_kernels()
    assert found is not None, "a C compiler is needed for these tests"
    return found


class Numbers:
    """Random tensors, one after the other."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator)

    def linear(self, out: int, into: int, has_bias: bool) -> Linear:
        """Outputs are about as large as inputs."""
        return Linear(self(out, into) / into**0.5, self(out) if has_bias else None)


@dataclasses.dataclass(frozen=True)
class Case:
    """A decoder and a batch. The sizes are no multiples of anything that a register holds."""

    rows: int = 3
    layers: int = 2
    hidden: int = 39
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 10
    intermediate: int = 51
    vocab: int = 61
    biases: bool = False
    head_norms: bool = False
    windows: tuple[int | None, ...] = (None, None)
    offset: float = 0.0
    activation: str = "silu"
    own_room: int = 12
    prompt_room: int = 9
    prompts: int = 3

    def decoder(self) -> Decoder:
        draw = Numbers(1)
        queries, keys, width = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.intermediate
        layers = [
            DecoderLayer(
                input_norm=draw(self.hidden),
                query=draw.linear(queries, self.hidden, self.biases),
                key=draw.linear(keys, self.hidden, self.biases),
                value=draw.linear(keys, self.hidden, self.biases),
                out=draw.linear(self.hidden, queries, self.biases),
                post_norm=draw(self.hidden),
                gate=draw.linear(width, self.hidden, self.biases),
                up=draw.linear(width, self.hidden, self.biases),
                down=draw.linear(self.hidden, width, self.biases),
                head_norms=(draw(self.head_dim), draw(self.head_dim)) if self.head_norms else None,
                window=window,
            )
            for window in self.windows[: self.layers]
        ]
        angles = draw(self.prompt_room + self.own_room, self.head_dim // 2) * 3
        return Decoder(
            layers,
            norm=draw(self.hidden),
            head=draw.linear(self.vocab, self.hidden, self.biases),
            rotation=(angles.cos(), angles.sin()),
            head_dim=self.head_dim,
            scale=0.3,
            eps=1e-3,
            offset=self.offset,
            activation=self.activation,
        )

    def batch(self) -> dict[str, Any]:
        """Memory is NaN wherever nothing was kept yet: whoever reads it shows."""
        draw = Numbers(2)
        index = torch.arange(self.rows)
        slots = torch.randperm(self.rows + 2, generator=torch.Generator().manual_seed(9))[: self.rows]
        lengths, prompts = index * 5 % self.own_room, index * 7 % self.prompts
        prompt_lengths = torch.arange(self.prompts) * 4 % self.prompt_room + 1
        own = tuple(draw(self.layers, self.rows + 2, self.kv_heads, self.own_room, self.head_dim) for _ in range(2))
        shared = tuple(
            draw(self.layers, self.prompts, self.kv_heads, self.prompt_room, self.head_dim) for _ in range(2)
        )
        for memory, places, used in (
            *((part, slots, lengths) for part in own),
            *((part, range(self.prompts), prompt_lengths) for part in shared),
        ):
            kept = memory.clone()
            memory.fill_(NAN)
            for place, length in zip(torch.as_tensor(places).tolist(), used.tolist(), strict=True):
                memory[:, place, :, :length] = kept[:, place, :, :length]
        places = RowsOfMemory(slots, lengths, prompts, prompt_lengths[prompts])
        return {"embeddings": draw(self.rows, self.hidden), "responses": own, "shared": shared, "rows": places}


def select(batch: dict[str, Any], wanted: list[int]) -> dict[str, Any]:
    """Some of the rows, with memory of their own."""
    rows = RowsOfMemory(*(part[wanted] for part in batch["rows"]))
    copies = {name: tuple(part.clone() for part in batch[name]) for name in ("responses", "shared")}
    return {"embeddings": batch["embeddings"][wanted].clone(), **copies, "rows": rows}


# ---- the oracle


def normed(x: Tensor, weight: Tensor, decoder: Decoder) -> Tensor:
    return (decoder.offset + weight.double()) * x / (x.square().mean(-1, keepdim=True) + decoder.eps).sqrt()


def product(x: Tensor, linear: Linear) -> Tensor:
    return functional.linear(x, linear.weight.double(), None if linear.bias is None else linear.bias.double())


def rotated(x: Tensor, decoder: Decoder, position: int) -> Tensor:
    cos, sin = (part[position].double() for part in decoder.rotation)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def one_row(decoder: Decoder, batch: dict[str, Any], row: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Its logits, and the key and value of each layer, (kv_heads, head_dim)."""
    x, kept = batch["embeddings"][row].double(), []
    slot, length, prompt, prompt_length = (int(part[row]) for part in batch["rows"])
    activation = functional.silu if decoder.activation == "silu" else lambda x: functional.gelu(x, approximate="tanh")
    for number, layer in enumerate(decoder.layers):
        into = normed(x, layer.input_norm, decoder)
        query, key, value = (
            product(into, part).view(-1, decoder.head_dim) for part in (layer.query, layer.key, layer.value)
        )
        if layer.head_norms:
            query, key = (normed(x, w, decoder) for x, w in zip((query, key), layer.head_norms, strict=True))
        query, key = (rotated(x, decoder, prompt_length + length) for x in (query, key))
        kept.append((key, value))
        keys, values = (
            torch.cat([s[number, prompt, :, :prompt_length], o[number, slot, :, :length], new[:, None]], dim=1).double()
            for s, o, new in zip(batch["shared"], batch["responses"], (key, value), strict=True)
        )
        first = max(0, keys.shape[1] - layer.window) if layer.window else 0
        group = len(query) // len(key)
        heads = [
            (keys[h // group, first:] @ query[h] * decoder.scale).softmax(0) @ values[h // group, first:]
            for h in range(len(query))
        ]
        x = x + product(torch.cat(heads), layer.out)
        into = normed(x, layer.post_norm, decoder)
        x = x + product(activation(product(into, layer.gate)) * product(into, layer.up), layer.down)
    return product(normed(x, decoder.norm, decoder), decoder.head), kept


def check(kernels: CPUKernels, case: Case, atol: float = 2e-5) -> None:
    decoder, batch = case.decoder(), case.batch()
    before = [part.clone() for part in (*batch["responses"], *batch["shared"])]
    found = kernels.decoder_pass(decoder)(**batch)
    assert found.shape == (case.rows, case.vocab)
    for row in range(case.rows):
        (slot, length), now = (int(part[row]) for part in batch["rows"][:2]), batch["responses"]
        logits, kept = one_row(decoder, {**batch, "responses": before[:2], "shared": before[2:]}, row)
        torch.testing.assert_close(found[row].double(), logits, atol=atol, rtol=1e-5)
        for number, states in enumerate(kept):
            for i, state in enumerate(states):
                torch.testing.assert_close(now[i][number, slot, :, length].double(), state, atol=atol, rtol=1e-5)
                before[i][number, slot, :, length] = now[i][number, slot, :, length]
    for memory, kept in zip((*batch["responses"], *batch["shared"]), before, strict=True):
        assert memory.nan_to_num(7e7).equal(kept.nan_to_num(7e7))  # nothing else was written


# ---- what it computes


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 64, 65, 130])
def test_any_number_of_rows(kernels: CPUKernels, rows: int, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        check(kernels, Case(rows=rows))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize(
    "change",
    [
        {"biases": True},
        {"head_norms": True},
        {"windows": (1, 4)},
        {"windows": (None, 9)},
        {"offset": 1.0, "head_norms": True},
        {"activation": "gelu", "biases": True},
        {"heads": 2},
        {"heads": 1, "kv_heads": 1, "head_dim": 2},
        {"head_dim": 64},
        {"head_dim": 128, "kv_heads": 1},
        {"hidden": 1, "intermediate": 1, "vocab": 1},
        {"hidden": 5, "intermediate": 23, "vocab": 25},
        {"hidden": 48, "intermediate": 96, "vocab": 48},
        {"layers": 1},
        {"vocab": 1000},
    ],
    ids=str,
)
def test_any_decoder(kernels: CPUKernels, change: dict[str, Any], rows: int) -> None:
    check(kernels, dataclasses.replace(Case(rows=rows), **change))


@pytest.mark.parametrize("width", [1023, 1024, 1025, 2049])
def test_long_sums_come_in_parts(kernels: CPUKernels, width: int) -> None:
    check(kernels, Case(layers=1, hidden=width, intermediate=7), atol=1e-4)
    check(kernels, Case(layers=1, rows=66, intermediate=width), atol=1e-4)


def test_weights_are_read_where_they_lie(kernels: CPUKernels) -> None:
    decoder, case = Case().decoder(), Case()
    compiled = kernels.decoder_pass(decoder)
    before = compiled(**case.batch())
    decoder.head.weight.mul_(2)
    assert compiled(**case.batch()).equal(2 * before)


def test_no_rows(kernels: CPUKernels) -> None:
    batch = select(Case().batch(), [])
    assert kernels.decoder_pass(Case().decoder())(**batch).shape == (0, 61)


# ---- what it does not depend on


BITS = Case(rows=130, biases=True, head_norms=True, windows=(None, 4), hidden=200, intermediate=1100)


@pytest.mark.parametrize(
    "wanted", [[0], [77], [129], list(range(16)), list(range(100, 117)), [5, 3, 128], list(range(65))], ids=len
)
def test_no_bit_of_a_row_depends_on_the_others(kernels: CPUKernels, wanted: list[int]) -> None:
    compiled = kernels.decoder_pass(BITS.decoder())
    together, alone = BITS.batch(), select(BITS.batch(), wanted)
    assert compiled(**together)[wanted].equal(compiled(**alone))
    for row in wanted:
        slot, length = (int(part[row]) for part in together["rows"][:2])
        for ours, others in zip(together["responses"], alone["responses"], strict=True):
            assert ours[:, slot, :, length].equal(others[:, slot, :, length])


def test_the_number_of_threads_changes_no_bit(kernels: CPUKernels) -> None:
    compiled, found = kernels.decoder_pass(BITS.decoder()), []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        found.append(compiled(**BITS.batch()))
    torch.set_num_threads(1)
    assert all(logits.equal(found[0]) for logits in found)


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_what_is_not_finite_stays_in_its_row(kernels: CPUKernels, bad: float) -> None:
    case = Case(rows=20)
    compiled = kernels.decoder_pass(case.decoder())
    good = compiled(**case.batch())
    for row, place in itertools.product((0, 17), (0, 38)):
        batch = case.batch()
        batch["embeddings"][row, place] = bad
        found = compiled(**batch)
        others = [other for other in range(case.rows) if other != row]
        assert found[others].equal(good[others])
        assert not found[row].isfinite().any()
