"""Scorer that gets scores from a user's service over HTTP.

One request per sample::

    POST <url>
    {"data_source": "gsm8k", "solution_str": "... #### 4", "ground_truth": "4", "extra_info": {"index": 7}}

    200 OK
    1.0        or   {"score": 1.0, "acc": true}

Requests are repeated by :func:`verl.base.http_retries.retry_rule`. After the last attempt, no answer in time gives the
sample the status ``timeout``; everything else, such as a service that cannot be reached, is its ``error``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from verl.errors import ConfigError, RewardError
from verl.supervision.killable_pool import plain

if TYPE_CHECKING:
    import httpx2


class RemoteScorer:
    """Async reward function that posts each sample to a service.

    Args:
        url: address of the service.
        headers: HTTP headers of every request, such as an access token.
        max_retries: attempts after the first.
        request_timeout_s: timeout of one attempt.

    Raises:
        ConfigError: the url is invalid or contains a password, or a number is out of range.
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
                f"the reward manager remote needs the address of the service that scores, and has url={url!r}. "
                "Set url=http://host:port/path (reward_kwargs)."
            )
        if "@" in urlsplit(url).netloc:
            raise ConfigError(
                "the url of the service that scores holds a password, which would be in every error. Put it into "
                "headers."
            )
        if max_retries < 0 or request_timeout_s <= 0:
            raise ConfigError(
                f"the reward manager remote: max_retries={max_retries} must be at least 0 and "
                f"request_timeout_s={request_timeout_s} positive."
            )
        self.url, self.headers = url, dict(headers or {})
        self.max_retries, self.request_timeout_s = max_retries, request_timeout_s
        self._client: httpx2.AsyncClient | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_client": None}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        import verl.base.http_limits
        import verl.base.http_retries  # now: loading its libraries in the first call would block all others  # noqa: F401

        self.__dict__.update(state)

    async def __call__(
        self, data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, object]
    ) -> object:
        """Request the score of one response.

        Raises:
            TimeoutError: the service did not answer the last attempt in time.
            RewardError: the service answers with an error, cannot be reached, or does not answer in JSON.
        """
        import httpx2
        from tenacity import AsyncRetrying

        from verl.base.http_retries import retry_rule

        body = plain(
            {
                "data_source": data_source,
                "solution_str": solution_str.encode(errors="replace").decode(),  # JSON has no lone surrogates
                "ground_truth": ground_truth,
                "extra_info": extra_info,
            }
        )
        try:
            return await AsyncRetrying(**retry_rule(self.max_retries))(self._ask, body)
        except httpx2.ReadTimeout as error:
            raise TimeoutError(f"{self.url} gave no answer in {self.request_timeout_s:g} s") from error
        except httpx2.HTTPStatusError as error:
            answer = error.response
            raise RewardError(f"{self.url} answered {answer.status_code}: {self._shown(answer.text)}") from None
        except httpx2.TransportError as error:
            raise RewardError(f"{self.url} cannot be reached: {str(error) or type(error).__name__}") from error
        except httpx2.DecodingError as error:
            raise RewardError(f"{self.url} gave an answer that is not read: {error}") from error

    async def _ask(self, body: Mapping[str, object]) -> object:
        import httpx2

        from verl.base.http_limits import UNCOMPRESSED, async_answer_limit

        if self._client is None:
            self._client = httpx2.AsyncClient(
                headers=UNCOMPRESSED | self.headers, event_hooks=async_answer_limit(), timeout=self.request_timeout_s
            )
        answer = await self._client.post(self.url, json=body)
        answer.raise_for_status()
        try:
            return answer.json()
        except (ValueError, RecursionError) as error:
            raise RewardError(f"{self.url} answered what is no JSON: {self._shown(answer.text)}") from error

    def _shown(self, text: str) -> str:
        """First 200 characters of an answer; words of the request's headers, such as a token, are masked."""
        for word in " ".join(self.headers.values()).split():
            text = text.replace(word, "***") if len(word) > 6 else text  # shorter words are not secrets ("Bearer")
        return text[:200]
