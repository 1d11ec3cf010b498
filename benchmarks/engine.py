"""Plans beside their peers, in one run: ``python -m benchmarks.engine --target cpu``.

Peers: torch eager (NHWC too), on a GPU under a CUDA graph; on a CPU all of torch.compile (with
freezing), ONNX Runtime and OpenVINO that are installed, each with as many threads as torch. The
plan and the two runtimes take float32 NCHW images and answer in float32; torch's own peers are
given the image in the network's element type and format. In int8 the two runtimes run a file that
ONNX Runtime has quantized, calibrated with the images of the plan. Nothing of the server or of
training is imported, so that a bare GPU machine can run it.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import io
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.networks import Workload, workload
from benchmarks.quantized import quantized
from benchmarks.report import RESULTS, document, markdown, write
from tessella import compiler, runtime
from tessella.artifacts.plan import Plan
from tessella.core.device import default_target, torch_device
from tessella.core.dtype import PRECISIONS
from tessella.core.spec import DimRange
from tessella.graph import Graph, capture
from tessella.graph.onnx import read
from tessella.search.timing import latency

Run = Callable[[], object]
Tensors = tuple[torch.Tensor, ...]

CALIBRATED = 64  # samples, of larger batches


def main() -> None:
    args = _arguments()
    path = Path(args.out or RESULTS / f"engine-{args.target}.json")
    rows: list[dict[str, Any]] = []
    asked = (args.networks, args.precisions, args.batches, args.sources)
    for name, precision, batch, source in itertools.product(*(texts.split(",") for texts in asked)):
        row = measure(name, precision, int(batch), source, args)
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
    parser.add_argument(
        "--peers", help="eager_nhwc,torch_compile on a GPU; on a CPU what is installed"
    )
    parser.add_argument("--sources", default="torch", help="what plans are made of: torch,onnx")
    parser.add_argument("--seconds", type=float, default=10.0, help="a row, at most")
    parser.add_argument("--cache", type=Path, help="timing cache, read and added to")
    parser.add_argument("--out")
    args = parser.parse_args()
    args.peers = args.peers.split(",") if args.peers else default_peers(args.target)
    return args


def default_peers(target: str) -> list[str]:
    """The peers of a plan where the user names none."""
    if target != "cpu":
        return ["eager_nhwc", "torch_compile"]
    native = shutil.which("g++") or shutil.which("clang++")
    found = [p for p in ("onnxruntime", "openvino") if importlib.util.find_spec(p)]
    return ["eager_nhwc", *(["torch_compile"] if native else []), *found]


def runs_in(peer: str, precision: str) -> bool:
    """ONNX Runtime's CPU provider has no bfloat16 convolutions, and nobody here multiplies fp8."""
    if peer == "onnxruntime":
        return precision in ("fp32", "int8")
    return peer != "openvino" or precision != "fp8"


def measure(
    name: str, precision: str, batch: int, source: str, args: argparse.Namespace
) -> dict[str, Any]:
    """One network at one precision and batch: the plan and every peer, interleaved."""
    work, device = workload(name, batch), torch_device(args.target)
    inputs = work.sample(device)
    plan, setup_s = _plan(work, inputs, precision, source, args)
    engine = runtime.load(plan)
    fed = dict(zip((spec.name for spec in work.inputs), inputs, strict=True))
    runs: dict[str, Run] = {"plan": lambda: engine(**fed)}
    left_out = {}
    for peer in args.peers:
        if runs_in(peer, precision):
            try:
                runs[peer] = PEERS[peer](work.module, inputs, precision)
            except PeerCrashes as crash:
                left_out[peer] = str(crash)
    with torch.inference_mode():
        timings = latency(runs, device=device, seconds=args.seconds)
    times = {
        name: {"median_ms": t.time_us / 1e3, "spread_ms": (t.spread_us or 0.0) / 1e3}
        for name, t in timings.items()
    }
    best = min((p for p in runs if p != "plan"), key=lambda p: times[p]["median_ms"])
    bucket = plan.program.buckets[-1]
    asked = runs if precision in compiler.KINDS else {"plan": runs["plan"]}
    found = errors(asked, work, inputs)
    return {
        "network": f"{name} (ONNX)" if source == "onnx" else name,
        "precision": precision,
        "batch": batch,
        "times": times,
        "best_peer": best,
        "ratio": round(times[best]["median_ms"] / times["plan"]["median_ms"], 3),
        "samples_per_s": round(batch / times["plan"]["median_ms"] * 1e3),
        "steps": len(bucket.steps),
        "kernels": dict(Counter(step.kernel for step in bucket.steps).most_common()),
        "setup_s": round(setup_s, 1),
        "load_s": round(_load_s(plan), 2),
        "output_error": found.pop("plan"),
        **({"peer_errors": found} if found else {}),
        **({"left_out": left_out} if left_out else {}),
    }


def _plan(
    work: Workload,
    inputs: tuple[torch.Tensor, ...],
    precision: str,
    source: str,
    args: argparse.Namespace,
) -> tuple[Plan, float]:
    """The plan for one batch size with its machine code, and the seconds that building it took."""
    begun = time.monotonic()
    graph = _from_onnx(work, inputs) if source == "onnx" else capture(work.module, work.inputs)
    fed = dict(zip((spec.name for spec in work.inputs), inputs, strict=True))
    words = any(not value.is_floating_point() for value in inputs)
    calibration = None
    if precision in compiler.KINDS:
        seen = {name: value[:CALIBRATED] for name, value in fed.items()}
        calibration = compiler.calibrate(graph, [seen], kinds=(precision,))
    size = work.inputs[0].batch.opt
    plan = compiler.compile_graph(
        graph,
        target=args.target,
        batch=DimRange(min=size, opt=size, max=size),
        precision=precision,
        calibration=calibration,
        samples={name: value.cpu() for name, value in fed.items()} if words else None,
        about=compiler.About(built_from=work.name, rebuild="python -m benchmarks.engine"),
        measuring=compiler.Measuring(cache=args.cache),
    )
    plan, left_out = runtime.add_kernels(plan)
    for kernel, reason in left_out.items():
        print(f"{kernel} is left out: {reason}")
    return plan, time.monotonic() - begun


def _from_onnx(work: Workload, inputs: Tensors) -> Graph:
    """The network's graph as its ONNX file says it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "network.onnx")
        path.write_bytes(_onnx(work.module, inputs, [spec.name for spec in work.inputs]))
        return read(path)


def _load_s(plan: Plan) -> float:
    """Seconds from the end of ``import torch`` to an engine, in a new process without caches."""
    script = (
        "import sys, time, torch; begun = time.monotonic()\n"
        "from tessella import runtime; runtime.load(sys.argv[1])\n"
        "print(time.monotonic() - begun)"
    )
    with tempfile.TemporaryDirectory() as folder:
        plan.save(path := Path(folder) / "network.plan")
        ran = subprocess.run(
            [sys.executable, "-c", script, str(path)],
            env={**os.environ, "TRITON_CACHE_DIR": folder},
            capture_output=True,
            text=True,
            check=True,
        )
    return float(ran.stdout.split()[-1])


def errors(runs: dict[str, Run], work: Workload, inputs: Tensors) -> dict[str, float]:
    """Largest difference of each from eager float32 over the largest value, on these inputs."""
    with torch.inference_mode():
        right = work.module.to(inputs[0].device)(*inputs).float()
        made = {name: _answer(run()).to(right.device).float() for name, run in runs.items()}
    largest = right.abs().max()
    return {name: float((answer - right).abs().max() / largest) for name, answer in made.items()}


def _answer(made: Any) -> torch.Tensor:
    """The one answer of a plan, a module or a runtime."""
    if isinstance(made, torch.Tensor):
        return made
    first = next(iter(made.values() if hasattr(made, "values") else made))
    return first if isinstance(first, torch.Tensor) else torch.from_numpy(np.array(first))


def _cast(module: torch.nn.Module, inputs: Tensors, precision: str) -> tuple[Any, Tensors]:
    """A copy of the module in the precision's element type, and its inputs.

    torch's own peers do not convolve in 8 bits: there it is float16 on a GPU, float32 on a CPU.
    """
    if precision in compiler.KINDS:
        dtype = torch.float16 if inputs[0].is_cuda else torch.float32
    else:
        dtype = getattr(torch, PRECISIONS[precision])
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    copied = copy.deepcopy(module)
    cast = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    return copied.to(device=inputs[0].device, dtype=dtype).eval(), cast


def _last(inputs: Tensors) -> Tensors:
    """The inputs with images in channels_last."""
    layout = torch.channels_last
    return tuple(x.to(memory_format=layout) if x.dim() == 4 else x for x in inputs)


def eager(module: torch.nn.Module, inputs: Tensors, precision: str) -> Run:
    return _graphed(*_cast(module, inputs, precision))


def eager_nhwc(module: torch.nn.Module, inputs: Tensors, precision: str) -> Run:
    peer, cast = _cast(module, inputs, precision)
    return _graphed(peer.to(memory_format=torch.channels_last), _last(cast))


def torch_compile(module: torch.nn.Module, inputs: Tensors, precision: str) -> Run:
    peer, cast = _cast(module, inputs, precision)
    peer, cast = peer.to(memory_format=torch.channels_last), _last(cast)
    torch._dynamo.reset()
    if cast[0].is_cuda:
        compiled = torch.compile(peer, mode="max-autotune")
    else:
        compiled = torch.compile(peer, options={"freezing": True})
    return lambda: compiled(*cast)


def _onnx(module: torch.nn.Module, inputs: Tensors, names: Sequence[str] = ()) -> bytes:
    names = names or [f"input_{i}" for i in range(len(inputs))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "network.onnx")
        torch.onnx.export(module, inputs, path, dynamo=False, input_names=list(names))
        return path.read_bytes()


def _arrays(inputs: Tensors) -> list[np.ndarray]:
    return [np.ascontiguousarray(x.cpu().numpy()) for x in inputs]


def _onnx_in(module: torch.nn.Module, inputs: Tensors, precision: str) -> bytes:
    """The network's ONNX file, quantized for int8."""
    file = _onnx(module, inputs)
    if precision != "int8":
        return file
    names = [f"input_{i}" for i in range(len(inputs))]
    return quantized(file, dict(zip(names, _arrays(inputs), strict=True)))


def onnxruntime(module: torch.nn.Module, inputs: Tensors, precision: str) -> Run:
    import onnxruntime as ort

    if not runs_in("onnxruntime", precision):
        raise SystemExit("the ONNX Runtime peer runs fp32 and int8 only")
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # by default its threads spin after a run, and steal the cores from whatever runs next
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(
        _onnx_in(module, inputs, precision), options, providers=["CPUExecutionProvider"]
    )
    fed = {f"input_{i}": array for i, array in enumerate(_arrays(inputs))}
    return lambda: session.run(None, fed)


def openvino(module: torch.nn.Module, inputs: Tensors, precision: str) -> Run:
    compiled = in_openvino(_onnx_in(module, inputs, precision), precision)
    arrays = _arrays(inputs)
    return lambda: compiled(arrays)


def in_openvino(file: bytes, precision: str) -> Callable[[list[Any]], object]:
    """The network of an ONNX file, compiled by OpenVINO."""
    import openvino as ov

    hints = {"fp32": "f32", "int8": "f32", "bf16": "bf16", "fp16": "f16"}  # of what is not int8
    settings = {
        "INFERENCE_PRECISION_HINT": hints[precision],
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    core = ov.Core()
    if precision == "int8":  # 2026.4.1 reads a null pointer where it compiles DenseNet-121's
        _try_apart(file, settings)
    made: Callable[[list[Any]], object]
    made = core.compile_model(core.read_model(io.BytesIO(file)), "CPU", settings)
    return made


class PeerCrashes(Exception):
    """A peer whose process ends by a signal where it compiles this network."""


def _try_apart(file: bytes, settings: dict[str, Any]) -> None:
    """Let OpenVINO compile a file in a process of its own first.

    Raises:
        PeerCrashes: a signal ended that process.
    """
    script = (
        "import ast, io, sys, openvino; core = openvino.Core()\n"
        "file = core.read_model(io.BytesIO(sys.stdin.buffer.read()))\n"
        "core.compile_model(file, 'CPU', ast.literal_eval(sys.argv[1]))"
    )
    ended = subprocess.run([sys.executable, "-c", script, repr(settings)], input=file).returncode
    if ended < 0:
        raise PeerCrashes(f"OpenVINO's compiler ends by {signal.Signals(-ended).name}")


def _graphed(module: torch.nn.Module, inputs: Tensors) -> Run:
    """Eager on a CPU; on a GPU a replayed CUDA graph, the fastest that eager can be."""
    if not inputs[0].is_cuda:
        return lambda: module(*inputs)
    stream = torch.cuda.Stream()
    torch.backends.cudnn.benchmark = True
    with torch.cuda.stream(stream), torch.inference_mode():
        for _ in range(3):
            module(*inputs)
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # as ``capturing``: none of an earlier graph's memory
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        module(*inputs)
    return partial(_replay, graph, module, inputs)


def _replay(graph: torch.cuda.CUDAGraph, *alive: object) -> None:
    """Replay the graph, which reads the memory of weights and inputs: both must stay alive."""
    graph.replay()


PEERS: dict[str, Callable[[torch.nn.Module, Tensors, str], Run]] = {
    "eager": eager,
    "eager_nhwc": eager_nhwc,
    "torch_compile": torch_compile,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
}


def _table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    head = [
        "network", "precision", "batch", "plan", "samples/s", "best peer", "ratio", "all peers",
        "set-up", "load",
    ]  # fmt: skip
    body: list[list[object]] = []
    for row in rows:
        times = {name: t["median_ms"] for name, t in row["times"].items()}
        best = row["best_peer"]
        others = ", ".join(f"{name} {ms:.2f}" for name, ms in times.items() if name != "plan")
        body.append(
            [row["network"], row["precision"], row["batch"], f"{times['plan']:.3f} ms",
             f"{row['samples_per_s']:,}", f"{best} {times[best]:.3f} ms", f"{row['ratio']:.2f}×",
             others, f"{row['setup_s']} s", f"{row['load_s']} s"]
        )  # fmt: skip
    return head, body


if __name__ == "__main__":
    main()
