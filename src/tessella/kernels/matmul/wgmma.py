"""Matrix product on Hopper's tensor cores: TMA, a ring in shared memory, WGMMA, specialized warps.

The host's side: what fits, which tilings are worth trying, packing, descriptors and launches. The
device code is ``wgmma_device``. For ``matmul`` and ``linear`` in float16, bfloat16, TF32, int8 and
both kinds of fp8, with the whole epilogue fused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tessella.core.errors import KernelError
from tessella.kernels.catalog import Call, Config
from tessella.kernels.epilogue import ACTIVATIONS
from tessella.kernels.hopper import descriptor
from tessella.kernels.launch import launch
from tessella.kernels.matmul.wgmma_device import multiply, reduce_splits
from tessella.kernels.packing import packed
from tessella.kernels.problem import Problem, TensorMeta

WRITES_OUT = True

A, B, BIAS, RESIDUAL, SCALE = range(5)
ROW_BYTES = 128  # of a tile along K: what one swizzled line of shared memory holds
SHARED_BYTES = 227 * 1024  # what a block may have
BARRIER_BYTES = 1024  # room for barriers, and for the alignment of what comes before them
MULTIPROCESSORS = 132  # where there is no GPU to ask

FLOATS = ("float32", "bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
RESULTS = {
    "float16": (*FLOATS, "int8", *FP8),
    "bfloat16": (*FLOATS, "int8", *FP8),
    "float32": FLOATS,
    "int8": ("int32", "int8", *FLOATS),
    "float8_e4m3fn": (*FLOATS, *FP8),
    "float8_e5m2": (*FLOATS, *FP8),
}


@dataclass(frozen=True, kw_only=True)
class Product:
    """C[batch, m, n] = Σ_k A[batch, m, k] B[batch, k, n], and how the operands lie in memory.

    ``a_k_major``: the rows of A lie along K (else along M); ``b_k_major``: B lies as [n, k].
    """

    batch: int
    m: int
    n: int
    k: int
    b_batched: bool
    a_k_major: bool
    b_k_major: bool

    @staticmethod
    def of(problem: Problem) -> Product:
        a, b = problem.inputs[A].shape, problem.inputs[B].shape
        if problem.op == "linear":
            rows = math.prod(a[:-1])
            return Product(
                batch=1, m=rows, n=b[0], k=b[1], b_batched=False, a_k_major=True, b_k_major=True
            )
        a_k_major = not problem.attr("transpose_a")
        b_k_major = bool(problem.attr("transpose_b"))
        m, k = a[-2:] if a_k_major else a[:-3:-1]
        n = b[-2] if b_k_major else b[-1]
        batch = math.prod(a[:-2])
        if len(b) == 2 and a_k_major:  # one B for all: more rows
            batch, m = 1, batch * m
        return Product(
            batch=batch,
            m=m,
            n=n,
            k=k,
            b_batched=len(b) > 2,
            a_k_major=a_k_major,
            b_k_major=b_k_major,
        )


def fits(problem: Problem) -> str | None:
    a, b = problem.inputs[A], problem.inputs[B]
    return (
        _refused_types(problem, a, b)
        or _refused_shapes(problem, a, b)
        or _refused_layouts(problem)
        or _refused_epilogue(problem)
    )


def _refused_types(problem: Problem, a: TensorMeta, b: TensorMeta) -> str | None:
    if a.dtype not in RESULTS:
        return f"no tensor-core product of {a.dtype}"
    if a.dtype != b.dtype:
        return f"both factors of one element type, not {a.dtype} and {b.dtype}"
    if a.dtype == "float32" and problem.math != "tf32":
        return "float32 products are rounded to TF32 here; ieee was asked for"
    if problem.output.dtype not in RESULTS[a.dtype]:
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
    product, constant = Product.of(problem), problem.constant
    dtype = problem.inputs[A].dtype
    for name, i, lies_right, along in (
        ("first", A, product.a_k_major, "M (transpose_a)"),
        ("second", B, product.b_k_major, "N (no transpose_b)"),
    ):
        meta = problem.inputs[i]
        if i not in constant and meta.format != "contiguous":
            return f"rows of the {name} factor are not dense"
        if not lies_right and i not in constant and _wants_k_major(dtype):
            return f"{dtype} is read along K; the {name} factor lies along {along}"
        k_major = lies_right or _wants_k_major(dtype)
        if _row_bytes(product.k if k_major else meta.shape[-1], dtype) % 16:
            return f"rows of the {name} factor are not multiples of 16 bytes, as TMA wants them"
    for meta in (problem.output, problem.meta(RESIDUAL)):
        if meta is not None and meta.format != "contiguous":
            return "makes, and adds, dense rows"
    if _row_bytes(product.n, problem.output.dtype) % 16:
        return "rows of the result are not multiples of 16 bytes, as TMA wants them"
    return None


def _row_bytes(elements: int, dtype: str) -> int:
    return elements * int(getattr(torch, dtype).itemsize)


def _refused_epilogue(problem: Problem) -> str | None:
    activation, residual = problem.attr("activation"), problem.meta(RESIDUAL)
    n = Product.of(problem).n
    if activation is not None and activation not in ACTIVATIONS:
        return f"does not know the activation {activation}"
    if residual is not None and (residual.dtype, residual.shape) != (
        problem.output.dtype,
        problem.output.shape,
    ):
        return "the residual is like the result"
    for meta in (problem.meta(BIAS), problem.meta(SCALE)):
        if meta is not None and (meta.dtype not in FLOATS or meta.shape != (n,)):
            return "bias and scale are vectors of floating numbers, one a column"
    bare = activation is None and problem.attr("alpha") == 1 and not any(problem.inputs[2:])
    if problem.output.dtype == "int32" and not bare:
        return "int32 results are bare products"
    return None


def _wants_k_major(dtype: str) -> bool:
    """WGMMA reads only 16-bit factors across their rows."""
    return dtype not in ("float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """One way to run it.

    Attributes:
        tile_m, tile_n: what a block computes at a time.
        ping_pong: the warpgroups take turns at whole tiles, instead of halves of each tile.
        stages: of the ring; each holds ``ROW_BYTES`` along K of both factors.
        buffers: of a warpgroup, for its results on their way out.
        split_k: ranges of K, summed by a second kernel in a fixed order.
        group: tiles down a column before the next column (what the L2 cache holds).
    """

    tile_m: int
    tile_n: int
    ping_pong: bool
    stages: int
    buffers: int
    split_k: int = 1
    group: int = 8

    @property
    def rows(self) -> int:
        """Rows that one warpgroup accumulates."""
        return self.tile_m if self.ping_pong else self.tile_m // 2

    def shared_bytes(self) -> int:
        """Upper bound: results leave in pieces of ``ROW_BYTES`` a row, whatever their type."""
        ring = self.stages * (self.tile_m + self.tile_n) * ROW_BYTES
        return ring + 2 * self.buffers * self.rows * ROW_BYTES + BARRIER_BYTES


def _pieces(tile_n: int, dtype: str) -> int:
    """Buffers that hold a warpgroup's whole tile."""
    return max(1, _row_bytes(tile_n, dtype) // ROW_BYTES)


def configs(problem: Problem) -> tuple[Config, ...]:
    return ({"tile_m": 128, "tile_n": 256, "ping_pong": False, "stages": 4, "buffers": 2},)


def workspace_bytes(problem: Problem, *, split_k: int = 1, **_: int) -> int:
    product = Product.of(problem)
    return 4 * split_k * product.batch * product.m * product.n if split_k > 1 else 0


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> Call:
    """The factors as [batch, rows, columns], descriptors of them, and one or two launches."""
    tiling = Tiling(**(config or configs(problem)[0]))
    product = Product.of(problem)
    dtype = problem.inputs[A].dtype
    a_k_major = product.a_k_major or _wants_k_major(dtype)
    b_k_major = product.b_k_major or _wants_k_major(dtype)
    ready = dict(constants)
    for i, k_major, lies in ((A, a_k_major, product.a_k_major), (B, b_k_major, product.b_k_major)):
        if i in ready:
            turn = k_major != lies
            ready[i] = packed(
                ready[i], ("dense", turn), lambda t, turn=turn: _dense(t.mT if turn else t)
            )
    alpha, beta = (float(problem.attr(name)) for name in ("alpha", "beta"))
    activation = problem.attr("activation")
    partial = torch.int32 if dtype == "int8" else torch.float32
    split = tiling.split_k
    tiles_m = -(-product.m // tiling.tile_m)
    tiles_n = -(-product.n // tiling.tile_n)
    width = ROW_BYTES // int(getattr(torch, dtype).itemsize)
    tiles_k = -(-product.k // width)
    units = product.batch * split * tiles_m * tiles_n
    grid = (min(units, _multiprocessors()),)
    box_a = [1, tiling.rows, width] if a_k_major else [1, width, tiling.rows]
    box_b = [1, tiling.tile_n, width] if b_k_major else [1, width, tiling.tile_n]

    def tiles(tensor: torch.Tensor, rows: int, columns: int, box: list[int]):
        if tensor.data_ptr() % 16:
            raise KernelError(
                "a tensor is not aligned to 16 bytes, as TMA wants it",
                seen=f"address {tensor.data_ptr():#x}, shape {tuple(tensor.shape)}",
                fix="pass a copy of it (tensor.clone())",
            )
        return descriptor(tensor.view(-1, rows, columns), box)

    def call(
        *inputs: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        operands = problem.operands(ready, inputs)
        a, b, bias, residual, scale = (*operands, *[None] * (5 - len(operands)))
        m, n, k = product.m, product.n, product.k
        into = out if split == 1 else workspace.view(partial)
        box_c = [1, tiling.rows, min(ROW_BYTES // into.itemsize, tiling.tile_n)]
        fused = split == 1
        launch(
            multiply,
            grid,
            tiles(a, *((m, k) if a_k_major else (k, m)), box_a),
            tiles(b, *((n, k) if b_k_major else (k, n)), box_b),
            tiles(into, m, n, box_c),
            tiles(residual, m, n, box_c) if fused and residual is not None else None,
            scale if fused else None,
            bias if fused else None,
            n,
            units,
            tiles_m,
            tiles_n,
            tiles_k,
            -(-tiles_k // split),
            product.batch,
            int(product.b_batched),
            WM=tiling.rows,
            WN=tiling.tile_n,
            BK=width,
            A_K_MAJOR=a_k_major,
            B_K_MAJOR=b_k_major,
            PING_PONG=tiling.ping_pong,
            STAGES=tiling.stages,
            BUFFERS=tiling.buffers,
            GROUP=tiling.group,
            PROMOTE=dtype in FP8 and not problem.attr("fast_accumulation"),
            ALPHA=alpha if fused else 1.0,
            BETA=beta,
            ACTIVATION=activation if fused else None,
            num_warps=4,
        )
        if not fused:
            rows = product.batch * m
            launch(
                reduce_splits,
                (-(-rows // 4), -(-n // 256)),
                into,
                out,
                scale,
                bias,
                residual,
                rows,
                n,
                alpha,
                beta,
                SPLITS=split,
                ACTIVATION=activation,
                ROWS=4,
                COLUMNS=256,
                num_warps=4,
            )
        return out

    return call


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Itself if its rows are dense and it can be given to TMA, else a copy."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _multiprocessors() -> int:
    if not torch.cuda.is_available():
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties("cuda").multi_processor_count
