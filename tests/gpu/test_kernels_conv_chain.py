"""Two 1 × 1 convolutions in one kernel on a GPU: right in every configuration, and faster."""

from __future__ import annotations

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
from tessella.kernels.catalog import Call
from tessella.kernels.conv.hopper import chain as kernel
from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search import find as search
from tessella.search.buffers import POISON
from tessella.search.timing import measure
from tessella.search.tuning import Trial
from tests.support.networks import ABOUT
from tests.support.problems.chains import exact, operands_of, problem_of

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

GPU = torch.device("cuda")
Tensors = dict[int, torch.Tensor]
ROW = "conv2d_chain.back_to_back.sm90"
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}

# channels, N, size: of ResNet-50 and of no network; most end within a tile, a chunk, a box
SHAPES = (
    ((64, 256, 64), 3, (56, 56)),
    ((64, 256, 128), 1, (55, 53)),
    ((128, 512, 128), 5, (28, 28)),
    ((256, 1024, 256), 3, (14, 14)),
    ((32, 176, 80), 3, (7, 9)),
    ((96, 64, 16), 1, (1, 1)),
    ((16, 1008, 48), 2, (5, 3)),
)


def ran(problem: Problem, operands: Tensors, config: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """On poisoned results: what a kernel leaves unwritten must show."""
    rest = {i: t for i, t in operands.items() if i not in problem.constant}
    constants = {i: operands[i] for i in problem.constant}
    empty = TensorMeta.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorMeta, "empty", lambda meta, device: empty(meta, device).fill_(POISON))
        made = kernel.bind(problem, constants, **config)(*rest.values())
    return made if isinstance(made, tuple) else (made,)


def on_gpu(problem: Problem, seed: int) -> Tensors:
    return {i: t.to(GPU) for i, t in operands_of(problem, seed).items()}


def assert_right(problem: Problem, configs: Any = None, seed: int = 0) -> None:
    assert kernel.fits(problem) is None
    operands = on_gpu(problem, seed)
    right = exact(problem, operands)
    for config in configs or kernel.configs(problem):
        for made, wanted in zip(ran(problem, operands, config), right, strict=True):
            error = (made.double() - wanted).abs().max()
            if made.dtype == torch.int8:
                assert error == 0, config
            else:
                most = TOLERANCE[problem.outputs[0].dtype] * wanted.abs().max()
                assert error <= most, (config, float(error), float(most))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_every_configuration(shape: tuple[Any, ...], dtype: str) -> None:
    channels, n, size = shape
    assert_right(problem_of(dtype, channels, N=n, size=size, beta=0.5))


@pytest.mark.parametrize("dtype", kernel.TYPES)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_with_and_without_residual_and_what_is_between(
    dtype: str, residual: bool, keep: bool
) -> None:
    for channels, n, size in (SHAPES[0], SHAPES[4]):
        problem = problem_of(dtype, channels, N=n, size=size, residual=residual, keep=keep)
        assert_right(problem, kernel.configs(problem)[:2])


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_activations(activation: str | None) -> None:
    problem = problem_of(activation=activation, N=2)
    assert_right(problem, kernel.configs(problem)[:1])


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_many_tiles_a_block_give_the_same_bits_again(dtype: str) -> None:
    problem = problem_of(dtype, N=67, size=(56, 56))
    operands = on_gpu(problem, 1)
    for config in kernel.configs(problem)[:4]:
        first = ran(problem, operands, config)
        for _ in range(10):
            again = ran(problem, operands, config)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), config
    assert_right(problem, kernel.configs(problem)[:1], seed=1)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_wide_results_of_many_tiles_a_block(dtype: str) -> None:
    """Pieces of several tiles are on their way out at once."""
    assert_right(problem_of(dtype, (128, 512, 256), N=64, size=(28, 28)))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_is_faster_than_two_kernels_where_memory_binds(dtype: str) -> None:
    problem = problem_of(dtype, N=128, size=(56, 56))
    operands = on_gpu(problem, 0)
    x, w, b, r, s, v, c, t = problem.inputs
    constant = (1, 2) if s is None else (1, 2, 4)
    rest = {"constant": constant, "activation": "relu"}
    first = problems.conv(x, w, b, r, s, **rest)
    second = problems.conv(problem.outputs[1], v, c, None, t, **rest)
    whole = best(problem, {i: operands[i] for i in problem.constant}, algorithms=("back_to_back",))
    one = best(first, {i: operands[i] for i in constant})
    two = best(second, {i: operands[{1: 5, 2: 6, 4: 7}[i]] for i in constant})
    images, residual = operands[0], operands[3]
    timings = measure(
        {"chained": lambda: whole(images, residual), "apart": lambda: two(one(images, residual))},
        device=GPU,
        budget_s=0.1,
    )
    times = {name: round(timing.time_us, 1) for name, timing in timings.items()}
    print(dtype, times)
    assert times["chained"] < times["apart"], times


def best(problem: Problem, constants: Tensors, **options: Any) -> Call:
    """The fastest kernel for a problem, bound, after a run."""
    trial = search.find(
        problem, constants, target="sm_90", options=search.SearchOptions(**options)
    )[0]
    row = catalog.kernel(trial.kernel)
    call, buffers = search.bind(row, problem, constants, GPU, trial.config)
    return lambda *inputs: call(*inputs, **buffers)


class Bottlenecks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reduce = nn.ModuleList(nn.Conv2d(64, 16, 1) for _ in range(2))
        self.expand = nn.ModuleList(nn.Conv2d(16, 64, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for reduce, expand in zip(self.reduce, self.expand, strict=True):
            x = torch.relu(expand(torch.relu(reduce(x))) + x)
        return x.mean((2, 3))


def test_a_plan_with_chains_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The race is decided here: what is asked is whether such a plan computes what it should."""
    monkeypatch.setattr(race, "times_us", lambda programs, *_, **__: [2.0, 1.0][: len(programs)])
    measured = fuse_chains.trials

    def winning(*args: Any, **named: Any) -> tuple[Trial, ...]:
        return tuple(replace(trial, time_us=0.0) for trial in measured(*args, **named))

    monkeypatch.setattr(fuse_chains, "trials", winning)
    batch = DimRange(min=1, opt=4, max=4)
    spec = TensorSpec(name="image", dtype="float32", shape=(batch, 64, 20, 20))
    module = Bottlenecks().eval()
    plan = compiler.compile_graph(
        capture(module, (spec,)), target="sm_90", batch=batch, precision="fp16", about=ABOUT,
        measuring=compiler.Measuring(budget_s=0.005),
    )  # fmt: skip
    assert ROW in {s.kernel for s in plan.program.buckets[-1].steps}
    engine = runtime.load(plan)
    x = torch.randn(3, 64, 20, 20)
    (made,) = engine(x).values()
    with torch.no_grad():
        right = module.double()(x.double())
    assert (made.double().cpu() - right).abs().max() <= 1e-2 * right.abs().max()
