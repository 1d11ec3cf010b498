"""A first layer and its pooling as one kernel on a GPU: right, repeatable, and faster than two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tessella import compiler, runtime
from tessella.compiler.choices import fuse_chains, race
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture
from tessella.kernels import catalog
from tessella.kernels.conv.hopper import pooled as kernel
from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.search import find as search
from tessella.search.buffers import POISON
from tessella.search.timing import measure
from tessella.search.tuning import Trial
from tests.support.networks import ABOUT
from tests.support.problems.pooled_convolutions import (
    GOOGLENET,
    SQUEEZENET,
    Tensors,
    operands_of,
    problem_of,
    right,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

GPU = torch.device("cuda")
ROW = "conv2d_pool.direct.sm90"
RESNET: dict[str, Any] = {"N": 128}

# size, how it differs from ResNet's first layer, rows of a band: sums of whole numbers are exact
EXACT: dict[str, tuple[tuple[int, int], dict[str, Any], int]] = {
    "ResNet": ((224, 224), {"N": 9}, 19),
    "GoogLeNet, int8": ((224, 224), {"N": 3, "out": "int8", "gamma": 0.25, **GOOGLENET}, 5),
    "SqueezeNet": ((224, 224), {"N": 5, **SQUEEZENET}, 56),
    "bfloat16, many bands a block": (
        (96, 160),
        {"N": 67, "dtype": "bfloat16", "out": "int8", "gamma": 0.5, "activation": None},
        1,
    ),
    "over the edge": ((24, 48), {"N": 2, "ceil_mode": True, "bias": "float16"}, 4),
    "one channel": ((28, 32), {"N": 33, "channels": 1, "taps": 5, "padding": 2, "bias": None}, 3),
}


def on_gpu(operands: Tensors) -> Tensors:
    return {i: t.to(GPU) for i, t in operands.items()}


def ran(problem: Problem, operands: Tensors, **config: int) -> torch.Tensor:
    """Into a poisoned result: what a kernel leaves unwritten must show."""
    assert kernel.fits(problem) is None
    constants = {i: operands[i] for i in problem.constant}
    rest = [t for i, t in operands.items() if i not in problem.constant]
    out = problem.output.empty(GPU).fill_(POISON)
    return kernel.bind(problem, constants, **config)(*rest, out=out)


def drawn(problem: Problem, seed: int = 0) -> Tensors:
    """Random numbers of about the size that a network has."""
    torch.manual_seed(seed)
    made = on_gpu(operands_of(problem, seed))
    return {i: (torch.randn_like(t.float()) / (1, 12, 4)[i]).to(t.dtype) for i, t in made.items()}


@pytest.mark.parametrize("name", EXACT)
def test_whole_numbers_are_exact(name: str) -> None:
    size, change, rows = EXACT[name]
    problem = problem_of(size, **change)
    operands = on_gpu(operands_of(problem, 0))
    assert torch.equal(ran(problem, operands, rows=rows), right(problem, operands))


@pytest.mark.parametrize("out", ["float16", "int8"])
def test_every_configuration_at_full_size(out: str) -> None:
    gamma = 40.0 if out == "int8" else 1.0
    problem = problem_of(N=16, out=out if out == "int8" else None, gamma=gamma)
    operands = drawn(problem)
    wanted = right(problem, operands).double()
    for config in kernel.configs(problem):
        error = (ran(problem, operands, **config).double() - wanted).abs()
        if out == "int8":  # ties fall either way by a sum's last bit
            assert error.max() <= 1
            assert (error > 0).double().mean() < 1e-3, config
        else:
            assert error.max() <= 1e-3 * wanted.abs().max(), config


def test_the_same_bits_again() -> None:
    problem = problem_of(out="int8", gamma=40.0, **RESNET)
    operands = drawn(problem)
    config = kernel.configs(problem)[0]
    first = ran(problem, operands, **config)
    assert all(torch.equal(first, ran(problem, operands, **config)) for _ in range(10))


def test_no_number_stays_one() -> None:
    problem = problem_of((64, 64), N=1, activation=None)
    operands = drawn(problem)
    operands[0][0, 0, 20, 20], operands[0][0, 2, 3, 6] = torch.nan, torch.inf
    made, wanted = ran(problem, operands, rows=3), right(problem, operands)
    assert wanted.isnan().any()
    assert torch.equal(made.isfinite(), wanted.isfinite())


@pytest.mark.parametrize("out", ["float16", "int8"])
def test_is_faster_than_two_kernels(out: str) -> None:
    problem = problem_of(
        bias="float16", out=out if out == "int8" else None, gamma=40.0 if out == "int8" else 1.0,
        **RESNET,
    )  # fmt: skip
    operands = drawn(problem)
    constants = {i: operands[i] for i in problem.constant}
    first, pool = apart(problem)
    one, two = best(first, constants), best(pool, {})
    whole = best(problem, constants, algorithms=("direct",))
    x = operands[0]
    timings = measure(
        {"one": lambda: whole(x), "apart": lambda: two(one(x))}, device=GPU, budget_s=0.1
    )
    times = {name: round(timing.time_us, 1) for name, timing in timings.items()}
    print(out, times)
    assert times["one"] < times["apart"], times


def apart(problem: Problem) -> tuple[Problem, Problem]:
    """The convolution and the pooling."""
    pooling = {name: problem.attrs[called] for name, called in problems.POOLED.items()}
    rest = {n: v for n, v in problem.attrs.items() if n not in problems.POOLED.values()}
    between = replace(problem.output, shape=(problem.inputs[0].shape[0], 64, 112, 112))
    first = replace(problem, op="conv2d", outputs=(between,), attrs=rest)
    return first, Problem(
        op="max_pool2d", inputs=(between,), outputs=problem.outputs, attrs=pooling
    )


def best(problem: Problem, constants: Tensors, **options: Any) -> Callable[..., torch.Tensor]:
    """The fastest kernel for a problem, bound."""
    trial = search.find(
        problem, constants, target="sm_90", options=search.SearchOptions(**options)
    )[0]
    row = catalog.kernel(trial.kernel)
    call, buffers = search.bind(row, problem, constants, GPU, trial.config)
    return lambda *inputs: call(*inputs, **buffers)


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.BatchNorm2d(64)
        self.pool, self.then = nn.MaxPool2d(3, 2, 1), nn.Conv2d(64, 32, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.pool(torch.relu(self.norm(self.first(x))))).mean((2, 3))


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_plan_with_it_runs(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race is decided here: what is asked is whether such a plan computes what it should."""
    monkeypatch.setattr(race, "times_us", lambda programs, *_, **__: [2.0, 1.0][: len(programs)])
    measured = fuse_chains.trials
    row = catalog.kernel(ROW)
    monkeypatch.setattr(fuse_chains, "kernels", lambda op, _: [row] if op == row.op else [])

    def winning(*args: Any, **named: Any) -> tuple[Trial, ...]:
        return tuple(replace(trial, time_us=0.0) for trial in measured(*args, **named))

    monkeypatch.setattr(fuse_chains, "trials", winning)
    admitted = search._admitted
    monkeypatch.setattr(
        search, "_admitted", lambda p, *a: [row] if p.op == row.op else admitted(p, *a)
    )
    batch = DimRange(min=1, opt=4, max=4)
    spec = TensorSpec(name="image", dtype="float32", shape=(batch, 3, 64, 64))
    module = Stem().eval()
    graph = capture(module, (spec,))
    images = [{"image": torch.randn(4, 3, 64, 64)} for _ in range(2)]
    found = compiler.calibrate(graph, images, kinds=("int8",)) if precision == "int8" else None
    plan = compiler.compile_graph(
        graph, target="sm_90", batch=batch, precision=precision, calibration=found, about=ABOUT,
        measuring=compiler.Measuring(budget_s=0.005),
    )  # fmt: skip
    assert ROW in {s.kernel for s in plan.program.buckets[-1].steps}
    engine = runtime.load(plan)
    x = torch.randn(3, 3, 64, 64)
    (made,) = engine(x).values()
    with torch.no_grad():
        wanted = module.double()(x.double())
    most = {"fp16": 1e-2, "int8": 5e-2}[precision] * wanted.abs().max()
    assert (made.double().cpu() - wanted).abs().max() <= most
