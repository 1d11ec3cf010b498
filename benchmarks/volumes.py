"""Volumes: ``python -m benchmarks.volumes``, on a GPU or a CPU.

- *dice*: a U-Net learns balls, ellipsoids and tubes in noise (`made_volumes`: 24 volumes of 48³),
  and is measured on volumes that it has not seen, whole ones by windows;
- *step*: a step of the U-Net on crops that stay on the GPU, in the ways that a training may take,
  beside a plain loop of torch (channels last, autocast, fused AdamW) and torch.compile;
- *plan*: the latency of one input as a plan, beside eager PyTorch and torch.compile, which a GPU
  replays from CUDA graphs, and beside ONNX Runtime and OpenVINO on a CPU.

All of a part run in one process, interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from benchmarks import engine
from benchmarks.intake import Row
from benchmarks.made_volumes import CLASSES, write_volumes
from benchmarks.masks import Cast, slowest
from benchmarks.report import document, markdown, write
from benchmarks.steps import _seconds, turn
from tessella import api, compiler, runtime
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Precision, Recipe, Solver
from tessella.core.device import default_target, torch_device
from tessella.core.dtype import PRECISIONS
from tessella.core.spec import DimRange, TensorSpec
from tessella.data import ImportSettings, import_images
from tessella.data.loading import batches
from tessella.graph import capture
from tessella.nn import zoo
from tessella.search.timing import latency
from tessella.tasks import LossSettings, named
from tessella.training.captured import WARM
from tessella.training.parallel import alone
from tessella.training.precision import MixedPrecision, arithmetic
from tessella.training.prepare import begin
from tessella.training.trainer import Trainer
from tessella.training.ways import WAYS, Choice, Way

PEERS = ("torch", "torch.compile")
ROUNDS, STEPS = 5, 5
TASK = named("volumes")
Step = Callable[[], object]


def main() -> None:
    args = _arguments()
    rows: list[Row] = []
    parts: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
        "dice": dice, "step": step, "plan": plan
    }  # fmt: skip
    for part in args.parts.split(","):
        for row in parts[part](args):
            rows.append({"part": part, **row})
            print(rows[-1], flush=True)
            if args.out is not None:
                write(args.out, document(default_target(), rows))
    head = list(dict.fromkeys(name for row in rows for name in row))
    print(markdown(head, [[row.get(name) for name in head] for row in rows]))


def _arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="step,plan" if on_gpu else "dice,plan")
    parser.add_argument("--side", type=int, default=128 if on_gpu else 64)
    parser.add_argument("--batch", type=int, default=4, help="crops of a step")
    parser.add_argument("--width", type=int, default=32, help="channels of the first level")
    parser.add_argument("--levels", type=int, default=5)
    parser.add_argument("--precision", default="bf16", help="of steps")
    parser.add_argument("--plan-precision", default="fp16" if on_gpu else "fp32")
    parser.add_argument("--who", default=",".join((*PEERS, "fused", "compile")))
    parser.add_argument("--epochs", type=float, default=20, help="of the training that is judged")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each latency")
    parser.add_argument("--budget", type=float, default=0.02, help="seconds to measure a kernel")
    parser.add_argument("--time-limit", type=float, help="seconds to search for kernels")
    parser.add_argument("--untuned", action="store_true", help="a cost model chooses the kernels")
    parser.add_argument("--cache", type=Path, help="timings of kernels, read and added to")
    parser.add_argument("--steps", type=int, default=0, help="print so many of the slowest steps")
    parser.add_argument("--alone", type=Path, help="a folder with which others take turns")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


# --- accuracy -------------------------------------------------------------------------------------


def dice(args: argparse.Namespace) -> Iterator[Row]:
    """What a short training is worth on volumes of its validation split."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_volumes(root / "made", count=24, side=48)
        began = time.perf_counter()
        settings = ImportSettings(task="volumes", size=48, holdout=0.25)
        dataset = import_images(root / "made", root / "data", settings)
        imported = time.perf_counter() - began
        run = api.train(
            "unet3d", dataset, out=root / "run", epochs=args.epochs, batch_size=1,
            solver={"name": "adamw", "lr": 5e-3}, augment={"flip": True, "flip_vertical": True},
            network_options={"width": 8, "levels": 3}, val_interval=2 * args.epochs,
            snapshot_interval=args.epochs,
        )  # fmt: skip
        trained = time.perf_counter() - began - imported
        report = api.evaluate_split(api.open_checkpoint(run), dataset)
        each = {c.label: round(c.dice or 0.0, 3) for c in report.classes}  # type: ignore[attr-defined]
        yield {
            "who": "tessella", "dice": round(report.values["dice"], 4), "by class": each,
            "miou": round(report.values["miou"], 4), "import_s": round(imported, 1),
            "train_s": round(trained, 1),
        }  # fmt: skip


# --- steps ----------------------------------------------------------------------------------------


def step(args: argparse.Namespace) -> Iterator[Row]:
    """Crops a second of steps on one batch."""
    precision: Precision = args.precision
    with tempfile.TemporaryDirectory() as folder, arithmetic(precision):
        root, ways = Path(folder), dict[str, Step]()
        dataset = _random_volumes(root, args)
        for name in args.who.split(","):
            began = time.perf_counter()
            make = _torchs if name in PEERS else _ours
            ways[name] = make(root, dataset, args, name)
            _seconds(ways[name], 2)
            torch.cuda.empty_cache()
            print(f"{name}: ready in {time.perf_counter() - began:.0f} s", flush=True)
        with turn(args.alone or _alone(root), 60):
            times: dict[str, list[float]] = {name: [] for name in ways}
            for one in ways.values():
                _seconds(one, WARM + 2)
            for _ in range(ROUNDS):
                for name, one in ways.items():
                    times[name].append(_seconds(one, STEPS))
        for name, one in ways.items():
            if why := getattr(getattr(one, "graph", lambda: None)(), "refused", None):
                print(f"{name}: no graph, {why}", flush=True)
    found = {name: statistics.median(each) for name, each in times.items()}
    best = min((found[name] for name in PEERS if name in found), default=None)
    for name, seconds in found.items():
        yield {
            "who": name if name in PEERS else f"tessella, {name}",
            "what": f"unet3d {args.side}³ {precision} b{args.batch}",
            "ms": round(1e3 * seconds, 2), "crops/s": round(args.batch / seconds, 2),
            "share of the best peer": None if best is None else round(best / seconds, 3),
        }  # fmt: skip


def _alone(folder: Path) -> Path:
    """A folder in which nobody else takes turns."""
    (folder / "count").write_text("1")
    return folder


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {"width": args.width, "levels": args.levels}


def _random_volumes(root: Path, args: argparse.Namespace) -> Dataset:
    rng = np.random.default_rng(0)
    for name in ("images", "labels"):
        (root / "made" / name).mkdir(parents=True)
    sides = (args.side,) * 3
    for number in range(2):
        labels = np.sort(rng.integers(0, len(CLASSES), sides, dtype=np.uint8), axis=0)
        volume = labels + rng.standard_normal(sides, np.float32)
        np.save(root / "made" / "images" / f"{number}.npy", volume)
        np.save(root / "made" / "labels" / f"{number}.npy", labels)
    (root / "made" / "classes.txt").write_text("\n".join(CLASSES))
    settings = ImportSettings(task="volumes", size=args.side, holdout=0)
    return import_images(root / "made", root / "data", settings)


def _ours(root: Path, dataset: Dataset, args: argparse.Namespace, name: str) -> Step:
    """A training's step."""
    way: Way = next(way for way in WAYS if way == name)
    recipe = Recipe(
        network="unet3d", dataset=str(dataset.path), batch_size=args.batch,
        precision=args.precision, solver=Solver(name="adamw", lr=1e-4),
        network_options=_options(args),
    )  # fmt: skip
    run, _ = begin(recipe, root / f"run-{way}", resume=False)
    trainer = Trainer(run.info, dataset.train.info, alone(), way=Choice(way=way, why="measured"))
    # a batch of a split of two volumes is these again and again
    stream = batches(
        dataset.train, dataset.preprocess, batch_size=args.batch, augment=None, training=True,
        for_gpu=True,
    )  # fmt: skip
    with closing(trainer.feed.stream(stream)) as fed_stream:
        fed = next(fed_stream)

    def one() -> None:
        trainer.step(fed.images, fed.labels, done=0, rate=1e-4, momentum=0.9)

    one.graph = lambda: trainer._captured  # type: ignore[attr-defined]
    return one


def _torchs(root: Path, dataset: Dataset, args: argparse.Namespace, name: str) -> Step:
    """A loop as people write it."""
    device = torch_device(default_target())
    last = torch.channels_last_3d if device.type == "cuda" else torch.contiguous_format
    module = _network(args).train().to(device).to(memory_format=last)
    images = torch.randn(args.batch, 1, *(args.side,) * 3, device=device)
    images = images.contiguous(memory_format=last)
    labels = torch.randint(len(CLASSES), (args.batch, *(args.side,) * 3), device=device)
    labels = labels.to(torch.uint8)
    call = torch.compile(module) if name == "torch.compile" else module
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1e-4, weight_decay=1e-4, fused=device.type == "cuda"
    )
    mixed, settings = MixedPrecision(args.precision, device), LossSettings()

    def one() -> None:
        optimizer.zero_grad()
        with mixed.autocast():
            outputs = call(images)
        mixed.update(TASK.loss.loss(outputs, labels, settings), optimizer)

    return one


def _network(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    record = zoo.network(
        "unet3d", classes=len(CLASSES), channels=1, size=args.side, answers="voxels",
        options=_options(args),
    )  # fmt: skip
    return zoo.build(record)


# --- a plan ---------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> Iterator[Row]:
    """The latency of one input, and how far the plan's answer is from eager PyTorch's."""
    device, precision = torch_device(default_target()), args.plan_precision
    module = _network(args).eval()
    shape = (1, *(args.side,) * 3)
    one = DimRange(min=1, opt=1, max=1)
    spec = TensorSpec(name="image", dtype="float32", shape=(one, *shape))
    images = torch.randn(1, *shape, device=device)
    began = time.perf_counter()
    graph = capture(module, [spec], outputs=["scores"])
    made = compiler.compile_graph(
        graph, target=default_target(), batch=one, precision=precision,
        about=compiler.About(built_from="volumes", rebuild="python -m benchmarks.volumes"),
        measuring=compiler.Measuring(
            cache=args.cache, budget_s=args.budget, untuned=args.untuned,
            time_limit_s=args.time_limit,
        ),
    )  # fmt: skip
    setup_s = time.perf_counter() - began
    print(f"a plan after {setup_s:.0f} s", flush=True)
    loaded = runtime.load(made)
    runs: dict[str, Step] = {"tessella": lambda: loaded(images)}
    module = module.to(device)
    with torch.inference_mode():
        right = module(images)
        if device.type == "cpu":
            runs["torch"] = lambda: module(images)
            file = _exported(module, images)
            runs["onnxruntime"] = _onnxruntime(file, images)
            runs["openvino"] = partial(engine.in_openvino(file, precision), [images.numpy()])
        else:
            dtype = getattr(torch, PRECISIONS[precision])
            peer = Cast(module.to(dtype).to(memory_format=torch.channels_last_3d), dtype)
            seen = images.contiguous(memory_format=torch.channels_last_3d)
            runs["torch"] = engine._graphed(peer, (seen,))
            runs["torch.compile"] = engine._graphed(cast(nn.Module, torch.compile(peer)), (seen,))
        told = torch.as_tensor(loaded(images)["scores"]).to(right.device)
        with turn(args.alone or _alone(Path(tempfile.mkdtemp())), 60):
            timings = latency(runs, device=device, seconds=args.seconds)
            if args.steps:
                slowest(loaded, 1, args.steps)
    best = min(timings[name].time_us for name in runs if name != "tessella")
    for name, timing in timings.items():
        ours = name == "tessella"
        yield {
            "who": name, "what": f"unet3d {args.side}³ {precision} b1",
            "ms": round(timing.time_us / 1e3, 3),
            "share of the best peer": round(best / timing.time_us, 3),
            "error": float((told - right).abs().max() / right.abs().max()) if ours else None,
            "setup_s": round(setup_s, 1) if ours else None,
        }  # fmt: skip


def _exported(module: nn.Module, images: torch.Tensor) -> bytes:
    """The file that torch writes: ours has no word for transposed convolutions of volumes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        torch.onnx.export(
            module, (images,), path, dynamo=False, input_names=["image"], output_names=["scores"]
        )
        return path.read_bytes()


def _onnxruntime(file: bytes, images: torch.Tensor) -> Step:
    import onnxruntime as ort

    threads = ort.SessionOptions()
    threads.intra_op_num_threads = torch.get_num_threads()
    threads.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(file, threads, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, {"image": images.numpy()})


if __name__ == "__main__":
    main()
