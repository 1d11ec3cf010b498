"""Whether a request is lost when a server changes or breaks: ``python -m benchmarks.losses``.

A LeNet behind several acceptors, and behind one process; clients in processes of their own ask in a
closed loop while, one after the other,

======== ===========================================================================================
reload   another plan, whose scores are twice as large, takes the model's place, again and again
acceptor an acceptor is killed
engine   the engine's process is killed
sigterm  the server is told to end
======== ===========================================================================================

Every answer is compared with those of both plans. *Lost* is a request that was sent whole and whose
connection ended without an answer; *unsent* is a connection that could not be had. A row has what
came back, by kind, and how long before their end the lost ones had been sent.

    python -m benchmarks.losses --target cpu --acceptors 2 --generators 1 --clients 32
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch

from benchmarks.networks import workload
from benchmarks.report import RESULTS, document, markdown, write
from benchmarks.serve import MODEL, serving
from tessella import compiler, loadtest
from tessella.compiler.settings import Measuring
from tessella.core.device import default_target
from tessella.core.spec import DimRange
from tessella.graph import capture
from tessella.runtime import add_kernels

NETWORK, BATCH, CLASSES = "lenet", DimRange(min=1, opt=8, max=32), 10
EVENTS = ("reload", "acceptor", "engine", "sigterm")
KINDS = ("first", "second", "other", "503", "lost", "unsent")
RETRY_S = 0.01  # before a connection is asked for again
END_S = 20.0  # after the last request, for its answer


def main() -> None:
    args = _arguments()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for factor, name in enumerate(("first", "second"), 1):
            _save_plan(folder / f"{name}.plan", args.target, factor)
        for acceptors in (int(n) for n in args.acceptors.split(",")):
            shutil.copy(folder / "first.plan", folder / "served.plan")
            with serving(folder / "served.plan", acceptors, "host", grpc=False) as (pid, url, _):
                target = loadtest.Target(url=url, model=MODEL)
                (folder / "request").write_bytes(loadtest.body_for(target, "binary"))
                _learn(target, folder)
                for event in EVENTS:
                    if acceptors or event in ("reload", "sigterm"):
                        row = {"server": acceptors, "event": event}
                        rows.append(row | _row(event, pid, target, folder, args))
                        told = {"about": args.about, "cores": len(os.sched_getaffinity(0))}
                        write(args.out, document(args.target, rows) | told)
                        print(json.dumps(rows[-1]), flush=True)
    columns = ["server", "event", "requests_per_s", "times", *KINDS, "lost_after_ms"]
    print(markdown(columns, [[row.get(name, "") for name in columns] for row in rows]))
    print(f"wrote {args.out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=default_target())
    parser.add_argument("--acceptors", default="6,0", help="of each server; 0 is one process")
    parser.add_argument("--generators", type=int, default=6, help="processes that ask")
    parser.add_argument("--clients", type=int, default=128, help="connections of all of them")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each row")
    parser.add_argument("--about", help="what a reader has to know of the machine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.out = args.out or RESULTS / f"losses-{args.target}.json"
    return args


def _save_plan(path: Path, target: str, factor: int) -> None:
    work = workload(NETWORK, BATCH.max)
    last = [m for m in work.module.modules() if isinstance(m, torch.nn.Linear)][-1]
    with torch.no_grad():
        last.weight.mul_(factor)
        last.bias.mul_(factor)
    plan = compiler.compile_graph(
        capture(work.module, work.inputs),
        target=target,
        batch=BATCH,
        precision="fp32",
        about=compiler.About(built_from=NETWORK, rebuild="python -m benchmarks.losses"),
        measuring=Measuring(untuned=True),
    )
    plan, _ = add_kernels(plan)
    plan.save(path)


def _learn(target: loadtest.Target, folder: Path) -> None:
    """Keep the answers of both plans, which the clients compare theirs with."""
    host, port = target.url.removeprefix("http://").split(":")
    scores = []
    for name in ("second", "first"):
        _change(target, folder, name)
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall((folder / "request").read_bytes())
            content = b""
            while len(content) < (_whole(content) or 1 << 30):
                content += connection.recv(1 << 16)
        scores.append(np.frombuffer(content[-4 * CLASSES :], np.float32))
    np.testing.assert_allclose(scores[0], 2 * scores[1], rtol=1e-3, atol=1e-4)
    np.save(folder / "scores.npy", np.stack(scores[::-1]))


def _change(target: loadtest.Target, folder: Path, name: str) -> None:
    shutil.copy(folder / f"{name}.plan", folder / "next.plan")
    os.replace(folder / "next.plan", folder / "served.plan")
    load = f"{target.url}/v2/repository/models/{MODEL}/load"
    httpx.post(load, timeout=60).raise_for_status()


def _row(
    event: str, server: int, target: loadtest.Target, folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """What came back while something happened."""
    with _asking(target, folder, args) as results:
        until_s = time.perf_counter() + args.seconds
        time.sleep(args.seconds / 3)
        times = 0
        if event == "reload":
            while time.perf_counter() < until_s - args.seconds / 3:
                _change(target, folder, ("second", "first")[times % 2])
                times += 1
        elif event == "sigterm":
            os.kill(server, signal.SIGTERM)
            times = 1
        else:
            name = {"acceptor": "tessella-http", "engine": "tessella-engine"}[event]
            family = psutil.Process(server).children(recursive=True)
            next(p for p in family if p.name() == name).kill()
            times = 1
        time.sleep(max(0.0, until_s - time.perf_counter()))
    answers = [json.loads(result.read_text()) for result in results]
    counts = sum((Counter(answer["counts"]) for answer in answers), Counter[str]())
    lost_s = [s for answer in answers for s in answer["lost_s"]]
    good = counts["first"] + counts["second"]
    return {
        "requests_per_s": round(good / max(answer["asked_s"] for answer in answers)),
        "times": times,
        **{kind: counts[kind] for kind in KINDS},
        "statuses": {kind: count for kind, count in counts.items() if kind not in KINDS},
        "lost_after_ms": round(1e3 * max(lost_s), 1) if lost_s else None,
    }


# --- clients --------------------------------------------------------------------------------------


@contextmanager
def _asking(
    target: loadtest.Target, folder: Path, args: argparse.Namespace
) -> Iterator[list[Path]]:
    """Clients ask during the block, and write what came back to these files until its end."""
    each = max(1, args.clients // args.generators)
    results = [folder / f"came-{n}" for n in range(args.generators)]
    command = "from benchmarks.losses import be_client; be_client()"
    told = [target.url, str(folder), str(each), str(args.seconds)]
    running = [
        subprocess.Popen([sys.executable, "-c", command, *told, str(r)], stdout=subprocess.PIPE)
        for r in results
    ]
    try:
        for client in running:
            assert client.stdout is not None
            client.stdout.readline()
        yield results
        for client in running:
            client.wait(args.seconds + END_S + 10)
    finally:
        for client in running:
            client.kill()
            client.wait()


def be_client() -> None:
    """Be a process that asks; its results are in the last argument's file."""
    url, folder, connections, seconds, result = sys.argv[1:]
    host, port = url.removeprefix("http://").split(":")
    clients = Clients((host, int(port)), Path(folder))
    print("begins", flush=True)
    clients.ask(int(connections), float(seconds))
    told = {"counts": clients.counts, "lost_s": clients.lost_s, "asked_s": float(seconds)}
    Path(result).write_text(json.dumps(told))


class Clients:
    """Connections of one process, each with one request at a time."""

    def __init__(self, address: tuple[str, int], folder: Path) -> None:
        self._address = address
        self._request = (folder / "request").read_bytes()
        self._scores = np.load(folder / "scores.npy")
        self._names: dict[bytes, str] = {}  # of scores that were compared before
        self.counts: Counter[str] = Counter()
        self.lost_s: list[float] = []
        self._poll = select.epoll()
        self._open: dict[int, tuple[socket.socket, bytearray, float]] = {}
        self._later: list[float] = []

    def ask(
        self, connections: int, seconds: float, *, is_enough: Callable[[], bool] = lambda: False
    ) -> None:
        """Ask for so long, or until it is enough."""
        until_s = time.perf_counter() + seconds
        self._later = [0.0] * connections
        while (now_s := time.perf_counter()) < until_s + END_S:
            is_over = now_s >= until_s or is_enough()
            if is_over and not self._open:
                break
            due = 0 if is_over else sum(at_s <= now_s for at_s in self._later)
            self._later = sorted(self._later)[due:]
            for _ in range(due):
                self._connect()
            for number, _ in self._poll.poll(RETRY_S):
                self._read(number, is_over=is_over)
        self.counts["lost"] += len(self._open)

    def _connect(self) -> None:
        try:
            connection = socket.create_connection(self._address, timeout=5)
        except OSError:
            self._unsent()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll.register(connection, select.EPOLLIN)
        self._send(connection)

    def _send(self, connection: socket.socket) -> None:
        try:
            connection.sendall(self._request)
        except OSError:  # it was closed between two requests: none of this one has gone
            self._end(connection)
            self._unsent()
        else:
            self._open[connection.fileno()] = connection, bytearray(), time.perf_counter()

    def _read(self, number: int, *, is_over: bool) -> None:
        connection, content, since_s = self._open[number]
        more = b""
        with suppress(ConnectionError):
            more = connection.recv(1 << 16)
        content += more
        if not more:
            self._end(connection)
            self.counts["lost"] += 1
            self.lost_s.append(time.perf_counter() - since_s)
            self._later.append(0.0)
        elif (whole := _whole(content)) is not None and len(content) >= whole:
            self._see(bytes(content))
            if is_over or b"connection: close" in content[:whole].lower():
                self._end(connection)
                self._later.append(0.0)
            else:
                self._send(connection)

    def _see(self, answer: bytes) -> None:
        status = answer[9:12].decode()
        self.counts[self._which(answer[-4 * CLASSES :]) if status == "200" else status] += 1

    def _which(self, content: bytes) -> str:
        """The plan that has computed these scores: as it has by itself, or in company."""
        if (name := self._names.get(content)) is None:
            given = np.frombuffer(content, np.float32)
            near = [np.allclose(given, scores, rtol=1e-2, atol=1e-3) for scores in self._scores]
            name = self._names[content] = "other" if sum(near) != 1 else KINDS[near.index(True)]
        return name

    def _end(self, connection: socket.socket) -> None:
        self._open.pop(connection.fileno(), None)
        self._poll.unregister(connection)
        connection.close()

    def _unsent(self) -> None:
        self.counts["unsent"] += 1
        self._later.append(time.perf_counter() + RETRY_S)


def _whole(content: bytes | bytearray) -> int | None:
    """How long an answer is; None if its head is not there."""
    end = content.find(b"\r\n\r\n")
    if end < 0:
        return None
    length = content[:end].lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    return end + 4 + int(length)


if __name__ == "__main__":
    main()
