"""What HTTP costs: ``python -m benchmarks.serving``, with wrk for the clients.

A network on a CPU, one image a request and an answer of its scores, both as binary tensors: a
server of one process, servers of several, and a bare ASGI application in uvicorn that reads the
same bytes and answers the same bytes without a network. All wait while one is asked, in rounds; wrk
runs on the same cores. The table has medians over the rounds.

With ``--peers-venv``, a virtual environment that has them, other servers of the same network stand
beside ours: LitServe and MLServer with what torch compiles, asked in JSON as their documents show
(``serving_peers``; ours is then asked in JSON, too), and Triton with ONNX Runtime or OpenVINO,
asked in the same binary tensors as ours (``serving_triton``). Ratios are medians over the rounds.

In each round the engine is timed, too, with a batch of as many images as there are clients: so the
table says what a request costs beside its share of the engine.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn

from benchmarks.networks import Workload, workload
from benchmarks.report import RESULTS, document, markdown, write
from tessella import compiler
from tessella.artifacts.plan import Plan
from tessella.core.count import counted
from tessella.core.spec import DimRange
from tessella.graph import capture
from tessella.runtime import Engine, load
from tessella.server import serve
from tessella.server.listening import bind, url_of

BATCH = DimRange(min=1, opt=8, max=32)
BARE = "bare uvicorn"
PATH = "/v2/models/network/infer"
HEADERS = {"Inference-Header-Content-Length": "0", "Content-Type": "application/octet-stream"}
NUMBER = r"([\d.]+)(us|ms|s|m)"
IN_JSON = {"litserve": "/predict", "mlserver": PATH}
ON_TRITON = {"triton-onnxruntime": "onnxruntime", "triton-openvino": "openvino"}
PEERS = (*IN_JSON, *ON_TRITON)
PEER_START_S = 120  # torch compiles
JSON_HEADERS = {"Content-Type": "application/json"}
MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--acceptors", default="0,2", help="of each server; 0 is one process")
    parser.add_argument("--clients", default="1,32,128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2, help="of each server in a round")
    parser.add_argument("--network", default="lenet", help="lenet, or any for pictures in colour")
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--peers-venv", type=Path, help="a virtual environment with the peers")
    parser.add_argument("--peers", default="litserve,mlserver", help="of " + ", ".join(PEERS))
    parser.add_argument("--about", help="what a reader has to know of the machine")
    parser.add_argument("--out", type=Path, default=RESULTS / "serving-cpu.json")
    args = parser.parse_args()
    acceptors, clients = (
        [int(n) for n in text.split(",")] for text in (args.acceptors, args.clients)
    )
    peers = args.peers.split(",") if args.peers_venv else []
    if unknown := set(peers) - {*PEERS}:
        parser.error(f"no such peers: {', '.join(unknown)}")
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of all servers
    rows = measure(
        work := workload(args.network, BATCH.opt),
        acceptors,
        clients,
        rounds=args.rounds,
        seconds=args.seconds,
        peers=dict.fromkeys(peers, args.peers_venv),
    )
    made = document("cpu", rows) | {
        "about": args.about,
        "network": work.name,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[2], 1),  # over 15 minutes: that of others, too
    }
    write(args.out, made)
    columns = [name for name in rows[0] if name != "rounds"]
    print(markdown(columns, [[row[name] for name in columns] for row in rows]))
    for name, ratios in beside_peers(rows).items():
        print(f"{name}: {ratios}")
    print(f"wrote {args.out}")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What wrk sends, and where."""

    url: str
    body: bytes
    headers: Mapping[str, str]

    def answer(self) -> bytes:
        """The answer to one such request."""
        request = urllib.request.Request(self.url, data=self.body, headers=dict(self.headers))
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def script(self, folder: Path, name: str) -> Path:
        """The request as a script of wrk's."""
        body, script = folder / f"{name}.body", folder / f"{name}.lua"
        body.write_bytes(self.body)
        lines = [f'wrk.headers["{key}"] = "{value}"' for key, value in self.headers.items()]
        lines += ['wrk.method = "POST"', f'wrk.body = io.open("{body}", "rb"):read("*a")']
        script.write_text("\n".join(lines) + "\n")
        return script


def measure(
    work: Workload,
    acceptors: Sequence[int],
    clients: Sequence[int],
    *,
    rounds: int,
    seconds: int,
    peers: Mapping[str, Path],
) -> list[dict[str, Any]]:
    """By server and number of clients: requests a second and latencies, one of each a round."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        body = save_plan(work, folder / "network.plan")
        servers: dict[str, Asked] = {}
        for count in acceptors:
            name = f"{count} acceptors" if count else "one process"
            url = stack.enter_context(_serving(str(count), folder / "network.plan")) + PATH
            servers[name] = Asked(url=url, body=body, headers=HEADERS)
        answers = [server.answer() for server in servers.values()]
        scores = [_scores(work, answer) for answer in answers]
        for other in scores[1:]:
            np.testing.assert_allclose(other, scores[0], rtol=1e-3, atol=1e-4)
        (folder / "answer").write_bytes(answers[0])
        url = stack.enter_context(_serving("bare", folder / "answer")) + PATH
        servers[BARE] = Asked(url=url, body=body, headers=HEADERS)
        assert servers[BARE].answer() == answers[0]
        first = next(iter(servers.values()))
        servers |= stack.enter_context(_peers(peers, work, folder, first, scores[0]))
        scripts = {name: server.script(folder, name) for name, server in servers.items()}
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # as the servers have
        engine = stack.enter_context(load(folder / "network.plan"))
        for _ in range(rounds):
            for count in clients:
                own_us = engine_us(engine, min(count, BATCH.max))
                for name, server in servers.items():
                    one = _wrk(server.url, scripts[name], clients=count, seconds=seconds)
                    one["engine_us"] = 0.0 if name == BARE else own_us
                    found.setdefault((name, count), []).append(one)
    return [_row(name, count, found) for name, count in found]


def _row(name: str, clients: int, found: dict[tuple[str, int], list[dict[str, float]]]) -> Any:
    mine, bare = found[name, clients], found[BARE, clients]
    ratios = [a["requests_per_s"] / b["requests_per_s"] for a, b in zip(mine, bare, strict=True)]
    return {
        "server": name,
        "clients": clients,
        "requests_per_s": round(statistics.median(one["requests_per_s"] for one in mine)),
        "p50_ms": round(statistics.median(one["p50_ms"] for one in mine), 2),
        "p99_ms": round(statistics.median(one["p99_ms"] for one in mine), 2),
        "ratio": round(statistics.median(ratios), 3),
        "engine_us": round(statistics.median(one["engine_us"] for one in mine)),
        "beside_us": round(
            statistics.median(1e6 / one["requests_per_s"] - one["engine_us"] for one in mine)
        ),
        "rounds": mine,
    }


def beside_peers(rows: list[dict[str, Any]]) -> dict[str, str]:
    """How many times the requests of each peer ours answer, by number of clients."""
    rates = {
        (row["server"], row["clients"]): [one["requests_per_s"] for one in row["rounds"]]
        for row in rows
    }
    told = {}
    for ours in sorted({name for name, _ in rates} - {BARE, *PEERS}):
        for peer in sorted({name for name, _ in rates} & {*PEERS}):
            ratios = {
                count: statistics.median(
                    a / b for a, b in zip(rates[ours, count], rates[peer, count], strict=True)
                )
                for name, count in rates
                if name == peer
            }
            told[f"{ours} over {peer}"] = ", ".join(
                f"{ratio:.2f} with {counted(count, 'client')}" for count, ratio in ratios.items()
            )
    return told


def engine_us(engine: Engine, batch: int, *, seconds: float = 0.2) -> float:
    """Microseconds that the engine takes for one image of a batch: the median over some time."""
    (spec,) = engine.inputs
    images = {spec.name: np.zeros(spec.at(batch), np.float32)}
    taken_ns: list[int] = []
    until_ns = time.perf_counter_ns() + 1e9 * seconds
    while not taken_ns or time.perf_counter_ns() < until_ns:
        begun_ns = time.perf_counter_ns()
        engine(**images)
        taken_ns.append(time.perf_counter_ns() - begun_ns)
    return statistics.median(taken_ns) / batch / 1e3


def save_plan(work: Workload, path: Path) -> bytes:
    """Compile the network; the tensor of one image, as a client sends it."""
    plan: Plan = compiler.compile_graph(
        capture(work.module, work.inputs),
        target="cpu",
        batch=BATCH,
        precision="fp32",
        about=compiler.About(built_from=work.name, rebuild="python -m benchmarks.serving"),
    )
    plan.save(path)
    return bytes(_images(work)[:1].numpy().tobytes())


def save_module(work: Workload, path: Path) -> None:
    """The network for others, with batches of any size, as torch.export saves it."""
    batch = torch.export.Dim("batch", min=1, max=BATCH.max)
    with torch.no_grad():
        exported = torch.export.export(
            work.module.eval(), (_images(work),), dynamic_shapes=({0: batch},)
        )
    torch.export.save(exported, path)


def save_onnx(work: Workload, path: Path) -> None:
    """The network for others, with batches of any size, as ONNX."""
    torch.onnx.export(
        work.module.eval(), (_images(work),), path, dynamo=False,
        input_names=["image"], output_names=["scores"],
        dynamic_axes={"image": {0: "batch"}, "scores": {0: "batch"}},
    )  # fmt: skip


def _images(work: Workload) -> torch.Tensor:
    torch.manual_seed(0)
    return work.sample(torch.device("cpu"))[0]


def _scores(work: Workload, answer: bytes) -> np.ndarray:
    """Those at the end of a binary answer."""
    with torch.inference_mode():
        count = work.module.eval()(_images(work)[:1]).numel()
    return np.frombuffer(answer[-4 * count :], np.float32)


# --- servers --------------------------------------------------------------------------------------


@contextmanager
def _serving(kind: str, path: Path) -> Iterator[str]:
    """A server in processes of its own; its URL."""
    server = subprocess.Popen(
        [sys.executable, "-c", "from benchmarks.serving import be_server; be_server()", kind, path],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.terminate()
        server.wait(60)


def be_server() -> None:
    """Be a server: ``bare`` with the answer's file, or a number of acceptors with a plan."""
    kind, path = sys.argv[1], Path(sys.argv[2])
    if kind != "bare":
        serve(
            {"network": path}, port=0, acceptors=int(kind), ready=lambda url: print(url, flush=True)
        )
        return
    answer = path.read_bytes()
    head = {
        "type": "http.response.start",
        "status": 200,
        "headers": [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % len(answer)),
        ],
    }

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send(head)
        await send({"type": "http.response.body", "body": answer})

    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    listener = bind("127.0.0.1", 0)
    listener.listen(2048)
    print(url_of(listener), flush=True)
    uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _peers(
    peers: Mapping[str, Path], work: Workload, folder: Path, ours: Asked, scores: np.ndarray
) -> Iterator[dict[str, Asked]]:
    """The peers that serve the network, and ours with the same JSON, once they agree with it.

    Args:
        peers: by their names, the virtual environments that have them.
        ours: our server, asked in binary.
    """
    (spec,) = work.inputs
    image = np.frombuffer(ours.body, np.float32).reshape(1, *spec.at(1)[1:])
    tensor = {"name": "image", "datatype": "FP32", "shape": list(image.shape)}
    tensor["data"] = image.ravel().tolist()
    documents = {
        "litserve": {"image": base64.b64encode(ours.body).decode()},
        "mlserver": {"inputs": [tensor]},
    }
    bodies = {name: json.dumps(told).encode() for name, told in documents.items()}
    asked: dict[str, Asked] = {}
    if set(peers) & set(IN_JSON):
        save_module(work, folder / "network.pt2")
        asked["one process, JSON"] = Asked(
            url=ours.url, body=bodies["mlserver"], headers=JSON_HEADERS
        )
    if set(peers) & set(ON_TRITON):
        save_onnx(work, folder / "network.onnx")
    with ExitStack() as stack:
        for name, environment in peers.items():
            url = stack.enter_context(_peer(environment, name, folder, image.shape[1:]))
            if name in ON_TRITON:
                asked[name] = Asked(url=url + PATH, body=ours.body, headers=ours.headers)
            else:
                asked[name] = Asked(
                    url=url + IN_JSON[name], body=bodies[name], headers=JSON_HEADERS
                )
        for name, server in asked.items():
            answer = server.answer()
            if name in ON_TRITON:
                found = _scores(work, answer)
            else:
                told = json.loads(answer)
                found = told["scores"] if name == "litserve" else told["outputs"][0]["data"]
            np.testing.assert_allclose(found, scores, rtol=1e-3, atol=1e-4, err_msg=name)
        yield asked


@contextmanager
def _peer(environment: Path, name: str, folder: Path, image: tuple[int, ...]) -> Iterator[str]:
    """A peer in processes of its own; its URL."""
    with bind("127.0.0.1", 0) as probe:
        port = int(probe.getsockname()[1])
    script, kind, network = "serving_peers.py", name, folder / "network.pt2"
    if name in ON_TRITON:
        script, kind, network = "serving_triton.py", ON_TRITON[name], folder / "network.onnx"
    peer = subprocess.Popen(
        [environment / "bin" / "python", "-P", Path(__file__).with_name(script), kind, network,
         str(port), "x".join(map(str, image))],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        until_s = time.monotonic() + PEER_START_S
        health = "/health" if name == "litserve" else "/v2/models/network/ready"
        while True:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}{health}", timeout=5).close()
                break
            if peer.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"{name} does not start")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):  # it never started
            os.killpg(peer.pid, signal.SIGTERM)
        try:
            peer.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(peer.pid, signal.SIGKILL)
            peer.wait()


# --- clients --------------------------------------------------------------------------------------


def _wrk(url: str, script: Path, *, clients: int, seconds: int) -> dict[str, float]:
    text = subprocess.run(
        ["wrk", "-t1", f"-c{clients}", f"-d{seconds}s", "--latency", "-s", script, url],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return parse(text)


def parse(text: str) -> dict[str, float]:
    """Requests a second and latencies in milliseconds, of what wrk prints.

    Raises:
        ValueError: an answer was an error or did not come.
    """
    if "Non-2xx" in text or "Socket errors" in text:
        raise ValueError(f"not every request had its answer:\n{text}")
    found = {"requests_per_s": float(_found(r"Requests/sec:\s+([\d.]+)", text)[1])}
    for percent in (50, 99):
        match = _found(rf"^\s+{percent}%\s+{NUMBER}\s*$", text)
        found[f"p{percent}_ms"] = round(float(match[1]) * MS[match[2]], 3)
    return found


def _found(pattern: str, text: str) -> re.Match[str]:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise ValueError(f"wrk did not say {pattern}:\n{text}")
    return match


if __name__ == "__main__":
    main()
