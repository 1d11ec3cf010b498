"""quantize, dequantize, int8 pooling and oneDNN's int8 layers, against float64 and integers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tessella.kernels import catalog
from tessella.kernels.shared import onednn
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta, meta_of
from tests.support.problems.quantized import SCALES, every_quantized_value, like

pytestmark = [
    pytest.mark.instructions,
    # lanes beyond the edge compute with zeros, which NumPy, but no GPU, remarks on
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")
CHANNELS_LAST = torch.channels_last


def run(id: str, problem: Problem, constants: dict[int, torch.Tensor], *inputs: torch.Tensor):
    """One kernel's answer, into a poisoned buffer where it writes into one."""
    row = catalog.kernel(id)
    assert row.refusal(problem) is None
    call = row.load().bind(problem, constants, **row.configs(problem)[0])
    if not row.writes_out:
        return call(*inputs)
    out = problem.output.empty(CPU)
    out.fill_(77)
    return call(*inputs, out=out)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """With ties, and what is out of range."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 40
    flat = made.view(-1)
    flat[:8] = torch.tensor([0.25, 0.75, 1.25, -0.25, -0.75, 1e9, -1e9, 0.0])
    return made


def quantized(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


# ── quantize, dequantize ──────────────────────────────────────────────────────────────────────────


QUANTIZE = ["reference", "quantize.aten", "quantize.tiled", "quantize.generated"]
DEQUANTIZE = ["reference", "dequantize.aten", "dequantize.tiled", "dequantize.generated"]


@pytest.mark.parametrize("kernel", QUANTIZE)
@pytest.mark.parametrize("zero", [None, 3, -128])
@pytest.mark.parametrize("shape", [(70,), (2, 20, 3, 3)])
def test_quantize_rounds_half_to_even_and_then_adds_zero(
    kernel: str, zero: int | None, shape: tuple[int, ...]
) -> None:
    x, scale = numbers(*shape), torch.tensor(0.5)
    if len(shape) == 4:
        x = x.contiguous(memory_format=CHANNELS_LAST)
    right = ((x.double() / 0.5).round() + (zero or 0)).clamp(-128, 127)
    constants = {1: scale} | ({} if zero is None else {2: torch.tensor(zero, dtype=torch.int8)})
    problem = Problem(
        op="quantize",
        inputs=(meta_of(x), *(meta_of(c) for c in constants.values())),
        outputs=(like(x, "int8"),),
        attrs={"axis": 0, "dtype": "int8"},
        constant=tuple(constants),
    )
    made = run(kernel, problem, constants, x)
    assert made.dtype == torch.int8
    assert torch.equal(made.double(), right)


@pytest.mark.parametrize("kernel", QUANTIZE)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_quantize_to_fp8_saturates(kernel: str, dtype: str) -> None:
    x, scale = numbers(5000).clamp(-6e4, 6e4).to(getattr(torch, dtype)), torch.tensor(0.5)
    problem = Problem(
        op="quantize",
        inputs=(meta_of(x), meta_of(scale)),
        outputs=(like(x, "float8_e4m3fn"),),
        attrs={"axis": 0, "dtype": "float8_e4m3fn"},
        constant=(1,),
    )
    made = run(kernel, problem, {1: scale}, x).float()
    assert float(made.max()) == 448.0
    exact = (x.float() / 0.5).clamp(-448, 448)
    right = exact.to(torch.float8_e4m3fn).float()
    if kernel in ("quantize.tiled", "quantize.generated"):
        # the interpreter's cast is wrong below the least normal number, for ties, and where
        # rounding carries into the exponent; on a GPU all quantized values are compared
        ties = exact.frexp()[0] * 16 % 1 == 0.5
        carried = (right.frexp()[0].abs() == 0.5) & (right != exact)
        known = ~ties & ~carried & (right.abs() >= 2.0**-6)
        made, right = made[known], right[known]
    assert len(right) > 4000
    assert torch.equal(made, right)


@pytest.mark.parametrize("kernel", ["quantize.tiled", "quantize.generated"])
@pytest.mark.parametrize("scale", SCALES)
def test_every_code(kernel: str, scale: float) -> None:
    every_quantized_value(kernel, "int8", scale, CPU)


@pytest.mark.parametrize("kernel", DEQUANTIZE)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("small", ["int8", "float8_e4m3fn"])
def test_dequantize(kernel: str, dtype: str, small: str) -> None:
    q = quantized(300).clamp(-127).to(getattr(torch, small))
    scale = torch.tensor(0.037)
    constants = {1: scale} | ({2: torch.tensor(-5, dtype=torch.int8)} if small == "int8" else {})
    problem = Problem(
        op="dequantize",
        inputs=(meta_of(q), *(meta_of(c) for c in constants.values())),
        outputs=(like(q, dtype),),
        attrs={"axis": 0, "dtype": dtype},
        constant=tuple(constants),
    )
    right = (q.double() + 5 * (small == "int8")) * scale.double()
    made = run(kernel, problem, constants, q)
    assert made.dtype == getattr(torch, dtype)
    eps = torch.finfo(made.dtype).eps
    torch.testing.assert_close(made.double(), right, rtol=eps, atol=0)


@pytest.mark.parametrize("kernel", ["aten", "generated"])
@pytest.mark.parametrize("op", ["quantize", "dequantize"])
def test_a_scale_for_each_channel(op: str, kernel: str) -> None:
    x, scale = numbers(4, 6, 5), torch.rand(6) + 0.1
    zero = quantized(6, seed=1)
    attrs = {"axis": 1, "dtype": "int8" if op == "quantize" else "float32"}
    x = x if op == "quantize" else quantized(4, 6, 5)
    problem = Problem(
        op=op,
        inputs=(meta_of(x), meta_of(scale), meta_of(zero)),
        outputs=(like(x, attrs["dtype"]),),
        attrs=attrs,
        constant=(1, 2),
    )
    made = run(f"{op}.{kernel}", problem, {1: scale, 2: zero}, x)
    for channel in range(6):
        one = [x[:, channel], scale[channel], zero[channel]]
        (right,) = operation(op).call(one, {**attrs, "axis": 0})
        assert torch.equal(made[:, channel], right)
    assert "one scale" in str(catalog.kernel(f"{op}.tiled").load().fits(problem))


@pytest.mark.parametrize("op", ["quantize", "dequantize"])
def test_a_slice_is_rounded_where_it_lies(op: str) -> None:
    """One part of what several layers made at once: its rows lie apart."""
    small, floating = "int8", "float32"
    source = numbers(3, 7, 48) if op == "quantize" else quantized(3, 7, 48)
    part = source[..., 16:32]
    read = meta_of(source).part(2, 16)
    scale = torch.tensor(0.5)
    dtype = small if op == "quantize" else floating
    problem = Problem(
        op=op,
        inputs=(read, meta_of(scale)),
        outputs=(TensorMeta(shape=(3, 7, 16), dtype=dtype),),
        attrs={"axis": 0, "dtype": dtype},
        constant=(1,),
    )
    assert read.matches(part)
    made = run(f"{op}.generated", problem, {1: scale}, part)
    (right,) = operation(op).call([part, scale], problem.attrs)
    assert torch.equal(made, right)
    assert catalog.kernel(f"{op}.tiled").load().fits(problem) == "both sides dense, in one format"


# ── pooling ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"),
    [
        ((3, 3), (2, 2), (1, 1), (1, 1), False),
        ((3, 2), (2, 1), (0, 0), (1, 2), True),
        ((2, 2), (2, 2), (1, 1), (1, 1), True),
    ],
)
def test_max_pool_of_codes(dtype: str, kernel, stride, padding, dilation, ceil: bool) -> None:
    x = quantized(2, 20, 7, 9).to(getattr(torch, dtype)).contiguous(memory_format=CHANNELS_LAST)
    x[0, :, :3, :3] = -128  # a window of the least quantized values only
    attrs = {
        "kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation,
        "ceil_mode": ceil,
    }  # fmt: skip
    right = F.max_pool2d(x.double(), kernel, stride, padding, dilation, ceil)
    output = TensorMeta(shape=tuple(right.shape), dtype=dtype, format="channels_last")
    problem = Problem(op="max_pool2d", inputs=(meta_of(x),), outputs=(output,), attrs=attrs)
    for id in ("max_pool2d.windows", "max_pool2d.aten"):
        assert torch.equal(run(id, problem, {}, x).double(), right)


# ── layers ────────────────────────────────────────────────────────────────────────────────────────


def layer(
    op: str,
    dtype: str,
    activation: str | None,
    residual: bool,
    groups: int = 1,
    non_negative: bool = False,
):
    """A layer of random quantized values, its operands, and the exact result before storing."""
    if op == "conv2d":
        x, w = (
            quantized(2, 12, 9, 7).contiguous(memory_format=CHANNELS_LAST),
            quantized(8, 12, 3, 3),
        )
        w = w[:, : 12 // groups].contiguous()
        window = {"stride": (2, 1), "padding": (1, 1), "dilation": (1, 1), "groups": groups}
        x = x.clamp(0) if non_negative else x
        product = F.conv2d(x.double(), w.double(), None, **window)
        shape, format = (-1, 1, 1), "channels_last"
    else:
        x, w, window = quantized(2, 5, 12), quantized(8, 12), {}
        x = x.clamp(0) if non_negative else x
        product = x.double() @ w.double().T
        shape, format = (-1,), "contiguous"
    # of few bits, as is what is added: the exact result is a float32, which nobody rounds to the
    # other side of a half
    draw = torch.Generator().manual_seed(4)
    scale, bias = (torch.randint(*ends, (8,), generator=draw) for ends in ((1, 41), (-320, 321)))
    scale, bias = scale / 4096, bias / 64
    exact = product * scale.double().view(shape) + bias.double().view(shape)
    added = None
    if residual:
        added = quantized(*exact.shape, seed=3).to(getattr(torch, dtype))
        added = added.contiguous(memory_format=CHANNELS_LAST) if op == "conv2d" else added
        exact = exact + 0.75 * added.double()
    if activation:
        exact = exact.relu() if activation == "relu" else F.gelu(exact)
    problem = Problem(
        op=op,
        inputs=(
            meta_of(x),
            meta_of(w),
            meta_of(bias),
            None if added is None else meta_of(added),
            meta_of(scale),
        ),
        outputs=(TensorMeta(shape=tuple(exact.shape), dtype=dtype, format=format),),
        attrs={**window, "activation": activation, "dtype": dtype, "beta": 0.75}
        | ({"non_negative": True} if non_negative else {}),
        constant=(1, 2, 4),
    )
    return problem, {1: w, 2: bias, 4: scale}, [x] if added is None else [x, added], exact


@pytest.mark.parametrize("op", ["conv2d", "linear"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("non_negative", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_onednn_int8_is_exact(
    op: str,
    residual: bool,
    activation: str,
    dtype: str,
    split: bool,
    non_negative: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On every processor; with weights as sums of two, for those whose 16-bit sums saturate."""
    if split:
        monkeypatch.setattr(onednn, "saturates", lambda: True)
    problem, constants, inputs, exact = layer(
        op, dtype, activation, residual, non_negative=non_negative
    )
    before = [t.clone() for t in inputs]
    module = catalog.kernel(f"{op}.onednn_int8").load()
    if dtype == "int8" and activation == "gelu":
        assert "only relu" in str(module.fits(problem))
        return
    made = run(f"{op}.onednn_int8", problem, constants, *inputs)
    assert problem.output.matches(made)
    if dtype == "int8":
        assert torch.equal(made.double(), exact.round().clamp(-128, 127))
    else:
        torch.testing.assert_close(made.double(), exact, rtol=1e-5, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    (stored,) = operation(op).call(problem.operands(constants, inputs), problem.attrs)
    assert torch.equal(made, stored) or dtype == "float32"


@pytest.mark.parametrize("split", [False, True])
def test_grouped_int8_convolution(split: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if split:
        monkeypatch.setattr(onednn, "saturates", lambda: True)
    problem, constants, inputs, exact = layer("conv2d", "int8", "relu", False, groups=4)
    made = run("conv2d.onednn_int8", problem, constants, *inputs)
    assert torch.equal(made.double(), exact.round().clamp(-128, 127))


@pytest.mark.parametrize("op", ["conv2d", "linear"])
@pytest.mark.parametrize("non_negative", [False, True])
@pytest.mark.parametrize("limit", [64, 128])
def test_the_largest_sums_do_not_saturate(op: str, limit: int, non_negative: bool) -> None:
    """All activations and weights at their ends: 255 · 127 · 2 is more than 16 bits hold, and
    127 · 128 · 2 is not."""
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    format = "channels_last" if op == "conv2d" else "contiguous"
    x = torch.full((1, 64, 8, 8) if op == "conv2d" else (5, 64), 127, dtype=torch.int8)
    ends = (16, 64, 3, 3) if op == "conv2d" else (16, 64)
    weight = torch.full(ends, min(limit, 127), dtype=torch.int8)
    weight[1::2] = -limit
    product = F.conv2d if op == "conv2d" else F.linear
    exact = product(x.double(), weight.double(), **({"padding": 1} if op == "conv2d" else {}))
    problem = Problem(
        op=op,
        inputs=(TensorMeta(shape=tuple(x.shape), dtype="int8", format=format), meta_of(weight)),
        outputs=(TensorMeta(shape=tuple(exact.shape), dtype="float32", format=format),),
        attrs={**(window if op == "conv2d" else {}), "activation": None, "dtype": "float32"}
        | ({"non_negative": True} if non_negative else {}),
        constant=(1,),
    )
    assert onednn.must_split(problem, weight) == (
        onednn.saturates() and limit == 128 and not non_negative
    )
    if op == "conv2d":
        x = x.contiguous(memory_format=CHANNELS_LAST)
    made = run(f"{op}.onednn_int8", problem, {1: weight}, x)
    assert torch.equal(made.double(), exact)
