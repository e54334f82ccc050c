"""Scores from a service of yours, over HTTP.

One request per sample::

    POST <url>
    {"data_source": "gsm8k", "solution_str": "... #### 4", "ground_truth": "4", "extra_info": {"index": 7}}

    200 OK
    1.0        or   {"score": 1.0, "acc": true}

Status 429, 5xx and broken connections are tried again, with growing pauses; any other status is an error
of the sample. A request that gets no answer in time is a ``timeout``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from verl.errors import ConfigError, RewardError
from verl.utils.killable_pool import plain

if TYPE_CHECKING:
    import httpx2

RETRIED = (429, 500, 502, 503, 504)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0


class RemoteScorer:
    """An async reward function that asks a service.

    Args:
        url: where to post.
        headers: of every request, for a token of access.
        max_retries: how often a request is tried again.
        request_timeout_s: how long one request may take.

    Raises:
        ConfigError: the url is none, or a number makes no sense.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        max_retries: int = 3,
        request_timeout_s: float = 30.0,
    ) -> None:
        if not str(url).startswith(("http://", "https://")):
            raise ConfigError(
                f"reward_manager=remote needs the address of the service that scores, and has url={url!r}. "
                "Set reward_model.reward_kwargs.url=http://host:port/path."
            )
        if "@" in urlsplit(url).netloc:
            raise ConfigError(
                "reward_manager=remote: the url holds a password, which would be in every error. Put it into "
                "reward_model.reward_kwargs.headers."
            )
        if max_retries < 0 or request_timeout_s <= 0:
            raise ConfigError(
                f"reward_manager=remote: max_retries={max_retries} must be at least 0 and "
                f"request_timeout_s={request_timeout_s} positive."
            )
        self.url, self.headers = url, dict(headers or {})
        self.max_retries, self.request_timeout_s = max_retries, request_timeout_s
        self._client: httpx2.AsyncClient | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        import httpx2  # now, in the process that scores: the first call would hold up all others  # noqa: F401
        import tenacity  # noqa: F401

        self.__dict__.update(state)

    async def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
    ) -> Any:
        """Ask for the score of one response.

        Raises:
            TimeoutError: no answer in time, in no attempt.
            RewardError: the service refuses, cannot be reached, or its answer is no JSON.
        """
        import httpx2
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential

        body = plain(
            {
                "data_source": data_source,
                "solution_str": solution_str,
                "ground_truth": ground_truth,
                "extra_info": extra_info,
            }
        )
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self.max_retries + 1),
            wait=wait_random_exponential(FIRST_PAUSE_S, LONGEST_PAUSE_S),
            retry=retry_if_exception(_may_pass),
            reraise=True,
        )
        try:
            return await attempts(self._ask, body)
        except httpx2.TimeoutException as error:
            raise TimeoutError(f"{self.url} gave no answer in {self.request_timeout_s:g} s") from error
        except httpx2.HTTPStatusError as error:
            answer = error.response
            raise RewardError(f"{self.url} answered {answer.status_code}: {self._shown(answer.text)}") from None
        except httpx2.TransportError as error:
            raise RewardError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error

    async def _ask(self, body: Mapping[str, Any]) -> Any:
        import httpx2

        if self._client is None:
            self._client = httpx2.AsyncClient(headers=self.headers, timeout=self.request_timeout_s)
        answer = await self._client.post(self.url, json=body)
        answer.raise_for_status()
        try:
            return answer.json()
        except (ValueError, RecursionError) as error:
            raise RewardError(f"{self.url} answered what is no JSON: {self._shown(answer.text)}") from error

    def _shown(self, text: str) -> str:
        """The beginning of an answer, without the words of the headers, should the service repeat them."""
        for word in " ".join(self.headers.values()).split():
            text = text.replace(word, "***") if len(word) > 6 else text  # a shorter one is no secret
        return text[:200]


def _may_pass(error: BaseException) -> bool:
    """Whether another attempt may go better."""
    import httpx2

    if isinstance(error, httpx2.HTTPStatusError):
        return error.response.status_code in RETRIED
    return isinstance(error, httpx2.TransportError)
