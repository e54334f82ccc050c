"""CPU kernels in C, compiled on first use, for operations in which PyTorch leaves the processor idle.

    kernels = cpu_kernels()          # None without a C compiler; the reason is logged once
    y = kernels.rms_norm(x, Norm(weight, eps))

All tensors must be contiguous and fp32, which is not checked. There is no autograd here: backward passes are functions
of their own. Compiling takes about a second; the library is cached in ``$XDG_CACHE_HOME/verl`` (``~/.cache/verl``).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from verl.backends.cpu.kernels.decoding import (
    AttentionStruct,
    Decoder,
    DecoderLayer,
    DecoderStruct,
    Linear,
    MemoryStruct,
    Norm,
    RowsOfMemory,
    address,
    decoder_struct,
    memory_struct,
)
from verl.backends.cpu.kernels.training import FeedForward, Heads, TrainingKernels
from verl.base.fs import is_private
from verl.errors import RolloutError

__all__ = [
    "CPUKernels",
    "Decoder",
    "DecoderLayer",
    "DecoderPass",
    "FeedForward",
    "Heads",
    "Linear",
    "Norm",
    "RowsOfMemory",
    "TrainingKernels",
    "cpu_kernels",
]

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
# Sums may be taken in any order, or no loop could use SIMD; infinities and NaN keep their meaning.
_FLAGS = [
    "-O3",
    "-march=native",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",
    "-fno-signed-zeros",
]
# Elementwise work on less than this runs on one thread; waking the others would take longer.
_FEW_ELEMENTS = 1 << 16
_FLOAT, _INT, _INT64, _POINTER = ctypes.c_float, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p


class CPUKernels:
    """The compiled functions of the shared library ``path``, with tensors as arguments."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.training = TrainingKernels(library)
        self._decode_attention = library.decode_attention
        attention = ctypes.POINTER(AttentionStruct), ctypes.POINTER(MemoryStruct)
        self._decode_attention.argtypes = [*attention, *[_POINTER] * 4, _INT]
        self._decode = library.decode
        decoder = ctypes.POINTER(DecoderStruct)
        self._decode.argtypes = [decoder, ctypes.POINTER(MemoryStruct), *[_POINTER] * 3, _INT]
        self._decode.restype = None
        self._decode_space = library.decode_space
        self._decode_space.argtypes = [decoder, _INT64, _INT64, _INT]
        self._decode_space.restype = _INT64
        self._attention_forward = library.attention_forward
        self._attention_forward.argtypes = [_POINTER] * 7 + [_INT64] * 5 + [_FLOAT, _INT]
        self._attention_backward = library.attention_backward
        self._attention_backward.argtypes = [_POINTER] * 11 + [_INT64] * 5 + [_FLOAT, _INT]
        self._rms_norm = library.rms_norm
        self._rms_norm.argtypes = [_POINTER] * 3 + [_INT64] * 2 + [_FLOAT] * 2 + [_INT]
        self._rms_norm.restype = None
        self._silu_mul = library.silu_mul
        self._silu_mul.argtypes = [_POINTER] * 3 + [_INT64, _INT]
        self._silu_mul.restype = None

    def attention_forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        scale: float,
        window: int | None = None,
        key_starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Causal attention within each sequence of a packed row.

        Args:
            query: (tokens, heads, head_dim).
            key: (keys, kv_heads, head_dim).
            value: (keys, kv_heads, head_dim).
            starts: (sequences + 1,) int64, first token of each sequence, and the number of tokens.
            scale: factor of the scores.
            window: number of tokens that a token attends to, itself included; None is all.
            key_starts: as ``starts``, of keys and values, where sequences have more of these than queries: the queries
                are then of the last tokens.

        Returns:
            (tokens, heads, head_dim) output, and (tokens, heads) logarithms of the softmax denominators, for the
            backward pass.

        Raises:
            MemoryError: a sequence is too long for the free memory.
        """
        out, log_sums = torch.empty_like(query), query.new_empty(query.shape[:2])
        tensors = (out, log_sums, query, key, value, starts, starts if key_starts is None else key_starts)
        self._attend(self._attention_forward, tensors, query, key, starts, scale, window)
        return out, log_sums

    def attention_backward(
        self,
        grad: Tensor,
        out: Tensor,
        log_sums: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        scale: float,
        window: int | None = None,
        key_starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients with respect to query, key and value from ``grad``, that with respect to ``out``."""
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        key_starts = starts if key_starts is None else key_starts
        tensors = (*grads, grad, out, log_sums, query, key, value, starts, key_starts)
        self._attend(self._attention_backward, tensors, query, key, starts, scale, window)
        return grads

    @staticmethod
    def _attend(
        function: Callable[..., int],
        tensors: tuple[Tensor, ...],
        query: Tensor,
        key: Tensor,
        starts: Tensor,
        scale: float,
        window: int | None,
    ) -> None:
        sizes = len(starts) - 1, query.shape[1], key.shape[1], query.shape[2], window or 0
        if function(*map(address, tensors), *sizes, scale, torch.get_num_threads()):
            raise MemoryError(f"attention of {len(key)} tokens; use shorter sequences or fewer tokens in a pass")

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """RMS norm (offset + weight) · x / sqrt(mean(x²) + eps) over the last dimension of ``x``."""
        out = torch.empty_like(x)
        width = x.shape[-1]
        sizes = x.numel() // width, width, norm.eps, norm.offset, _threads(x.numel())
        self._rms_norm(out.data_ptr(), x.data_ptr(), norm.weight.data_ptr(), *sizes)
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute silu(gate) · up in place: ``gate`` is overwritten and returned."""
        self._silu_mul(gate.data_ptr(), gate.data_ptr(), up.data_ptr(), gate.numel(), _threads(gate.numel()))
        return gate

    def decode_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        responses: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor],
        rows: RowsOfMemory,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Store key and value of each row's new token, then attend to the row's prompt and response so far.

        Args:
            query: (rows, heads, head_dim) of the new tokens, as the result.
            key: (rows, kv_heads, head_dim).
            value: (rows, kv_heads, head_dim).
            responses: keys and values of responses, (slots, kv_heads, room, head_dim); the new ones are written here.
            shared: keys and values of prompts, (prompts, kv_heads, room, head_dim).
            rows: places of each row in ``responses`` and ``shared``.
            scale: factor of the scores.
            window: number of tokens that a token attends to, itself included; None is all.

        Raises:
            RolloutError: there is no memory for the scores.
        """
        out = torch.empty_like(query)
        count, heads, head_dim = query.shape
        attention = AttentionStruct(heads, key.shape[1], head_dim, window or 0, scale)
        tensors = (out, query, key, value)
        memory = memory_struct(responses, shared, rows)
        if self._decode_attention(attention, memory, *map(address, tensors), torch.get_num_threads()):
            raise RolloutError(
                f"no memory for the attention scores of {count} rows; generate fewer at once (max_num_seqs)."
            )
        return out

    def decoder_pass(self, decoder: Decoder) -> DecoderPass:
        """Return the function that decodes one token per row with ``decoder``."""
        return DecoderPass(self._decode, self._decode_space, decoder)


class DecoderPass:
    """Decoding step of a whole decoder in one call; a row's logits are bitwise independent of the other rows.

    Args:
        function: ``decode`` of the library.
        space: ``decode_space`` of the library: the workspace it needs, in floats.
        decoder: its tensors are read in place at every call, so weights may be updated in place between calls.
    """

    def __init__(self, function: Callable[..., None], space: Callable[..., int], decoder: Decoder) -> None:
        self._function, self._space_of = function, space
        self.decoder, self._struct = decoder, decoder_struct(decoder)
        self._space = torch.empty(0)
        self._space_for: tuple[int, ...] = (0, 0, 0)  # rows, tokens, threads

    def reserve(self, rows: int, tokens: int) -> None:
        """Allocate the workspace for ``rows`` rows of at most ``tokens`` tokens, unless it is large enough."""
        needed = rows, tokens, torch.get_num_threads()
        if any(new > old for new, old in zip(needed, self._space_for, strict=True)):
            self._space_for = needed
            self._space = torch.empty(self._space_of(self._struct, *needed), dtype=torch.float32)

    def __call__(
        self,
        embeddings: Tensor,
        responses: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor],
        rows: RowsOfMemory,
    ) -> Tensor:
        """Append one token to each row and return the (rows, vocab) logits of the next.

        Args:
            embeddings: (rows, hidden) of the newest tokens.
            responses: keys and values of responses, (layers, slots, kv_heads, room, head_dim); gets the new ones.
            shared: keys and values of prompts, (layers, prompts, kv_heads, room, head_dim).
            rows: places of each row in ``responses`` and ``shared``.
        """
        self.reserve(len(embeddings), responses[0].shape[3] + shared[0].shape[3])
        logits = embeddings.new_empty(len(embeddings), len(self.decoder.head.weight))
        memory = memory_struct(responses, shared, rows)
        tensors = (logits, embeddings, self._space)
        self._function(self._struct, memory, *map(address, tensors), torch.get_num_threads())
        return logits


def _threads(elements: int) -> int:
    return 1 if elements < _FEW_ELEMENTS else torch.get_num_threads()


@cache
def cpu_kernels() -> CPUKernels | None:
    """Return the kernels for this machine, compiled if need be; None, with a warning, if they cannot be compiled."""
    try:
        compiler = _compiler()
    except ValueError as error:  # CC has an unclosed quotation mark
        logger.warning(
            "CC=%s is no command (%s), so PyTorch's operations are used, which are slower", _requested_compiler(), error
        )
        return None
    if compiler is None:
        tried = _requested_compiler() or "CC, cc, gcc, clang"
        logger.warning("no C compiler (%s): a CPU uses PyTorch's operations, which are slower", tried)
        return None
    try:
        return CPUKernels(_compiled(compiler))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: the user has no home directory
        detail = getattr(error, "stderr", None) or error
        logger.warning(
            "no CPU kernels with %s, so PyTorch's operations are used, which are slower (XDG_CACHE_HOME says where "
            "they are kept, CC what compiles them): %s",
            " ".join(compiler),
            detail,
        )
        return None


def _requested_compiler() -> str | None:
    return os.environ.get("CC")


def _compiler() -> list[str] | None:
    """Return the command in ``CC`` with its arguments, or the first compiler found; None if there is none."""
    for words in map(shlex.split, [requested] if (requested := _requested_compiler()) else ["cc", "gcc", "clang"]):
        if words and (path := shutil.which(words[0])):
            return [path, *words[1:]]
    return None


def _compiled(compiler: list[str]) -> Path:
    """Return the cached library for this source, compiler and processor; compile it if there is none."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    sources = [path.read_text() for path in sorted(_FOLDER.glob("*.[ch]"))]
    parts = [*sources, version, _processor(), *compiler, *_FLAGS]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_private(folder)
    name = f"cpu_kernels-{key}"
    library = next((path for path in sorted(folder.glob(f"{name}-*.so")) if path == _named(path, folder / name)), None)
    if library is None:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            library_file = Path(scratch) / f"{name}.so"
            _compile(compiler, library_file)
            library_file.chmod(0o700)  # a umask such as 002 would let a group write, which _check_private refuses
            # Atomic, because several processes may compile at once.
            library = library_file.replace(_named(library_file, folder / name))
        logger.info("CPU kernels compiled with %s into %s", " ".join(compiler), library)
    _check_private(library)
    return library


def _named(library: Path, beginning: Path) -> Path:
    """Append the digest of the library's bytes to ``beginning``."""
    # Loading a truncated library would kill the process; a name that does not fit the bytes makes it compiled again.
    digest = hashlib.sha256(library.read_bytes()).hexdigest()[:16]
    return beginning.with_name(f"{beginning.name}-{digest}.so")


def _check_private(path: Path) -> None:
    """Refuse a path that others may write: code is loaded from it."""
    if not is_private(path.resolve()):  # the cache of a user may be a link
        status = path.stat()
        raise PermissionError(
            f"{path} belongs to user {status.st_uid} with mode {stat.filemode(status.st_mode)}; only you (user "
            f"{os.getuid()}) or root may be able to write there. Try chmod go-w, or set XDG_CACHE_HOME to your own "
            "folder"
        )


def _compile(compiler: list[str], target: Path) -> None:
    command = [*compiler, *_FLAGS, "-shared", *map(str, sorted(_FOLDER.glob("*.c"))), "-o", str(target), "-lm"]
    with_threads = subprocess.run([*command, "-fopenmp"], capture_output=True, text=True, timeout=300)
    if with_threads.returncode:  # no OpenMP (Apple's clang): one thread
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.version()}"
    fields = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(fields)}))
