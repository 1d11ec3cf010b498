"""The catalog: which kernels exist. A static table that imports none of them; ``register`` adds a
user's own.

A kernel is a module with two functions::

    def fits(problem: Problem) -> str | None: ...        # None, or why it is refused
    def bind(problem: Problem, constants: Mapping[int, Tensor]) -> Call: ...

What else it can do stands in its row here. ``bind`` packs the constants (by their position
among the inputs) once and returns the function that runs the kernel on the remaining inputs, in
order. ``fits`` is cheap and does not touch a GPU. A result that is a slice has
``TensorMeta.strides``: its rows lie apart in a larger buffer.
A kernel that can be tuned, or that needs scratch memory, has two functions more::

    def configs(problem: Problem) -> tuple[Config, ...]: ...     # arguments of bind, best first
    def workspace_bytes(problem: Problem, **config) -> int: ...  # then call(..., workspace=uint8)

One that has been far behind wherever it was measured says where, and is tried there only by name,
or for a report (``benchmarks.behind`` counts; some dozen compilations less for each network)::

    def outclassed(problem: Problem) -> str | None: ...          # None, or what was measured

Ids are never reused: plans name them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from tessella.core.errors import CompileError, UsageError
from tessella.operations.epilogue import is_gamma
from tessella.operations.problem import Problem
from tessella.operations.table import operation

Call = Callable[..., Any]  # tensors in, a tensor or a tuple of tensors out
Config = dict[str, Any]  # one way to run a kernel, a flat JSON object: tile sizes and the like


class KernelModule(Protocol):
    """What every kernel's module has."""

    def fits(self, problem: Problem) -> str | None: ...

    def bind(
        self, problem: Problem, constants: Mapping[int, torch.Tensor], **config: Any
    ) -> Call: ...


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One entry.

    Attributes:
        id: ``operation.algorithm[.target]``, the name in plans.
        op: the operation, ``*`` for any.
        module: where its code lies; imported only when it is used.
        targets: where it can run.
        source: who wrote it: ``tessella``, ``onednn``, ``mkl``, ``cudnn``, ``cublaslt``,
            ``cusparselt``, ``aten``, ``user``.
        version: raised when its code changes, so that old timings of it are not believed.
        writes_out: it writes its result into ``out=buffer``, else it returns a new tensor.
        sliced_out: the result may be a slice of a larger buffer.
        in_place: ``out`` may be an input, whose numbers end there.
        gamma: it has the factor behind an epilogue's activation.
        views: its output may share memory with its input, which must live as long.
        overwrites: the operand whose memory its result takes; nothing may need it afterwards
            (``Problem.is_dying``).
        last_resort: tried only where no other kernel fits.
        unproven: compiled, but never run on a GPU in its present form, so that it might hang: it
            takes part only where its algorithm is asked for by name.
        sparse: it takes layers whose constant weight is 2:4 sparse, and no others.
    """

    id: str
    op: str
    module: str
    targets: tuple[str, ...]
    source: str
    version: int = 1
    writes_out: bool = True
    sliced_out: bool = False
    in_place: bool = False
    gamma: bool = False
    views: bool = False
    overwrites: str | None = None
    last_resort: bool = False
    unproven: bool = False
    sparse: bool = False

    @property
    def algorithm(self) -> str:
        """The second part of the id: ``implicit_gemm`` of ``conv2d.implicit_gemm.sm90``."""
        return self.id.split(".")[1] if "." in self.id else self.id

    @property
    def aliases(self) -> bool:
        """Whether its inputs may be read through its output, which is a view of them."""
        return self.views and self.overwrites is None

    @property
    def overwritten(self) -> int | None:
        """The position of the input that ``overwrites`` names."""
        return None if self.overwrites is None else operation(self.op).position(self.overwrites)

    def load(self) -> KernelModule:
        return cast(KernelModule, importlib.import_module(self.module))

    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot carry a problem out, or None."""
        if reason := problem.misfit:
            return reason
        sliced = any(meta.strides is not None for meta in problem.outputs)
        if sliced and not self.sliced_out:
            return "does not write into a slice of a larger buffer"
        if not is_gamma(gamma := problem.epilogue.gamma):
            return f"gamma is a number above zero that float32 holds, not {gamma!r}"
        if gamma != 1 and not self.gamma:
            return "has no factor behind the activation (gamma)"
        return self.load().fits(problem)

    def outclassed(self, problem: Problem) -> str | None:
        """What was measured against trying it on such a problem, where others fit too, or None."""
        outclassed = getattr(self.load(), "outclassed", None)
        return outclassed(problem) if outclassed else None

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """The ways to run it, the most promising first; ``({},)`` if there is only one."""
        configs = getattr(self.load(), "configs", None)
        return _configs(configs, problem) if configs else ({},)

    def workspace_bytes(self, problem: Problem, config: Config) -> int:
        """Scratch memory that a call needs beside its inputs and outputs."""
        workspace_bytes = getattr(self.load(), "workspace_bytes", None)
        return workspace_bytes(problem, **config) if workspace_bytes else 0


_known_configs: dict[tuple[Any, str], tuple[Config, ...]] = {}


def _configs(
    propose: Callable[[Problem], tuple[Config, ...]], problem: Problem
) -> tuple[Config, ...]:
    """What a kernel proposes. Weighing tiles takes up to 10 ms, and networks repeat layers."""
    key = propose, problem.key
    if key not in _known_configs:
        _known_configs[key] = propose(problem)
    return _known_configs[key]


_TORCH = ("cpu", "sm_90")
_ALL = ("reference", *_TORCH)


def _row(id: str, module: str, *targets: str, source: str, **flags: Any) -> Kernel:
    op = id.partition(".")[0]
    return Kernel(
        id=id, op=op, module=f"tessella.kernels.{module}", targets=targets, source=source, **flags
    )


def _aten(ops: str, module: str, **flags: Any) -> tuple[Kernel, ...]:
    """One row ``OP.aten`` for each operation that one module runs through torch."""
    return tuple(_row(f"{op}.aten", module, *_TORCH, source="aten", **flags) for op in ops.split())


def _rows(ops: str, algorithm: str, module: str, source: str, **flags: Any) -> tuple[Kernel, ...]:
    """A row ``OP.algorithm`` for the GPU for each operation that one module carries out."""
    return tuple(
        _row(f"{op}.{algorithm}", module, "sm_90", source=source, **flags) for op in ops.split()
    )


KERNELS: tuple[Kernel, ...] = (
    # convolution
    _row("conv2d.avx512", "conv.x86", "cpu", source="tessella", sliced_out=True),
    _row(
        "conv2d.avx512_sum",
        "conv.x86_sum",
        "cpu",
        source="tessella",
        views=True,
        overwrites="residual",
        writes_out=False,
    ),
    _row("conv2d.onednn", "conv.libraries.onednn", "cpu", source="onednn", writes_out=False),
    _row(
        "conv2d.onednn_sum",
        "conv.libraries.onednn_sum",
        "cpu",
        source="onednn",
        views=True,
        overwrites="residual",
        writes_out=False,
    ),
    _row(
        "conv2d.onednn_linear",
        "conv.libraries.onednn_linear",
        "cpu",
        source="onednn",
        writes_out=False,
    ),
    _row(
        "conv2d.onednn_int8", "conv.libraries.onednn_int8", "cpu", source="onednn", writes_out=False
    ),
    _row("conv2d.cudnn", "conv.libraries.cudnn", "sm_90", source="cudnn", writes_out=False),
    _row("conv2d.cudnn_graph", "conv.libraries.cudnn_graph", "sm_90", source="cudnn"),
    _row(
        "conv2d.implicit_gemm.sm90",
        "conv.hopper.implicit_gemm",
        "sm_90",
        source="tessella",
        version=4,
        sliced_out=True,
        gamma=True,
    ),
    _row(
        "conv2d.pointwise.sm90",
        "conv.hopper.pointwise",
        "sm_90",
        source="tessella",
        version=2,
        gamma=True,
    ),
    _row(
        "conv2d.direct.sm90",
        "conv.hopper.direct",
        "sm_90",
        source="tessella",
        version=2,
        gamma=True,
    ),
    _row(
        "conv2d_chain.back_to_back.sm90",
        "conv.hopper.chain",
        "sm_90",
        source="tessella",
        version=3,
        writes_out=False,
    ),
    _row("conv2d_pool.direct.sm90", "conv.hopper.pooled", "sm_90", source="tessella", gamma=True),
    *_rows("conv2d conv1d conv3d", "direct", "conv.direct", "tessella", version=3, gamma=True),
    *_rows("conv2d conv1d conv3d", "gemm", "conv.gemm", "tessella", gamma=True),
    *_rows("conv2d conv1d conv3d", "implicit_gemm", "conv.implicit_gemm", "tessella", gamma=True),
    *_rows(
        "conv2d conv1d conv3d",
        "implicit_precomp_gemm",
        "conv.implicit_precomp_gemm",
        "tessella",
        gamma=True,
    ),
    _row("conv2d.winograd", "conv.winograd.fused", "sm_90", source="tessella", version=2),
    _row(
        "conv2d.winograd_nonfused", "conv.winograd.nonfused", "sm_90", source="tessella", version=2
    ),
    _row("conv2d.fft", "conv.fourier.fft", "sm_90", source="tessella", version=2),
    _row("conv2d.fft_tiling", "conv.fourier.fft_tiling", "sm_90", source="tessella", version=2),
    *_aten("conv1d conv2d conv3d", "conv.libraries.aten", writes_out=False),
    # its gradients
    _row("conv2d_dgrad.implicit_gemm.sm90", "conv.hopper.dgrad", "sm_90", source="tessella"),
    _row(
        "conv2d_wgrad.implicit_gemm.sm90",
        "conv.hopper.wgrad",
        "sm_90",
        source="tessella",
    ),
    _row("conv2d_dgrad.implicit_gemm", "conv.dgrad", "sm_90", source="tessella"),
    _row("conv2d_wgrad.implicit_gemm", "conv.wgrad", "sm_90", source="tessella"),
    _row(
        "conv2d_dgrad.cudnn",
        "conv.libraries.backward_cudnn",
        "sm_90",
        source="cudnn",
        writes_out=False,
    ),
    _row(
        "conv2d_wgrad.cudnn",
        "conv.libraries.backward_cudnn",
        "sm_90",
        source="cudnn",
        writes_out=False,
    ),
    *_aten(
        "conv1d_dgrad conv2d_dgrad conv3d_dgrad", "conv.libraries.backward_aten", writes_out=False
    ),
    *_aten(
        "conv1d_wgrad conv2d_wgrad conv3d_wgrad", "conv.libraries.backward_aten", writes_out=False
    ),
    # matrix products
    _row("linear.onednn", "gemm.onednn", "cpu", source="onednn", writes_out=False),
    _row("linear.onednn_int8", "gemm.onednn_int8", "cpu", source="onednn", writes_out=False),
    _row("linear.mkl", "gemm.mkl", "cpu", source="mkl", writes_out=False),
    *_rows("linear matmul", "cublaslt", "gemm.cublaslt", "cublaslt"),
    *_rows("linear matmul", "wgmma.sm90", "gemm.wgmma", "tessella", version=4, gamma=True),
    *_rows("linear matmul", "skinny.sm90", "gemm.skinny_sm90", "tessella", gamma=True),
    *_rows("linear matmul", "skinny", "gemm.skinny", "tessella", gamma=True),
    *_rows("linear matmul", "tiled", "gemm.tiled", "tessella", gamma=True),
    *_rows(
        "linear conv2d", "cusparselt", "sparse.cusparselt", "cusparselt", sparse=True, gamma=True
    ),
    *_rows("linear conv2d", "sparse.sm90", "sparse.wgmma", "tessella", sparse=True, gamma=True),
    *_rows("linear matmul", "fma.sm90", "gemm.fma_sm90", "tessella", gamma=True),
    *_aten("linear matmul", "gemm.aten"),
    _row(
        "linear_norm.normed.sm90",
        "gemm.normed",
        "sm_90",
        source="tessella",
        writes_out=False,
        gamma=True,
    ),
    # the other layers
    _row("max_pool2d.avx512", "pool.x86", "cpu", source="tessella", sliced_out=True),
    _row("max_pool2d.shifted", "pool.shifted", "cpu", source="tessella"),
    *_aten("max_pool2d avg_pool2d adaptive_avg_pool2d", "pool.aten", writes_out=False),
    *_aten("batch_norm layer_norm", "norm.aten", writes_out=False),
    *_aten("softmax log_softmax", "softmax.aten"),
    *_aten("mean sum", "reduce.aten"),
    _row(
        "scaled_dot_product_attention.flash.sm90",
        "attention.flash_sm90",
        "sm_90",
        source="tessella",
        version=3,
        writes_out=False,
        gamma=True,
    ),
    _row(
        "scaled_dot_product_attention.flash",
        "attention.flash",
        "sm_90",
        source="tessella",
        writes_out=False,
        gamma=True,
    ),
    _row(
        "scaled_dot_product_attention.windows",
        "attention.windows",
        "sm_90",
        source="tessella",
        writes_out=False,
        gamma=True,
    ),
    _row(
        "scaled_dot_product_attention.cudnn",
        "attention.cudnn",
        "sm_90",
        source="cudnn",
        writes_out=False,
    ),
    *_aten("scaled_dot_product_attention", "attention.aten", writes_out=False),
    # element by element
    *_aten(
        "relu relu6 sigmoid tanh silu gelu hardswish hardsigmoid mish",
        "pointwise.unary",
        sliced_out=True,
        in_place=True,
    ),
    *_aten(
        "leaky_relu elu clamp exp log sqrt rsqrt reciprocal neg abs erf",
        "pointwise.unary",
        sliced_out=True,
        in_place=True,
    ),
    *_aten("add sub mul div pow", "pointwise.binary", sliced_out=True, in_place=True),
    # between floating numbers and int8 or fp8
    *_rows("quantize dequantize", "tiled", "quant.tiled", "tessella", version=2),
    *_aten("quantize dequantize", "quant.aten"),
    *_rows(
        "pointwise relu relu6 sigmoid tanh silu gelu hardswish hardsigmoid mish leaky_relu elu"
        " softplus clamp exp log sqrt rsqrt reciprocal neg abs erf add sub mul div pow maximum"
        " minimum to batch_norm softmax log_softmax layer_norm rms_norm mean sum amax amin"
        " adaptive_avg_pool2d quantize dequantize",
        "generated",
        "pointwise.generated",
        "tessella",
        version=3,
        sliced_out=True,
    ),
    _row("pointwise.aten", "pointwise.sequence", *_TORCH, source="aten", sliced_out=True),
    *_rows(
        "pointwise",
        "generated_several",
        "pointwise.generated_several",
        "tessella",
        version=3,
        writes_out=False,
    ),
    *_rows(
        "max_pool2d avg_pool2d adaptive_avg_pool2d pointwise",
        "windows",
        "pool.windows",
        "tessella",
        version=4,
        sliced_out=True,
    ),
    *_rows(
        "mean sum adaptive_avg_pool2d pointwise",
        "columns",
        "reduce.columns",
        "tessella",
        version=3,
    ),
    # moving elements
    *_aten("to cat", "transform.copy", sliced_out=True),
    _row("cat.in_place", "transform.join", *_TORCH, source="aten", sliced_out=True),
    _row("image_to_tensor.pointwise", "transform.image", "sm_90", source="tessella"),
    *_aten("image_to_tensor", "transform.image_aten"),
    _row("rearrange.rows", "transform.rearrange_rows", "sm_90", source="tessella"),
    _row("rearrange.tiles", "transform.rearrange_tiles", "sm_90", source="tessella"),
    *_aten("rearrange", "transform.rearrange_aten"),
    _row("reshape.view", "transform.reshape", *_TORCH, source="aten", views=True, writes_out=False),
    _row("permute.view", "transform.permute", *_TORCH, source="aten", views=True, writes_out=False),
    *(
        _row(
            f"{op}.view",
            "transform.cut",
            *_TORCH,
            source="aten",
            views=True,
            writes_out=False,
            sliced_out=True,
        )
        for op in ("slice", "select", "split", "expand")
    ),
    # what a user wrote, and what has no kernel of its own
    _row("user.operator", "user.step", *_ALL, source="user", writes_out=False),
    _row("fallback.aten", "fallback.aten", *_ALL, source="aten", views=True, writes_out=False),
    Kernel(
        id="reference",
        op="*",
        module="tessella.kernels.fallback.last_resort",
        targets=_ALL,
        source="aten",
        views=True,
        last_resort=True,
        writes_out=False,
        gamma=True,
    ),
)

BY_ID: dict[str, Kernel] = {kernel.id: kernel for kernel in KERNELS}


def rows() -> tuple[Kernel, ...]:
    """The table, and what users have registered."""
    return (*KERNELS, *_REGISTERED.values())


def candidates(op: str, target: str) -> tuple[Kernel, ...]:
    """The kernels that may carry out ``op`` on ``target``, in the table's order, users' last."""
    return tuple(k for k in rows() if k.op in (op, "*") and target in k.targets)


def kernel(id: str) -> Kernel:
    """The row called ``id``; raises ``CompileError`` if there is none."""
    if id in _REGISTERED:
        return _REGISTERED[id]
    if id not in BY_ID:
        raise CompileError(
            "unknown kernel", seen=id, fix="rebuild the plan with this version of Tessella"
        )
    return BY_ID[id]


_REGISTERED: dict[str, Kernel] = {}


def register(kernel: Kernel) -> None:
    """Add a kernel of a user's own for the life of this process, or replace it.

    Raises:
        UsageError: the id is that of a kernel of the table.
    """
    if kernel.id in BY_ID:
        raise UsageError(
            "there is a kernel of this name", seen=kernel.id, fix="choose another algorithm's name"
        )
    _REGISTERED[kernel.id] = kernel


def unregister(id: str) -> None:
    """Take a kernel of a user's own out again."""
    _REGISTERED.pop(id, None)
