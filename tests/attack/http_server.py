"""Attacks on the server: raw requests, spoilt in their bytes, heads, paths, numbers and bodies.

The server runs in a process of its own. After each request it must answer an honest one as before.
"""

from __future__ import annotations

import functools
import gzip
import json
import random
import re
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable

import numpy as np

from tests.support.pictures.encoded import noise, png_of
from tests.support.pictures.hostile import PROMISES, mutated, peak_bytes
from tests.support.plans import fuzz_fields

SILENT_S = 2.0  # then the client says that it sends no more
ANSWER_S = 30.0
MOST_BYTES = 2 << 30  # of the server's memory, which limits the bodies of all requests to 3 MB
IMAGE = np.random.default_rng(3).normal(size=(1, 3, 8, 8)).astype(np.float32)
NAMES = ("flowers", "echo", "pixels", "ghost")
REFUSALS = (503,)  # what a server may say of itself: it is busy
NUMBERS = (b"-1", b"0", b"1", b"65536", b"4294967296", b"9" * 20, b"9" * 5000, b"1e9", b"NaN",
           b"", b" 1", b"+1", b"0x10", b"\xd9\xa3", b"1, 1", b"true", b"1;2")  # fmt: skip
HEADERS = (
    b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Content-Encoding: gzip",
    b"Content-Encoding: deflate", b"Content-Encoding: gzip, gzip", b"Content-Encoding: br",
    b"Inference-Header-Content-Length: 5", b"Inference-Header-Content-Length: -1",
    b"Host: [", b"Host: evil", b"Host: localhost\r\nHost: localhost", b"Host:", b"Host: [::1",
    b"Content-Type: multipart/form-data; boundary=x", b"Content-Type: multipart/form-data",
    b"Content-Type: image/png", b"Content-Type: text/\xff", b"Accept-Encoding: gzip;q=x",
    b"Authorization: Bearer x", b"Authorization: Basic \xff", b"Expect: 100-continue",
    b"Connection: Upgrade\r\nUpgrade: websocket", b"Upgrade: h2c", b"Range: bytes=0-0",
    b"X-Forwarded-For: 1", b"Origin: null", b"Cookie: " + b"a=b; " * 2000, b" folded", b"No colon",
    b"A" * 9000 + b": 1", b"X: " + b"\0",
)  # fmt: skip
PATHS = (
    b"/", b"/docs", b"/metrics", b"/openapi.json", b"/v2", b"/v2/", b"/v2/models", b"/v2/models/",
    b"/v2/health/live", b"/v2/health/ready", b"/v2/models/stats", b"/v2/models/flowers/config",
    b"/v2/models/flowers/versions/1/infer", b"/v2/models/flowers/versions/99999999999999999999",
    b"/v2/models/flowers/stats", b"/v2/models/%2e%2e%2fetc", b"/v2/models/flowers%00/infer",
    b"/v2/models/flowers/classify?top=-1", b"/v2/models/flowers/classify?top=1000000000000",
    b"/v2/models/flowers/classify?top=x&top=1", b"/v2/models/flowers/classify?top=%ff",
    b"/v2/models/%ff%fe/infer", b"*", b"http://evil/v2", b"//v2", b"/v2/../../x", b"/\x7f",
    b"/v2/repository/index", b"/v2/repository/models/ghost/load",
    b"/v2/repository/models/ghost/unload", b"/v2/repository/models/..%2f..%2fx/load",
    b"/v2/models/" + b"a" * 70_000,
)  # fmt: skip


# --- the server -----------------------------------------------------------------------------------


def main() -> None:
    """Serve until the parent's end of standard input closes."""
    from tessella import runtime
    from tessella.artifacts.plan import from_bytes
    from tessella.server import Limits, Server
    from tests.support.engines import Echo, Scores, repository
    from tests.support.plans.subjects import subject

    limits = Limits(body_bytes=1 << 20, held_bytes=3 << 20, body_idle_s=0.5, head_s=0.5, waiting=4)
    pixels = runtime.load(from_bytes(subject("pixels").content))
    engines = {"flowers": Scores(), "echo": Echo(), "pixels": pixels}
    with Server(repository(engines, limits=limits), limits=limits) as server:
        print(server.url, flush=True)
        sys.stdin.read()


_server: subprocess.Popen[str] | None = None
_address: tuple[str, int] = ("", 0)


def prepare() -> None:
    global _server, _address
    _server = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert _server.stdout is not None
    host, _, port = _server.stdout.readline().strip().removeprefix("http://").partition(":")
    _address = (host, int(port))
    for name in ("flowers", "pixels"):
        assert _honest(name) == (200, _right(name)), name


# --- the requests ---------------------------------------------------------------------------------


def _request(method: bytes, path: bytes, heads: list[bytes], body: bytes) -> bytes:
    """An honest request; what is in ``heads`` comes before its length."""
    given = [b"Host: localhost", *heads, b"Content-Length: %d" % len(body), b"Connection: close"]
    return b"%s %s HTTP/1.1\r\n" % (method, path) + b"\r\n".join(given) + b"\r\n\r\n" + body


def _tensors(name: str) -> bytes:
    shape, kind, data = {
        "pixels": ([1, 6, 6, 1], "UINT8", list(range(36))),
        "echo": ([1, 3], "INT32", [1, 2, 3]),
    }.get(name, ([1, 3, 8, 8], "FP32", IMAGE.ravel().tolist()))
    field = "in_int32" if name == "echo" else "image"
    entry = {"name": field, "datatype": kind, "shape": shape, "data": data}
    return json.dumps({"id": "1", "inputs": [entry], "parameters": {"x": 1}}).encode()


def _in_binary() -> tuple[list[bytes], bytes]:
    """The same tensor as bytes behind the JSON."""
    data = IMAGE.tobytes()
    entry = {"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8],
             "parameters": {"binary_data_size": len(data)}}  # fmt: skip
    text = json.dumps({"inputs": [entry], "outputs": [{"name": "scores"}]}).encode()
    return [b"Inference-Header-Content-Length: %d" % len(text)], text + data


def case(seed: int, index: int) -> tuple[str, Callable[[], str]]:
    """The request of this number: the same one for the same seed."""
    rng = random.Random(f"{seed}/{index}")
    kind = ("json", "binary", "file", "form", "path", "compressed")[index % 6]
    name = rng.choice(NAMES)
    method, path, heads, body = b"POST", b"/v2/models/%s/infer" % name.encode(), [], _tensors(name)
    if kind == "json" and rng.random() < 0.8:
        data = json.loads(body)
        for _ in range(rng.choice((1, 1, 2))):
            fuzz_fields.lie_about(rng, data)
        body = fuzz_fields.dumped(data)[: 3 << 20]
    elif kind == "binary":
        path = b"/v2/models/flowers/infer"
        heads, body = _in_binary()
        size = int(heads[0].rpartition(b" ")[2])
        if rng.random() < 0.4:
            heads = [b"Inference-Header-Content-Length: " + rng.choice(NUMBERS)]
        elif rng.random() < 0.6:
            data = json.loads(body[:size])
            fuzz_fields.lie_about(rng, data)
            text = fuzz_fields.dumped(data)[: 1 << 19]
            heads, body = [b"Inference-Header-Content-Length: %d" % len(text)], text + body[size:]
    elif kind in ("file", "form"):
        path = b"/v2/models/%s/%s" % (name.encode(), rng.choice((b"classify", b"infer")))
        path += rng.choice((b"", b"?top=1", b"?top=" + rng.choice(NUMBERS).replace(b" ", b"+")))
        body = png_of(noise(9, 9, 3), 2) if rng.random() < 0.6 else rng.choice(PROMISES)[1]
        body = mutated(body, rng.getrandbits(60)) if rng.random() < 0.6 else body
        heads = [b"Content-Type: application/octet-stream"]
        if kind == "form":
            heads = [b"Content-Type: multipart/form-data; boundary=xyz"]
            part = b'--xyz\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\n\r\n'
            part %= rng.choice(((b"image", b"a.png"), (b"", b""), (b"\xff", b"../x"), (b'"', b'"')))
            body = (part + body + b"\r\n") * rng.choice((1, 1, 2, 40)) + b"--xyz--\r\n"
            body = mutated(body, rng.getrandbits(60)) if rng.random() < 0.4 else body
    elif kind == "path":
        method = rng.choice((b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"TRACE",
                             b"CONNECT", b"get", b"A" * 300, b"PRI"))  # fmt: skip
        path = rng.choice(PATHS)
        body = b"" if method == b"GET" else rng.choice((b"", b"{}", b"[]", b"null", b"{" * 2000))
    elif kind == "compressed":
        path, body = b"/v2/models/flowers/infer", _tensors("flowers")
        body = rng.choice((body, bytes(1 << 26), b"[" * (1 << 22), b""))
        pack, word = rng.choice(((gzip.compress, b"gzip"), (zlib.compress, b"deflate")))
        body = pack(pack(body)) if rng.random() < 0.2 else pack(body)
        body = mutated(body, rng.getrandbits(60)) if rng.random() < 0.3 else body
        heads = [b"Content-Encoding: " + rng.choice((word, word, word, b"gzip, deflate", b"br"))]
    if rng.random() < 0.35:
        heads.insert(rng.randrange(len(heads) + 1), rng.choice(HEADERS))
    request = _request(method, path, heads, body)
    if rng.random() < 0.25:
        end = request.index(b"\r\n\r\n") + 4
        request = mutated(request[:end], rng.getrandbits(60)) + request[end:]
    label = f"{kind} {request[:160]!r}"
    return label, functools.partial(outcome, request)


# --- the judge ------------------------------------------------------------------------------------


def outcome(request: bytes) -> str:
    """``answered``, ``refused``, or what is wrong with this answer or with the next one."""
    status = _sent(request)[0]
    if status >= 500 and status not in REFUSALS:
        return f"status {status}"
    for name in ("flowers", "pixels"):
        if (honest := _honest(name)) != (200, _right(name)):
            return f"differs afterwards: {str(honest)[:200]}"
    assert _server is not None
    if (peak := peak_bytes(str(_server.pid))) > MOST_BYTES:
        return f"large {peak >> 20} MB in the server"
    return "answered" if 200 <= status < 300 else "refused"


def _sent(request: bytes) -> tuple[int, bytes]:
    """The worst status of the answers to what is sent, 0 where there is none; the first's body."""
    answer, is_open = b"", True
    with socket.create_connection(_address, timeout=SILENT_S) as connection:
        try:
            connection.sendall(request)
            while is_open or not answer:
                try:
                    chunk = connection.recv(1 << 16)
                except TimeoutError:
                    if not is_open:
                        raise AssertionError("the connection stays open") from None
                    connection.shutdown(socket.SHUT_WR)  # that is all: nothing more is coming
                    connection.settimeout(ANSWER_S)
                    is_open = False
                    continue
                if not chunk:
                    break
                answer += chunk
        except (ConnectionResetError, BrokenPipeError):
            pass  # it was closed while more was coming: what was said before counts
    statuses = re.findall(rb"(?:^|[\r\n}])HTTP/1\.[01] (\d{3}) ", answer)
    return max(map(int, statuses), default=0), answer.partition(b"\r\n\r\n")[2]


def _honest(name: str) -> tuple[int, list[float]]:
    path = f"/v2/models/{name}/infer".encode()
    status, body = _sent(_request(b"POST", path, [], _tensors(name)))
    if status != 200:
        return status, []
    return status, [round(v, 2) for v in json.loads(body)["outputs"][0]["data"]]


@functools.cache
def _right(name: str) -> list[float]:
    """What it answered first."""
    return _honest(name)[1]


if __name__ == "__main__":
    main()
