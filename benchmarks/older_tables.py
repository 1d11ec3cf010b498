"""The tables of older GPUs' code and of older states of this project, for docs/benchmarks.md."""

from __future__ import annotations

import math
from collections.abc import Iterator

from benchmarks.report import RESULTS, markdown
from benchmarks.runs import Row, key_of, ms_of, optional, origin_of, origins_of, peers_of, runs_of

# (network, precision) → what the ratio to the peer named shall be at least, and its goal; and of
# ours alone, beside the plan of the GPU that is here
COMPILED = "torch compile default"
AIMS = {
    ("resnet50", "fp16"): (COMPILED, "1.2 · 1.6"),
    ("vit_b_16", "fp16"): (COMPILED, "1.0 · 1.2"),
    ("bert_large", "fp16"): (COMPILED, "1.0 · 1.2"),
    ("resnet50", "int8"): ("eager nhwc", "2 · 3"),
}
OWN = {("resnet50", "fp16"): "0.45 · 0.65"}
KERNELS = "older-kernels-sm_80.json"
BEFORE = "beside-dd26bbf-sm_90.json"


def plans() -> Iterator[str]:
    """Whole networks by code for an older GPU on the newer one, with its libraries and without."""
    yield "### H200, code for an older GPU: `older-plans-*.json`\n"
    yield (
        "Kernels and configurations of the older target, written by Triton and nvrtc for its"
        " instructions; ptxas and the libraries know the GPU that is here. *Ours alone* has no"
        " library where a kernel of ours fits, and its share is the time of this GPU's own plan"
        " over its time. What the older chip itself takes is not known. *torch compile default*"
        " is `reduce-overhead`; `max-autotune` took 5.15 ms for ResNet-50 and 14.2 for ViT-B/16 on"
        " such a GPU (above). Behind a ratio stand floor and goal.\n"
    )
    runs = [
        run for path in sorted(RESULTS.glob("older-plans-*.json")) for run in runs_of(path.name)
    ]
    lines = [
        (run["device"]["target"], *_plan_line(row), number)
        for number, run in enumerate(runs, 1)
        for row in run["rows"]
    ]
    head = ("target", "network", "precision", "batch", "plan", "peers", "ratio", "ours alone",
            "this GPU's plan", "share", "run")  # fmt: skip
    yield markdown(head, lines) + "\n"
    yield from origins_of(runs)


def _plan_line(row: Row) -> tuple[object, ...]:
    network, precision, _ = key_of(row)
    peer, aims = AIMS[network, precision]
    others = {n: t for n, t in row["times"].items() if not n.startswith("plan")}
    ratio = f"{row['ratios'][peer.replace(' ', '_')]:.2f} of {peer} ({aims})"
    share = optional(row["own_of_here"], "{:.3f}")
    if share:
        share += f" ({OWN[network, precision]})"
    own, here = (ms_of(row, n) if n in row["times"] else "" for n in ("plan_own", "plan_here"))
    return (
        *key_of(row), ms_of(row, "plan"), peers_of({"times": others}), ratio, own, here, share
    )  # fmt: skip


def kernels() -> Iterator[str]:
    """Single convolutions by an older GPU's code beside cuDNN with the newer one's."""
    (run,) = runs_of(KERNELS)
    yield f"### H200, convolutions by an older GPU's code: `{KERNELS}`\n"
    yield (
        "The convolutions of ResNet-50, VGG-16 and GoogLeNet but for their first layers, 128 images"
        " in float16, by our kernels for the older target alone, beside cuDNN with the kernels of"
        " the GPU that is here. Floor 0.55, goal 0.7.\n"
    )
    ratios = [row["ratio"] for row in run["rows"] if row.get("ratio")]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    left = len(run["rows"]) - len(ratios)
    head = ("target", "shapes", "ratio (geometric mean)", "worst", "best", "refused")
    numbers = (f"{value:.2f}" for value in (mean, min(ratios), max(ratios)))
    yield markdown(head, [(run["device"]["target"], len(ratios), *numbers, left)]) + "\n"
    yield f"1. {origin_of(run)}\n"


def beside_before() -> Iterator[str]:
    """Plans of an earlier state of this project beside today's, both searched anew."""
    yield f"### H200, beside the state of 2026-11-22: `{BEFORE}`\n"
    yield (
        "Plans of commit dd26bbf and of the state of the date below, both searched on one GPU, in"
        " turns. Nothing may have lost more than 2 % (a ratio of 0.98).\n"
    )
    runs = runs_of(BEFORE)
    lines = [
        (*key_of(row), ms_of(row, "before"), ms_of(row, "plan"), f"{row['ratio']:.3f}", number)
        for number, run in enumerate(runs, 1)
        for row in run["rows"]
    ]
    yield (
        markdown(("network", "precision", "batch", "before", "plan", "ratio", "run"), lines) + "\n"
    )
    yield from origins_of(runs)
