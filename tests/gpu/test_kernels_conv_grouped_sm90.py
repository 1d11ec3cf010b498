"""The Hopper convolution of several groups on a GPU: exact on small integers, close on others."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tessella.kernels import catalog
from tessella.kernels.conv.hopper import implicit_gemm as kernel
from tessella.search.buffers import POISON, whole, wrote_beside
from tests.support.problems import convolutions
from tests.support.problems.convolutions import Case

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

ROW = catalog.kernel("conv2d.implicit_gemm.sm90")
LAST = "channels_last"


def case_of(
    groups: int,
    group_c: int,
    group_k: int | None = None,
    *,
    N: int = 3,
    size: tuple[int, int] = (13, 17),
    taps: tuple[int, int] = (3, 3),
    **more: Any,
) -> Case:
    return Case(
        x=(N, groups * group_c, *size),
        w=(groups * (group_k or group_c), group_c, *taps),
        groups=groups,
        **{"padding": 1, "dtype": "float16", "x_format": LAST, "w_format": LAST, **more},
    )


EPILOGUE: dict[str, Any] = {"bias": "float32", "residual": True, "activation": "relu"}
CASES = {
    "2": case_of(40, 2),
    "4": case_of(32, 4, N=5, size=(23, 19)),
    "8, stride 2": case_of(32, 8, stride=2),
    "16": case_of(32, 16, N=2, size=(14, 14)),
    "32": case_of(32, 32, N=9, size=(7, 7)),
    "64": case_of(4, 64),
    "24": case_of(10, 24, size=(28, 28)),
    "40": case_of(14, 40, N=2),
    "112": case_of(8, 112, N=1, size=(9, 9)),
    "20": case_of(12, 20),
    "12 to 20, 5 × 5": case_of(4, 12, 20, taps=(5, 5), padding=2),
    "128 to 16": case_of(2, 128, 16, stride=(2, 1)),
    "8 to 48, dilation": case_of(4, 8, 48, dilation=2, padding=2),
    "1 × 1": case_of(8, 48, taps=(1, 1), padding=0),
    "1 × 7": case_of(6, 16, taps=(1, 7), padding=(0, 3)),
    "one image, split sums": case_of(2, 512, N=1, size=(7, 7)),
    "many tiles of a block": case_of(32, 4, N=33, size=(56, 56)),
}
check = functools.partial(convolutions.check, ROW, device="cuda")


def kinds(case: Case) -> list[dict[str, Any]]:
    """The best configuration of each way to work, weights that stay and taps among them."""
    found: dict[Any, dict[str, Any]] = {}
    for config in kernel.configs(case.problem):
        kind = tuple(config[key] for key in ("groups", "warps", "residents", "taps", "swap"))
        found.setdefault((*kind, config["tile_k"], "held" in config), config)
    return list(found.values())[:8]


@pytest.mark.parametrize("name", CASES)
def test_exact_on_small_integers(name: str) -> None:
    case = replace(CASES[name], out="float32", bias="float32")
    assert kernel.fits(case.problem) is None
    for config in kinds(case):
        check(case, config, integers=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_epilogues_on_random_numbers(name: str, dtype: str) -> None:
    case = replace(CASES[name], dtype=dtype, **EPILOGUE)
    for config in kernel.configs(case.problem)[:2]:
        check(case, config)


@pytest.mark.parametrize("name", ["16", "32", "40", "112", "1 × 7", "one image, split sums"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float32"])
def test_other_types(name: str, dtype: str) -> None:
    case = replace(
        CASES[name], dtype=dtype, out="int8" if dtype == "int8" else "float32", math="tf32",
        scale=dtype == "int8", **EPILOGUE,
    )  # fmt: skip
    assert kernel.fits(case.problem) is None
    for config in kinds(case)[:4]:
        check(case, config, integers=True)


def test_weights_that_stay_where_there_is_one_group() -> None:
    """Not proposed, but it works."""
    case = case_of(1, 64, N=9, size=(28, 28), out="float32", **EPILOGUE)
    tried = 0
    for config in kernel.configs(case.problem):
        fits = config["tile_k"] <= 64 and config["splits"] == 1 and config["residents"] == 1
        if fits and config["tile_n"] * config["tile_h"] * config["tile_w"] <= 128:
            check(case, {**config, "held": True, "stages": 2, "slots": 1}, integers=True)
            tried += 1
    assert tried


def test_slices_of_channels_in_and_out() -> None:
    case = replace(CASES["40"], bias="float32", activation="relu")
    problem = case.problem
    metas = []
    for meta, more in ((problem.inputs[0], 32), (problem.output, 80)):
        n, c, *sizes = meta.shape
        metas.append(dataclasses.replace(meta, shape=(n, c + more, *sizes)).part(1, c))
    problem = replace(problem, inputs=(metas[0], *problem.inputs[1:]), outputs=(metas[1],))
    assert ROW.refusal(problem) is None
    drawn = convolutions.draw(case, "cuda", integers=True)
    x = metas[0].empty(drawn[0].device)
    whole(x).fill_(float("nan"))  # of other layers: nobody may multiply them, even by zero
    x.copy_(drawn[0])
    right = convolutions.right(case, drawn)
    for config in kernel.configs(problem)[::3]:
        out = metas[1].empty(x.device)
        whole(out).fill_(POISON)
        space = torch.empty(ROW.workspace_bytes(problem, config), dtype=torch.uint8, device="cuda")
        kernel.bind(problem, {1: drawn[1]}, **config)(x, drawn[2], out=out, workspace=space)
        assert torch.equal(out, right.half()), config
        assert not wrote_beside(out)


def test_the_same_bits_every_time_and_in_a_graph() -> None:
    case = CASES["many tiles of a block"]
    x, weight = convolutions.draw(case, "cuda")[:2]
    expected = F.conv2d(x.double(), weight.double(), None, 1, 1, 1, case.groups)
    for config in kinds(case)[:4]:
        call = kernel.bind(case.problem, {1: weight}, **config)
        out = case.problem.output.empty(x.device)
        call(x, out=out)
        first = out.clone()
        error = (first.double() - expected).abs().max() / expected.abs().max()
        assert float(error) <= convolutions.TOLERANCES["float16"]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):  # the next one's weights are on their way while one runs
                call(x, out=out)
        for _ in range(5):
            out.zero_()
            graph.replay()
            assert torch.equal(out, first), config
