"""Matrix product on Hopper's tensor cores: TMA, a ring in shared memory, WGMMA, specialized warps.

The host's side: what fits, which tilings are worth trying, packing, descriptors and launches. The
device code is ``wgmma_device``. For ``matmul`` and ``linear`` in float16, bfloat16, TF32, int8 and
both kinds of fp8, with the whole epilogue fused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from tessella.core.dtype import FLOATS, FP8
from tessella.device.hopper import TensorDescriptor, descriptor
from tessella.device.launch import launch
from tessella.device.machine import ALIGNMENT, HOPPER, multiprocessors
from tessella.device.packing import packed
from tessella.kernels.catalog import Call, Config
from tessella.kernels.epilogue.int8 import folded, refusal, small_sums
from tessella.kernels.epilogue.sixteen_bit import in_sixteen_bits
from tessella.kernels.gemm.wgmma_device import Epilogue, Form, Roles, add_ranges, multiply
from tessella.kernels.shared.matrix_product import (
    OUTPUTS,
    a_by_rows,
    b_by_rows,
    second,
    sides,
    sizes,
)
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

ROW_BYTES = 128  # of a tile along K: what one swizzled line of shared memory holds
BARRIER_BYTES = 1024  # room for barriers, and for the alignment of what comes before them
ADDED_ROWS = 8  # of a tile, in a block of the second kernel


def fits(problem: Problem) -> str | None:
    a, b = sides(problem)
    return (
        _refused_types(problem, a, b)
        or _refused_shapes(problem, a, b)
        or _refused_layouts(problem)
        or _refused_epilogue(problem)
        or refusal(problem)
    )


def _refused_types(problem: Problem, a: TensorMeta, b: TensorMeta) -> str | None:
    if a.dtype not in OUTPUTS:
        return f"no tensor-core product of {a.dtype}"
    if a.dtype != b.dtype:
        return f"both factors of one element type, not {a.dtype} and {b.dtype}"
    if a.dtype == "float32" and problem.math != "tf32":
        return "float32 products are rounded to TF32 here; ieee was asked for"
    if problem.output.dtype not in OUTPUTS[a.dtype]:
        return f"no {problem.output.dtype} result of {a.dtype} factors"
    return None


def _refused_shapes(problem: Problem, a: TensorMeta, b: TensorMeta) -> str | None:
    if len(a.shape) < 2 or len(b.shape) < 2:
        return "factors are matrices"
    if problem.op == "matmul" and len(b.shape) > 2 and a.shape[:-2] != b.shape[:-2]:
        return "leading axes are equal, or absent in the second factor"
    if 0 in (*a.shape, *b.shape):
        return "empty"
    return None


def _refused_layouts(problem: Problem) -> str | None:
    made, dtype = sizes(problem), problem["input"].dtype
    for name, operand, lies_right, along in (
        ("first", "input", a_by_rows(problem), "M (transpose_a)"),
        ("second", second(problem), b_by_rows(problem), "N (no transpose_b)"),
    ):
        meta, constant = problem[operand], problem.is_constant(operand)
        if not constant and meta.format != "contiguous":
            return f"rows of the {name} factor are not dense"
        if not lies_right and not constant and _wants_k_major(dtype):
            return f"{dtype} is read along K; the {name} factor lies along {along}"
        k_major = lies_right or _wants_k_major(dtype)
        if _row_bytes(made.k if k_major else meta.shape[-1], dtype) % 16:
            return f"rows of the {name} factor are not multiples of 16 bytes, as TMA wants them"
    for stored in (problem.output, problem.epilogue.residual):
        if stored is not None and stored.format != "contiguous":
            return "makes, and adds, dense rows"
    if _row_bytes(made.n, problem.output.dtype) % 16:
        return "rows of the result are not multiples of 16 bytes, as TMA wants them"
    return None


def _row_bytes(elements: int, dtype: str) -> int:
    return elements * int(getattr(torch, dtype).itemsize)


def _refused_epilogue(problem: Problem) -> str | None:
    epilogue, n = problem.epilogue, sizes(problem).n
    residual = epilogue.residual
    if epilogue.activation is not None and epilogue.activation not in ACTIVATIONS:
        return f"does not know the activation {epilogue.activation}"
    if residual is not None and (residual.dtype, residual.shape) != (
        problem.output.dtype,
        problem.output.shape,
    ):
        return "the residual is like the result"
    for meta in (epilogue.bias, epilogue.scale):
        if meta is not None and (meta.dtype not in FLOATS or meta.shape != (n,)):
            return "bias and scale are vectors of floating numbers, one a column"
    if problem.output.dtype == "int32" and not epilogue.is_empty:
        return "int32 results are bare products"
    return None


def _wants_k_major(dtype: str) -> bool:
    """WGMMA reads only 16-bit factors across their rows."""
    return dtype not in ("float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """One way to run the kernel.

    Attributes:
        tile_m, tile_n: what a block computes at a time.
        schedule: how two warpgroups share the work: ``cooperative``, in step on halves of a tile;
            ``staggered``, each at its own pace; ``ping_pong``, alternate tiles; ``paired``, each in
            a block of its own, two of them on a multiprocessor.
        stages: of the ring; each holds ``ROW_BYTES`` along K of both factors.
        buffers: of a warpgroup, for its results on their way out.
        split_k: ranges of K of the tiles that are not whole; a second kernel adds them in order.
        whole_waves: rounds of the grid with tiles over all of K, before those whose K is split.
        group: tiles down a column before the next column (what the L2 cache holds).
    """

    tile_m: int
    tile_n: int
    schedule: str
    stages: int
    buffers: int
    split_k: int = 1
    whole_waves: int = 0
    group: int = 8

    @property
    def rows(self) -> int:
        """Rows of a tile that one consumer accumulates."""
        return self.tile_m // 2 if self.schedule == "staggered" else self.tile_m

    @property
    def consumers(self) -> int:
        return 2 if self.schedule in ("staggered", "ping_pong") else 1

    @property
    def residents(self) -> int:
        """Blocks on a multiprocessor."""
        return 2 if self.schedule == "paired" else 1

    def shared_bytes(self) -> int:
        """An upper bound: results leave in pieces of ``ROW_BYTES`` a row, whatever their type."""
        ring = self.stages * (self.tile_m + self.tile_n) * ROW_BYTES
        return ring + self.consumers * self.buffers * self.rows * ROW_BYTES + BARRIER_BYTES


# Tiles worth trying: (tile_m, tile_n, schedule); all of them have run on an H200
TILES = (
    (128, 256, "staggered"),
    (128, 128, "ping_pong"),
    (128, 256, "cooperative"),
    (256, 128, "staggered"),
    (256, 128, "cooperative"),
    (64, 256, "ping_pong"),
    (128, 128, "staggered"),
    (64, 128, "ping_pong"),
    (128, 128, "cooperative"),
    (128, 64, "staggered"),
    (128, 128, "paired"),
    (128, 64, "paired"),
)
MOST_CONFIGS = 12
MOST_RANGES = 16
WORTH_SPLITTING = 0.97
SHORTEST_RANGE = 4  # tiles along K: below, filling the ring costs more than is shared
# The model that orders configurations, in clocks of one multiprocessor; fitted to one run on an
# H200, float16, 15 tilings of 8 shapes
TENSOR_SHARE = 0.88  # of the tensor cores' rate, in long runs
BYTES_PER_CLOCK = 72.0  # from the L2 cache
STEP_CLOCKS = 50.0  # around each tile along K
LONE_CLOCKS = 80.0  # more, where a block has only one small tile
EPILOGUE_CLOCKS = {  # an element
    "cooperative": 0.069,
    "staggered": 0.045,
    "ping_pong": 0.0,
    "paired": 0.0,  # as of the former; not fitted
}
ONE_BUFFER = 1.4  # times that, where results leave through one buffer
ADD_CLOCKS = 9000.0  # the second kernel
ADDED_BYTES_PER_CLOCK = 1200.0  # of partial sums, written and read, all multiprocessors together


def configs(problem: Problem) -> tuple[Config, ...]:
    """The tilings by a model of their time, best first."""
    ranked = sorted(_tilings(problem), key=lambda tiling: _clocks(problem, tiling))
    return tuple(asdict(tiling) for tiling in ranked[:MOST_CONFIGS])


def _tilings(problem: Problem) -> Iterator[Tiling]:
    accurate = problem["input"].dtype in FP8 and not problem.attr("fast_accumulation")
    residual = problem.epilogue.residual
    adds_int8 = residual is not None and residual.dtype == "int8"
    for tile_m, tile_n, schedule in TILES:
        alone = schedule in ("ping_pong", "paired")
        if accurate and tile_m * tile_n > 64 * 128 * (1 if alone else 2):
            continue  # two accumulators are too much for the registers
        if (problem["input"].dtype, schedule) == ("int8", "cooperative"):
            continue  # spills registers with a residual, and was never the fastest
        if adds_int8 and (tile_m, tile_n) == (128, 256):
            continue  # spills, too
        plain = _ring(problem, tile_m, tile_n, schedule)
        yield plain
        work = _Work.of(problem, plain)
        waves, left = divmod(work.whole, multiprocessors())
        if not left or schedule == "paired" or not _may_split(problem, plain):
            continue
        most = min(MOST_RANGES, work.tiles_k // SHORTEST_RANGE)
        splits = {
            replace(plain, split_k=_even(ranges, work.tiles_k), whole_waves=waves)
            for ranges in range(2, most + 1)
        }
        # what is saved must show
        clocks = {tiling: _clocks(problem, tiling) for tiling in splits}
        if clocks and min(clocks.values()) < WORTH_SPLITTING * _clocks(problem, plain):
            yield min(splits, key=lambda tiling: (clocks[tiling], tiling.split_k))


def _may_split(problem: Problem, tiling: Tiling) -> bool:
    """Whether partial sums can leave through the buffers of results, whose rows are as long."""
    return _row_bytes(tiling.tile_n, problem.output.dtype) >= ROW_BYTES


def _even(ranges: int, tiles_k: int) -> int:
    """The fewest ranges that are as long as so many ranges would be: none is empty."""
    return -(-tiles_k // -(-tiles_k // ranges))


def _ring(problem: Problem, tile_m: int, tile_n: int, schedule: str) -> Tiling:
    """A tiling with all buffers where a residual waits in them, and as many stages as fit."""
    pieces = max(1, _row_bytes(tile_n, problem.output.dtype) // ROW_BYTES)
    residual = problem.epilogue.residual is not None
    for buffers in (pieces if residual else min(2, pieces), min(2, pieces), 1):
        plain = Tiling(tile_m=tile_m, tile_n=tile_n, schedule=schedule, stages=0, buffers=buffers)
        stage_bytes = (tile_m + tile_n) * ROW_BYTES
        most = HOPPER.shared_bytes_of_block(plain.residents) - plain.shared_bytes()
        stages = min(8, most // stage_bytes)
        if stages >= (3 if residual or schedule == "paired" else 4):
            break
    return replace(plain, stages=stages)


def _clocks(problem: Problem, tiling: Tiling) -> float:
    """About how long a tiling takes, in clocks of a multiprocessor, without the launches."""
    work = _Work.of(problem, tiling)
    m, n = tiling.tile_m, tiling.tile_n
    # the tensor cores take 32 elements of a tile times ROW_BYTES of K a clock, of every type
    step = STEP_CLOCKS + max(m * n / 32 / TENSOR_SHARE, (m + n) * ROW_BYTES / BYTES_PER_CLOCK)
    if work.units <= multiprocessors() and m * n < 128 * 256:
        step += LONE_CLOCKS
    epilogue = EPILOGUE_CLOCKS[tiling.schedule] * m * n * (ONE_BUFFER if tiling.buffers == 1 else 1)
    blocks = multiprocessors()
    whole = -(-work.whole // blocks) * (work.tiles_k * step + epilogue)
    ranges = -(-tiling.split_k * work.split // blocks) * (work.k_each * step + epilogue)
    added = 0.0
    if work.split:
        added = ADD_CLOCKS + work.workspace_bytes / ADDED_BYTES_PER_CLOCK
    return whole + ranges + added


def workspace_bytes(problem: Problem, **config: Any) -> int:
    return _Work.of(problem, _tiling(problem, config)).workspace_bytes


def _tiling(problem: Problem, config: Config) -> Tiling:
    return Tiling(**(config or configs(problem)[0]))


@dataclass(frozen=True, kw_only=True)
class _Work:
    """How a product is cut: a unit is a tile over all of K (the first ``whole``) or over a range.

    ``tiles_m``, ``tiles_n``, ``tiles_k``: how many; ``split``: tiles whose K is cut into
    ``ranges`` of ``k_each`` tiles along K; ``blocks``: the grid.
    """

    tiling: Tiling
    tiles_m: int
    tiles_n: int
    tiles_k: int
    whole: int
    split: int
    blocks: int

    @staticmethod
    def of(problem: Problem, tiling: Tiling) -> _Work:
        product = sizes(problem)
        tiles_m = -(-product.m // tiling.tile_m)
        tiles_n = -(-product.n // tiling.tile_n)
        tiles = product.batch * tiles_m * tiles_n
        blocks = multiprocessors()
        whole = tiles if tiling.split_k == 1 else min(tiles, tiling.whole_waves * blocks)
        split = tiles - whole
        return _Work(
            tiling=tiling,
            tiles_m=tiles_m,
            tiles_n=tiles_n,
            tiles_k=-(-_row_bytes(product.k, problem["input"].dtype) // ROW_BYTES),
            whole=whole,
            split=split,
            blocks=min(whole + tiling.split_k * split, tiling.residents * blocks),
        )

    @property
    def units(self) -> int:
        return self.whole + self.tiling.split_k * self.split

    @property
    def k_each(self) -> int:
        return -(-self.tiles_k // self.tiling.split_k)

    @property
    def workspace_bytes(self) -> int:
        return 4 * self.tiling.split_k * self.split * self.tiling.tile_m * self.tiling.tile_n


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any) -> Call:
    """The factors as [batch, rows, columns], descriptors of them, and one or two launches."""
    tiling = _tiling(problem, config)
    product, work = sizes(problem), _Work.of(problem, tiling)
    dtype = problem["input"].dtype
    a_k_major = a_by_rows(problem) or _wants_k_major(dtype)
    b_k_major = b_by_rows(problem) or _wants_k_major(dtype)
    ready = dict(constants)
    turns = (a_k_major != a_by_rows(problem), b_k_major != b_by_rows(problem))
    for i, turn in enumerate(turns):
        if i in ready:
            ready[i] = packed(ready[i], ("dense rows", turn), _turned if turn else dense)
    width = ROW_BYTES // problem["input"].itemsize
    piece = min(ROW_BYTES // problem.output.itemsize, tiling.tile_n)
    box_a = [1, tiling.rows, width] if a_k_major else [1, width, tiling.rows]
    spread = _spreads(problem, tiling)
    if spread:
        box_b = [1, tiling.tile_n // 64, 8, 8, width]
    else:
        box_b = [1, tiling.tile_n, width] if b_k_major else [1, width, tiling.tile_n]
    box_c = [1, tiling.rows, piece]
    box_p = [1, tiling.rows, _row_bytes(piece, problem.output.dtype) // 4]
    partial = torch.int32 if dtype == "int8" else torch.float32
    m, n, k = product.m, product.n, product.k
    small = small_sums(problem, constants, product.k) and not work.split
    vectors = None if work.split else folded(problem, constants, small=small)
    gamma, (activation, beta) = problem.gamma, problem.epilogue.on_device
    epilogue = Epilogue(
        ALPHA=float(problem.epilogue.alpha),
        BETA=float(beta),
        ACTIVATION=activation,
        FOLDED=vectors is not None,
        SMALL=small,
        SPREAD=spread,
        SIXTEEN_BITS=in_sixteen_bits(problem),
    )
    finished = epilogue  # of tiles over all of K
    if vectors:
        finished = epilogue._replace(ALPHA=1.0, BETA=epilogue.BETA * (gamma or 1.0))
        gamma = None
    options: dict[str, Any] = {"maxnreg": 128} if tiling.schedule == "paired" else {}

    def call(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        a, b, added = problem.product_operands(ready, inputs)
        residual = added.residual
        assert workspace is not None or not work.split
        sums = workspace.view(partial) if workspace is not None and work.split else None
        scale, bias = vectors or (added.scale, added.bias)
        launch(
            multiply,
            (work.blocks,),
            matrix_tiles(a, (m, k) if a_k_major else (k, m), box_a),
            _spread(b, n, k, box_b)
            if spread
            else matrix_tiles(b, (n, k) if b_k_major else (k, n), box_b),
            matrix_tiles(out, (m, n), box_c),
            None if sums is None else matrix_tiles(sums, (tiling.tile_m, tiling.tile_n), box_p),
            None if residual is None else matrix_tiles(residual, (m, n), box_c),
            (scale, bias, gamma),
            n if n % tiling.tile_n else None,
            work.units,
            work.whole,
            max(work.split, 1),
            work.tiles_m,
            work.tiles_n,
            work.tiles_k,
            work.k_each,
            int(not product.shared),
            FORM=Form(
                WM=tiling.rows,
                WN=tiling.tile_n,
                BK=width,
                A_K_MAJOR=a_k_major,
                B_K_MAJOR=b_k_major,
                STAGES=tiling.stages,
                GROUP=tiling.group,
                SPREAD=spread,
                LET_START=work.units <= work.blocks,
            ),
            ROLES=Roles(
                SCHEDULE=tiling.schedule,
                BUFFERS=tiling.buffers,
                PROMOTE=dtype in FP8 and not problem.attr("fast_accumulation"),
                PRODUCER=40 if tiling.schedule == "cooperative" else 24,
            ),
            EPILOGUE=finished,
            num_warps=8 if tiling.schedule == "cooperative" else 4,
            launch_pdl=True,
            **options,
        )
        if sums is not None:
            launch(
                add_ranges,
                (work.split * tiling.tile_m // ADDED_ROWS,),
                sums,
                out,
                residual,
                scale,
                bias,
                problem.gamma,
                m,
                n,
                work.whole,
                work.split,
                work.tiles_m,
                work.tiles_n,
                RANGES=tiling.split_k,
                TILE_M=tiling.tile_m,
                TILE_N=tiling.tile_n,
                ROWS=ADDED_ROWS,
                GROUP=tiling.group,
                ALPHA=epilogue.ALPHA,
                BETA=epilogue.BETA,
                ACTIVATION=epilogue.ACTIVATION,
                num_warps=4,
            )
        return out

    return call


def _spreads(problem: Problem, tiling: Tiling) -> bool:
    """Whether B's rows come in another order, which 8-bit results want: see ``multiply``."""
    eight = problem.output.dtype in ("int8", *FP8) and _wants_k_major(problem["input"].dtype)
    return eight and tiling.split_k == 1 and tiling.tile_n % 64 == 0 == sizes(problem).n % 64


def _spread(tensor: torch.Tensor, n: int, k: int, box: list[int]) -> TensorDescriptor:
    """TMA's view of a dense B, [batch, n, k], with every 64 rows transposed as 8 × 8."""
    count = tensor.numel() // (n * k)
    return descriptor(
        tensor.as_strided((count, n // 64, 8, 8, k), (n * k, 64 * k, k, 8 * k, 1)), box
    )


def matrix_tiles(tensor: torch.Tensor, matrix: tuple[int, int], box: list[int]) -> TensorDescriptor:
    """TMA's view of a dense tensor as [batch, rows, columns]."""
    return descriptor(tensor.view(-1, *matrix), box)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    return dense(tensor.mT)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if TMA can read it, dense and aligned; else a copy."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
