"""Whoever is not the user's own page gets nothing."""

from __future__ import annotations

import pytest

from tests.plugins.view.conftest import TOKEN
from tests.support.made_up_run import make_up_run


@pytest.fixture(scope="module")
def server(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_up_run(folder, steps=3)
    return command(folder)


KNOWN = {"authorization": f"Bearer {TOKEN}"}
PATHS = ["/", "/api/runs", "/api/events", "/api/sample/1", "/page/main.js", "/page/vendor/uPlot.esm.js"]


@pytest.mark.parametrize("path", PATHS)
def test_without_the_token_nothing_is_told(server, path):
    for headers in ({}, {"authorization": "Bearer wrong"}, {"cookie": f"verl_view_{server.port}=wrong"}):
        answer = server.get(path, headers=headers)
        assert answer.status_code == 401
        assert "first" not in answer.text
    assert server.get(path, headers={}, token="wrong").status_code == 401
    if path != "/":
        assert server.get(path, headers={}, token=TOKEN).status_code == 401


def test_the_address_with_the_token_sets_a_cookie_that_is_enough(server):
    answer = server.get("/", headers={}, token=TOKEN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert server.get("/api/runs", headers={"cookie": cookie.split(";")[0]}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}"])
def test_a_name_that_was_turned_to_this_address_gets_nothing(server, host):
    answer = server.get("/api/runs", headers=KNOWN | {"host": host.format(port=server.port)})
    assert answer.status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:1"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
    ],
)
def test_a_request_that_another_page_sent_is_refused(server, headers):
    assert server.get("/api/runs", headers=KNOWN | headers).status_code == 403


def test_requests_cannot_change_anything_or_leave_the_folders(server):
    import httpx2

    assert httpx2.post(server.address + "/api/runs", headers=KNOWN).status_code == 405
    for path in ("/page/../server.py", "/page/%2e%2e/server.py", "/page//etc/passwd"):
        assert server.get(path).status_code in (404, 401), path
    assert server.get("/api/series", run="../../etc/passwd", name="x").status_code == 404


def test_answers_forbid_frames_foreign_scripts_and_guesses_of_types(server):
    headers = server.get("/").headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")


def test_addresses_that_make_no_sense_are_told_so(server):
    run = server.get("/api/runs").json()["runs"][0]["id"]
    answer = server.get("/api/samples", run=run, step_from="many")
    assert (answer.status_code, "not understood" in answer.json()["error"]) == (400, True)
    for path, query in ((f"/api/sample/{10**30}", {}), ("/api/samples", {"run": run, "length_from": 10**30})):
        assert server.get(path, **query).status_code == 400
    assert "no sample 999999" in server.get("/api/sample/999999").json()["error"]
