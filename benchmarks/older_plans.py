"""Plans for an older GPU beside their peers and the newer GPU's plan, on that newer one:
``python -m benchmarks.older_plans --target sm_80 --networks resnet50 --precisions fp16``.

In one process, interleaved: ``plan`` of the older target with its libraries, ``plan_own`` with ours
wherever one fits, ``plan_here`` for the GPU that is here, and the peers of ``benchmarks.engine``,
which know nothing of the older target. ``benchmarks.older_gpu`` says what is the older GPU's.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks import engine
from benchmarks.networks import Workload, workload
from benchmarks.older_gpu import as_if, only_own
from benchmarks.report import RESULTS, document, markdown, write
from tessella import runtime
from tessella.artifacts.plan import Plan
from tessella.core.device import default_target, torch_device
from tessella.search.timing import latency

Key = tuple[str, str, int]


def torch_compile_default(module: torch.nn.Module, inputs: Any, precision: str) -> engine.Run:
    """torch.compile with CUDA graphs, which searches no kernels: a minute, not four."""
    peer, cast = engine._cast(module, inputs, precision)
    peer, cast = peer.to(memory_format=torch.channels_last), engine._last(cast)
    torch._dynamo.reset()
    compiled = torch.compile(peer, mode="reduce-overhead")
    return lambda: compiled(*cast)  # type: ignore[no-untyped-call]


PEERS = {**engine.PEERS, "torch_compile_default": torch_compile_default}


def main() -> None:
    args = _arguments()
    here, older = default_target(), args.target
    asked = (args.networks.split(","), args.precisions.split(","), args.batches.split(","))
    keys = [(name, precision, int(batch)) for name, precision, batch in itertools.product(*asked)]
    built: dict[Key, dict[str, tuple[Plan, float]]] = {key: {} for key in keys}
    if "plan_here" in args.plans:
        for key in keys:
            built[key]["plan_here"] = _built(key, here, args)
    loaded = {key: {n: runtime.load(p) for n, (p, _) in built[key].items()} for key in keys}
    as_if(older)
    rows = []
    for key in keys:
        built[key]["plan"] = _built(key, older, args)
        if "plan_own" in args.plans:
            with only_own():
                built[key]["plan_own"] = _built(key, older, args, "-own")
        rows.append(_row(key, built[key], loaded[key], args))
        write(args.out, {**document(older, rows), "compared_with": here})
        print(*(f"{k} {v}" for k, v in rows[-1].items() if k != "kernels"), flush=True)
    print(markdown(*_table(rows)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="sm_80")
    parser.add_argument("--networks", default="resnet50")
    parser.add_argument("--precisions", default="fp16")
    parser.add_argument("--batches", default="128")
    parser.add_argument("--plans", default="plan_own,plan_here", help="besides the target's own")
    parser.add_argument("--peers", default="eager_nhwc,torch_compile")
    parser.add_argument("--seconds", type=float, default=5.0, help="a row, at most")
    parser.add_argument("--cache", type=Path, help="folder of timing caches, read and added to")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.out = args.out or RESULTS / f"older-plans-{args.target}.json"
    return args


def _built(key: Key, target: str, args: argparse.Namespace, suffix: str = "") -> tuple[Plan, float]:
    """The plan and the seconds of its build.

    Args:
        suffix: of its own timing cache's name: beside a faster library, a search that may take it
            tries one configuration of ours, and no more is known to the search that may not.
    """
    name, precision, batch = key
    work = workload(name, batch)
    if args.cache:
        args.cache.mkdir(parents=True, exist_ok=True)
    told = argparse.Namespace(target=target, cache=args.cache and args.cache / f"{target}{suffix}")
    made = engine._plan(work, work.sample(torch_device(target)), precision, "torch", told)
    print(f"{name} {precision} {batch} for {target}: {made[1]:.1f} s", flush=True)
    return made


def _row(
    key: Key,
    built: dict[str, tuple[Plan, float]],
    engines: dict[str, runtime.Engine],
    args: argparse.Namespace,
) -> dict[str, Any]:
    name, precision, batch = key
    work: Workload = workload(name, batch)
    inputs = work.sample(torch.device("cuda"))
    fed = dict(zip((spec.name for spec in work.inputs), inputs, strict=True))
    engines |= {n: runtime.load(p) for n, (p, _) in built.items() if n not in engines}
    runs: dict[str, Any] = {n: (lambda e=e: e(**fed)) for n, e in engines.items()}
    for peer in filter(None, args.peers.split(",")):
        runs[peer] = PEERS[peer](work.module, inputs, precision)
    with torch.inference_mode():
        timings = latency(runs, device=torch.device("cuda"), seconds=args.seconds)
    times = {
        n: {"median_ms": t.time_us / 1e3, "spread_ms": (t.spread_us or 0.0) / 1e3}
        for n, t in timings.items()
    }
    mine = times["plan"]["median_ms"]
    return {
        "network": name,
        "precision": precision,
        "batch": batch,
        "times": times,
        "ratios": {n: round(t["median_ms"] / mine, 3) for n, t in times.items() if n != "plan"},
        "own_of_here": round(times["plan_here"]["median_ms"] / times["plan_own"]["median_ms"], 3)
        if {"plan_here", "plan_own"} <= set(times)
        else None,
        "samples_per_s": round(batch / mine * 1e3),
        "setup_s": {n: round(seconds, 1) for n, (_, seconds) in built.items()},
        "kernels": {
            n: dict(Counter(s.kernel for s in p.program.buckets[-1].steps).most_common())
            for n, (p, _) in built.items()
        },
        "output_error": engine.errors({n: runs[n] for n in engines}, work, inputs),
    }


def _table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    head = ["network", "precision", "batch", "times (ms)", "over the plan's", "own of here"]
    body: list[list[object]] = []
    for row in rows:
        times = ", ".join(f"{n} {t['median_ms']:.3f}" for n, t in row["times"].items())
        ratios = ", ".join(f"{n} {ratio:.2f}" for n, ratio in row["ratios"].items())
        body.append([row["network"], row["precision"], row["batch"], times, ratios,
                     row["own_of_here"]])  # fmt: skip
    return head, body


if __name__ == "__main__":
    main()
