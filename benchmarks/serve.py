"""What is left of an engine behind a server: ``python -m benchmarks.serve``, with one GPU in mind.

ResNet-50 in FP16 that takes images as bytes, on one machine with its clients: the engine alone (its
images on the device, and as NumPy arrays), and servers of one process and of several acceptors:

====== =========================================================================
raw    as many images a request as the engine takes at once, by HTTP, 8 connections
one    one image a request, by HTTP, ``--clients`` connections
jpeg   a JPEG of 500 × 375 a request, for the task's verb
grpc   as ``one``, by gRPC
shared as ``one``, in shared memory that requests name
lone   one client that sends one image and waits, in turns with the engine alone: its row has what
       is above the engine's own time, and the cores that the server takes for it, and for nobody
====== =========================================================================

Clients are processes of their own (``--generators``) on the same cores, in a closed loop. The file
has a row for each, with images a second, the latencies, the part of the engine's rate, and what
failed. What could not run (no grpcio, say) is told in its row, and the others go on.

With a plan (``--plan``; made and kept there if it is missing) the default takes about 90 s on 16
cores: 15 s to start each server, 5 s for each row. To make it takes 1 to 2 minutes tuned, and 20 s
with ``--untuned`` (ResNet-50 in FP16 on an H200).

    python -m benchmarks.serve --plan resnet50.plan --seconds 3
    python -m benchmarks.serve --target cpu --network lenet --precision fp32 --clients 4 --seconds 1
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import torch

from benchmarks.networks import workload
from benchmarks.report import RESULTS, document, markdown, write
from tessella import compiler, loadtest
from tessella.artifacts.plan import Plan, load_plan
from tessella.compiler.settings import Measuring
from tessella.core.device import default_target
from tessella.core.preprocess import Preprocess
from tessella.core.spec import DimRange
from tessella.graph import capture
from tessella.runtime import Engine, add_kernels, load
from tessella.server import serve
from tessella.server.doors import Doors

MODEL = "network"
WORKS = ("raw", "one", "jpeg", "grpc", "shared", "lone")
TURNS = 6  # of a lone client and the engine
REGION = "tessella-benchmark"
SIDES = 375, 500  # height and width of the picture


def main() -> None:
    args = _arguments()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = args.plan or Path(folder, "network.plan")
        began_s = time.perf_counter()
        if not path.exists():
            save_plan(
                path,
                target=args.target,
                network=args.network,
                batch=args.batch,
                precision=args.precision,
                untuned=args.untuned,
                cache=args.cache,
            )
        setup_s = round(time.perf_counter() - began_s, 1)
        print(f"plan: {setup_s} s", flush=True)
        engine_rates: list[float] = []
        for row in engine_rows(path, args):
            engine_rates.append(row["images_per_s"])
            rows.append(row)
            _write(args, rows, setup_s)
        of_device, of_arrays = engine_rates
        for acceptors in (int(n) for n in args.acceptors.split(",")):
            for row in server_rows(path, Path(folder), acceptors, args):
                row["of_device"] = round(row["images_per_s"] / of_device, 3)
                row["of_engine"] = round(row["images_per_s"] / of_arrays, 3)
                rows.append(row)
                _write(args, rows, setup_s)  # what was measured is kept
    columns = ["server", "work", "images_per_s", "of_device", "of_engine", "p50_ms", "p99_ms"]
    columns += ["server_cores", "client_cores", "failures"]
    print(markdown(columns, [[row.get(name, "") for name in columns] for row in rows]))
    print(f"wrote {args.out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=default_target())
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--batch", type=int, default=32, help="most images at once")
    parser.add_argument("--plan", type=Path, help="taken from here if it is there, else kept here")
    parser.add_argument("--untuned", action="store_true", help="measure no kernels: a plan sooner")
    parser.add_argument("--cache", type=Path, help="timing cache, read and added to")
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--acceptors", default="0,6", help="of each server; 0 is one process")
    parser.add_argument("--clients", type=int, default=256, help="connections, but for raw")
    parser.add_argument("--decode", default="host", choices=["host", "gpu"], help="of JPEG files")
    parser.add_argument("--generators", type=int, default=6, help="processes that ask")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each row")
    parser.add_argument("--about", help="what a reader has to know of the machine")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.out = args.out or RESULTS / f"serve-{args.target}.json"
    return args


def _write(args: argparse.Namespace, rows: list[dict[str, Any]], setup_s: float) -> None:
    told = {"about": args.about, "cores": len(os.sched_getaffinity(0)), "setup_s": setup_s}
    write(args.out, document(args.target, rows) | told)
    print(json.dumps(rows[-1]), flush=True)


def save_plan(
    path: Path,
    *,
    target: str,
    network: str,
    batch: int,
    precision: str = "fp16",
    untuned: bool = False,
    cache: Path | None = None,
) -> None:
    """Compile a network that takes up to so many pictures as bytes."""
    work = workload(network, batch)
    channels, height, width = work.inputs[0].at(1)[1:]
    record = Preprocess(height=height, width=width, channels=channels, mean=(0.45,), std=(0.225,))
    rebuild = f"python -m benchmarks.serve --target {target}"
    plan: Plan = compiler.compile_graph(
        capture(work.module, work.inputs),
        target=target,
        batch=DimRange(min=1, opt=batch, max=batch),
        precision=precision,
        input="uint8",
        about=compiler.About(built_from=network, rebuild=rebuild, preprocess=record),
        measuring=Measuring(cache=cache, untuned=untuned),
    )
    plan, _ = add_kernels(plan)
    plan.save(path)


# --- the engine -----------------------------------------------------------------------------------


def engine_rows(path: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The engine with images on its device, and with NumPy arrays as a server has them."""
    with load(path) as engine:
        (spec,) = engine.inputs
        pixels = _pixels(spec.at(args.batch))
        on_device = torch.from_numpy(pixels).to(engine.device)
        yield _engine_row("engine, tensors on the device", engine, on_device, args.seconds)
        yield _engine_row("engine, NumPy arrays", engine, pixels, args.seconds)


def _engine_row(name: str, engine: Engine, images: Any, seconds: float) -> dict[str, Any]:
    taken_s: list[float] = []
    until_s = time.perf_counter() + seconds
    while not taken_s or time.perf_counter() < until_s:
        begun_s = time.perf_counter()
        engine(images)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        taken_s.append(time.perf_counter() - begun_s)
    return {
        "server": "none",
        "work": name,
        "images_per_s": round(len(images) / statistics.median(taken_s)),
        "p50_ms": round(1e3 * statistics.median(taken_s), 3),
        "p99_ms": round(1e3 * sorted(taken_s)[int(0.99 * len(taken_s))], 3),
    }


def _pixels(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


# --- servers --------------------------------------------------------------------------------------


def server_rows(
    path: Path, folder: Path, acceptors: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each work of a server of that many acceptors."""
    name = f"{acceptors} acceptors" if acceptors else "one process"
    shape = load_plan(path).manifest.inputs[0].at(1)
    has_grpc = "grpc" in args.works.split(",")
    with serving(path, acceptors, args.decode, grpc=has_grpc) as (process, url, grpc):
        target = loadtest.Target(url=url, model=MODEL)
        for work in args.works.split(","):
            batch = args.batch if work == "raw" else 1
            clients = 8 if work == "raw" else args.clients
            row: dict[str, Any] = {"server": name, "work": work, "images_per_s": 0}
            with ExitStack() as kept:
                try:
                    content = _content(work, target, (batch, *shape[1:]), folder, kept)
                    asked = replace(target, grpc=grpc) if work == "grpc" else target
                    if work == "lone":
                        row |= _alone(process, path, target, content, args.seconds)
                    else:
                        row |= _asked(process, asked, content, batch, clients, folder, args)
                except Exception as error:  # the next row can still be measured
                    row["failures"] = {f"{type(error).__name__}: {error}"[:300]: 1}
            yield row


def _content(
    work: str, target: loadtest.Target, shape: tuple[int, ...], folder: Path, kept: ExitStack
) -> bytes:
    """A whole request."""
    pixels = _pixels(shape)
    if work == "jpeg":
        picture = folder / "picture.jpg"
        smooth = cv2.GaussianBlur(_pixels((*SIDES, 3)), (0, 0), 2.0)
        bright = cv2.normalize(smooth, smooth, 0, 255, cv2.NORM_MINMAX)
        encoded = cv2.imencode(".jpg", bright, [cv2.IMWRITE_JPEG_QUALITY, 90])[1]
        picture.write_bytes(encoded.tobytes())
        return loadtest.body_for(target, "image", picture=picture)
    if work == "grpc":
        return loadtest.body_for(target, "grpc", batch=len(pixels))
    if work != "shared":
        return loadtest.body_for(target, "binary", batch=len(pixels))
    memory = SharedMemory(f"{REGION}-{os.getpid()}", create=True, size=pixels.nbytes)
    kept.callback(memory.unlink)
    kept.callback(memory.close)
    Path("/dev/shm", memory.name).write_bytes(pixels.tobytes())
    root = f"{target.url}/v2/systemsharedmemory/region/{REGION}"
    told = {"key": f"/{memory.name}", "byte_size": pixels.nbytes}
    httpx.post(f"{root}/register", json=told).raise_for_status()
    kept.callback(httpx.post, f"{root}/unregister")
    place = {"shared_memory_region": REGION, "shared_memory_byte_size": pixels.nbytes}
    (spec,) = httpx.get(f"{target.url}/v2/models/{MODEL}").json()["inputs"]
    entry = {"name": spec["name"], "datatype": "UINT8", "shape": list(shape), "parameters": place}
    text = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [entry]}).encode()
    head = [
        f"POST /v2/models/{MODEL}/infer HTTP/1.1",
        f"Host: {target.url.removeprefix('http://')}",
        f"Content-Length: {len(text)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + text


@contextmanager
def serving(
    path: Path, acceptors: int, decode: str, *, grpc: bool
) -> Iterator[tuple[int, str, str | None]]:
    """A server in processes of its own: the number of the first, its URL, and gRPC's address."""
    port = _free_port() if grpc else None
    command = "from benchmarks.serve import be_server; be_server()"
    server = subprocess.Popen(
        [sys.executable, "-c", command, path, str(acceptors), str(port or 0), decode],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"the server of {acceptors} acceptors did not start")
        yield server.pid, url, None if port is None else f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)
        assert server.stdout is not None
        server.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def be_server() -> None:
    """Be a server: of a plan, with so many acceptors, with gRPC on a port unless it is 0."""
    path, acceptors, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    decode: Any = sys.argv[4]
    serve(
        {MODEL: path},
        port=0,
        acceptors=acceptors,
        doors=Doors(grpc_port=port or None, shared_memory=True),
        decode=decode,
        ready=lambda url: print(url, flush=True),
    )


# --- clients --------------------------------------------------------------------------------------


def _alone(
    server: int, path: Path, target: loadtest.Target, content: bytes, seconds: float
) -> dict[str, Any]:
    """One client and the engine, in turns."""
    host, port = target.url.removeprefix("http://").split(":")
    with load(path) as engine, socket.create_connection((host, int(port))) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pixels = _pixels(engine.inputs[0].at(1))

        def ask() -> None:
            client.sendall(content)
            told = client.recv(1 << 17)
            head = told.partition(b"\r\n\r\n")[0]
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the server refuses: {told[:200]!r}")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            while len(told) < len(head) + 4 + length:
                told += client.recv(1 << 17)

        asked_s, alone_s, cores = list[float](), list[float](), list[float]()
        for _ in range(TURNS):
            before_s, begun_s = _processor_s(server), time.perf_counter()
            asked_s += _timed(ask, seconds / TURNS)
            passed_s = time.perf_counter() - begun_s
            cores.append((_processor_s(server) - before_s) / passed_s)
            alone_s += _timed(lambda: engine(pixels), seconds / TURNS)
        time.sleep(0.1)  # what it looks for after the last one
        before_s, begun_s = _processor_s(server), time.perf_counter()
        time.sleep(seconds / TURNS)
        idle = (_processor_s(server) - before_s) / (time.perf_counter() - begun_s)
    (p50, p99), own = _percentiles_ms(asked_s), _percentiles_ms(alone_s)
    return {
        "clients": 1,
        "images_per_s": round(1e3 / p50),
        "p50_ms": p50,
        "p99_ms": p99,
        "engine_p50_ms": own[0],
        "engine_p99_ms": own[1],
        "above_p50_ms": round(p50 - own[0], 3),
        "above_p99_ms": round(p99 - own[1], 3),
        "server_cores": round(statistics.mean(cores), 2),
        "idle_cores": round(idle, 3),
        "failures": {},
    }


def _timed(call: Callable[[], object], seconds: float) -> list[float]:
    """How long each of the calls took that had time, but for the first few."""
    for _ in range(20):
        call()
    taken_s: list[float] = []
    until_s = time.perf_counter() + seconds
    while not taken_s or time.perf_counter() < until_s:
        begun_s = time.perf_counter()
        call()
        taken_s.append(time.perf_counter() - begun_s)
    return taken_s


def _percentiles_ms(taken_s: list[float]) -> tuple[float, float]:
    ranked = sorted(taken_s)
    return tuple(round(1e3 * ranked[int(part * len(ranked))], 3) for part in (0.5, 0.99))  # type: ignore[return-value]


def _asked(
    server: int,
    target: loadtest.Target,
    content: bytes,
    batch: int,
    clients: int,
    folder: Path,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """What came back of one work, from all processes that asked."""
    (folder / "content").write_bytes(content)
    processes = min(args.generators, clients)
    connections = str(-(-clients // processes))
    told = [target.url, target.grpc or "", target.model, str(folder / "content"), connections]
    told.append(str(args.seconds))
    results = [folder / f"answers-{n}" for n in range(processes)]  # a pipe may not take them whole
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serve_client", *told, str(result)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for result in results
    ]
    try:
        for client in running:  # all begin together
            assert client.stdout is not None
            client.stdout.readline()
        before_s, began_s = _processor_s(server), time.perf_counter()
        for client in _started(running):
            client.communicate(timeout=120)
        passed_s = time.perf_counter() - began_s
        cores = (_processor_s(server) - before_s) / passed_s
        answers = [json.loads(result.read_text()) for result in results]
    finally:
        for client in running:
            client.kill()
            client.wait()
    latencies_s = sorted(s for answer in answers for s in answer["latencies_s"])
    failures: dict[str, int] = {}
    for answer in answers:
        for status, count in answer["failures"].items():
            failures[status] = failures.get(status, 0) + count
    found = loadtest.Outcome(
        latencies_s=latencies_s,
        failures=failures,
        late_s=[],
        seconds=max(answer["seconds"] for answer in answers),
    )
    return {
        "clients": clients,
        "images_per_s": round(batch * found.rate),
        "p50_ms": round(1e3 * found.percentile(50), 2) if latencies_s else None,
        "p99_ms": round(1e3 * found.percentile(99), 2) if latencies_s else None,
        "failures": failures,
        "server_cores": round(cores, 1),
        "client_cores": round(sum(answer["processor_s"] for answer in answers) / passed_s, 1),
    }


def _processor_s(process: int) -> float:
    """Seconds of processors that a process and all below it have taken."""
    root = Path(f"/proc/{process}")
    try:
        told = (root / "stat").read_text().rpartition(")")[2].split()
        children = (root / f"task/{process}/children").read_text().split()
    except OSError:  # it has ended
        return 0.0
    own = (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(_processor_s(int(child)) for child in children)


def _started(running: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    for client in running:
        assert client.stdin is not None
        client.stdin.write("go\n")
        client.stdin.flush()
    return running


if __name__ == "__main__":
    main()
