"""Access to the studio: no page, picture or socket is answered without the token.

The token comes once in the URL and then lives in a cookie that other sites can neither read nor
send. A foreign ``Host`` (DNS rebinding) and a foreign ``Origin`` (cross-site requests and
sockets) are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
from html import escape
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tessella.core.errors import UsageError

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
COOKIE_DAYS = 30

# Vue compiles its templates in the browser, hence unsafe-eval; all else comes from this server.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "form-action 'self'"
)


def read_or_make_token(path: Path) -> str:
    """The token in ``path``; on the first start a random one, readable by its owner only (0600)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        token = path.read_text().strip()
        if len(token) < 16:
            raise UsageError(
                "the studio's token is too short to protect anything",
                seen=f"{len(token)} characters in {path}",
                fix="delete the file; the next start makes a new one",
            ) from None
        return token
    token = secrets.token_urlsafe(32)
    with os.fdopen(handle, "w") as file:
        file.write(token + "\n")
    return token


class Guard:
    """ASGI middleware that passes requests which know the token and come from our own pages.

    Args:
        token: the secret; the cookie holds only a keyed hash of it.
        host: the address that the server is bound to.
        port: part of the cookie's name, so that two studios do not log each other out.
    """

    def __init__(self, app: ASGIApp, *, token: str, host: str, port: int) -> None:
        self._app, self._token, self._host = app, token, host
        self._cookie = f"tessella_studio_{port}"
        self._cookie_value = hmac.new(token.encode(), b"studio cookie", hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, _with_headers(send))
        elif scope["type"] == "http":
            await refusal(scope, receive, _with_headers(send))
        else:
            await send({"type": "websocket.close", "code": 4401})

    def _refusal(self, scope: Scope) -> Response | None:
        """The response to a request that may not pass; None lets it pass."""
        headers = Headers(scope=scope)
        if not self._known_host(headers.get("host", "")):
            return _page(403, "This host name is not known here", "Open the studio by 127.0.0.1.")
        if self._foreign_origin(scope, headers):
            return _page(403, "Another site asked for this", "Use the studio's own pages.")
        if self._has_cookie(headers):
            return None
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        given = dict(query).get("token", "")
        if given and hmac.compare_digest(given.encode(), self._token.encode()):
            return self._enter(scope, [(k, v) for k, v in query if k != "token"])
        return _page(
            401,
            "This studio is locked",
            "Open the address with <code>?token=…</code> that <code>tessella studio</code> printed "
            "when it started. It also lies in the workspace, in <code>.studio/token</code>.",
        )

    def _known_host(self, header: str) -> bool:
        try:
            name = (urlsplit(f"//{header}").hostname or "").lower()
        except ValueError:  # an address without its closing bracket
            return False
        if name in LOOPBACK or name == self._host:
            return True
        # Bound to every address: an address in the URL is fine, a name could be anyone's DNS entry.
        return self._host in ("0.0.0.0", "::") and _is_address(name)

    def _foreign_origin(self, scope: Scope, headers: Headers) -> bool:
        if scope["type"] == "http" and scope["method"] in SAFE_METHODS:
            return False
        origin = headers.get("origin")
        if origin is None:
            return False
        try:
            return urlsplit(origin).netloc != headers.get("host", "")
        except ValueError:
            return True

    def _has_cookie(self, headers: Headers) -> bool:
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        value = cookies[self._cookie].value if self._cookie in cookies else ""
        return hmac.compare_digest(value.encode(), self._cookie_value.encode())

    def _enter(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        """Set the cookie and go to the same page without the token in its address."""
        path = "/" + scope["path"].lstrip("/")
        response = RedirectResponse(path + (f"?{urlencode(query)}" if query else ""), 303)
        response.set_cookie(
            self._cookie,
            self._cookie_value,
            max_age=COOKIE_DAYS * 86_400,
            httponly=True,
            samesite="strict",
        )
        return response


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _with_headers(send: Send) -> Send:
    """Add the headers that keep pages out of caches, frames and other sites."""

    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.setdefault("Cache-Control", "no-store")
            headers.setdefault("Content-Security-Policy", POLICY)
            headers["X-Content-Type-Options"] = "nosniff"
            headers["Referrer-Policy"] = "no-referrer"
        await send(message)

    return wrapped


def _page(status: int, title: str, text: str) -> HTMLResponse:
    """A page without scripts, for a client that may not load ours. ``text`` is trusted HTML."""
    return HTMLResponse(
        f"<!doctype html><meta charset=utf-8><title>{escape(title)}</title>"
        "<style>:root{color-scheme:light dark}body{font:16px/1.6 system-ui,sans-serif;"
        "max-width:34rem;margin:18vh auto;padding:0 1.5rem}h1{font-size:1.4rem}</style>"
        f"<h1>{escape(title)}</h1><p>{text}</p>",
        status_code=status,
    )
