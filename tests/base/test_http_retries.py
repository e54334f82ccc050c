"""Which answers of a service are worth another request, and when it is made."""

from __future__ import annotations

import httpx2
import pytest
from tenacity import Retrying

from verl.base.http_retries import LONGEST_PAUSE_S, retry_rule


def pauses_of(first: list[int | httpx2.TransportError], retries: int, **headers: str) -> tuple[int, list[float]]:
    """The last status that was asked for, and the pauses between the requests."""
    pauses: list[float] = []

    def ask() -> int:
        answer = first.pop(0)
        if isinstance(answer, httpx2.TransportError):
            raise answer
        request = httpx2.Request("POST", "http://localhost/")
        return httpx2.Response(answer, headers=headers, request=request).raise_for_status().status_code

    return Retrying(**retry_rule(retries), sleep=pauses.append)(ask), pauses


def test_pauses_grow_and_what_may_pass_is_repeated():
    busy = [408, 429, 500, 502, 503, 504, httpx2.ConnectError("refused"), httpx2.ReadTimeout("no answer")]
    status, pauses = pauses_of([*busy, 200], retries=8)
    assert (status, len(pauses)) == (200, 8)
    bounds = [0.5, 1, 2, 4, 8, 16, 32, 60]
    assert all(0 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))


def test_a_service_says_when_to_come_again():
    assert pauses_of([429, 503, 200], retries=2, **{"Retry-After": "40"}) == (200, [40.0, 40.0])
    assert pauses_of([429, 200], retries=2, **{"Retry-After": "9999"}) == (200, [LONGEST_PAUSE_S])


@pytest.mark.parametrize("first, asked", [([404, 200], 1), ([401], 1), ([503, 503, 503, 200], 3)])
def test_the_last_answer_is_raised(first: list[int | httpx2.TransportError], asked: int):
    given = len(first)
    with pytest.raises(httpx2.HTTPStatusError):
        pauses_of(first, retries=2)
    assert given - len(first) == asked
