import stat
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from tessella.core.errors import UsageError
from tessella.studio.guard import Guard, read_or_make_token

TOKEN = "a-secret-of-the-first-start"
HOME = "http://127.0.0.1:8080"


def app(host: str = "127.0.0.1") -> Guard:
    async def anything(request):
        return PlainTextResponse(f"inside {request.url.path} {request.url.query}")

    async def socket(websocket):
        await websocket.accept()
        await websocket.send_text("inside")
        await websocket.close()

    inner = Starlette(
        routes=[
            WebSocketRoute("/socket", socket),
            Route("/{path:path}", anything, methods=["GET", "POST", "PUT"]),
        ]
    )
    return Guard(inner, token=TOKEN, host=host, port=8080)


def visitor(base: str = HOME, host: str = "127.0.0.1") -> TestClient:
    return TestClient(app(host), base_url=base, follow_redirects=False)


def member() -> TestClient:
    client = visitor()
    client.get("/", params={"token": TOKEN})
    return client


@pytest.mark.parametrize("path", ["/", "/data", "/api/uploads", "/_nicegui/3/static/x.js", "/../x"])
def test_nothing_without_the_token(path):
    response = visitor().get(path)
    assert response.status_code == 401
    assert "inside" not in response.text
    assert visitor().get(path, params={"token": TOKEN[:-1]}).status_code == 401


def test_the_token_becomes_a_cookie_and_leaves_the_address():
    client = visitor()
    response = client.get("/data", params={"dataset": "a b", "token": TOKEN})
    assert response.status_code == 303
    assert response.headers["location"] == "/data?dataset=a+b"
    cookie = response.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert client.get("/data").text.startswith("inside /data")


def test_a_redirect_never_leaves_this_host():
    response = visitor().get(f"{HOME}//evil.example/x", params={"token": TOKEN})
    assert response.status_code == 303
    assert response.headers["location"].startswith("/evil")


def test_a_made_up_cookie_is_no_cookie():
    client = visitor()
    client.cookies.set("tessella_studio_8080", TOKEN)
    assert client.get("/").status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "evil.example:8080", "[", "[::1", "a]b"]
)
def test_a_foreign_host_name_is_refused_even_with_the_token(host):
    response = member().get("/", headers={"host": host})
    assert response.status_code == 403
    assert "inside" not in response.text


@pytest.mark.parametrize("host", ["localhost:8080", "[::1]:8080", "127.0.0.1:8080"])
def test_names_of_this_machine_are_known(host):
    assert member().get("/", headers={"host": host}).status_code == 200


def test_bound_to_all_addresses_an_address_is_fine_and_a_name_is_not():
    everywhere = visitor(host="0.0.0.0")
    assert everywhere.get("/", headers={"host": "192.0.2.7:8080"}).status_code == 401
    assert everywhere.get("/", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:9999", "http://["]
)
def test_other_sites_cannot_write(origin):
    client = member()
    assert client.post("/api/x", headers={"origin": origin}).status_code == 403
    assert client.post("/api/x", headers={"origin": HOME}).status_code == 200


def test_the_socket_has_the_same_door():
    with pytest.raises(WebSocketDisconnect), visitor().websocket_connect("/socket"):
        pass
    client = member()
    with client.websocket_connect("ws://127.0.0.1:8080/socket", headers={"origin": HOME}) as socket:
        assert socket.receive_text() == "inside"
    with (
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect("/socket", headers={"origin": "https://evil.example"}),
    ):
        pass


def test_pages_stay_out_of_caches_and_frames():
    headers = member().get("/").headers
    assert headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


def test_the_token_is_made_once_for_its_owner_only(tmp_path: Path):
    path = tmp_path / "own" / "token"
    token = read_or_make_token(path)
    assert len(token) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_or_make_token(path) == token
    path.write_text("short")
    with pytest.raises(UsageError, match="too short"):
        read_or_make_token(path)
