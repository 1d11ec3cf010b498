"""The Hopper convolution without a GPU: what it takes and refuses, its configurations, its code."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tessella.core.architectures import GPU_TARGETS
from tessella.core.errors import KernelError
from tessella.device.hopper import descriptor
from tessella.device.machine import HOPPER
from tessella.kernels import catalog
from tessella.kernels.conv.hopper import implicit_gemm as kernel
from tessella.kernels.conv.hopper import implicit_gemm_tiles as tiles
from tessella.kernels.conv.hopper import walk_device as device
from tessella.operations.epilogue import ACTIVATIONS, Epilogue
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format, TensorMeta
from tests.support.kernels.compile_only import compile_all

CPU = torch.device("cpu")


def problem_of(
    dtype: str = "float16",
    out: str | None = None,
    *,
    N: int = 8,
    C: int = 64,
    size: tuple[int, int] = (28, 28),
    K: int = 64,
    filter: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    residual: bool = False,
    scale: bool = False,
    weight_format: Format = "channels_last",
    constant: tuple[int, ...] = (1, 2, 4),
    **attrs: Any,
) -> Problem:
    out = out or dtype
    P, Q = (
        (n + 2 * p - d * (f - 1) - 1) // s + 1
        for n, f, s, p, d in zip(size, filter, stride, padding, dilation, strict=True)
    )
    y = TensorMeta(shape=(N, K, P, Q), dtype=out, format="channels_last")
    vector = TensorMeta(shape=(K,), dtype="float32")
    return Problem(
        op="conv2d",
        inputs=(
            TensorMeta(shape=(N, C, *size), dtype=dtype, format="channels_last"),
            TensorMeta(shape=(K, C, *filter), dtype=dtype, format=weight_format),
            None if out == "int32" else vector,
            y if residual else None,
            vector if scale else None,
        ),
        outputs=(y,),
        attrs={
            "stride": stride, "padding": padding, "dilation": dilation, "groups": 1, **attrs
        },
        constant=constant,
        math="tf32",
    )  # fmt: skip


# ResNet-50, VGG-16 and GoogLeNet, and some that are in none of them
SHAPES: dict[str, dict[str, Any]] = {
    "3x3@56": {"N": 128, "size": (56, 56)},
    "3x3/2@28": {"N": 128, "C": 256, "K": 256, "stride": (2, 2)},
    "3x3@7": {"N": 128, "C": 512, "K": 512, "size": (7, 7)},
    "3x3@7 N=1": {"N": 1, "C": 512, "K": 512, "size": (7, 7)},
    "1x1@56": {"N": 128, "K": 256, "size": (56, 56), "filter": (1, 1), "padding": (0, 0)},
    "1x1@14 K=16": {"N": 128, "C": 480, "K": 16, "filter": (1, 1), "padding": (0, 0)},
    "5x5 dilated": {"N": 2, "C": 48, "K": 80, "filter": (5, 5), "dilation": (2, 3)},
    "1x7": {"N": 3, "C": 160, "K": 192, "filter": (1, 7), "padding": (0, 3), "size": (17, 17)},
    "one pixel": {"N": 1, "size": (1, 1)},
    "VGG@224": {"N": 4, "size": (224, 224)},
}


def test_is_in_the_catalog() -> None:
    row = catalog.kernel("conv2d.implicit_gemm.sm90")
    assert [target for target in GPU_TARGETS if row.runs_on(target)] == ["sm_90"]
    assert row.load() is kernel


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"stride": (3, 3)}, "strides of 1 and 2"),
        ({"C": 12}, "C = 12"),
        ({"K": 12}, "K = 12"),
        ({"dtype": "int8", "C": 24}, "C = 24"),
        ({"dtype": "float64"}, "does not make"),
        ({"dtype": "float16", "out": "int8"}, "does not make"),
        ({"N": 0}, "empty"),
        ({"N": 2**16, "size": (128, 128)}, "2^31"),
        ({"dtype": "int8", "out": "int32", "activation": "relu"}, "bare products"),
    ],
)
def test_refuses_what_it_cannot_do(change: dict[str, Any], reason: str) -> None:
    refused = kernel.fits(problem_of(**change))
    assert refused is not None
    assert reason in refused


def test_refuses_formats_that_it_cannot_read() -> None:
    problem = problem_of(residual=True)
    for position in (0, 1, 3):
        inputs = list(problem.inputs)
        inputs[position] = dataclasses.replace(inputs[position], format="strided")
        assert kernel.fits(dataclasses.replace(problem, inputs=tuple(inputs)))
    nchw = dataclasses.replace(problem.output, format="contiguous")
    assert kernel.fits(dataclasses.replace(problem, outputs=(nchw,)))
    assert kernel.fits(dataclasses.replace(problem_of("float32"), math="ieee"))


def test_refuses_misaligned_tensors() -> None:
    aligned = torch.zeros(4 * 4 * 8 + 1, dtype=torch.float16)
    assert descriptor(aligned[:-1].view(16, 8), (16, 8)).block_shape == [16, 8]
    with pytest.raises(KernelError, match="not aligned to 16 bytes"):
        descriptor(aligned[1:].view(16, 8), (16, 8))


def sliced(problem: Problem, x: int | None = None, out: int | None = None) -> Problem:
    """The problem with its input or output a slice of so many channels."""
    inputs, output = list(problem.inputs), problem.output
    for channels, position in ((x, 0), (out, None)):
        if channels is not None:
            meta = output if position is None else inputs[position]
            whole = dataclasses.replace(meta, shape=(meta.shape[0], channels, *meta.shape[2:]))
            part = whole.part(1, meta.shape[1])
            if position is None:
                output = part
            else:
                inputs[position] = part
    return dataclasses.replace(problem, inputs=tuple(inputs), outputs=(output,))


def test_takes_and_makes_slices_of_channels() -> None:
    row = catalog.kernel("conv2d.implicit_gemm.sm90")
    assert row.refusal(sliced(problem_of(), x=96, out=256)) is None
    assert "C = 68" in str(row.refusal(sliced(problem_of(), x=68)))
    assert "K = 65" in str(row.refusal(sliced(problem_of(), out=65)))
    rows = dataclasses.replace(problem_of().output, shape=(8, 64, 56, 28)).part(2, 28)
    assert rows.strides is not None
    assert "slices of its channels" in str(
        row.refusal(dataclasses.replace(problem_of(), outputs=(rows,)))
    )
    other = catalog.kernel("conv2d.implicit_gemm")
    assert "slice" in str(other.refusal(sliced(problem_of(), out=256)))
    assert other.refusal(sliced(problem_of(), x=256)) is None


def test_views_of_slices_are_what_tma_reads() -> None:
    whole = torch.randn(2, 3, 4, 24)  # N, H, W, C
    part = whole[..., 8:16].permute(0, 3, 1, 2)
    rows = kernel._rows(part, (2, 3, 4, 8), 24)
    assert torch.equal(rows, whole[..., 8:16].transpose(0, 1))
    assert rows.data_ptr() == part.data_ptr()


@pytest.mark.parametrize("dtype", kernel.OUTPUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_configurations_fit_the_multiprocessor(name: str, dtype: str) -> None:
    problem = problem_of(dtype, **SHAPES[name])
    assert kernel.fits(problem) is None
    configs = kernel.configs(problem)
    assert 1 <= len(configs) <= tiles.MAX_CONFIGS
    assert len({repr(c) for c in configs}) == len(configs)
    for config in configs:
        pixels = config["tile_n"] * config["tile_h"] * config["tile_w"]
        accumulators = pixels * config["tile_k"] / (32 * config["warps"])
        assert accumulators <= 128
        assert all(value & (value - 1) == 0 for key, value in config.items() if "tile" in key)
        count = math.prod(tiles.tile_counts(tiles.shape_of(problem), config))
        assert config["splits"] == 1 or count * config["splits"] <= HOPPER.multiprocessors


def test_many_tiles_are_not_split_and_few_are() -> None:
    large = kernel.configs(problem_of(**SHAPES["3x3@56"]))
    assert all(config["splits"] == 1 for config in large)
    assert kernel.configs(problem_of(**SHAPES["3x3@7 N=1"]))[0]["splits"] > 1


def test_workspace_holds_the_parts_and_the_packed_weight() -> None:
    problem = problem_of(N=1, C=512, K=512, size=(7, 7))
    split = next(c for c in kernel.configs(problem) if c["splits"] > 1)
    images = tiles.round_up(1, split["tile_n"])
    assert kernel.workspace_bytes(problem, **split) == tiles.round_up(
        split["splits"] * images * 49 * 512 * 4, 256
    )
    whole = {**split, "splits": 1}
    assert kernel.workspace_bytes(problem, **whole) == 0
    given = problem_of("int8", K=80, constant=())  # output channels are taken by 64
    assert kernel.workspace_bytes(given, **kernel.configs(given)[-1]) >= 128 * 64 * 9


@pytest.mark.parametrize("weight_format", ["contiguous", "channels_last"])
def test_packing_keeps_every_weight(weight_format: Format) -> None:
    weight = torch.randn(5, 8, 3, 2).contiguous(
        memory_format=torch.channels_last
        if weight_format == "channels_last"
        else torch.contiguous_format
    )
    packed = kernel._pack(weight, 64)
    assert torch.equal(packed[:5], weight)
    assert not packed[5:].any()
    assert packed.is_contiguous(memory_format=torch.channels_last)


def test_the_epilogues_order_of_channels() -> None:
    """Accumulator column 8 j + q of every 64 belongs to output channel j + 8 q."""
    weight = torch.arange(128).view(128, 1, 1, 1).expand(128, 16, 1, 1).to(torch.int8)
    described = kernel._weight_descriptor(
        weight.contiguous(memory_format=torch.channels_last), 8, 64, 16
    )
    rows = described.base[..., 0, 0].reshape(2, 64)
    column = torch.arange(64)
    expected = column // 8 + 8 * (column % 8)
    assert torch.equal(rows[0].long(), expected)
    assert torch.equal(rows[1].long(), expected + 64)


def _walk(problem: Problem, config: dict[str, Any]) -> float:
    """Stages of the average tile, counted tap by tap; a tile takes at least one."""
    shape = tiles.shape_of(problem)
    counts = []
    for size, out, count, stride, pad, dilation, box in (
        (shape.H, shape.P, shape.R, shape.stride[0], shape.padding[0], shape.dilation[0],
         config["tile_h"]),
        (shape.W, shape.Q, shape.S, shape.stride[1], shape.padding[1], shape.dilation[1],
         config["tile_w"]),
    ):  # fmt: skip
        seen = [
            max(
                1,
                sum(
                    any(0 <= p * stride + r * dilation - pad < size for p in range(q, q + box))
                    for r in range(count)
                ),
            )
            for q in range(0, out, box)
        ]
        counts.append(sum(seen) / len(seen))
    return math.prod(counts) * math.ceil(shape.C / config["tile_c"])


def test_taps_that_see_only_padding_are_skipped() -> None:
    for size, padding in (((7, 7), (1, 1)), ((14, 14), (1, 1)), ((9, 30), (1, 3))):
        problem = problem_of(N=128, size=size, padding=padding)
        config = {**kernel.configs(problem)[0], "tile_h": 1, "tile_w": 1, "taps": 1}
        assert tiles.stages_of_a_tile(tiles.shape_of(problem), config) == pytest.approx(
            _walk(problem, config)
        )


class Language:
    """As much of Gluon as the walk over tiles and taps needs, on the CPU."""

    where = staticmethod(lambda condition, a, b: a if condition else b)
    maximum, minimum = max, min
    block = 0

    @classmethod
    def program_id(cls, axis: int) -> int:
        return cls.block


# the device's own functions, on whole numbers; all that they divide is positive
WALK: dict[str, Any] = {"gl": Language}
WALK |= {
    name: FunctionType(getattr(device, name).fn.__code__, WALK)
    for name in ("_taps", "first_tile", "next_tile", "channel", "terms", "next_step")
}


def _walked(
    problem: Problem, config: dict[str, Any], blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution as the blocks walk over it, zeros around the image included; and torch's."""
    shape = tiles.shape_of(problem)
    x = torch.randint(-3, 4, (shape.N, shape.H, shape.W, shape.C)).double()
    w = torch.randint(-3, 4, (shape.K, shape.R, shape.S, shape.C)).double()
    BN, BH, BW = config["tile_n"], config["tile_h"], config["tile_w"]
    BCO, BK, splits = config["tile_k"], config["tile_c"], config["splits"]
    (SH, SW), counts = shape.stride, tiles.tile_counts(shape, config)
    far = 64  # zeros on each side, and pixels of tiles that reach over the edge
    padded = F.pad(x, (0, BK, far, far, far, far, 0, BN))
    weights = F.pad(w, (0, BK, 0, 0, 0, 0, 0, BCO))
    y = torch.zeros(splits, shape.N + BN, shape.P + BH, shape.Q + BW, shape.K + BCO).double()
    chunks = math.ceil(shape.C / BK)
    geometry = (
        shape.C, chunks, shape.H, shape.W, shape.R, shape.S, *shape.padding, *shape.dilation
    )  # fmt: skip
    grid = (counts[:3], tuple(kernel._digits(blocks, counts[:3])), splits, max(0, shape.K - BCO))
    tile = device.Tile(
        BN=BN, BH=BH, BW=BW, BCO=BCO, BK=BK, SH=SH, SW=SW, TAPS=1, INTERLEAVE=1,
        DILATED=shape.dilation != (1, 1), SPLIT=splits > 1,
    )  # fmt: skip
    for Language.block in range(blocks):
        k, q, p, n = WALK["first_tile"](grid)
        for _ in range(Language.block, math.prod(counts) * splits, blocks):
            steps, r, s, c, s_low, s_high = WALK["terms"](p, q, grid, geometry, tile)
            k0 = WALK["channel"](k, grid, BCO)
            sums = torch.zeros(BN, BH, BW, BCO).double()
            for _ in range(steps):
                h = p * BH * SH + r * shape.dilation[0] - shape.padding[0] + far
                v = q * BW * SW + s * shape.dilation[1] - shape.padding[1] + far
                box = padded[
                    n * BN : n * BN + BN, h : h + BH * SH : SH, v : v + BW * SW : SW, c : c + BK
                ]
                part = weights[k0 : k0 + BCO, r, s, c : c + BK]
                sums += torch.einsum("nhwc,kc->nhwk", box, part)
                r, s, c = WALK["next_step"](r, s, c, s_low, s_high, shape.C, BK)
            made = y[Language.block % splits, n * BN :, p * BH :, q * BW :, k0:]
            made[:BN, :BH, :BW, :BCO] = sums
            k, q, p, n = WALK["next_tile"](k, q, p, n, grid)
    right = F.conv2d(
        x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), None, shape.stride, shape.padding,
        shape.dilation,
    )  # fmt: skip
    return y.sum(0)[: shape.N, : shape.P, : shape.Q, : shape.K].permute(0, 3, 1, 2), right


@pytest.mark.parametrize(
    "shape",
    [
        {"N": 3, "C": 24, "K": 40, "size": (9, 7)},
        {"N": 2, "C": 16, "K": 16, "size": (8, 11), "stride": (2, 1), "padding": (0, 2)},
        {"N": 1, "C": 16, "K": 16, "filter": (2, 5), "dilation": (3, 2), "size": (9, 12)},
        {"N": 5, "C": 40, "K": 72, "filter": (1, 1), "padding": (0, 0), "size": (5, 5)},
        {"N": 2, "C": 16, "K": 16, "size": (3, 2), "padding": (4, 3)},
    ],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_the_walk_over_tiles_and_taps_is_a_convolution(shape: dict[str, Any], splits: int) -> None:
    torch.manual_seed(0)
    problem = problem_of(**shape)
    config = {
        "tile_n": 2, "tile_h": 4, "tile_w": 2, "tile_k": 32, "tile_c": 16, "splits": splits,
        "taps": 1,
    }  # fmt: skip
    items = math.prod(tiles.tile_counts(tiles.shape_of(problem), config)) * splits
    for blocks in {items} if splits > 1 else {1, min(items, 5), items}:
        made, right = _walked(problem, config, blocks)
        assert torch.equal(made, right)


# ------------------------------------------------------------------ machine code


def compiled_problems() -> dict[str, Problem]:
    return {
        "float16": problem_of(N=128, size=(56, 56), residual=True, activation="relu"),
        "bfloat16": problem_of("bfloat16", N=128, K=256, filter=(1, 1), padding=(0, 0)),
        "float32": problem_of("float32", N=32, C=128, K=128),
        "int8": problem_of("int8", N=128, C=128, K=128, residual=True, scale=True),
        "int8, a factor": problem_of(
            "int8", N=128, C=128, K=128, scale=True, activation="silu", gamma=3.0
        ),
        "float8_e4m3fn": problem_of("float8_e4m3fn", "float16", C=128, K=128, stride=(2, 2)),
        "int8 to int32, N=1": problem_of("int8", "int32", N=1, C=512, K=512, size=(7, 7)),
    }


@functools.cache
def _compiled_configs() -> dict[str, list[dict[str, Any]]]:
    """By problem: its best configuration, and the best of each structure that is new at its size.

    A structure is groups, residents, roles and taps, of which a problem has four at most; what
    counts for registers is also how wide an element is.
    """
    seen: set[Any] = set()
    found: dict[str, list[dict[str, Any]]] = {}
    for name, problem in compiled_problems().items():
        width = getattr(torch, problem.inputs[0].dtype).itemsize
        kinds: dict[Any, dict[str, Any]] = {}
        for config in kernel.configs(problem):
            kind = (config["groups"], config["residents"], config["swap"], config["taps"])
            kinds.setdefault((width, *kind), config)
        tried = list(kinds)[:4]
        found[name] = [kinds[kind] for i, kind in enumerate(tried) if i == 0 or kind not in seen]
        seen.update(tried)
    return found


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, problem in compiled_problems().items():
        for i, config in enumerate(_compiled_configs()[name]):
            yield f"{name} #{i}", lambda problem=problem, config=config: _run(problem, config)


def _run(problem: Problem, config: dict[str, Any]) -> None:
    small = {i: meta.empty(CPU) for i, meta in enumerate(problem.inputs) if meta is not None}
    constants = {i: small[i] for i in problem.constant if i in small}
    call = kernel.bind(problem, constants, **config)
    workspace = torch.empty(kernel.workspace_bytes(problem, **config), dtype=torch.uint8)
    rest = [tensor for i, tensor in small.items() if i not in constants]
    call(*rest, out=problem.output.empty(CPU), workspace=workspace)


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    return compile_all("tests.kernels.conv.test_sm90:cases")


PRODUCT = {"int8": "IGMMA", "float8_e4m3fn": "QGMMA"}


@pytest.mark.parametrize("name", compiled_problems())
def test_compiles_to_tensor_core_products_fed_by_tma(
    name: str, compiled: dict[str, list[dict[str, Any]]]
) -> None:
    problem = compiled_problems()[name]
    dtype = problem.inputs[0].dtype
    for i, config in enumerate(_compiled_configs()[name]):
        convolution, *second = compiled[f"{name} #{i}"]
        assert len(second) == (config["splits"] > 1)
        assert convolution["spilled_bytes"] == 0
        assert convolution["shared_bytes"] <= 227 * 1024
        assert convolution["threads"] <= 384
        opcodes = convolution["opcodes"]
        assert opcodes[PRODUCT.get(dtype, "HGMMA")] == _products(problem, config), config
        assert opcodes["UTMALDG"] >= 2
        assert opcodes["UTMASTG"] >= 1
        assert not opcodes.get("LDL")
        assert not opcodes.get("STL")


def _products(problem: Problem, config: dict[str, Any]) -> int:
    """Instructions that one stage takes, in each of the groups."""
    rows, columns = config["tile_n"] * config["tile_h"] * config["tile_w"], config["tile_k"]
    if config["swap"]:
        rows, columns = columns, rows
    itemsize = getattr(torch, problem.inputs[0].dtype).itemsize
    per_warpgroup = rows * columns // (config["warps"] // 4)
    layout = kernel._layout(getattr(torch, problem.inputs[0].dtype), rows, columns, config["warps"])
    product = 64 * layout.instr_shape[1]
    depth = config["tile_c"] * itemsize // 32
    return config["groups"] * config["taps"] * depth * per_warpgroup // product


# ------------------------------------------------------------------ sums in parts


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("gamma", [1.0, 3.0])
def test_parts_are_added_and_finished(activation: str | None, gamma: float) -> None:
    torch.manual_seed(0)
    parts = torch.randn(3, 2, 5, 7, 16)  # splits, images (one of them is not real), P, Q, K
    bias, scale, residual = torch.randn(16), torch.rand(16), torch.randn(1, 5, 7, 16)
    problem = problem_of(
        "float16", "float32", N=1, K=16, size=(5, 7), residual=True, scale=True,
        activation=activation, alpha=0.5, beta=-2.0, gamma=gamma,
    )  # fmt: skip
    out = torch.full((1, 5, 7, 16), 77.0).permute(0, 3, 1, 2)
    epilogue = problem.epilogue.of(bias, residual.permute(0, 3, 1, 2), scale)
    kernel._add_parts(problem, parts.flatten(0, 1), 3, epilogue, out)
    right = 0.5 * scale.double() * parts[:, :1].double().sum(0) + bias - 2.0 * residual.double()
    if activation:
        right = ACTIVATIONS[activation](right)
    right = right * gamma
    torch.testing.assert_close(
        out.permute(0, 2, 3, 1).double(), right.double(), rtol=1e-5, atol=1e-5
    )


def test_parts_are_added_into_a_slice() -> None:
    torch.manual_seed(0)
    parts = torch.randn(3, 2, 5, 7, 16)
    problem = sliced(problem_of("float16", "float32", N=2, K=16, size=(5, 7)), out=48)
    whole = torch.full((2, 5, 7, 48), 77.0)
    bias = torch.randn(16)
    out = whole[..., 16:32].permute(0, 3, 1, 2)
    kernel._add_parts(problem, parts.flatten(0, 1), 3, Epilogue(bias=bias), out)
    right = parts.double().sum(0) + bias
    torch.testing.assert_close(whole[..., 16:32].double(), right, rtol=1e-5, atol=1e-5)
    assert (whole[..., :16] == 77).all()
    assert (whole[..., 32:] == 77).all()


def test_parts_of_int8_are_exact() -> None:
    parts = torch.randint(-(2**20), 2**20, (4, 1, 3, 3, 32), dtype=torch.int32)
    problem = problem_of("int8", "int32", N=1, K=32, size=(3, 3))
    out = torch.zeros(1, 3, 3, 32, dtype=torch.int32).permute(0, 3, 1, 2)
    kernel._add_parts(problem, parts.flatten(0, 1), 4, Epilogue(), out)
    assert torch.equal(out.permute(0, 2, 3, 1), parts.sum(0, dtype=torch.int32))
