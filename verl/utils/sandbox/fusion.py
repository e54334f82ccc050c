"""The same contract served by SandboxFusion over HTTP: programs run on another machine.

Request and response are those of ``POST /run_code`` (https://bytedance.github.io/SandboxFusion).
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from verl.utils.sandbox.types import Limits, Outcome, SandboxError, Status, end_of

RETRIES = 4
BACKOFF_S = 0.5
BUSY = (429, 502, 503, 504)
CONNECT_S = 10.0
QUEUE_S = 30.0
"""How much longer than the program a request may take: compilation and the service's own queue."""


class Semaphore(Protocol):
    """A semaphore of threading or multiprocessing."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


class FusionSandbox:
    """Runs programs on a SandboxFusion service.

    The service has one time limit, by the clock: it is given ``cpu_s``, or ``wall_s`` if that is less. Of
    the other limits it knows the memory; ``max_output_bytes`` is looked at here. Requests that meet a busy
    service (429, 502, 503, 504), a refused connection or no answer are repeated, with pauses that double.

    Args:
        url: address of the service, with or without ``/run_code``.
        semaphore: bounds requests at once; shared by whoever shares the service.
        language: language of the programs, by the service's name for it.
        retries: how often a request is repeated.
        backoff_s: first pause.

    Raises:
        SandboxError: the address is not one of http or https.
    """

    def __init__(
        self,
        url: str,
        semaphore: Semaphore | None = None,
        language: str = "python",
        retries: int = RETRIES,
        backoff_s: float = BACKOFF_S,
    ) -> None:
        self.url = run_code_url(url)
        self.semaphore = semaphore
        self.language = language
        self.retry = Retry(
            total=retries,
            status_forcelist=BUSY,
            allowed_methods=("POST",),
            backoff_factor=backoff_s,
            backoff_jitter=backoff_s,
            raise_on_status=False,
        )
        self._sessions = threading.local()

    def run(self, program: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
        """Run a program; see :meth:`verl.utils.sandbox.Sandbox.run`.

        Raises:
            SandboxError: the service cannot be reached, does not answer as it should, or reports that it
                failed itself.
        """
        limits = limits or Limits()
        seconds = min(limits.cpu_s, limits.wall_s)
        body = {
            "code": program,
            "stdin": stdin,
            "language": self.language,
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "memory_limit_MB": limits.memory_mb,
            "files": {},
            "fetch_files": [],
        }
        with self.semaphore or contextlib.nullcontext():
            answer = self._post(body, timeout=seconds * 2 + QUEUE_S)
        return outcome_of(answer, limits)

    def _post(self, body: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        try:
            response = self._session().post(self.url, json=body, timeout=(CONNECT_S, timeout))
            if response.status_code != requests.codes.ok:
                raise SandboxError(
                    f"the code service {self.url} answered {response.status_code} after "
                    f"{len(response.raw.retries.history) if response.raw.retries else 0} repetitions: "
                    f"{response.text[:500]}"
                )
            answer = response.json()
        except requests.RequestException as error:
            raise SandboxError(
                f"the code service {self.url} cannot be used ({error}). Check reward_model.sandbox_fusion.url, or "
                "leave it null to run code in the sandbox of this machine."
            ) from error
        if not isinstance(answer, Mapping):
            raise SandboxError(
                f"the code service {self.url} answered {answer!r:.200}, not an object with 'run_result'."
            )
        return answer

    def _session(self) -> requests.Session:
        """Connections are kept, one set per thread."""
        session = getattr(self._sessions, "value", None)
        if session is None:
            session = self._sessions.value = requests.Session()
            session.mount("http://", HTTPAdapter(max_retries=self.retry))
            session.mount("https://", HTTPAdapter(max_retries=self.retry))
        return session


@functools.cache
def run_code_url(url: str) -> str:
    """The address that programs are posted to.

    Raises:
        SandboxError: it is not an address of http or https.

    >>> run_code_url("http://localhost:8080")
    'http://localhost:8080/run_code'
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise SandboxError(
            f"reward_model.sandbox_fusion.url='{url}' is no address. Expected http://HOST:PORT or "
            "http://HOST:PORT/run_code."
        )
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/run_code"


def outcome_of(answer: Mapping[str, Any], limits: Limits) -> Outcome:
    """What the service says of a run, in the words of the sandbox of this machine.

    Raises:
        SandboxError: the service failed, or the answer is not one of its answers.
    """
    if answer.get("status") == "SandboxError":
        raise SandboxError(f"the code service failed: {answer.get('message')}")
    compiled, run = answer.get("compile_result"), answer.get("run_result")
    result = compiled if compiled and not run else run
    if answer.get("status") not in ("Success", "Failed") or not isinstance(result, Mapping):
        raise SandboxError(f"the code service gave an answer that is not understood: {answer!r:.500}")
    stdout, stderr = str(result.get("stdout") or ""), str(result.get("stderr") or "")
    code, seconds = result.get("return_code"), float(result.get("execution_time") or math.nan)
    signal_name = None
    if result.get("status") == "TimeLimitExceeded":
        status, code = Status.TIMEOUT, None
    elif code is None:
        raise SandboxError(f"the code service could not run the program: {stderr or answer.get('message')}")
    else:
        # Python's subprocess reports a signal as its negative number.
        status, signal_name = end_of(int(code) if code >= 0 else 128 - int(code), stderr)
    size = limits.max_output_bytes
    if max(len(stdout.encode()), len(stderr.encode())) > size:
        status, code = Status.OUTPUT_LIMIT, None
        stdout, stderr = (text.encode()[:size].decode("utf-8", "replace") for text in (stdout, stderr))
    return Outcome(
        status=status,
        stdout=stdout,
        stderr=stderr,
        seconds=seconds,
        exit_code=None if signal_name else code,
        signal=signal_name,
    )
