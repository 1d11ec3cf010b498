"""Access to the server: which requests are answered at all.

A foreign ``Host`` is DNS rebinding, a foreign ``Origin`` another site's page using the browser of
someone who may reach this server; both are refused with or without a token.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

from tessella.core.errors import ServeError, UsageError
from tessella.server.body import Headers

SAFE_METHODS = ("GET", "HEAD")
OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")  # probes know no token
LEAST_TOKEN = 16
DECIDING = (
    b"host", b"authorization", b"origin", b"sec-fetch-site", b"content-type", b"content-encoding",
    b"content-length", b"inference-header-content-length",
)  # fmt: skip


class Guard:
    """Checks every request before its body is read.

    Args:
        host: the address that the server listens on.
        token: what clients must send as ``Authorization: Bearer TOKEN``; None lets all in.
        names: further host names under which clients reach this server.

    Raises:
        UsageError: reachable by others without a token, or a token that protects nothing.
    """

    def __init__(self, *, host: str, token: str | None, names: tuple[str, ...] = ()) -> None:
        self._is_local = is_loopback(host)
        if token is None and not self._is_local:
            raise UsageError(
                "whoever reaches this address could use and reload the models",
                seen=f"host {host!r} and no token",
                fix="give a token, or listen on 127.0.0.1",
            )
        if token is not None and (len(token) < LEAST_TOKEN or not _is_plain(token)):
            raise UsageError(
                "the token protects nothing",
                seen=f"{len(token)} characters",
                fix=f"use at least {LEAST_TOKEN} random ASCII characters, for example from"
                " python -c 'import secrets; print(secrets.token_urlsafe(32))'",
            )
        self._token = None if token is None else token.encode()
        self._names = {n.lower() for n in (host, *names)}
        self._is_known = functools.lru_cache(maxsize=64)(self._knows)

    @property
    def has_token(self) -> bool:
        """Whether clients must send a token."""
        return self._token is not None

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Raise ``ServeError`` (401, 403, 421) unless the request may be answered."""
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._is_known(host):
            raise ServeError(
                "this server does not answer under that host name",
                status=421,
                seen=host[:140] or "no Host header",
                fix="use the address that it printed when it started",
            )
        if method not in SAFE_METHODS:
            self._check_origin(host, headers)
        if self._token is not None and path not in OPEN_PATHS:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if not hmac.compare_digest(given, self._token) or scheme.lower() != b"bearer":
                raise ServeError(
                    "the token is missing or wrong",
                    status=401,
                    fix="send the header Authorization: Bearer TOKEN",
                )

    def _knows(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name = (parts.hostname or "").lower()
        except ValueError:
            return False
        if parts.netloc != host or "@" in host:
            return False
        if is_loopback(name) or name in self._names:
            return True
        # An address in the URL is no DNS name, so nobody can rebind it.
        return not self._is_local and _address(name) is not None

    def _check_origin(self, host: str, headers: Headers) -> None:
        origin = headers.get(b"origin")
        foreign = origin is not None and _host_of(origin) != host.lower()
        if foreign or headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            raise ServeError(
                "another site's page sent this",
                status=403,
                seen=(origin or b"Sec-Fetch-Site").decode("latin-1")[:140],
                fix="send it from a program, or from a page of this server",
            )


def require_method(given: str, method: str) -> None:
    """Raise ``ServeError`` 405 unless the request has the route's method; HEAD is a GET."""
    if given != method and not (method == "GET" and given == "HEAD"):
        raise ServeError(f"this route takes {method}", status=405, seen=given, fix=f"use {method}")


def require_once(lines: Sequence[tuple[bytes, bytes]], headers: Headers) -> None:
    """Raise ``ServeError`` 400 if a header that decides something is given twice: a proxy in front
    may go by the first and we by the last.
    """
    if len(lines) == len(headers):
        return
    names = Counter(name for name, _ in lines)
    twice = [name.decode("latin-1") for name in DECIDING if names[name] > 1]
    if twice:
        raise ServeError(
            "a header is given more than once",
            status=400,
            seen=", ".join(twice),
            fix="send it once",
        )


def _host_of(origin: bytes) -> str:
    """Host and port of an origin; empty for ``null`` and for an invalid origin."""
    try:
        return urlsplit(origin.decode("latin-1")).netloc.lower()
    except ValueError:
        return ""


def _is_plain(token: str) -> bool:
    return token.isascii() and token.isprintable()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on ``host``."""
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
