"""Detectors in 8 bits that have learned something: ``python -m benchmarks.learned_detectors``.

A detector learns one to four real digits on plain ground for some seconds. Plans with its weights
are judged on pictures with digits that it has not seen, all on the same ones, and timed in turns in
this process: what a precision costs in mAP and what it gains in time are of one network::

    python -m benchmarks.learned_detectors --network d_fine_s --precisions fp16,int8

Weights that are written with ``--weights`` are read by the next run, which then learns nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.masks import FromPixels
from benchmarks.report import RESULTS, document, markdown, write
from benchmarks.runs import lost_and_gained
from tessella import compiler, runtime
from tessella.artifacts.plan import Plan
from tessella.core.device import default_target, torch_device
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import Graph, capture
from tessella.nn import zoo
from tessella.search.timing import latency
from tessella.tasks import named
from tessella.tasks.detection import head, metrics
from tessella.tasks.detection.examples import BoxSets

CLASSES, MOST = 10, 4  # digits, and of them in a picture
HELD_OUT = 397  # of scikit-learn's 1,797, which pictures that judge have
SIDES = (0.15, 0.35)  # of the picture's side
INK = 0.3  # a brighter pixel belongs to the digit's box
TRIES, AT_ONCE = 20, 50
CALIBRATED = 64
LEARNING = {"lr": 4e-4, "batch": 16, "warmup": 40, "full": 0.3}  # the last: until it decays
# Of the time, a vision transformer that starts from nothing learns its patches' digits. RF-DETR-S
# on an H200: 610 steps of them, then 620 of boxes: mAP 19; 310 and, at half the rate, 470: none.
LOOKS = 0.3
SMALL = 0.6  # of the time, a network of convolutions learns pictures of half the size
Tell = Callable[..., None]
Digits: TypeAlias = npt.NDArray[np.float64]
Numbers: TypeAlias = npt.NDArray[np.int64]
Box = tuple[int, int, int, int]  # left, top, right, bottom
Placed = tuple[int, npt.NDArray[np.float32], int, int, Box]  # digit, ink, where: top, left; box


@dataclass(frozen=True)
class Pictures:
    """Gray pictures as bytes [N, S, S], and what is in each as training has it, [N, M, 6]."""

    pixels: Tensor
    things: Tensor

    def images(self, places: Tensor | slice) -> Tensor:
        gray = self.pixels[places].float()[:, None] / 255
        return gray.expand(-1, 3, -1, -1).contiguous()


def drawn(count: int, size: int, seed: int, held_out: bool, device: torch.device) -> Pictures:
    """Digits on a ground that changes slowly and is a little grainy; none covers another."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.images))
    pool = order[:HELD_OUT] if held_out else order[HELD_OUT:]
    rng, noise = np.random.default_rng((seed, held_out)), torch.Generator(device)
    noise.manual_seed(2 * seed + held_out)
    pixels = torch.empty(count, size, size, dtype=torch.uint8, device=device)
    things = torch.full((count, MOST, 6), -1.0)
    for first in range(0, count, AT_ONCE):
        part = min(AT_ONCE, count - first)
        ground = torch.rand(part, 1, 3, 3, generator=noise, device=device) * 90 + 40
        ground = F.interpolate(ground, (size, size), mode="bilinear")[:, 0]
        ground += 6 * torch.randn(ground.shape, generator=noise, device=device)
        for i in range(part):
            for number, (digit, ink, top, left, box) in enumerate(
                _placed(rng, found.images, pool, size)
            ):
                under = ground[i, top : top + len(ink), left : left + len(ink)]
                under += torch.from_numpy(ink).to(device) * (240 - under)
                things[first + i, number, :4] = torch.tensor(box) / size
                things[first + i, number, 4:] = torch.tensor([float(found.target[digit]), 0.0])
        pixels[first : first + part] = ground.clamp(0, 255).to(torch.uint8)
    return Pictures(pixels, things.to(device))


def _placed(rng: np.random.Generator, images: Digits, pool: Numbers, size: int) -> Iterator[Placed]:
    boxes: list[Box] = []
    for _ in range(rng.integers(1, MOST + 1)):
        digit = int(rng.choice(pool))
        side = int(rng.uniform(size * SIDES[0], size * SIDES[1]))
        ink = cv2.resize(images[digit].astype(np.float32) / 16, (side, side))
        rows, columns = (np.flatnonzero((ink > INK).any(axis)).tolist() for axis in (1, 0))
        for _ in range(TRIES):
            top, left = (int(n) for n in rng.integers(0, size - side, 2))
            box = left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1
            if all(box[2] <= b[0] or b[2] <= box[0] or box[3] <= b[1] or b[3] <= box[1]
                   for b in boxes):  # fmt: skip
                boxes.append(box)
                yield digit, ink, top, left, box
                break


def network(name: str, size: int) -> Any:
    torch.manual_seed(0)
    return zoo.build(zoo.network(name, classes=CLASSES, size=size, answers="boxes", options={}))


def learn(
    name: str, size: int, count: int, seconds: float, device: torch.device, tell: Tell
) -> Any:
    """A network that has learned for so many seconds, with AdamW and a rate that falls to 0."""
    net = network(name, size).to(device)
    transformer = name.startswith("rf_detr")
    sizes = [size] if transformer else [size // 2, size]
    pools = [drawn(count, side, seed, False, device) for seed, side in enumerate(sizes)]
    tell(pictures=count, weights=sum(p.numel() for p in net.parameters()))
    looks = nn.Conv2d(net.network.config.d_model, CLASSES + 1, 1).to(device)
    opt = _solver([*net.parameters(), *(looks.parameters() if transformer else [])], device)
    exact = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    batch, step, losses = int(LEARNING["batch"]), 0, list[Tensor]()
    begun = told = time.monotonic()
    since, looking = 0, transformer  # the step that began what is learned
    order, at = torch.randperm(count), 0
    while (share := (time.monotonic() - begun) / seconds) < 1:
        if looking and share > LOOKS:
            looking, since = False, step
        pool = pools[-1] if share > SMALL else pools[0]
        if at + batch > count:
            order, at = torch.randperm(count), 0
        pick = order[at : at + batch].to(device)
        at += batch
        falls = max(0.0, share - LEARNING["full"]) / (1 - LEARNING["full"])
        for group in opt.param_groups:
            group["lr"] = LEARNING["lr"] * min(1, (step - since + 1) / LEARNING["warmup"])
            group["lr"] *= max(0.02, 0.5 * (1 + math.cos(math.pi * falls)))
        net.train()
        opt.zero_grad(set_to_none=True)
        if looking:
            made = looked(looks(net._map(pool.images(pick))), pool.things[pick])
        else:
            made = net(pool.images(pick), pool.things[pick])
        torch.autograd.backward(made[0])
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        step, losses = step + 1, [*losses, made.detach()][-20:]
        losses[0].tolist()  # the host is so many steps ahead at most
        if time.monotonic() - told > 10:
            told = time.monotonic()
            loss = [round(v, 3) for v in torch.stack(losses).mean(0).tolist()]
            tell(steps=step, share=round(share, 2), of_patches=looking, loss=loss)
    tell(steps=step, step_s=round((time.monotonic() - begun) / step, 4))
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = exact
    return net.eval()


def _solver(parameters: list[nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.dim() > 1]
    others = [p for p in parameters if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 1e-4}, {"params": others, "weight_decay": 0.0}]
    fused = device.type == "cuda"
    return torch.optim.AdamW(groups, lr=LEARNING["lr"], betas=(0.9, 0.98), fused=fused)


def looked(scores_NKRC: Tensor, things_NM6: Tensor) -> Tensor:
    """The loss of patches that say which digit their middle lies in, and the share that are right
    of those in one."""
    rows, columns = scores_NKRC.shape[2:]
    y = (torch.arange(rows, device=scores_NKRC.device) + 0.5)[:, None] / rows
    x = (torch.arange(columns, device=scores_NKRC.device) + 0.5) / columns
    left, top, right, bottom, label, _ = things_NM6[..., None, None].unbind(2)
    inside = (x >= left) & (x < right) & (y >= top) & (y < bottom) & (label >= 0)
    wanted = torch.where(inside, label.long(), -1).amax(1)
    known = torch.where(wanted >= 0, wanted, CLASSES)
    loss = F.cross_entropy(scores_NKRC, known)
    hit = (scores_NKRC.argmax(1) == known) & (wanted >= 0)
    return torch.stack([loss, hit.sum() / (wanted >= 0).sum().clamp(min=1)])


def scored(answer: Callable[[Tensor], Tensor], pictures: Pictures, batch: int) -> dict[str, float]:
    """mAP in percent of ``answer``, which takes ``batch`` pictures."""
    size, rows = pictures.pixels.shape[1], []
    for first in range(0, len(pictures.pixels), batch):
        images = pictures.images(slice(first, first + batch))
        count = len(images)
        images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, batch - count))
        made = answer(images).float().cpu()[:count]
        rows.append(metrics.rows(made, made, CLASSES))  # what is there stands in the sets
    truth = []
    for things in pictures.things.cpu():
        there = things[things[:, 4] >= 0]
        boxes = there[:, :4].double() * size
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(1).tolist()
        truth.append({
            "boxes": boxes.tolist(), "labels": there[:, 4].int().tolist(), "areas": areas,
            "crowds": [False] * len(there), "zoom": 1.0, "size": [size, size],
            "view": [0, 0, size, size],
        })  # fmt: skip
    sets = BoxSets(pa.chunked_array([pa.array(truth)]), CLASSES)
    found = metrics.measure(torch.cat(rows).numpy(), sets, tuple(map(str, range(CLASSES))))
    return {name: round(100 * getattr(found, name), 2) for name in ("map", "map50", "recall")}


def captured(net: nn.Module, size: int, batch: int) -> Graph:
    """From pixels to boxes."""
    count = DimRange(min=1, opt=batch, max=batch)
    spec = TensorSpec(name="image", dtype="float32", shape=(count, 3, size, size))
    return capture(FromPixels(net, "detection").eval(), [spec], outputs=[head.OUTPUT])


def planned(graph: Graph, precision: str, batch: int, seen: Pictures, shown: Pictures,
            measuring: compiler.Measuring, precisions: Mapping[str, str] = {}) -> Plan:  # fmt: skip
    """A plan; of 8 bits, by a calibration on pictures that training had."""
    calibration = None
    if precision in compiler.KINDS:
        parts = [{"image": seen.images(slice(at, at + 16))} for at in range(0, CALIBRATED, 16)]
        calibration = compiler.calibrate(graph, parts, kinds=(precision,))
    return compiler.compile_graph(
        graph, target=default_target(), batch=DimRange(min=batch, opt=batch, max=batch),
        precision=precision, precisions=precisions, calibration=calibration, measuring=measuring,
        samples=None if calibration else {"image": shown.images(slice(batch)).cpu()},
        about=compiler.About(
            built_from="learned_detectors", rebuild="python -m benchmarks.learned_detectors",
            task=named("detection").record(),
        ),
    )  # fmt: skip


def judged(plan: Plan, pictures: Pictures, batch: int) -> tuple[runtime.Engine, dict[str, Any]]:
    """The plan where it runs, and what it scores."""
    engine, told = runtime.load(plan), plan.manifest.outputs[0].name
    scores = scored(lambda images: torch.as_tensor(engine(images)[told]), pictures, batch)
    fallen = dict(plan.manifest.precisions)
    steps = len(plan.program.buckets[-1].steps)
    return engine, {**scores, "steps": steps, "in_16_bits": len(fallen)}


def timed(engines: dict[str, runtime.Engine], images: Tensor, seconds: float) -> dict[str, float]:
    """Milliseconds of each plan, from pictures on the device to boxes, in turns."""
    found = latency(
        {name: partial(engine, images) for name, engine in engines.items()},
        device=images.device,
        seconds=seconds,
    )
    return {name: round(t.time_us / 1e3, 4) for name, t in found.items()}


def main() -> None:
    args = _arguments()
    device, begun = torch_device(default_target()), time.monotonic()

    def tell(**what: Any) -> None:
        print(round(time.monotonic() - begun, 1), json.dumps(what), flush=True)

    if args.weights is not None and args.weights.exists():
        net = network(args.network, args.size)
        net.load_state_dict(load_file(args.weights))
        net = net.to(device).eval()
    else:
        net = learn(args.network, args.size, args.pictures, args.seconds, device, tell)
        if args.weights is not None:
            save_file({k: v.contiguous() for k, v in net.state_dict().items()}, args.weights)
    pictures = drawn(args.judging, args.size, 0, True, device)
    with torch.inference_mode():
        row: dict[str, Any] = {
            "network": args.network, "size": args.size, "batch": args.batch,
            "judging": args.judging,
            "eager_fp32": scored(lambda x: head.finish(net(x), {}), pictures, args.batch),
        }  # fmt: skip
    tell(**row)
    graph = captured(net.cpu(), args.size, args.batch)
    seen = drawn(CALIBRATED, args.size, 0, False, device)
    measuring = compiler.Measuring(cache=args.cache, budget_s=args.budget, untuned=args.untuned)
    engines: dict[str, runtime.Engine] = {}
    row["plans"] = {}
    for precision in args.precisions.split(","):
        plan = planned(graph, precision, args.batch, seen, pictures, measuring)
        engines[precision], row["plans"][precision] = judged(plan, pictures, args.batch)
        tell(precision=precision, **row["plans"][precision])
    for name, ms in timed(engines, pictures.images(slice(args.batch)), args.timing).items():
        row["plans"][name]["ms"] = ms
    write(args.out, document(default_target(), [row]))
    print(markdown(*lost_and_gained([row])))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default="d_fine_s", help="D-FINE or RF-DETR, of any size")
    parser.add_argument("--size", type=int, default=640)
    parser.add_argument("--batch", type=int, default=32, help="pictures of a plan")
    parser.add_argument("--precisions", default="fp16,int8", help="the first is what others lose")
    parser.add_argument("--pictures", type=int, default=2000, help="to learn from")
    parser.add_argument("--judging", type=int, default=512, help="pictures that judge")
    parser.add_argument("--seconds", type=float, default=120, help="of learning")
    parser.add_argument("--timing", type=float, default=2, help="seconds of each plan's latency")
    parser.add_argument("--weights", type=Path, help="a file that is read, or written")
    parser.add_argument("--cache", type=Path, help="timings of kernels, read and added to")
    parser.add_argument("--budget", type=float, default=0.01, help="seconds to measure a step")
    parser.add_argument("--untuned", action="store_true", help="a cost model chooses the kernels")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / f"learned-detectors-{default_target()}.json"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
