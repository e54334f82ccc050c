"""Client that runs programs on a SandboxFusion service, with the interface of :class:`verl.plugins.sandbox.Sandbox`.

It uses ``POST /run_code`` (https://bytedance.github.io/SandboxFusion).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

import httpx2
from tenacity import Retrying

from verl.base.http_limits import UNCOMPRESSED, AnswerTooLongError, answer_limit
from verl.base.http_retries import FIRST_PAUSE_S, retry_rule
from verl.plugins.sandbox.types import Limits, ProgramResult, SandboxError, Status, end_of

RETRIES = 4  # attempts after the first
LONGEST_S = 1e9
"""Bound of the seconds that a service may report."""
CONNECT_S = 10.0  # a server that runs accepts at once, so that a wrong address is reported soon
QUEUE_S = 30.0
"""Extra seconds of a request for waiting in the service's queue."""


class Semaphore(Protocol):
    """Semaphore of ``threading`` or ``multiprocessing``."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> object: ...


class FusionSandbox:
    """Run programs on a SandboxFusion service.

    The service enforces a wall-clock limit, which is the smaller of ``cpu_s`` and ``wall_s``, and the memory
    limit; ``max_output_bytes`` is checked here, the other limits do not apply. Requests are repeated by
    :func:`verl.base.http_retries.retry_rule`.

    Args:
        url: address of the service, with or without ``/run_code``.
        semaphore: bounds the number of concurrent requests; may be shared by several clients.
        language: the service's name of the programming language.
        retries: attempts after the first.
        backoff_s: bound of the first pause.

    Raises:
        SandboxError: the address is not http or https.
    """

    def __init__(
        self,
        url: str,
        semaphore: Semaphore | None = None,
        language: str = "python",
        retries: int = RETRIES,
        backoff_s: float = FIRST_PAUSE_S,
    ) -> None:
        self.url = run_code_url(url)
        self.semaphore = semaphore
        self.language = language
        self.retries, self.backoff_s = retries, backoff_s
        # Shared by threads. The semaphore bounds the requests, so connections have no bound of their own.
        self._client = httpx2.Client(
            headers=UNCOMPRESSED,
            event_hooks=answer_limit(),
            limits=httpx2.Limits(max_connections=None),
            follow_redirects=True,
        )

    def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> ProgramResult:
        """Run a program; see :meth:`verl.plugins.sandbox.Sandbox.run`.

        Raises:
            SandboxError: the service cannot be reached, gives an invalid answer, or reports its own failure.
        """
        limits = limits or Limits()
        seconds = min(limits.cpu_s, limits.wall_s)
        body = {
            "code": program.encode(errors="replace").decode(),  # JSON has no lone surrogates
            "stdin": stdin,
            "language": self.language,
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "memory_limit_MB": limits.memory_mb,
            "files": {},
            "fetch_files": [],
        }
        try:
            with self.semaphore or contextlib.nullcontext():
                answer = self._post(body, timeout=seconds * 2 + QUEUE_S)
        except AnswerTooLongError:  # the program's output, and no failure of the service
            return ProgramResult(status=Status.OUTPUT_LIMIT, stdout="", stderr="", seconds=math.nan)
        return outcome_of(answer, limits)

    def _post(self, body: Mapping[str, object], timeout: float) -> Mapping[str, object]:
        attempts = Retrying(**retry_rule(self.retries, self.backoff_s))
        try:
            answer = attempts(self._ask, body, httpx2.Timeout(timeout, connect=CONNECT_S, pool=None))
        except httpx2.HTTPStatusError as error:
            raise SandboxError(
                f"the code service {self.url} answered {error.response.status_code} after "
                f"{attempts.statistics['attempt_number'] - 1} repetitions: {error.response.text[:500]}"
            ) from None
        except AnswerTooLongError:
            raise
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, RecursionError) as error:
            raise SandboxError(
                f"the code service {self.url} cannot be used ({str(error) or type(error).__name__}). Check "
                "this address (sandbox_fusion.url), or leave it null to run code in the sandbox of this machine."
            ) from error
        if not isinstance(answer, Mapping):
            raise SandboxError(
                f"the code service {self.url} answered {answer!r:.200}, not an object with 'run_result'."
            )
        return answer

    def _ask(self, body: Mapping[str, object], timeout: httpx2.Timeout) -> object:
        response = self._client.post(self.url, json=body, timeout=timeout)
        return response.raise_for_status().json()


@functools.cache
def run_code_url(url: str) -> str:
    """Return the address that programs are posted to.

    Raises:
        SandboxError: it is not http or https.

    >>> run_code_url("http://localhost:8080")
    'http://localhost:8080/run_code'
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise SandboxError(
            f"sandbox_fusion.url='{url}' is no address. Expected http://HOST:PORT or http://HOST:PORT/run_code."
        )
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/run_code"


def outcome_of(answer: Mapping[str, object], limits: Limits) -> ProgramResult:
    """Convert an answer of the service.

    Raises:
        SandboxError: the service failed, or the answer has an unknown form.
    """
    if answer.get("status") == "SandboxError":
        raise SandboxError(f"the code service failed: {answer.get('message')}")
    compiled, run = answer.get("compile_result"), answer.get("run_result")
    result = compiled if compiled and not run else run
    if answer.get("status") not in ("Success", "Failed") or not isinstance(result, Mapping):
        raise SandboxError(f"the code service gave an answer that is not understood: {answer!r:.500}")
    stdout, stderr = str(result.get("stdout") or ""), str(result.get("stderr") or "")
    code, seconds = result.get("return_code"), result.get("execution_time")
    if not isinstance(code, int | None) or (code is not None and not -(2**31) <= code < 2**32):
        raise SandboxError(f"the code service gave an answer that is not understood: return_code={code!r:.100}")
    signal_name = None
    if result.get("status") == "TimeLimitExceeded":
        status, code = Status.TIMEOUT, None
    elif code is None:
        raise SandboxError(f"the code service could not run the program: {stderr or answer.get('message')}")
    else:
        # Python's subprocess reports a signal as its negative number.
        status, signal_name = end_of(code if code >= 0 else 128 - code, stderr)
    size = limits.max_output_bytes
    if max(len(stdout.encode()), len(stderr.encode())) > size:
        status, code = Status.OUTPUT_LIMIT, None
        stdout, stderr = (text.encode()[:size].decode("utf-8", "replace") for text in (stdout, stderr))
    return ProgramResult(
        status=status,
        stdout=stdout,
        stderr=stderr,
        seconds=float(seconds) if isinstance(seconds, int | float) and abs(seconds) < LONGEST_S else math.nan,
        exit_code=None if signal_name else code,
        signal=signal_name,
    )
