"""What the portable convolution kernels share: the shape of the problem, tiles, calls, weights.

What runs on the GPU is in ``tiles_device``.

A convolution is a matrix product of pixels × depth and depth × filters. Pixels are the places of
the output (n, o, p, q), depth are the taps of the filter and under each the input channels
(t, r, s, c), filters are the output channels of one group. There are always three spatial axes;
those that a problem lacks have extent 1 and cost nothing, because they are known when compiling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tessella.core.dtype import FLOATS, FP8
from tessella.core.integers import ceil_div, power_of_two, round_up
from tessella.device.launch import launch
from tessella.device.machine import multiprocessors, stages_that_fit
from tessella.device.overlap import overlapping
from tessella.device.packing import with_packed
from tessella.kernels.conv.tiles_device import Block, Ending, Window, add_parts
from tessella.operations.epilogue import Epilogue
from tessella.operations.problem import Problem

OUTPUTS = (*FLOATS, *FP8, "int8", "int32")
LARGEST_INT32 = 2**31 - 1

Axes = tuple[int, int, int]  # depth, height, width


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A convolution's numbers, over three spatial axes.

    Attributes:
        channels, filters: of one group: what a filter reads, and how many there are.
        image, filter, out: spatial extents of input, weight and output.
    """

    batch: int
    groups: int
    channels: int
    filters: int
    image: Axes
    filter: Axes
    out: Axes
    stride: Axes
    padding: Axes
    dilation: Axes

    @property
    def window(self) -> Window:
        """As the kernels take it."""
        return Window(
            C=self.channels,
            FILTER=self.filter,
            STRIDE=self.stride,
            PADDING=self.padding,
            DILATION=self.dilation,
        )

    @classmethod
    def of(cls, problem: Problem) -> Geometry:
        x, weight = problem["input"], problem["weight"]
        groups = problem.attrs["groups"]
        return cls(
            batch=x.shape[0],
            groups=groups,
            channels=weight.shape[1],
            filters=weight.shape[0] // groups,
            image=_three(x.shape[2:], 1),
            filter=_three(weight.shape[2:], 1),
            out=_three(problem.output.shape[2:], 1),
            stride=_three(problem.attrs["stride"], 1),
            padding=_three(problem.attrs["padding"], 0),
            dilation=_three(problem.attrs["dilation"], 1),
        )

    @property
    def pixels(self) -> int:
        return self.batch * math.prod(self.out)

    @property
    def depth(self) -> int:
        return self.channels * math.prod(self.filter)


def _three(values: Sequence[int], absent: int) -> Axes:
    return (absent,) * (3 - len(values)) + tuple(values)  # type: ignore[return-value]


def strides(tensor: torch.Tensor | None) -> tuple[int, ...]:
    """Strides in elements: of the first two axes, then of three spatial axes (0 where there is
    none).
    """
    if tensor is None:
        return (0,) * 5
    first, spatial = tensor.stride()[:2], tensor.stride()[2:]
    return (*first, *(0,) * (3 - len(spatial)), *spatial)


def is_wide(*tensors: torch.Tensor | None) -> bool:
    """Whether offsets into one of the tensors need 64 bits."""
    return any(
        sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) > LARGEST_INT32
        for t in tensors
        if t is not None
    )


def refusal(problem: Problem, dtypes: Sequence[str]) -> str | None:
    """Why a kernel for these element types cannot take the problem, or None."""
    x, weight, out = problem["input"], problem["weight"], problem.output.dtype
    epilogue, residual = problem.epilogue, problem.epilogue.residual
    if x.dtype != weight.dtype:
        return f"input and weight of one element type, not {x.dtype} × {weight.dtype}"
    if x.dtype not in dtypes:
        return f"multiplies {', '.join(dtypes)}, not {x.dtype}"
    if out not in OUTPUTS:
        return f"cannot make {out}"
    if out == "int32" and (x.dtype != "int8" or epilogue != Epilogue()):
        return "int32 results are sums of int8 products, without an epilogue"
    if any(t is not None and t.dtype not in FLOATS for t in (epilogue.bias, epilogue.scale)):
        return f"bias and scale must be {', '.join(FLOATS)}"
    if residual is not None and residual.dtype not in (*FLOATS, *FP8, "int8"):
        return f"cannot add a residual of {residual.dtype}"
    if 0 in weight.shape:
        return "there are no filters, or no channels"
    if Geometry.of(problem).pixels > LARGEST_INT32 - 1024:
        return "more than 2³¹ pixels"
    if weight.shape[0] > 65535:  # blocks along an axis of a grid
        return "more than 65535 filters"
    return None


def on_plain_units(problem: Problem, operand: str = "input") -> bool:
    """Whether the products run outside the tensor cores, by one of the tensors multiplied."""
    return problem[operand].dtype == "float32" and problem.math == "ieee"


# ------------------------------------------------------------------ configurations
@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a product is cut: a configuration of the kernels that are matrix products.

    Attributes:
        pixels, filters, depth: of one tile; a block goes through the depth in such steps.
        splits: into how many parts the depth is cut, for more blocks; above 1 needs a workspace.
        warps, stages: of a block, and how many steps are loaded ahead (and one more).
        pack: whether a weight that comes as an argument is rearranged in the workspace first.
    """

    pixels: int
    filters: int
    depth: int
    splits: int = 1
    warps: int = 4
    stages: int = 3
    pack: bool = False

    def blocks(self, geometry: Geometry, pixels: int) -> tuple[int, int, int]:
        """The grid: tiles (filters fastest), groups, splits."""
        tiles = ceil_div(pixels, self.pixels) * ceil_div(geometry.filters, self.filters)
        return tiles, geometry.groups, self.splits


# pixels, filters, depth, warps, stages, and blocks of it that share a multiprocessor
_PLAIN = (
    (128, 128, 32, 8, 3, 1),
    (128, 128, 16, 8, 4, 1),
    (64, 128, 16, 4, 3, 2),
    (128, 64, 16, 4, 3, 2),
    (64, 64, 16, 2, 3, 4),
    (128, 32, 16, 4, 3, 4),
    (64, 32, 16, 2, 3, 6),
    (64, 16, 16, 2, 3, 8),
)
_TENSOR = (
    (128, 128, 64, 8, 3, 1),
    (128, 128, 64, 4, 3, 2),
    (128, 64, 64, 4, 3, 2),
    (64, 128, 64, 4, 3, 2),
    (64, 64, 64, 4, 4, 3),
    (128, 32, 64, 4, 3, 3),
    (64, 32, 64, 4, 3, 5),
    (64, 16, 64, 4, 3, 6),
)


def configs(problem: Problem, most: int = 8) -> tuple[dict[str, Any], ...]:
    """Tiles in the order of their estimated time.

    The estimate: rounds of blocks over the multiprocessors, times a tile's products, times what a
    small tile loses to loading (a tile of a × b loads a + b values for a · b products).
    """
    geometry = Geometry.of(problem)
    plain = on_plain_units(problem)
    size = problem["input"].itemsize
    pack = not problem.is_constant("weight")
    estimates: dict[Tile, float] = {}
    for pixels, filters, depth, warps, stages, resident in _PLAIN if plain else _TENSOR:
        depth = _depth(geometry, depth if plain else depth * 2 // size, least=32 // size)
        last = problem.output.format == "channels_last"
        if not plain and not (last and geometry.channels % depth == 0):
            # values are loaded one by one: more threads, or they do not fit the registers
            depth, warps = min(depth, 32), 8
        stages = stages_that_fit(stages, (pixels + filters) * depth * size)
        if not stages:
            continue
        for splits in (1, 2, 4, 8, 16):
            tile = Tile(pixels=pixels, filters=filters, depth=depth, splits=splits, warps=warps,
                        stages=stages, pack=pack)  # fmt: skip
            steps = ceil_div(geometry.depth, depth * splits)
            parts = splits * geometry.pixels * geometry.filters * geometry.groups
            if splits > 1 and (steps < 4 or parts * 4 > 2**28):
                continue
            blocks = math.prod(tile.blocks(geometry, geometry.pixels))
            rounds = ceil_div(blocks, multiprocessors() * resident)
            share = resident if blocks > multiprocessors() else 1
            work = rounds * share * steps * depth * pixels * filters
            loading = 1 + 24 / pixels + 24 / filters
            estimates[tile] = work * loading + (splits > 1) * (2e5 + parts)
    return tuple(asdict(tile) for tile in sorted(estimates, key=estimates.__getitem__)[:most])


def _depth(geometry: Geometry, most: int, least: int) -> int:
    """Values of the depth that a step takes: of one tap, if its channels divide into steps."""
    whole = geometry.channels & -geometry.channels  # the largest power of two that divides it
    fitting = min(most, whole) if whole >= least else most
    return max(16 if least < 32 else 32, min(fitting, power_of_two(geometry.depth)))


# ------------------------------------------------------------------ calls
def are_pixels_last(out: torch.Tensor) -> bool:
    """Whether the neighbour in memory is the next pixel, not the next channel."""
    return out.stride(1) != 1 or out.shape[1] == 1


def destination(
    problem: Problem,
    geometry: Geometry,
    x: torch.Tensor,
    epilogue: Epilogue[torch.Tensor],
    out: torch.Tensor,
) -> dict[str, Any]:
    """The arguments that ``store`` of a tile takes, by name."""
    residual = epilogue.residual
    activation, beta = problem.epilogue.on_device
    return {
        "bias": epilogue.bias,
        "scale": epilogue.scale,
        "residual": residual,
        "pixels": geometry.pixels,
        "out": geometry.out,
        "strides": (strides(out), strides(residual)),
        "factors": (float(problem.epilogue.alpha), float(beta), problem.gamma),
        "ENDING": Ending(
            ACTIVATION=activation,
            PIXELS_LAST=are_pixels_last(out),
            WIDE=is_wide(x, out, residual),
        ),
    }


@dataclass(frozen=True)
class Product:
    """A convolution as a matrix product, ready to be launched: what ``bind`` of a kernel keeps.

    A workspace holds the packed weight, then the parts of a split product, then what a kernel wants
    beside them.
    """

    problem: Problem
    geometry: Geometry
    tile: Tile
    constants: Mapping[int, torch.Tensor]

    @classmethod
    def of(
        cls, problem: Problem, config: Mapping[str, Any], constants: Mapping[int, torch.Tensor]
    ) -> Product:
        chosen = dict(config) or configs(problem, 1)[0]
        geometry, tile = Geometry.of(problem), Tile(**chosen)
        held = with_packed_weight(constants, filters_last=on_plain_units(problem))
        return cls(problem, geometry, tile, held)

    @classmethod
    def dense(
        cls, problem: Problem, config: Mapping[str, Any], constants: Mapping[int, torch.Tensor]
    ) -> Product:
        """A product that always packs its weight: offsets into it are multiples of the depth."""
        return cls.of(problem, {**(config or configs(problem, 1)[0]), "pack": True}, constants)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the workspace for the weight that a call packs."""
        return round_up(self.problem["weight"].nbytes, 256) if self._packs else 0

    @property
    def parts_bytes(self) -> int:
        """Bytes of the workspace for the parts of a split product, four bytes a number."""
        all_filters = self.geometry.filters * self.geometry.groups
        parts = self.tile.splits * self.geometry.pixels * all_filters
        return round_up(4 * parts, 256) if self.tile.splits > 1 else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace for the packed weight and the parts."""
        return self.weight_bytes + self.parts_bytes

    @property
    def _plain(self) -> bool:
        return on_plain_units(self.problem)

    @property
    def _packs(self) -> bool:
        return self.tile.pack and not self.problem.is_constant("weight")

    def launch(
        self,
        kernel: Any,
        inputs: Sequence[torch.Tensor],
        out: torch.Tensor,
        workspace: torch.Tensor | None,
        begin: int = 0,
        end: int | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """Pack the weight if that is part of the call, multiply, and add the parts.

        Args:
            begin, end: which pixels; the first call packs, the last one adds.
            more: what the kernel takes beside the arguments that are always the same.
        """
        problem, geometry, tile = self.problem, self.geometry, self.tile
        x, weight, epilogue = problem.product_operands(self.constants, inputs)
        end = geometry.pixels if end is None else end
        if self._packs:
            assert workspace is not None
            weight = pack_into(workspace, weight, self._plain, copy=begin == 0)
        parts = None
        if tile.splits > 1:
            kind = torch.int32 if x.dtype == torch.int8 else torch.float32
            assert workspace is not None
            parts = workspace[self.weight_bytes : self.nbytes].view(kind)
        fp8 = problem["input"].dtype in FP8
        accurate = fp8 and not problem.attr("fast_accumulation")
        ending = destination(problem, geometry, x, epilogue, out)
        launch(
            kernel,
            tile.blocks(geometry, end - begin),
            x,
            weight,
            out,
            parts=parts,
            filters=geometry.filters,
            image=geometry.image,
            WINDOW=geometry.window,
            BLOCK=Block(
                PIXELS=tile.pixels,
                FILTERS=tile.filters,
                DEPTH=tile.depth,
                SPLITS=tile.splits,
                STEPS=ceil_div(geometry.depth, tile.depth * tile.splits),
                STAGES=tile.stages,
                PRECISION=problem.math if problem["input"].dtype == "float32" else "ieee",
                IMPRECISE=min(tile.depth, 128) if accurate else None,
            ),
            num_warps=tile.warps,
            **overlapping(),
            **ending | {"strides": (strides(x), strides(weight), *ending["strides"])},
            **more,
        )
        if parts is not None and end == geometry.pixels:
            all_filters = geometry.filters * geometry.groups
            launch(
                add_parts,
                (ceil_div(geometry.pixels, 32), ceil_div(all_filters, 32)),
                parts,
                out,
                filters=all_filters,
                SPLITS=tile.splits,
                PIXELS=32,
                FILTERS=32,
                **ending,
            )
        return out


# ------------------------------------------------------------------ weights
def pack(weight: torch.Tensor, *, filters_last: bool) -> torch.Tensor:
    """The same weight [K, C, …] in another order of memory: [K, taps, C], as tensor cores want it,
    or [taps, C, K] for the plain units."""
    taps_first = weight.movedim(1, -1)
    if filters_last:
        return _copied(taps_first.movedim(0, -1)).movedim(-1, 0).movedim(-1, 1)
    return _copied(taps_first).movedim(-1, 1)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A dense copy whose last axis has stride 1: ``contiguous`` leaves any stride to an axis of
    one.
    """
    return tensor.new_empty(tensor.shape).copy_(tensor)


def with_packed_weight(
    constants: Mapping[int, torch.Tensor], *, filters_last: bool
) -> dict[int, torch.Tensor]:
    """The constants, with the weight packed once."""
    how = ("conv.tiles", filters_last)
    return with_packed(constants, how, lambda weight: pack(weight, filters_last=filters_last))


def pack_into(
    workspace: torch.Tensor, weight: torch.Tensor, filters_last: bool, *, copy: bool
) -> torch.Tensor:
    """``pack`` as part of a call: a copy into the workspace, or the one that is there."""
    flat = workspace[: weight.nbytes].view(weight.dtype)
    filters, channels, *taps = weight.shape
    if filters_last:
        target = flat.view(*taps, channels, filters).movedim(-1, 0).movedim(-1, 1)
    else:
        target = flat.view(filters, *taps, channels).movedim(-1, 1)
    return target.copy_(weight) if copy else target
