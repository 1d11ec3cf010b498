"""The catalogue's Triton kernels, compiled for every GPU target without a GPU.

``results()`` asks another process, whose Triton does not interpret, and which has a worker a core.
Each kernel is met with a problem that a network has, in its first configuration and for the target
``IN_FULL`` in the one whose tile is smallest, on tensors without memory, as the search compiles
ahead. By target and case there are the resources of every launch, or the error. ``every_case`` is
more than CI has time for.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tessella.core.architectures import GPU_TARGETS
from tessella.device.ahead_of_time import collecting
from tessella.device.launch import compiling
from tessella.device.machine import aimed_at
from tessella.kernels import catalog
from tessella.kernels.catalog import Config, Kernel
from tessella.operations.problem import Problem
from tessella.search.compile_ahead import launch_without_memory
from tests.support.kernels.barriers import left_valid
from tests.support.kernels.overwritten import overwritten
from tests.support.problems import (
    attentions,
    convolutions,
    gradients,
    groups,
    grown,
    looks,
    pooled_convolutions,
    pools,
    products,
    programs,
)
from tests.support.problems.programs import LAST, SUM, meta
from tests.support.problems.rearrangements import turned, windows

ROOT = Path(__file__).parents[3]
Launches = list[dict[str, Any]] | str  # the resources of each, or the error
CONV = convolutions.Case(
    x=(8, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype="float16", x_format=LAST, w_format=LAST,
    bias="float16", activation="relu",
)  # fmt: skip
PRODUCT = products.Case(m=512, n=512, k=512, bias="float16", activation="relu")
HEADS = attentions.Case(n=8, heads=12, queries=197, keys=197, width=64, fused=True, dtype="float16")


@functools.cache
def problems() -> dict[str, Problem]:
    """By name, with the shapes that networks have; those that most kernels take come first."""
    tokens, vector = meta(64, 768, dtype="float16"), meta(768, dtype="float16")
    images = {
        "half": CONV,
        "ieee": replace(CONV, dtype="float32", bias="float32"),
        "first": replace(CONV, x=(8, 3, 64, 64), w=(64, 3, 7, 7), stride=2, padding=3),
        "depthwise": replace(CONV, w=(64, 1, 3, 3), groups=64),
        "tf32": replace(CONV, dtype="float32", bias="float32", math="tf32"),
        "int8": replace(CONV, dtype="int8", out="int8", scale=True, bias="float32"),
    }
    matrices = {
        "half": PRODUCT,
        "ieee": replace(PRODUCT, dtype="float32", bias=None),
        "rows": replace(PRODUCT, m=8),
        "rows ieee": replace(PRODUCT, m=8, dtype="float32", bias=None),
        "bfloat16": replace(PRODUCT, dtype="bfloat16", bias="bfloat16"),
        "fp8": replace(PRODUCT, dtype="float8_e4m3fn", out="float16"),
    }
    found = {f"conv {name}": case.problem for name, case in images.items()}
    found |= {f"linear {name}": products.draw(case)[0] for name, case in matrices.items()}
    gradient = functools.partial(gradients.problem, x=(8, 64, 28, 28), weight=(64, 64, 3, 3))
    norm = ("layer_norm", (0, 1, 2), {"normalized_shape": (768,), "eps": 1e-5})
    narrow = replace(HEADS, queries=49, keys=49, width=32)
    pixels = meta(8, 224, 224, 3, dtype="uint8")
    looked = looks.asked(
        images=8, queries=300, heads=8, depth=16, sizes=(40, 40, 20, 20), points=(6, 6),
        dtype="float16",
    )  # fmt: skip
    scaling = {"gain": [0.1, 0.2, 0.3], "offset": [0.0, 0.1, 0.2], "dtype": "float16"}
    return found | {
        "first, pooled": pooled_convolutions.problem_of(N=8),
        "dgrad": gradient("conv2d_dgrad", padding=(1, 1)),
        "wgrad": gradient("conv2d_wgrad", padding=(1, 1)),
        "dgrad ieee": gradient("conv2d_dgrad", padding=(1, 1), dtype="float32"),
        "wgrad ieee": gradient("conv2d_wgrad", padding=(1, 1), dtype="float32"),
        "attention": attentions.draw(HEADS)[0],
        "attention ieee": attentions.draw(replace(HEADS, dtype="float32"))[0],
        "attention of windows": attentions.draw(narrow)[0],
        "attention of windows ieee": attentions.draw(replace(narrow, dtype="float32"))[0],
        "add and norm": programs.problem(
            [tokens, vector, vector, tokens], norm, ("add", (4, 3), SUM), constant=(1, 2)
        ),
        "two results": programs.problem(
            [tokens, tokens], ("add", (0, 1), SUM), ("mul", (2, 1), {"scalar": None}),
            results=(2, 3),
        ),
        "quantized": Problem(
            op="quantize", inputs=(tokens, meta()), outputs=(meta(64, 768, dtype="int8"),),
            attrs={"axis": 0, "dtype": "int8"}, constant=(1,),
        ),
        "maximum": pools.problem("max_pool2d", (8, 64, 56, 56), pools.maximum(), dtype="float16"),
        "columns": next(iter(pools.COLUMNS.values())),
        "windows": windows(8, 56, 7, 96, 3, dtype="float16"),
        "planes": turned(8, 768, 14, dtype="float16"),
        "looks": looked,
        "boxes": Problem(
            op="nms", inputs=(meta(8, 1000, 4), meta(8, 1, 1000)),
            outputs=(meta(8, 1, 100, dtype="int64"),),
            attrs={"iou_threshold": 0.5, "score_threshold": None, "most": 100},
        ),
        "scores": Problem(
            op="fallback", inputs=(meta(1, 8400, dtype="float16"),),
            outputs=(meta(1, 300, dtype="float16"), meta(1, 300, dtype="int64")),
            attrs={"target": "aten::topk", "args": ({"input": 0}, 300), "kwargs": {}},
        ),
        "groups": next(iter(groups.PROBLEMS.values())),
        "grown": grown.problem((8, 64, 28, 28), 32, (2, 2)),
        "grown ieee": grown.problem((8, 64, 28, 28), 32, (2, 2), dtype="float32"),
        "places": Problem(
            op="fallback", outputs=(meta(1, 300, 256, dtype="float16"),),
            inputs=(meta(1, 8400, 256, dtype="float16"), meta(1, 300, 256, dtype="int64")),
            attrs={"target": "aten::gather", "args": ({"input": 0}, 1, {"input": 1}), "kwargs": {}},
        ),
        "grid": Problem(
            op="fallback", outputs=(meta(2, 64, 32, 32, dtype="float16"),),
            inputs=(meta(2, 64, 32, 32, dtype="float16"), meta(2, 32, 32, 2, dtype="float16")),
            attrs={"target": "aten::grid_sampler_2d", "kwargs": {},
                   "args": ({"input": 0}, {"input": 1}, 0, 0, False)},
        ),
        "regions": Problem(
            op="pyramid_roi_align", outputs=(meta(1, 100, 256, 7, 7, dtype="float16"),),
            inputs=(meta(1, 1344, 256, dtype="float16"), meta(1, 100, 4),
                    meta(1, 100, dtype="int64")),
            attrs={"sizes": (32, 32, 16, 16, 8, 8), "strides": (4, 8, 16), "side": 7,
                   "samples": 2},
        ),
        "padded": Problem(
            op="pad", inputs=(meta(8, 64, 32, 32, dtype="float16", format=LAST),),
            outputs=(meta(8, 64, 33, 33, dtype="float16", format=LAST),),
            attrs={"pad": (0, 1, 0, 1), "mode": "constant", "value": 0.0},
        ),
        "joined": Problem(
            op="cat", attrs={"dim": 1},
            inputs=tuple(meta(8, c, 32, 32, dtype="float16", format=LAST) for c in (64, 32)),
            outputs=(meta(8, 96, 32, 32, dtype="float16", format=LAST),),
        ),
        "resized": Problem(
            op="interpolate", inputs=(meta(8, 64, 32, 32, dtype="float16", format=LAST),),
            outputs=(meta(8, 64, 64, 64, dtype="float16", format=LAST),),
            attrs={"size": (64, 64), "scale_factor": None, "mode": "bilinear",
                   "align_corners": False, "antialias": False},
        ),
        "image": Problem(
            op="image_to_tensor", inputs=(pixels,), attrs=scaling,
            outputs=(meta(8, 3, 224, 224, dtype="float16", format=LAST),),
        ),
    }  # fmt: skip


IN_FULL = "sm_80"  # the others, whose smallest tiles are these, have the first configurations alone
# what the first problem of a kernel does not meet: other types of products
BESIDES = {
    "conv tf32": "conv2d.implicit_gemm",
    "conv int8": "conv2d.implicit_gemm",
    "conv depthwise": "conv2d.direct",
    "first, pooled": "conv2d_pool.direct.sm80",
    "linear bfloat16": "linear.tiled",
    "linear fp8": "linear.tiled",
}


Asked = tuple[str, Kernel, list[Config]]


def portable(target: str) -> list[Kernel]:
    """The kernels that are for any GPU which has what they need."""
    operations = {problem.op for problem in problems().values()}
    ours = (k for k in catalog.KERNELS if k.source == "tessella" and "gpu" in k.targets)
    return [k for k in ours if "wgmma" not in k.needs and k.runs_on(target) and k.op in operations]


def taken(row: Kernel) -> Iterator[str]:
    """The names of the problems that a kernel takes."""
    return (n for n, p in problems().items() if p.op == row.op and not row.refusal(p))


def every_case(target: str) -> Iterator[Asked]:
    """Every kernel with every problem that it takes, its first and its smallest configuration."""
    with aimed_at(target):
        for row in portable(target):
            for name in taken(row):
                yield name, row, ends(row, problems()[name])


def cases(target: str) -> Iterator[Asked]:
    """The name of a problem, a kernel of each module that takes it, and its configurations."""
    with aimed_at(target):
        for row in {row.module: row for row in reversed(portable(target))}.values():
            for name in itertools.islice(taken(row), 1):
                yield name, row, ends(row, problems()[name])[: 2 if target == IN_FULL else 1]
        for name, kernel in BESIDES.items():
            row, problem = catalog.kernel(kernel), problems()[name]
            if not row.refusal(problem):
                yield name, row, [row.configs(problem)[0]]


def ends(row: Kernel, problem: Problem) -> list[Config]:
    """The first configuration, and the one of the smallest numbers."""
    found = row.configs(problem)
    least = min(found, key=lambda c: math.prod(v for v in c.values() if isinstance(v, int) and v))
    return [found[0]] if least == found[0] else [found[0], least]


def compiled(target: str, problem: str, kernel: str, configs: list[Config]) -> dict[str, Launches]:
    """By case: what each launch takes from a multiprocessor, or why there is none; in a worker.

    One does all configurations, as they share kernels: it compiles these once.
    """
    return {
        f"{problem}|{kernel}|{config}": resources(target, problem, kernel, config)
        for config in configs
    }


def resources(target: str, problem: str, kernel: str, config: Config) -> Launches:
    try:
        with compiling(target) as launches, collecting(target) as made:
            launch_without_memory(catalog.kernel(kernel), problems()[problem], config)
    except Exception as error:  # told to the test that asks
        return f"{type(error).__name__}: {str(error)[-500:]}"
    is_complete = not made.left_out and made.compiled.wrong(target) is None
    return [
        {
            **asdict(one.resources()),
            "is_complete": is_complete,
            "faults": [*overwritten(one), *left_valid(one)],
        }
        for one in launches
    ]


@functools.cache
def results(*told: str) -> dict[str, dict[str, Launches]]:
    """By target, and by problem, kernel and configuration.

    Args:
        told: ``--all``, for every case, and targets, if not for all but Hopper's.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-m", "tests.support.kernels.for_targets", *told]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    told = sys.argv[1:]
    # Hopper's own tests compile for it
    targets = [t for t in GPU_TARGETS if (t in told if told[1:] else t != "sm_90")]
    context = get_context("forkserver")
    context.set_forkserver_preload(["triton.compiler", __spec__.name])
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as workers:
        asked = [
            (target, workers.submit(compiled, target, name, row.id, configs))
            for target in targets
            for name, row, configs in (every_case if "--all" in told else cases)(target)
        ]
        found: dict[str, dict[str, Launches]] = {}
        for target, future in asked:
            found.setdefault(target, {}).update(future.result())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
