"""The Hopper convolution on a GPU: right on random and on exact inputs, in every configuration."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tessella.kernels.conv.hopper import implicit_gemm as kernel
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.buffers import POISON, whole, wrote_beside

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

# element type of the result → largest error over the largest value
TOLERANCE = {
    "float32": 3e-3, "float16": 2e-3, "bfloat16": 1.2e-2, "float8_e4m3fn": 8e-2,
    "float8_e5m2": 0.15,
}  # fmt: skip

# N, C, H, W, K, R, S, stride, padding, dilation
SHAPES = (
    (2, 64, 56, 56, 64, 3, 3, (1, 1), (1, 1), (1, 1)),
    (3, 32, 13, 17, 48, 3, 3, (2, 2), (1, 1), (1, 1)),
    (1, 128, 7, 7, 96, 3, 3, (1, 1), (1, 1), (1, 1)),
    (5, 48, 9, 8, 80, 5, 3, (2, 1), (2, 0), (1, 1)),
    (2, 64, 14, 14, 32, 3, 3, (1, 1), (2, 2), (2, 2)),
    (2, 16, 11, 30, 16, 1, 7, (1, 2), (0, 3), (1, 1)),
    (1, 80, 12, 12, 272, 1, 1, (1, 1), (0, 0), (1, 1)),
    (7, 64, 15, 15, 128, 1, 1, (2, 2), (0, 0), (1, 1)),
    (2, 32, 5, 5, 64, 3, 3, (1, 1), (4, 4), (1, 1)),
    (1, 512, 7, 7, 512, 3, 3, (1, 1), (1, 1), (1, 1)),
    (130, 64, 1, 1, 64, 1, 1, (1, 1), (0, 0), (1, 1)),
    (1, 64, 1, 3, 64, 3, 3, (2, 2), (4, 3), (4, 3)),
)


def problem_of(
    shape: tuple[Any, ...],
    dtype: str,
    out: str,
    *,
    bias: bool = True,
    residual: bool = False,
    scale: bool = False,
    constant: tuple[int, ...] = (1, 2, 4),
    weight_format: Any = "channels_last",
    **attrs: Any,
) -> Problem:
    N, C, H, W, K, R, S, stride, padding, dilation = shape
    P, Q = (
        (n + 2 * p - d * (f - 1) - 1) // s + 1
        for n, f, s, p, d in zip((H, W), (R, S), stride, padding, dilation, strict=True)
    )
    y = TensorMeta(shape=(N, K, P, Q), dtype=out, format="channels_last")
    vector = TensorMeta(shape=(K,), dtype="float32")
    return Problem(
        op="conv2d",
        inputs=(
            TensorMeta(shape=(N, C, H, W), dtype=dtype, format="channels_last"),
            TensorMeta(shape=(K, C, R, S), dtype=dtype, format=weight_format),
            vector if bias else None,
            y if residual else None,
            vector if scale else None,
        ),
        outputs=(y,),
        attrs={"stride": stride, "padding": padding, "dilation": dilation, "groups": 1, **attrs},
        constant=constant,
        math="tf32",
    )


def inputs_of(problem: Problem, *, exact: bool, seed: int = 0) -> list[torch.Tensor | None]:
    """Random operands; exact ones are small integers whose sums every type here holds."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def sample(meta: TensorMeta | None, size: float) -> torch.Tensor | None:
        if meta is None:
            return None
        values = torch.randn(meta.shape, generator=generator, device="cuda") * size
        if exact or meta.dtype == "int8":
            values = values.round()
        if exact:  # mostly zeros, so that sums stay small
            keep = torch.rand(meta.shape, generator=generator, device="cuda") < 0.1
            values = values.clamp(-2, 2) * keep
        made = values.clamp(-127, 127).to(getattr(torch, meta.dtype))
        if meta.strides is not None:
            return meta.empty(made.device).copy_(made)
        return made.contiguous(
            memory_format=torch.channels_last
            if meta.format == "channels_last"
            else torch.contiguous_format
        )

    integers = problem.inputs[0].dtype == "int8"
    fan = math.prod(problem.inputs[1].shape[1:])
    made = [
        sample(problem.meta(0), 20 if integers else 1),
        sample(problem.meta(1), 20 if integers else 1 if exact else fan**-0.5),
        sample(problem.meta(2), 1),
        sample(problem.meta(3), 20 if problem.output.dtype == "int8" else 1),
        None,
    ]
    if integers and made[2] is not None:
        made[2] = (made[2] * 8).round() / 4  # far from where rounding would turn
    if problem.meta(4) is not None:  # powers of two: scaling does not round
        K = problem.output.shape[1]
        power = -round(math.log2(400 * fan**0.5 / 40)) if integers and not exact else 0
        steps = torch.randint(-1, 2, (K,), generator=generator, device="cuda")
        made[4] = torch.exp2((steps + power).float())
    return made


def reference(problem: Problem, operands: list[torch.Tensor | None]) -> torch.Tensor:
    """In float64; int8 is limited, but not rounded."""
    x, weight, bias, residual, scale = (None if t is None else t.double() for t in operands)
    a = problem.attrs
    y = F.conv2d(x, weight, None, a["stride"], a["padding"], a["dilation"])
    y = y * problem.attr("alpha")
    if scale is not None:
        y = y * scale.view(1, -1, 1, 1)
    if bias is not None:
        y = y + bias.view(1, -1, 1, 1)
    if residual is not None:
        y = y + problem.attr("beta") * residual
    if problem.attr("activation"):
        y = ACTIVATIONS[problem.attr("activation")](y)
    if problem.output.dtype == "int8":
        y = y.clamp(-128, 127)
    return y


def run(problem: Problem, operands: list[torch.Tensor | None], config: dict[str, Any]) -> Any:
    constants = {i: operands[i] for i in problem.constant if operands[i] is not None}
    call = kernel.bind(problem, constants, **config)
    size = kernel.workspace_bytes(problem, **config)
    guard = 64
    workspace = torch.full((size + guard,), 0x7F, dtype=torch.uint8, device="cuda")
    out = problem.output.empty(torch.device("cuda"))
    out.view(torch.uint8).fill_(0x7F) if out.element_size() == 1 else out.fill_(77)
    rest = [t for i, t in enumerate(operands) if t is not None and i not in constants]
    if problem.output.strides is not None:
        whole(out).fill_(POISON)
    call(*rest, out=out, workspace=workspace)
    assert (workspace[size:] == 0x7F).all()
    assert problem.output.strides is None or not wrote_beside(out)
    return out


def assert_right(problem: Problem, *, exact: bool, configs: Any = None) -> None:
    assert kernel.fits(problem) is None
    operands = inputs_of(problem, exact=exact)
    right = reference(problem, operands)
    for config in configs or kernel.configs(problem):
        made = run(problem, operands, config).double()
        if problem.output.dtype == "int8" and not exact:
            off = float((made - right).abs().max())  # ``quantize_sums`` may be off by 0.02
            assert off <= 0.52, (config, off)
        elif exact or problem.output.dtype == "int32":
            rounded = right.round() if problem.output.dtype == "int8" else right
            assert torch.equal(made, rounded), (config, float((made - rounded).abs().max()))
        else:
            error = float((made - right).abs().max() / right.abs().max())
            assert error <= TOLERANCE[problem.output.dtype], (config, error)


def assert_first(problem: Problem, *, exact: bool) -> None:
    assert_right(problem, exact=exact, configs=kernel.configs(problem)[:1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_every_fourth_configuration(shape: tuple[Any, ...], dtype: str) -> None:
    problem = problem_of(
        shape, dtype, dtype, residual=True, scale=dtype == "int8", activation="relu"
    )
    assert_right(problem, exact=False, configs=kernel.configs(problem)[::4])


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_on_small_integers(shape: tuple[Any, ...]) -> None:
    for dtype in ("float16", "bfloat16"):
        assert_first(problem_of(shape, dtype, "float32", residual=True), exact=True)
    assert_first(problem_of(shape, "float8_e4m3fn", "float32"), exact=True)
    assert_first(problem_of(shape, "int8", "int32", bias=False), exact=False)


@pytest.mark.parametrize(
    ("dtype", "out"),
    [(d, o) for d, outs in kernel.OUTPUTS.items() for o in outs if (d, o) != ("int8", "int32")],
)
def test_every_pair_of_types(dtype: str, out: str) -> None:
    for fast in (False, True):
        problem = problem_of(
            SHAPES[1], dtype, out, residual=True, scale=True, fast_accumulation=fast, alpha=0.5,
            beta=2.0,
        )  # fmt: skip
        assert_right(problem, exact=False, configs=kernel.configs(problem)[:1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_slices_of_channels_in_and_out(shape: tuple[Any, ...], dtype: str) -> None:
    """Whole sums and split ones, of a part of a tensor's channels, into a part of another's."""
    problem = problem_of(shape, dtype, dtype, scale=dtype == "int8", activation="relu")
    metas = []
    for meta, more in ((problem.inputs[0], 32), (problem.output, 80)):
        n, c, *sizes = meta.shape
        metas.append(dataclasses.replace(meta, shape=(n, c + more, *sizes)).part(1, c))
    problem = dataclasses.replace(
        problem, inputs=(metas[0], *problem.inputs[1:]), outputs=(metas[1],)
    )
    configs = kernel.configs(problem)
    split = [config for config in configs if config["splits"] > 1]
    assert_right(problem, exact=False, configs=[*configs[:1], *split[:1]])


@pytest.mark.parametrize("x_value", [-128, 127])
def test_the_largest_sums_that_are_converted_by_addition(x_value: int) -> None:
    """256 products of -128 by -128 make 2^22, of 127 by -128 nearly -2^22."""
    shape = (1, 256, 8, 8, 64, 1, 1, (1, 1), (0, 0), (1, 1))
    problem = problem_of(shape, "int8", "int8", bias=False, scale=True, residual=True)
    operands = inputs_of(problem, exact=False)
    operands[0].fill_(x_value)
    operands[1].fill_(-128)
    operands[4].fill_(2.0**-16)
    made = run(problem, operands, kernel.configs(problem)[0]).double()
    assert torch.equal(made, reference(problem, operands).round())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str) -> None:
    problem = problem_of(SHAPES[0], "float16", "float16", residual=True, activation=activation)
    assert_right(problem, exact=False, configs=kernel.configs(problem)[:1])


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[3], SHAPES[9]])
@pytest.mark.parametrize("weight_format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("constant", [(), (1, 2, 4)])
def test_weights_given_or_known(
    shape: tuple[Any, ...], weight_format: str, constant: tuple[int, ...]
) -> None:
    for dtype in ("float16", "int8"):
        problem = problem_of(
            shape, dtype, dtype, scale=True, weight_format=weight_format, constant=constant
        )
        assert_right(problem, exact=False, configs=kernel.configs(problem)[:2])


def test_the_same_bits_every_time() -> None:
    problem = problem_of(SHAPES[9], "float16", "float16", residual=True)
    config = next(c for c in kernel.configs(problem) if c["splits"] > 1)
    operands = inputs_of(problem, exact=False)
    first = run(problem, operands, config)
    assert all(torch.equal(first, run(problem, operands, config)) for _ in range(10))


def test_runs_in_a_graph() -> None:
    problem = problem_of(SHAPES[0], "float16", "float16")
    operands = inputs_of(problem, exact=False)
    constants = {i: operands[i] for i in problem.constant if operands[i] is not None}
    call = kernel.bind(problem, constants, **kernel.configs(problem)[0])
    out = problem.output.empty(torch.device("cuda"))
    call(operands[0], out=out)
    right = out.clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call(operands[0], out=out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, right)


def test_sizes_of_odd_kinds() -> None:
    """Every small size of image against every small filter, dilation and stride."""
    for H, R, stride, dilation, pad in itertools.product(
        (1, 2, 3, 8), (1, 2, 3), (1, 2), (1, 2), (0, 1, 2)
    ):
        if H + 2 * pad < dilation * (R - 1) + 1:
            continue
        shape = (3, 16, H, H + 1, 32, R, R, (stride, stride), (pad, pad), (dilation, dilation))
        problem = problem_of(shape, "float16", "float16")
        empty = H == 1 and stride == 2 and (pad % 2 or (dilation == 1 and R > 1))
        assert (kernel.fits(problem) is not None) == bool(empty)
        if not empty:
            assert_right(problem, exact=False, configs=kernel.configs(problem)[:1])
