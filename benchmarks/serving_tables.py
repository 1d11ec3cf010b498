"""The tables of docs/benchmarks.md about serving."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.report import markdown
from benchmarks.runs import Row, Run, origin_of, origins_of, runs_of
from benchmarks.serving import beside_peers

# What the peers' files say of the floors that were set: 1.0 of an engine behind another server,
# 5 and 3 times LitServe and MLServer.
_PEERS = {
    "serving-peers-cpu.json": (
        "LeNet, asked in JSON as the peers' documents show; ours in binary tensors, too, which they"
        " do not take. Five times LitServe and three times MLServer were asked for: by binary"
        " tensors both are reached at any number of clients, in the same JSON with one client alone"
        " (with 32 it is 1.7 and 1.2 times)."
    ),
    "serving-triton-cpu.json": "LeNet behind Triton's Python backend, all in binary tensors.",
    "serving-triton-resnet50-cpu.json": (
        "ResNet-50 behind Triton's Python backend. As many requests as ONNX Runtime and OpenVINO"
        " there were asked for (1.0; goal 1.2): with one client ONNX Runtime's are missed by 1 to 2"
        " %, which is less than the rounds differ, and OpenVINO's are reached; with eight both are."
    ),
}


def all_of_them() -> Iterator[str]:
    """The sections, in the page's order."""
    yield from _serving()
    yield from _peers()
    yield from _gpu_serving()
    yield from _serving_parts()
    yield from _losses()
    yield from _leaks()


def _serving() -> Iterator[str]:
    """Rates and latencies of each server, by number of clients."""
    yield "## Over HTTP: `serving-cpu.json`\n"
    yield (
        "LeNet on a CPU, one image a request and an answer of ten scores, both as binary tensors;"
        " wrk on the same cores. *Bare uvicorn* reads the same bytes and answers the same bytes"
        " without a network; the ratio is that of the requests a second to its. Medians over rounds"
        " in which all servers are asked in turn; in brackets the slowest and the fastest round.\n"
    )
    for number, run in enumerate(runs_of("serving-cpu.json"), 1):
        yield from _servers(run, number)


def _peers() -> Iterator[str]:
    """The same network behind the servers of others."""
    for name, about in _PEERS.items():
        yield f"## Beside other servers: `{name}`\n"
        yield f"{about}\n"
        for number, run in enumerate(runs_of(name), 1):
            yield from _servers(run, number)
            told = "; ".join(
                f"{who}: {ratios}" for who, ratios in beside_peers(run["rows"]).items()
            )
            yield f"Requests a second, medians of the rounds' ratios. {told}.\n"


def _servers(run: Run, number: int) -> Iterator[str]:
    head = ("clients", "server", "requests/s", "p50", "p99", "ratio")
    yield markdown(head, [_serving_line(row) for row in run["rows"]]) + "\n"
    yield f"{number}. {origin_of(run)}\n"


def _serving_line(row: Row) -> tuple[object, ...]:
    rates = [one["requests_per_s"] for one in row["rounds"]]
    rate = f"{row['requests_per_s']:,} ({min(rates):,.0f} to {max(rates):,.0f})"
    latencies = (f"{row[name]:#.3g} ms".replace(". ", " ") for name in ("p50_ms", "p99_ms"))
    return row["clients"], row["server"], rate, *latencies, f"{row['ratio']:.2f}"


def _gpu_serving() -> Iterator[str]:
    """What is left of a GPU's engine behind servers, by what clients send."""
    yield "## Serving from a GPU: `serve-sm_90.json`\n"
    yield (
        "ResNet-50 in FP16, images as bytes, on the cores that the clients take, too. *raw*: 32"
        " images a request, 8 connections; the others one image a request, 256 connections: tensors"
        " over HTTP (*one*) and gRPC, JPEG files of 500×375 that the GPU decodes, and tensors in"
        " shared memory. Shares are of the engine, with its images on the device and with NumPy"
        " arrays.\n"
    )
    runs = runs_of("serve-sm_90.json")
    lines = [
        (
            row["server"],
            row["work"],
            f"{row['images_per_s']:,}",
            f"{row['images_per_s'] / run['rows'][0]['images_per_s']:.2f} · {row['of_engine']:.2f}"
            if "of_engine" in row
            else "",
            f"{row['p50_ms']:.3g} ms",
            f"{row['p99_ms']:.3g} ms",
            number,
        )
        for number, run in enumerate(runs, 1)
        for row in run["rows"]
    ]
    yield markdown(("server", "work", "images/s", "shares", "p50", "p99", "run"), lines) + "\n"
    yield from origins_of(runs)


def _losses() -> Iterator[str]:
    """What clients that ask without a pause lose while a server changes, breaks or ends."""
    yield "## Requests that are lost: `losses-sm_90.json`\n"
    yield (
        "*Server* counts acceptors; 0 is one process. *Other* answers than those of the two plans"
        " are wrong, *503* are refused for now.\n"
    )
    runs = runs_of("losses-sm_90.json")
    head = ["server", "event", "requests_per_s", "first", "second", "other", "503", "lost"]
    lines = [[*map(row.get, head), n] for n, run in enumerate(runs, 1) for row in run["rows"]]
    yield markdown([*(name.replace("_per_", "/") for name in head), "run"], lines) + "\n"
    yield from (f"{number}. {origin_of(run)}\n" for number, run in enumerate(runs, 1))


def _serving_parts() -> Iterator[str]:
    """What a lone request and a picture take behind a GPU's servers, by way and tree."""
    yield "## Parts of a request on a GPU: `serve-parts-sm_90.json`\n"
    yield (
        "What bounds a lone client and JPEG files, by scripts that ran the tree of before (*old*)"
        " and the new one in turns. A number is one reading, or a median where its run says so.\n"
    )
    for number, run in enumerate(runs_of("serve-parts-sm_90.json"), 1):
        columns = list(run["rows"][0])
        yield f"{number}. {run['date']}, {run['device']}, {run['cores']} cores. {run['about']}\n"
        lines = [[row[name] for name in columns] for row in run["rows"]]
        yield markdown([name.replace("_", " ") for name in columns], lines) + "\n"


def _leaks() -> Iterator[str]:
    """What is left of models that were loaded and went, or were replaced."""
    yield "## What is left of a model: `leaks-cpu.json`\n"
    yield (
        "Each cycle loads a LeNet, has one batch of each size computed, and unloads it or is"
        " replaced by the next (*reload*); behind two acceptors. Floor: resident memory grows by"
        " less than 1 % in 1,000 cycles.\n"
    )
    runs = runs_of("leaks-cpu.json")
    head = ("process", "change", "what", "before", "after", "growth", "run")
    lines = [
        (row["process"], row["change"], row["what"], f"{row['before']:,}", f"{row['after']:,}",
         f"{100 * row['growth']:+.2f} %", number)
        for number, run in enumerate(runs, 1)
        for row in run["rows"]
    ]  # fmt: skip
    yield markdown(head, lines) + "\n"
    for number, run in enumerate(runs, 1):
        yield f"{number}. {run['cycles']:,} cycles after {run['first']}. {origin_of(run)}\n"
