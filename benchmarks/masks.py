"""Networks that answer with boxes and masks: ``python -m benchmarks.masks --networks segformer``.

The time from pixels to the answer, what follows the network included, of a plan and its peers,
interleaved in one process, with weights that nobody trained: shapes are fixed, so that answers take
as long as they would. All are given a float32 picture where they run, and answer in float32. Peers
are eager PyTorch and torch.compile, on a GPU each replayed from a CUDA graph, and on a CPU ONNX
Runtime and OpenVINO with the file that ``tessella export`` writes. Names are the zoo's; the side of
its pictures and its options may follow::

    python -m benchmarks.masks --networks d_fine_s@640 segformer@512:backbone=mit_b0 \\
        mask_rcnn@320:backbone=resnet18,detections=20 --precisions fp16 --batches 1,32
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import engine
from benchmarks.report import RESULTS, document, markdown, write
from tessella import compiler, runtime
from tessella.artifacts.plan import Plan
from tessella.compiler.rewrites import fold_constants
from tessella.core.device import default_target, torch_device
from tessella.core.dtype import PRECISIONS
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import Graph, capture
from tessella.graph.onnx import write as write_onnx
from tessella.nn import zoo
from tessella.nn.zoo.catalog import ANSWERING
from tessella.runtime.profiler import profile
from tessella.search.timing import latency
from tessella.tasks import named
from tessella.tasks.task import Task

CLASSES = {"detection": 80, "instances": 20, "segmentation": 20}
SPREAD = 40.0  # times the scores of fresh heads, which are nearly the same: none would be the best
NETWORKS = (
    "d_fine_s@640", "rf_detr_s@640", "segformer@512:backbone=mit_b0", "unet_backbone@512",
    "deeplabv3plus@512:backbone=resnet50",
)  # fmt: skip
HEADS = {name: named(name).head for name in CLASSES}
Row = dict[str, Any]
Run = Callable[[], object]


def main() -> None:
    args = _arguments()
    rows: list[Row] = []
    begun, ready = time.monotonic(), []
    batches = [int(text) for text in args.batches.split(",")]
    for batch, asked, precision in itertools.product(
        batches, args.networks, args.precisions.split(",")
    ):
        if args.prepare and time.monotonic() - begun > args.prepare:
            break
        try:
            measure = prepared(asked, precision, batch, args)
            if args.prepare:
                ready.append(measure)
            else:
                tell(rows, measure(), args.out)
        except Exception as error:  # the others are still to be measured
            print(f"{asked} {precision} of {batch}: {type(error).__name__}: {error}", flush=True)
            if args.strict:
                raise
    time.sleep(max(0.0, args.prepare - (time.monotonic() - begun)) if ready else 0)
    for measure in ready:
        tell(rows, measure(), args.out)
    print(markdown(*table(rows)))


def tell(rows: list[Row], row: Row, out: Path | None) -> None:
    """Print a row, and write all that there are: what was measured is kept."""
    rows.append(row)
    print(*table([row])[1][0], sep="  ", flush=True)
    if out is not None:
        write(out, document(default_target(), rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--size", type=int, default=256, help="of a picture's sides, if not @SIZE")
    parser.add_argument("--precisions", default="fp32")
    parser.add_argument("--batches", default="1")
    parser.add_argument(
        "--peers", help="eager,eager_nhwc,torch_compile; on a CPU onnxruntime,openvino"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each latency")
    parser.add_argument("--cache", type=Path, help="timings of kernels, read and added to")
    parser.add_argument("--budget", type=float, default=0.02, help="seconds to measure a step")
    parser.add_argument("--steps", type=int, default=0, help="print so many of the slowest steps")
    parser.add_argument("--untuned", action="store_true", help="a cost model chooses the kernels")
    parser.add_argument("--alone", type=Path, help="a file that others hold while they measure")
    parser.add_argument(
        "--prepare", type=float, default=0.0,
        help="seconds in which plans and peers are made, all before the first is measured",
    )  # fmt: skip
    parser.add_argument("--strict", action="store_true", help="stop at the first failure")
    parser.add_argument("--out", type=Path, help=f"a JSON file, such as {RESULTS.name}/masks.json")
    return parser.parse_args()


class FromPixels(torch.nn.Module):
    """A network and what follows it: as ``tasks.finished``, but peers can be copied."""

    def __init__(self, network: torch.nn.Module, task: str) -> None:
        super().__init__()
        self.network, self._task = network, task

    def forward(self, images: Tensor) -> Tensor:
        head = HEADS[self._task]
        made = self.network(images)
        return head.finish(made, {}) if head.FINISHES else made


class Cast(torch.nn.Module):
    """A network in another element type, between a float32 picture and a float32 answer."""

    def __init__(self, network: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self._dtype = network, dtype

    def forward(self, images: Tensor) -> Tensor:
        told: Tensor = self.network(images.to(self._dtype))
        return told.float()


def prepared(asked: str, precision: str, batch: int, args: argparse.Namespace) -> Callable[[], Row]:
    """A plan and its peers, and what measures them: a network's times in ms, and how far the
    plan's answer is from eager PyTorch's.
    """
    device = torch_device(default_target())
    name, options, size = parsed(asked, args.size)
    task, module, channels = network(name, options, size)
    count = DimRange(min=1, opt=batch, max=batch)
    spec = TensorSpec(name="image", dtype="float32", shape=(count, channels, size, size))
    images = torch.randn(batch, channels, size, size, device=device)
    begun = time.monotonic()
    graph = capture(module, [spec], outputs=[task.head.OUTPUT])
    plan = compiled(graph, task, precision, batch, images, args)
    setup_s = time.monotonic() - begun
    loaded = runtime.load(plan)
    print(f"{asked} {precision} of {batch}: a plan after {setup_s:.0f} s", flush=True)
    runs: dict[str, Run] = {"plan": lambda: loaded(images)}
    module = module.to(device)
    with torch.inference_mode():
        right = module(images)
    usual = "eager,torch_compile" if device.type != "cpu" else "eager,onnxruntime,openvino"
    for peer in (args.peers or usual).split(","):
        try:
            runs[peer] = PEERS[peer](module, images, precision, graph)
        except Exception as error:  # the others are still to be measured
            print(f"{peer} of {asked}: {type(error).__name__}: {error}"[:1000], flush=True)

    def measure() -> Row:
        with torch.inference_mode():
            told = torch.as_tensor(loaded(images)[plan.manifest.outputs[0].name])
            told = task.head.aligned(told.cpu(), right.cpu())
            with alone(args.alone):
                timings = latency(runs, device=device, seconds=args.seconds)
                if args.steps:
                    slowest(loaded, batch, args.steps)
        times = {n: {"median_ms": t.time_us / 1e3, "spread_ms": (t.spread_us or 0.0) / 1e3}
                 for n, t in timings.items()}  # fmt: skip
        best = min((n for n in runs if n != "plan"), key=lambda n: times[n]["median_ms"])
        return {
            "network": name, "options": options, "size": size, "precision": precision,
            "batch": batch, "times": times, "best_peer": best,
            "ratio": round(times[best]["median_ms"] / times["plan"]["median_ms"], 3),
            "error": float((told - right.cpu()).abs().max()),
            "largest": float(right.abs().max()),
            "steps": len(plan.program.buckets[-1].steps), "setup_s": round(setup_s, 1),
        }  # fmt: skip

    return measure


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """While no other benchmark that was given the same file measures; others may compile."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def parsed(asked: str, size: int) -> tuple[str, dict[str, Any], int]:
    """Name, options and size of ``name@size:option=value,…``."""
    name, _, given = asked.partition(":")
    name, _, side = name.partition("@")
    pairs = (pair.split("=") for pair in given.split(",") if pair)
    options = {key: int(value) if value.isdigit() else value for key, value in pairs}
    return name, options, int(side or size)


def network(name: str, options: dict[str, Any], size: int) -> tuple[Task, torch.nn.Module, int]:
    """Its task, its module with what follows it, and how many channels its pictures have."""
    answers = next(kind for kind, table in ANSWERING.items() if name in table)
    task = named({"boxes": "detection", "masks": "instances"}.get(answers, "segmentation"))
    torch.manual_seed(0)
    record = zoo.network(
        name, classes=CLASSES[task.name], size=size, answers=answers, options=options
    )
    module = as_if_trained(zoo.build(record))
    return task, FromPixels(module, task.name).eval(), record.channels


def as_if_trained(module: torch.nn.Module) -> torch.nn.Module:
    """The network with numbers where fresh ones are all the same, of which a plan may make use."""
    for layer, part in module.named_modules():
        if isinstance(part, torch.nn.Linear):
            if not part.weight.any():
                torch.nn.init.normal_(part.weight, std=0.1)
            if "class_embed" in layer and "decoder" not in layer:
                part.weight.data *= SPREAD
        for number in part.parameters(recurse=False):
            if number.numel() == 1:  # D-FINE's factor and sum behind an activation
                number.data += torch.empty_like(number).uniform_(0.02, 0.05)
    return module


def compiled(
    graph: Graph, task: Task, precision: str, batch: int, images: Tensor, args: argparse.Namespace
) -> Plan:
    """The plan for one batch size."""
    calibration = None
    if precision in compiler.KINDS:
        seen = {"image": images[: engine.CALIBRATED]}
        calibration = compiler.calibrate(graph, [seen], kinds=(precision,))
    return compiler.compile_graph(
        graph,
        target=default_target(),
        batch=DimRange(min=batch, opt=batch, max=batch),
        precision=precision,
        calibration=calibration,
        about=compiler.About(
            built_from="masks", rebuild="python -m benchmarks.masks", task=task.record()
        ),
        measuring=compiler.Measuring(cache=args.cache, budget_s=args.budget, untuned=args.untuned),
    )


def slowest(loaded: runtime.Engine, batch: int, count: int) -> None:
    """Print the slowest steps of a plan, each measured by itself, and sums by kernel."""
    measured = profile(loaded, batch)
    print(f"in all {measured.total_us:.0f} µs, sum of {len(measured)} steps"
          f" {measured.sum_us:.0f}, of their limits {measured.least_us:.0f}")  # fmt: skip
    by_kernel: dict[str, list[float]] = {}
    for step in measured:
        by_kernel.setdefault(step.kernel, []).append(step.time_us)
    for kernel, times in sorted(by_kernel.items(), key=lambda item: -sum(item[1]))[:30]:
        print(f"  {sum(times):8.1f} µs  {len(times):3d}  {kernel}")
    for step in sorted(measured, key=lambda step: -step.time_us)[:count]:
        print(f"  {step.time_us:8.1f} µs, least {step.least_us:6.1f}  {step.kernel}"
              f"  {step.step}  {step.layer}")  # fmt: skip


def _peer(module: torch.nn.Module, precision: str, device: torch.device) -> torch.nn.Module:
    """The module in the precision's element type, beside which a plan of int8 or fp8 is fp16's."""
    dtype = torch.float16 if device.type != "cpu" else torch.float32
    if precision not in compiler.KINDS:
        dtype = getattr(torch, PRECISIONS[precision])
    peer, _ = engine._cast(module, (torch.zeros(1, device=device),), precision)
    return Cast(peer.to(dtype), dtype)


def graphed(module: Any, images: Tensor) -> Run:
    """Replayed from a CUDA graph where it can be captured; what says why not is printed."""
    try:
        return engine._graphed(module, (images,))
    except RuntimeError as error:
        print(f"no CUDA graph: {str(error).splitlines()[0]}", flush=True)
        torch.cuda.synchronize()
        return lambda: module(images)


def eager(module: torch.nn.Module, images: Tensor, precision: str, _: Graph) -> Run:
    return graphed(_peer(module, precision, images.device), images)


def eager_nhwc(module: torch.nn.Module, images: Tensor, precision: str, _: Graph) -> Run:
    peer = _peer(module, precision, images.device).to(memory_format=torch.channels_last)
    return graphed(peer, *engine._last((images,)))


def torch_compile(module: torch.nn.Module, images: Tensor, precision: str, _: Graph) -> Run:
    """With its defaults, on a GPU replayed from a CUDA graph."""
    peer = _peer(module, precision, images.device).to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    return graphed(torch.compile(peer), *engine._last((images,)))


def onnx_of(graph: Graph) -> bytes:
    """The file that ``tessella export`` writes, which all peers on a CPU read."""
    graph = graph.copy()
    fold_constants.apply(graph)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        write_onnx(graph, path)
        return path.read_bytes()


def onnxruntime(module: torch.nn.Module, images: Tensor, precision: str, graph: Graph) -> Run:
    import onnxruntime as ort

    threads = ort.SessionOptions()
    threads.intra_op_num_threads = torch.get_num_threads()
    # by default its threads spin after a run, and steal the cores from whatever runs next
    threads.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(onnx_of(graph), threads, providers=["CPUExecutionProvider"])
    return partial(session.run, None, {"image": images.numpy()})


def openvino(module: torch.nn.Module, images: Tensor, precision: str, graph: Graph) -> Run:
    return partial(engine.in_openvino(onnx_of(graph), precision), [images.numpy()])


PEERS: dict[str, Callable[[torch.nn.Module, Tensor, str, Graph], Run]] = {
    "eager": eager, "eager_nhwc": eager_nhwc, "torch_compile": torch_compile,
    "onnxruntime": onnxruntime, "openvino": openvino,
}  # fmt: skip


def table(rows: list[Row]) -> tuple[tuple[str, ...], list[list[object]]]:
    head = ("network", "size", "precision", "batch", "plan", "peers", "ratio", "steps", "error")
    body: list[list[object]] = []
    for row in rows:
        times = {name: t["median_ms"] for name, t in row["times"].items()}
        peers = ", ".join(f"{name} {ms:.2f}" for name, ms in times.items() if name != "plan")
        body.append([row["network"], row["size"], row["precision"], row["batch"],
                     f"{times['plan']:.3f} ms", peers, f"{row['ratio']:.2f}", row["steps"],
                     f"{row['error'] / row['largest']:.1e}"])  # fmt: skip
    return head, body


if __name__ == "__main__":
    main()
