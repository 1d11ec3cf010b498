"""Who is let in: host names, origins, tokens."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tessella.core.errors import ServeError, UsageError
from tessella.server import Server, serve
from tessella.server.guard import Guard
from tests.support.engines import Scores, repository

TOKEN = "a-long-and-random-token"


def status(guard: Guard, method: str = "POST", path: str = "/v2", **headers: str) -> int:
    """What the guard answers; 200 lets the request pass."""
    raw = {k.replace("_", "-").lower().encode(): v.encode() for k, v in headers.items()}
    try:
        guard.check(method, path, raw)
    except ServeError as error:
        return error.status
    return 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_no_public_address_without_a_token(host: str) -> None:
    with pytest.raises(UsageError, match="give a token, or listen on 127"):
        Guard(host=host, token=None)
    with pytest.raises(UsageError, match="no token"):
        serve({"flowers": Path("flowers.plan")}, host=host, port=0)
    Guard(host=host, token=TOKEN)


@pytest.mark.parametrize("token", ["", "short", "ü" * 20, "with a\nline break in it"])
def test_tokens_that_protect_nothing(token: str) -> None:
    with pytest.raises(UsageError, match="protects nothing"):
        Guard(host="127.0.0.1", token=token)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "LOCALHOST:1", "[::1]:8000", "127.1.2.3"]
)
def test_loopback_names_pass(host: str) -> None:
    assert status(Guard(host="127.0.0.1", token=None), Host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "169.254.169.254",
        "192.168.1.5",
        "evil@127.0.0.1",
        "127.0.0.1/evil",
        "127.0.0.1#evil",
        "[::1",
        "",
    ],
)
def test_foreign_names_do_not(host: str) -> None:
    guard = Guard(host="127.0.0.1", token=None)
    assert status(guard, Host=host) == 421
    assert status(guard, "GET", "/v2/health/live", Host=host) == 421


def test_no_host_at_all() -> None:
    assert status(Guard(host="127.0.0.1", token=None)) == 421


def test_a_public_server_answers_under_its_addresses_and_names() -> None:
    guard = Guard(host="0.0.0.0", token=TOKEN, names=("gpu7.lab",))
    bearer = {"Authorization": f"bearer {TOKEN}"}  # the scheme's case does not matter
    for host in ("192.168.1.5:8000", "[fe80::1]:8000", "gpu7.lab", "localhost"):
        assert status(guard, Host=host, **bearer) == 200
    assert status(guard, Host="evil.example", **bearer) == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:9000"},
        {"Origin": "http://localhost"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://[::1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:8000"},
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_other_sites_pages_may_send_nothing(method: str, headers: dict[str, str]) -> None:
    guard = Guard(host="127.0.0.1", token=None)
    assert status(guard, method, Host="localhost:8000", **headers) == 403


def test_own_pages_and_programs_may() -> None:
    guard = Guard(host="127.0.0.1", token=None)
    assert status(guard, Host="localhost:8000") == 200
    assert status(guard, Host="localhost:8000", Origin="http://localhost:8000") == 200
    assert status(guard, "GET", Host="localhost:8000", Origin="http://evil.example") == 200


@pytest.mark.parametrize(
    "given",
    ["", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Bearer  {TOKEN}", f"Basic {TOKEN}"],
)
def test_wrong_tokens(given: str) -> None:
    guard = Guard(host="127.0.0.1", token=TOKEN)
    for path in ("/v2", "/metrics", "/v2/models/x/infer", "/openapi.json", "/v2/health/live/x"):
        assert status(guard, "GET", path, Host="localhost", Authorization=given) == 401
    assert status(guard, "GET", "/v2/health/live", Host="localhost", Authorization=given) == 200


def test_a_live_server_is_guarded_everywhere() -> None:
    with Server(repository({"flowers": Scores()}), token=TOKEN) as server:
        with httpx.Client(base_url=server.url, verify=False, timeout=60) as http:
            bearer = {"Authorization": f"Bearer {TOKEN}"}
            routes = [
                ("GET", "/v2/models/flowers"),
                ("POST", "/v2/models/flowers/infer"),
                ("POST", "/v2/repository/index"),
                ("POST", "/v2/repository/models/flowers/unload"),
                ("GET", "/metrics"),
                ("GET", "/openapi.json"),
                ("GET", "/nowhere"),
            ]
            for method, path in routes:
                answer = http.request(method, path)
                assert answer.status_code == 401, path
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                foreign = {**bearer, "Host": "evil.example"}
                assert http.request(method, path, headers=foreign).status_code == 421, path
            cross = {**bearer, "Origin": "http://evil.example"}
            assert http.post(routes[3][1], headers=cross).status_code == 403
            assert http.get("/v2/models/flowers/ready", headers=bearer).status_code == 200
            assert http.get("/v2/health/ready").status_code == 200
