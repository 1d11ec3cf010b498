"""Networks that draw masks, one picture: ``python -m benchmarks.masks --networks segformer``.

The latency of a plan, of eager PyTorch and of ONNX Runtime with the file that ``tessella export``
writes, interleaved in one process, with weights that nobody trained: shapes are fixed, so that
answers take as long as they would. Names are the zoo's; of ``mask_rcnn`` options may follow::

    python -m benchmarks.masks --networks mask_rcnn:backbone=resnet18,detections=20 --size 320
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import document, write
from tessella import api, graph
from tessella.artifacts.checkpoint import Answering
from tessella.core.device import default_target, torch_device
from tessella.core.spec import TensorSpec
from tessella.graph.onnx import write as write_onnx
from tessella.nn import zoo
from tessella.nn.zoo.catalog import MASKS
from tessella.search.timing import latency
from tessella.tasks import named

CLASSES = 20
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["deeplabv3plus", "segformer"])
    parser.add_argument("--size", type=int, default=256, help="of a picture's sides")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each latency")
    parser.add_argument("--cache", type=Path, help="timings of kernels, read and added to")
    parser.add_argument("--limit", type=float, help="seconds to measure kernels, then to go on")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [
        measured(name, args.size, args.seconds, args.cache, args.limit) for name in args.networks
    ]
    if args.out is not None:
        write(args.out, document(default_target(), rows))
    for row in rows:
        print(row)


def measured(asked: str, size: int, seconds: float, cache: Path | None, limit: float | None) -> Row:
    """A network's times in ms, and how far the plan's answer is from eager PyTorch's."""
    import onnxruntime as ort

    name, _, given = asked.partition(":")
    pairs = (pair.split("=") for pair in given.split(",") if pair)
    options: dict[str, str | int | float | bool | None] = {
        key: int(value) if value.isdigit() else value for key, value in pairs
    }
    answers: Answering = "masks" if name in MASKS else "pixels"
    torch.manual_seed(0)
    record = zoo.network(name, classes=CLASSES, size=size, answers=answers, options=options)
    module = zoo.build(record).eval()
    spec = TensorSpec(name="image", dtype="float32", shape=(1, record.channels, size, size))
    image = torch.randn(1, record.channels, size, size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        captured = graph.capture(module, [spec])
        write_onnx(captured, path)
        threads = ort.SessionOptions()
        threads.intra_op_num_threads = torch.get_num_threads()
        # by default its threads spin after a run, and steal the cores from whatever runs next
        threads.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = ort.InferenceSession(path, threads, providers=["CPUExecutionProvider"])
    plan = api.compile(captured, batch=1, cache=cache, time_limit_s=limit)
    loaded = api.load(plan)
    fed = {"image": image.numpy()}
    runs = {
        "plan": lambda: loaded(image),
        "eager": lambda: module(image),
        "onnxruntime": lambda: session.run(None, fed),
    }
    with torch.inference_mode():
        right = module(image)
        told = torch.as_tensor(loaded(image)[plan.manifest.outputs[0].name])
        if answers == "masks":
            told = named("instances").head.aligned(told, right)
        timings = latency(runs, device=torch_device(default_target()), seconds=seconds)
    times = {n: {"median_ms": t.time_us / 1e3, "spread_ms": (t.spread_us or 0.0) / 1e3}
             for n, t in timings.items()}  # fmt: skip
    return {
        "network": name,
        "options": options,
        "size": size,
        "times": times,
        "ratio": round(times["onnxruntime"]["median_ms"] / times["plan"]["median_ms"], 3),
        "error": float((told - right).abs().max()),
        "largest": float(right.abs().max()),
        "steps": len(plan.program.buckets[0].steps),
    }


if __name__ == "__main__":
    main()
