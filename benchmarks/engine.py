"""Plans beside their peers, in one run: ``python -m benchmarks.engine --target cpu``.

Peers: torch eager (NHWC too), on a GPU under a CUDA graph; on a CPU all of torch.compile (with
freezing), ONNX Runtime and OpenVINO that are installed, each with as many threads as torch. The
plan and the two runtimes take float32 NCHW images and answer in float32; torch's own peers are
given the image in the network's element type and format. Networks have random weights: speed does
not depend on them.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import io
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tessella as ts
from benchmarks.report import RESULTS, document, markdown, write
from tessella.core.device import default_target, torch_device
from tessella.core.dtype import PRECISIONS
from tessella.core.spec import TensorSpec
from tessella.kernels.timing import latency
from tessella.nn import zoo

Run = Callable[[], object]


def main() -> None:
    args = _arguments()
    path = Path(args.out or RESULTS / f"engine-{args.target}.json")
    rows: list[dict[str, Any]] = []
    for name in args.networks.split(","):
        for precision in args.precisions.split(","):
            for batch in (int(b) for b in args.batches.split(",")):
                row = measure(name, precision, batch, args)
                rows.append(row)
                write(path, document(args.target, rows))  # what was measured is kept
                print(*_table([row])[1][0], sep="  ", flush=True)
    print(markdown(*_table(rows)))
    print(f"wrote {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=default_target())
    parser.add_argument("--networks", default="lenet,resnet18,resnet50,googlenet")
    parser.add_argument("--precisions", default="fp32")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--peers", help="eager,eager_nhwc on a GPU; on a CPU what is installed")
    parser.add_argument("--seconds", type=float, default=10.0, help="a row, at most")
    parser.add_argument("--cache", type=Path, help="timing cache, read and added to")
    parser.add_argument("--out")
    args = parser.parse_args()
    args.peers = args.peers.split(",") if args.peers else default_peers(args.target)
    return args


def default_peers(target: str) -> list[str]:
    """What a plan is compared with where the user does not say."""
    if target != "cpu":
        return ["eager", "eager_nhwc"]
    compiler = shutil.which("g++") or shutil.which("clang++")
    found = [p for p in ("onnxruntime", "openvino") if importlib.util.find_spec(p)]
    return ["eager_nhwc", *(["torch_compile"] if compiler else []), *found]


def runs_in(peer: str, precision: str) -> bool:
    """ONNX Runtime's CPU provider has no bfloat16 convolutions."""
    return peer != "onnxruntime" or precision == "fp32"


def measure(name: str, precision: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """One network at one precision and batch: the plan and every peer, interleaved."""
    torch.manual_seed(0)
    network = zoo.network(name, classes=10 if name == "lenet" else 1000)
    module = zoo.build(network).eval()
    shape = (network.channels, network.height, network.width)
    spec = TensorSpec(name="image", dtype="float32", shape=(batch, *shape))
    device = torch_device(args.target)
    image = torch.randn(batch, *shape, device=device)
    plan = ts.compile(module, inputs=[spec], batch=batch, target=args.target, precision=precision,
                      cache=args.cache)  # fmt: skip
    engine = ts.load(plan)
    runs: dict[str, Run] = {"plan": lambda: engine(image=image)}
    for peer in args.peers:
        if runs_in(peer, precision):
            runs[peer] = PEERS[peer](module, image, precision)
    with torch.inference_mode():
        timings = latency(runs, device=device, seconds=args.seconds)
    times = {
        name: {"median_ms": t.time_us / 1e3, "spread_ms": t.spread_us / 1e3}
        for name, t in timings.items()
    }
    best = min((p for p in runs if p != "plan"), key=lambda p: times[p]["median_ms"])
    return {
        "network": name,
        "precision": precision,
        "batch": batch,
        "times": times,
        "best_peer": best,
        "ratio": round(times[best]["median_ms"] / times["plan"]["median_ms"], 3),
        "steps": len(plan.program.buckets[-1].steps),
    }


def _cast(module: torch.nn.Module, image: torch.Tensor, precision: str) -> Any:
    """A copy of the module in the precision's element type, and its input."""
    dtype = getattr(torch, PRECISIONS[precision])
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    copied = copy.deepcopy(module)
    return copied.to(device=image.device, dtype=dtype).eval(), image.to(dtype)


def eager(module: torch.nn.Module, image: torch.Tensor, precision: str) -> Run:
    peer, cast = _cast(module, image, precision)
    return _graphed(peer, cast)


def eager_nhwc(module: torch.nn.Module, image: torch.Tensor, precision: str) -> Run:
    peer, cast = _cast(module, image, precision)
    peer = peer.to(memory_format=torch.channels_last)
    return _graphed(peer, cast.to(memory_format=torch.channels_last))


def torch_compile(module: torch.nn.Module, image: torch.Tensor, precision: str) -> Run:
    peer, cast = _cast(module, image, precision)
    peer = peer.to(memory_format=torch.channels_last)
    if image.is_cuda:
        compiled = torch.compile(peer, mode="max-autotune")
    else:
        compiled = torch.compile(peer, options={"freezing": True})
    cast = cast.to(memory_format=torch.channels_last)
    return lambda: compiled(cast)


def _onnx(module: torch.nn.Module, image: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.onnx.export(module, (image,), buffer, dynamo=False, input_names=["image"])
    return buffer.getvalue()


def onnxruntime(module: torch.nn.Module, image: torch.Tensor, precision: str) -> Run:
    import onnxruntime as ort

    if not runs_in("onnxruntime", precision):
        raise SystemExit("the ONNX Runtime peer runs fp32 only")
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # by default its threads spin after a run, and steal the cores from whatever runs next
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(
        _onnx(module, image), options, providers=["CPUExecutionProvider"]
    )
    array = np.ascontiguousarray(image.cpu().numpy())
    return lambda: session.run(None, {"image": array})


def openvino(module: torch.nn.Module, image: torch.Tensor, precision: str) -> Run:
    import openvino as ov

    settings = {
        "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}[precision],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    core = ov.Core()
    compiled = core.compile_model(
        core.read_model(io.BytesIO(_onnx(module, image))), "CPU", settings
    )
    array = np.ascontiguousarray(image.cpu().numpy())
    return lambda: compiled([array])


def _graphed(module: torch.nn.Module, image: torch.Tensor) -> Run:
    """Eager on a CPU; on a GPU replayed from a CUDA graph, the fastest that eager can be."""
    if not image.is_cuda:
        return lambda: module(image)
    stream = torch.cuda.Stream()
    torch.backends.cudnn.benchmark = True
    with torch.cuda.stream(stream), torch.inference_mode():
        for _ in range(3):
            module(image)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        module(image)
    return partial(_replay, graph, module, image)


def _replay(graph: torch.cuda.CUDAGraph, *alive: object) -> None:
    """Replay; the graph reads the memory of weights and input, so they must live as long."""
    graph.replay()


PEERS: dict[str, Callable[[torch.nn.Module, torch.Tensor, str], Run]] = {
    "eager": eager,
    "eager_nhwc": eager_nhwc,
    "torch_compile": torch_compile,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
}


def _table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    head = ["network", "precision", "batch", "plan", "best peer", "ratio", "all peers"]
    body = [
        [
            row["network"],
            row["precision"],
            row["batch"],
            f"{row['times']['plan']['median_ms']:.3f} ms",
            f"{row['best_peer']} {row['times'][row['best_peer']]['median_ms']:.3f} ms",
            f"{row['ratio']:.2f}×",
            ", ".join(f"{n} {t['median_ms']:.2f}" for n, t in row["times"].items() if n != "plan"),
        ]
        for row in rows
    ]
    return head, body


if __name__ == "__main__":
    main()
