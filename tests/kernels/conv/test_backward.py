"""Gradients of a convolution: references against autograd, and what each kernel takes, refuses and
becomes in machine code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tessella.device.launch import launch
from tessella.kernels import catalog
from tessella.kernels.conv import backward, dgrad, wgrad
from tessella.kernels.conv.hopper import dgrad as dgrad_sm90
from tessella.kernels.conv.hopper import wgrad as wgrad_sm90
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.gradients import problem

KERNELS = {"conv2d_dgrad": dgrad_sm90, "conv2d_wgrad": wgrad_sm90}
CPU = torch.device("cpu")

# x, weight, stride, padding, dilation, groups
CASES = [
    ((2, 4, 6, 6), (8, 4, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((2, 4, 7, 6), (6, 2, 3, 2), (2, 1), (1, 0), (1, 2), 2),
    ((1, 3, 9, 9), (5, 3, 1, 1), (2, 2), (0, 0), (1, 1), 1),
    ((2, 6, 5, 8), (6, 1, 3, 3), (1, 2), (2, 1), (2, 1), 6),
    ((1, 2, 11, 8), (4, 2, 4, 3), (3, 3), (0, 2), (1, 1), 1),
]


def gradients(
    x: torch.Tensor, weight: torch.Tensor, *window: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dy, and both gradients by autograd through a sum of shifted products, without convolution."""
    stride, padding, dilation, groups = window
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    out = [
        (n - d * (r - 1) - 1) // s + 1
        for n, r, s, d in zip(padded.shape[2:], weight.shape[2:], stride, dilation)
    ]
    y: Any = 0
    for r, s in itertools.product(range(weight.shape[2]), range(weight.shape[3])):
        rows = slice(r * dilation[0], r * dilation[0] + (out[0] - 1) * stride[0] + 1, stride[0])
        columns = slice(s * dilation[1], s * dilation[1] + (out[1] - 1) * stride[1] + 1, stride[1])
        seen = padded[:, :, rows, columns].unflatten(1, (groups, -1))
        taps = weight[:, :, r, s].unflatten(0, (groups, -1))
        y = y + torch.einsum("ngchw,gkc->ngkhw", seen, taps).flatten(1, 2)
    dy = torch.randn_like(y)
    y.backward(dy)
    return dy, x.grad, weight.grad


@pytest.mark.parametrize("case", CASES, ids=str)
def test_references_agree_with_autograd(case: Any) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.float64) for shape in case[:2])
    dy, dx, dw = gradients(x, weight, *case[2:])
    for op, operand, expected in (("conv2d_dgrad", weight, dx), ("conv2d_wgrad", x, dw)):
        asked = problem(op, *case, dtype="float64")
        (made,) = operation(op).call([dy, operand], asked.attrs)
        torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
        (shape,) = operation(op).call([dy.to("meta"), operand.to("meta")], asked.attrs)
        assert shape.shape == expected.shape


@pytest.mark.parametrize("format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_aten(op: str, case: Any, format: Any) -> None:
    torch.manual_seed(0)
    row = catalog.kernel(f"{op}.aten")
    asked = problem(op, *case, dtype="float32", format=format, weight_format=format)
    assert row.load().fits(asked) is None
    x, weight = (torch.randn(shape, dtype=torch.float64) for shape in case[:2])
    dy, dx, dw = gradients(x, weight, *case[2:])
    operand, expected = (weight, dx) if op == "conv2d_dgrad" else (x, dw)
    form = torch.channels_last if format == "channels_last" else torch.contiguous_format
    made = row.load().bind(asked, {})(
        *(t.float().contiguous(memory_format=form) for t in (dy, operand))
    )
    assert asked.output.matches(made)
    torch.testing.assert_close(made.double(), expected, rtol=1e-5, atol=1e-5)


PORTABLE = {"conv2d_dgrad": dgrad, "conv2d_wgrad": wgrad}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_portable(op: str, case: Any, format: Any, dtype: str) -> None:
    """Interpreted; whole numbers, whose sums are exact in every type and order."""
    torch.manual_seed(0)
    asked = problem(op, *case, dtype=dtype, format=format, weight_format=format)
    kernel = PORTABLE[op]
    assert kernel.fits(asked) is None
    x, weight = (torch.randint(-2, 3, shape).double() for shape in case[:2])
    dy, _, _ = gradients(x, weight, *case[2:])
    dy = dy.round().clamp(-2, 2)
    operands = dy, (weight if op == "conv2d_dgrad" else x)
    (expected,) = operation(op).call(operands, asked.attrs)
    form = torch.channels_last if format == "channels_last" else torch.contiguous_format
    inputs = [t.to(getattr(torch, dtype)).contiguous(memory_format=form) for t in operands]
    for config in kernel.configs(asked):
        out = asked.output.empty(CPU).fill_(float("nan"))
        more = {}
        if op == "conv2d_wgrad" and (size := kernel.workspace_bytes(asked, **config)):
            more["workspace"] = torch.full((size,), 255, dtype=torch.uint8)
        kernel.bind(asked, {}, **config)(*inputs, out=out, **more)
        assert torch.equal(out.double(), expected)


def test_portable_adds_parts() -> None:
    """Many pixels for few weights: the sum is made in parts, each with its place."""
    torch.manual_seed(0)
    asked = problem("conv2d_wgrad", (4, 3, 17, 17), (5, 3, 2, 2), dtype="float32")
    config = wgrad.configs(asked)[-1]
    assert config["splits"] > 4
    dy, x = torch.randn(asked.inputs[0].shape), torch.randn(4, 3, 17, 17)
    (expected,) = operation("conv2d_wgrad").call((dy.double(), x.double()), asked.attrs)
    scratch = torch.full((wgrad.workspace_bytes(asked, **config),), 255, dtype=torch.uint8)
    made = wgrad.bind(asked, {}, **config)(dy, x, out=asked.output.empty(CPU), workspace=scratch)
    torch.testing.assert_close(made.double(), expected, rtol=1e-5, atol=1e-4)


PLAIN = ((2, 64, 8, 8), (32, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1)
REFUSED = {
    "float32": ("multiplies float16 or bfloat16", {"dtype": "float32"}),
    "fp8": ("multiplies float16 or bfloat16", {"dtype": "float8_e4m3fn"}),
    "groups": ("one group", {"weight": (32, 32, 3, 3), "groups": 2}),
    "C = 3": ("multiples of 8", {"x": (2, 3, 8, 8), "weight": (32, 3, 3, 3)}),
    "K = 10": ("multiples of 8", {"weight": (10, 64, 3, 3)}),
    "NCHW": ("channels_last", {"format": "contiguous"}),
    "stride 3": ("strides up to", {"stride": (3, 3)}),
    "1 × 1, stride 2, padded": (
        "neither all pixels",
        {"weight": (32, 64, 1, 1), "stride": (2, 2), "padding": (1, 1)},
    ),
    "no image": ("nothing to multiply", {"x": (0, 64, 8, 8)}),
}


@pytest.mark.parametrize("op", KERNELS)
@pytest.mark.parametrize("why", REFUSED)
def test_refuses_with_a_reason(op: str, why: str) -> None:
    reason, changes = REFUSED[why]
    names = ("x", "weight", "stride", "padding", "dilation", "groups")
    asked = problem(op, **{**dict(zip(names, PLAIN)), **changes})
    if "stride 2" in why and op == "conv2d_wgrad":
        assert KERNELS[op].fits(asked) is None
        return
    assert reason in (KERNELS[op].fits(asked) or "")


@pytest.mark.parametrize("taps", [1, 2])
def test_pixels_without_a_tap_need_no_tiles(taps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 × 1 with stride 2 makes a quarter of dx, and the rest is zero."""
    tiles: list[Any] = []
    monkeypatch.setattr(dgrad_sm90, "launch", lambda _, grid, *args, **__: tiles.append(args[-1]))
    weight = (32, 64, taps, taps)
    asked = problem("conv2d_dgrad", (2, 64, 56, 55), weight, (2, 2), (0, 0), (1, 1), 1)
    inputs = [meta.empty(CPU) for meta in asked.inputs]
    out = asked.output.empty(CPU).fill_(7)
    config = dgrad_sm90.configs(asked)[0]
    dgrad_sm90.bind(asked, {}, **config)(*inputs, out=out)
    assert bool((out == (0 if taps == 1 else 7)).all())
    sides = zip((2, 28, 28), (config["box_n"], config["box_h"], config["box_w"]))
    boxes = math.prod(-(-size // side) for size, side in sides)
    classes = 1 if taps == 1 else 4
    assert tiles[0][-1] == classes * boxes * -(-64 // config["columns"])


def test_gradients_of_other_element_types() -> None:
    made = {d: problem("conv2d_wgrad", *PLAIN, made=d) for d in ("float32", "float16", "bfloat16")}
    assert [wgrad_sm90.fits(p) is None for p in made.values()] == [True, True, False]
    assert dgrad_sm90.fits(problem("conv2d_dgrad", *PLAIN, made="float32")) is not None


class Truncated(int):
    """Whole numbers that divide as a GPU's do: towards zero."""

    def __add__(self, other: int) -> Truncated:
        return Truncated(int(self) + int(other))

    def __sub__(self, other: int) -> Truncated:
        return Truncated(int(self) - int(other))

    def __mul__(self, other: int) -> Truncated:
        return Truncated(int(self) * int(other))

    def __floordiv__(self, other: int) -> Truncated:
        return Truncated(math.trunc(int(self) / int(other)))

    def __mod__(self, other: int) -> Truncated:
        return self - (self // other) * other

    __radd__, __rmul__ = __add__, __mul__


class Language:
    """As much of Gluon as a function of numbers needs, on the CPU."""

    where = staticmethod(lambda condition, a, b: Truncated(a if condition else b))
    maximum = staticmethod(lambda a, b: Truncated(max(a, b)))
    minimum = staticmethod(lambda a, b: Truncated(min(a, b)))
    static_range = staticmethod(lambda count: [Truncated(i) for i in range(count)])


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("taps", [1, 2, 3, 5])
def test_taps_of_a_box_are_those_that_reach_dy(stride: int, dilation: int, taps: int) -> None:
    """The device's own function, run on the CPU, against the definition of a convolution."""
    device = dgrad_sm90._taps.fn
    find = FunctionType(device.__code__, {**device.__globals__, "gl": Language})
    common = math.gcd(stride, dilation)
    for padding, size, box in itertools.product((0, 1, 2, 5), (1, 4, 7, 16), (1, 2, 8)):
        out = (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
        for part, at in itertools.product(range(stride), range(0, -(-size // stride), box)):
            if out < 1:
                continue
            numbers = (part, at, out, taps, padding, dilation, dilation // common)
            shapes = (box, stride, stride // common)
            tap, p, count = find(*map(Truncated, numbers), *shapes)
            found = {
                (tap + i * (stride // common), p - i * (dilation // common)) for i in range(count)
            }
            needed = set()
            for r, i in itertools.product(range(taps), range(box)):
                above = (at + i) * stride + part + padding - r * dilation
                if above % stride == 0 and 0 <= above // stride < out:
                    needed.add((r, above // stride - i))
            assert needed <= found
            assert all(
                0 <= r < taps and at * stride + part + padding - r * dilation == q * stride
                for r, q in found
            )


def test_boxes_cover_common_images_exactly() -> None:
    for side in (7, 14, 28, 56, 112, 224):
        for pixels in (64, 128, 256):
            box = backward.boxes(128, (side, side), pixels)[0]
            assert math.prod(box) == pixels
            covered = [-(-n // b) * b for n, b in zip((128, side, side), box)]
            waste = math.prod(covered) / (128 * side * side)
            assert waste == 1 or (side == 7 and pixels == 256)
    assert math.prod(backward.boxes(1, (13, 1), 128)[0]) == 128


WORKSPACES = [PLAIN, ((1, 8, 1, 1), (8, 8, 1, 1)), ((3, 40, 9, 5), (24, 40, 5, 3), (2, 1), (2, 1))]


@pytest.mark.parametrize("case", WORKSPACES, ids=str)
def test_parts_of_wgrad_fill_the_workspace(case: Any) -> None:
    """Every block's share of every tile has its own slot, and the last one ends the workspace."""
    asked = problem("conv2d_wgrad", *case)
    geometry = wgrad_sm90._geometry(asked)
    for config in wgrad_sm90.configs(asked):
        blocks, tiles, _, across = wgrad_sm90._work(geometry, config)
        boxes = math.prod(across)
        device = wgrad_sm90._part.fn
        units, slots = [], []
        for block in range(blocks):
            language = type("Block", (Language,), block_of(block, blocks))
            part = FunctionType(device.__code__, {**device.__globals__, "gl": language})
            splits = min(config["splits"], boxes)
            first, last = part(*map(Truncated, (tiles * boxes, boxes, splits)))
            assert first < last
            units += range(first, last)
            shared = range(first // boxes, (last - 1) // boxes + 1)
            slots += [block + (0 if splits else tile) for tile in shared]
        assert sorted(units) == list(range(tiles * boxes))
        assert len(slots) == len(set(slots))
        size = 4 * config["rows"] * config["panels"] * wgrad_sm90._width(geometry)
        assert wgrad_sm90.workspace_bytes(asked, **config) == size * (max(slots) + 1)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("case", WORKSPACES, ids=str)
def test_parts_are_added_to_the_gradient(case: Any, dtype: str) -> None:
    """The second kernel, interpreted: parts of a known gradient, which only together are right."""
    torch.manual_seed(0)
    asked = problem("conv2d_wgrad", *case, made=dtype)
    geometry = wgrad_sm90._geometry(asked)
    width, panels = wgrad_sm90._width(geometry), wgrad_sm90._panels(geometry)
    filters, channels, *window = asked.output.shape
    taps, c_panels = math.prod(window), -(-channels // width)
    expected = torch.randint(-9, 10, (filters, taps, c_panels * width)).float()
    for config in wgrad_sm90.configs(asked)[::3]:
        blocks, tiles, rows, across = wgrad_sm90._work(geometry, config)
        boxes, high, wide = math.prod(across), config["rows"], config["panels"]
        whole = torch.zeros(rows * high, tiles // rows * wide, width)
        whole[:filters, :panels] = expected.view(filters, panels, width)
        scratch = torch.full((wgrad_sm90.workspace_bytes(asked, **config) // 4,), float("nan"))
        parts = scratch.view(-1, high, wide, width)
        for tile in range(tiles):
            row, panel = tile % rows * high, tile // rows * wide
            slots = slots_of(tile, blocks, tiles, boxes, min(config["splits"], boxes))
            for i, slot in enumerate(slots, start=1):
                parts[slot] = i
            share = whole[row : row + high, panel : panel + wide]
            parts[slots[0]] += share - sum(range(1, len(slots) + 1))
        out = asked.output.empty(CPU).fill_(float("nan"))
        inputs = [meta.empty(CPU) for meta in asked.inputs if meta is not None]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wgrad_sm90, "launch", only_the_second)
            wgrad_sm90.bind(asked, {}, **config)(
                *inputs, out=out, workspace=scratch.view(torch.uint8)
            )
        made = out.permute(0, 2, 3, 1).reshape(filters, taps, channels).float()
        assert torch.equal(made, expected[..., :channels]), config


def only_the_second(kernel: Any, *args: Any, **options: Any) -> None:
    """Leaves out the Gluon kernel, which no CPU can run."""
    if kernel is wgrad_sm90._add_parts:
        launch(kernel, *args, **options)


def slots_of(tile: int, blocks: int, tiles: int, boxes: int, splits: int) -> list[int]:
    """Where the parts of a tile lie, in the order of their pixels: by the division of work."""
    if splits:
        return [split * tiles + tile for split in range(splits)]
    each, more = divmod(tiles * boxes, blocks)
    starts = [block * each + min(block, more) for block in range(blocks + 1)]
    return [
        block + tile
        for block in range(blocks)
        if starts[block] < (tile + 1) * boxes and starts[block + 1] > tile * boxes
    ]


def block_of(block: int, blocks: int) -> dict[str, Any]:
    """What a block of a launch asks about itself."""
    return {
        "program_id": staticmethod(lambda axis: Truncated(block)),
        "num_programs": staticmethod(lambda axis: Truncated(blocks)),
    }


def test_weights_are_copied_only_where_they_must() -> None:
    asked = problem("conv2d_dgrad", *PLAIN, weight_format="contiguous")
    assert dgrad_sm90.workspace_bytes(asked) == 32 * 64 * 9 * 2
    constant = problem("conv2d_dgrad", *PLAIN, weight_format="contiguous", constant=(1,))
    assert dgrad_sm90.workspace_bytes(constant) == 0
    assert dgrad_sm90.workspace_bytes(problem("conv2d_dgrad", *PLAIN)) == 0
    one = problem("conv2d_dgrad", (2, 64, 8, 8), (32, 64, 1, 1), weight_format="contiguous")
    assert dgrad_sm90.workspace_bytes(one) == 0


COMPILED = {
    "3x3": PLAIN,
    "3x3 stride 2": ((128, 128, 56, 56), (128, 128, 3, 3), (2, 2), (1, 1)),
    "1x1": ((128, 480, 14, 14), (16, 480, 1, 1)),
    "3x3 wide": ((128, 256, 14, 14), (256, 256, 3, 3), (1, 1), (1, 1)),
}


def cases() -> Iterator[tuple[str, Any]]:
    """The first configuration of each shape, both gradients; of the first shape the last too."""
    for (name, case), (op, kernel) in itertools.product(COMPILED.items(), KERNELS.items()):
        asked = problem(op, *case)
        configs = kernel.configs(asked)
        for config in configs[:1] if name != "3x3" else (configs[0], configs[-1]):
            yield f"{op} {name} {config}", _runner(kernel, asked, config)


def _runner(kernel: Any, asked: Problem, config: dict[str, Any]) -> Any:
    def run() -> None:
        inputs = [meta.empty(CPU) for meta in asked.inputs if meta is not None]
        scratch = torch.empty(kernel.workspace_bytes(asked, **config), dtype=torch.uint8)
        kernel.bind(asked, {}, **config)(*inputs, out=asked.output.empty(CPU), workspace=scratch)

    return run


def test_machine_code() -> None:
    for name, launches in compile_all("tests.kernels.conv.test_backward:cases").items():
        main = launches[0]
        assert all(one["spilled_bytes"] == 0 for one in launches), name
        assert main["opcodes"].get("HGMMA", 0) >= 4, name
        assert main["opcodes"].get("UTMALDG", 0) >= 2, name
        assert main["shared_bytes"] <= 227 * 1024, name
        assert not {"LDL", "STL", "HMMA"} & set(main["opcodes"]), name
        if "dgrad" in name:
            assert main["opcodes"]["UTMASTG"] >= (4 if "stride 2" in name else 1), name
