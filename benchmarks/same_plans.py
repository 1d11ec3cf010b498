"""Whether a change of the code changes a plan: ``python -m benchmarks.same_plans record FOLDER``
before the change, ``… check FOLDER`` after it, on one machine.

Each network is compiled once and its lock is kept; a check compiles it again by that lock, so that
nothing is measured, and compares the steps, the kernels with their configurations, the constants
and the recorded answers, byte for byte; and it times a call, as the record did. Neither training
nor the server is imported.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from benchmarks.networks import workload
from tessella import compiler, runtime
from tessella.artifacts.plan import Plan
from tessella.core.device import default_target, torch_device
from tessella.core.record import canonical_json
from tessella.core.spec import DimRange
from tessella.graph import capture

NETWORKS = "lenet,resnet50,googlenet,vit_b_16,swin_t"
WARM_UP_CALLS, CALLS = 50, 200
PRECISIONS = {"cpu": "fp32", "sm_90": "fp16"}


def main() -> int:
    args = _arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    wrong = 0
    for name in args.networks.split(","):
        begun = time.monotonic()
        path = args.folder / f"{name}-{args.target}.json.gz"
        if args.verb == "record":
            plan = _plan(name, args, lock=None)
            content = _content(plan) | {"time_us": _time_us(plan, args, name)}
            path.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
            outcome = f"{len(content['steps'])} steps, {content['time_us']:.1f} µs recorded"
        else:
            before = json.loads(gzip.decompress(path.read_bytes()))
            plan = _plan(name, args, lock=before["lock"])
            differs = _differences(before, _content(plan))
            wrong += bool(differs)
            outcome = "the same plan" if not differs else "\n  ".join(["differs", *differs])
            if not differs and "time_us" in before:
                time_us = _time_us(plan, args, name)
                ratio = time_us / before["time_us"]
                outcome += f", {time_us:.1f} µs a call, {ratio:.2f} of what was recorded"
        print(f"{name} on {args.target}: {outcome} ({time.monotonic() - begun:.1f} s)", flush=True)
    return int(wrong > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=["record", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default=default_target())
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--batch", type=int, default=2)
    return parser.parse_args()


def _plan(name: str, args: argparse.Namespace, lock: str | None) -> Plan:
    work = workload(name, args.batch)
    words = any(spec.dtype != "float32" for spec in work.inputs)
    sample = {s.name: t for s, t in zip(work.inputs, work.sample(torch.device("cpu")), strict=True)}
    size = work.inputs[0].batch.opt
    return compiler.compile_graph(
        capture(work.module, work.inputs),
        target=args.target,
        batch=DimRange(min=1 if isinstance(work.inputs[0].shape[0], DimRange) else size,
                       opt=size, max=size),
        precision=PRECISIONS[args.target],
        samples=sample if words else None,
        about=compiler.About(built_from=name, rebuild="python -m benchmarks.same_plans"),
        measuring=compiler.Measuring(lock=lock),
    )  # fmt: skip


def _time_us(plan: Plan, args: argparse.Namespace, name: str) -> float:
    """The median time of a call of the plan's engine, from call to answer."""
    work, device = workload(name, args.batch), torch_device(args.target)
    samples = work.sample(torch.device("cpu"))
    fed = {s.name: t.to(device) for s, t in zip(work.inputs, samples, strict=True)}
    times = []
    with runtime.load(plan) as engine:
        for _ in range(WARM_UP_CALLS + CALLS):
            begun = time.perf_counter()
            engine(**fed)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(times[WARM_UP_CALLS:])


def _content(plan: Plan) -> dict[str, Any]:
    """All of a plan that refactoring must not change, the tensors by their hashes."""
    steps = [json.loads(canonical_json(s)) for b in plan.program.buckets for s in b.steps]
    buffers = [json.loads(canonical_json(b.buffers)) for b in plan.program.buckets]
    return {
        "steps": steps,
        "buffers": buffers,
        "weights": {name: _hash(tensor) for name, tensor in sorted(plan.weights.items())},
        "golden": {name: _hash(tensor) for name, tensor in sorted(plan.golden.items())},
        "lock": plan.lock,
    }


def _hash(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return sha256(data).hexdigest()


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The first few differences, a line for each."""
    found = [f"{part} differ" for part in ("buffers", "lock") if before[part] != after[part]]
    for part in ("weights", "golden"):
        names = sorted({*before[part], *after[part]})
        changed = [n for n in names if before[part].get(n) != after[part].get(n)]
        found += [f"{part}: {', '.join(changed[:5])}"] if changed else []
    if len(before["steps"]) != len(after["steps"]):
        return [*found, f"{len(after['steps'])} steps, not {len(before['steps'])}"]
    pairs = zip(before["steps"], after["steps"], strict=True)
    return found + [f"{json.dumps(a)} became {json.dumps(b)}" for a, b in pairs if a != b][:5]


if __name__ == "__main__":
    sys.exit(main())
