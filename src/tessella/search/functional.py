"""The kernels as functions of tensors, with torch.nn.functional's names and argument order.

Each call takes the kernel that is fastest for its shapes on this device: from the timing cache, or
by a search the first time. Nothing here records gradients; ``tessella.nn`` has layers that do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from tessella.core.device import gpu_target
from tessella.core.dtype import Math, dtype_name
from tessella.core.errors import CompileError, KernelError, UsageError
from tessella.device.float32_math import float32_math
from tessella.device.machine import ALIGNMENT
from tessella.kernels import catalog
from tessella.kernels.catalog import Call
from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.operations.problems import Sizes
from tessella.operations.tensor_meta import TensorMeta, meta_of
from tessella.search import find as search
from tessella.search.find import SearchOptions
from tessella.search.tuning import CACHE_FOLDER, TimingCache, Trial

Tensor = torch.Tensor

WORKSPACE_BYTES = 2 << 30  # what a call may take beside its operands, unless asked for by name


class Settings(TypedDict, total=False):
    """What a product's call may say besides its operands.

    Attributes:
        residual: like the result; the C of BLAS.
        scale: a factor for each output channel, float32.
        activation: a name in ``epilogue.ACTIVATIONS``.
        gamma: above zero, in float32 too: 1 / the scale of a result of int8 or fp8, for example.
        fast_accumulation: fp8 only: sums stay in the tensor cores' 14-bit accumulators.
        out_dtype: default the first operand's; for int8 operands int8 if there is a scale (rounded
            half to even and saturated), else int32.
        math: ``ieee`` or ``tf32``: how float32 products may be rounded.
        algorithm: ``gemm``, ``implicit_gemm``, ``implicit_precomp_gemm``, ``direct``, ``fft``,
            ``fft_tiling``, ``winograd``, ``winograd_nonfused``, or a library's name; default the
            fastest.
        out: where to write the result; it may share memory with an operand, at the cost of a copy.
    """

    residual: Tensor | None
    scale: Tensor | None
    activation: str | None
    alpha: float
    beta: float
    gamma: float
    fast_accumulation: bool
    out_dtype: torch.dtype | None
    math: Math
    algorithm: str | None
    out: Tensor | None


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    **settings: Unpack[Settings],
) -> Tensor:
    """``gamma · activation(alpha · scale[k] · (x ∗ weight) + bias[k] + beta · residual)``.

    Also ``conv1d`` and ``conv3d``: the number of axes says which.

    Args:
        x: [N, C, H, W], NCHW or channels_last; the result has its format.
        weight: [K, C / groups, R, S].
        bias: [K], as the scale; the residual like the result [N, K, P, Q].
        settings: see ``Settings``.

    Raises:
        UsageError: arguments that do not go together.
        KernelError: the algorithm is not defined here; the message has its reason.
    """
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return _product(problems.conv, _dense(x), _dense(weight), bias, settings, **window)


conv1d = conv3d = conv2d


def conv2d_dgrad(
    dy: Tensor,
    weight: Tensor,
    input_size: Sequence[int],
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    math: Math = "ieee",
    algorithm: str | None = None,
) -> Tensor:
    """The gradient of ``conv2d``'s input.

    Args:
        dy: gradient of the result [N, K, P, Q].
        input_size: [N, C, H, W].
    """
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return _gradient(problems.conv_dgrad, dy, weight, input_size, algorithm, math=math, **window)


def conv2d_wgrad(
    dy: Tensor,
    x: Tensor,
    kernel_size: Sizes,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    *,
    out_dtype: torch.dtype | None = None,
    math: Math = "ieee",
    algorithm: str | None = None,
) -> Tensor:
    """The gradient of ``conv2d``'s weight [K, C / groups, R, S].

    Args:
        dy: gradient of the result [N, K, P, Q].
        x: the convolution's input [N, C, H, W].
        kernel_size: R and S.
        out_dtype: default x's.
    """
    window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    made = {"out_dtype": _name(out_dtype), "math": math, **window}
    return _gradient(problems.conv_wgrad, dy, x, kernel_size, algorithm, **made)


def _gradient(
    make: Callable[..., Problem],
    dy: Tensor,
    other: Tensor,
    size: Sizes,
    algorithm: str | None,
    **asked: Any,
) -> Tensor:
    """The gradient, of that size, of the operand that is not ``other``."""
    dy, other = _dense(dy), _dense(other)
    problem = make(meta_of(dy), meta_of(other), size, **asked)
    return _run(problem, [dy, other], algorithm, None)


def matmul(
    a: Tensor, b: Tensor, bias: Tensor | None = None, **settings: Unpack[Settings]
) -> Tensor:
    """``gamma · activation(alpha · scale[n] · (a @ b) + bias[n] + beta · residual)``.

    Args:
        a: [..., M, K]; a transposed view is used as it is.
        b: [..., K, N], leading axes those of a, or none; likewise.
        bias: [N], as the scale; the residual like the result [..., M, N].
        settings: see ``Settings``.
    """
    a, transpose_a = _untransposed(a)
    b, transpose_b = _untransposed(b)
    transposes = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    return _product(problems.matmul, a, b, bias, settings, **transposes)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, **settings: Unpack[Settings]
) -> Tensor:
    """``gamma · activation(alpha · scale[n] · (x @ weightᵀ) + bias[n] + beta · residual)``.

    Args:
        x: [..., K].
        weight: [N, K].
        bias, settings: as for ``matmul``.
    """
    return _product(problems.linear, _dense(x), _dense(weight), bias, settings)


def _product(
    make: Callable[..., Problem],
    first: Tensor,
    second: Tensor,
    bias: Tensor | None,
    settings: Settings,
    **own: Any,
) -> Tensor:
    """The product of two tensors that lie as kernels read them, with what follows it."""
    rest: dict[str, Any] = {**settings}
    algorithm, out = rest.pop("algorithm", None), rest.pop("out", None)
    added = [
        None if tensor is None else _dense(tensor)
        for tensor in (bias, rest.pop("residual", None), rest.pop("scale", None))
    ]
    operands = [first, second, *added]
    metas = [None if tensor is None else meta_of(tensor) for tensor in operands]
    problem = make(*metas, out_dtype=_name(rest.pop("out_dtype", None)), **own, **rest)
    return _run(problem, operands, algorithm, out)


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """The kernel that won for a problem, bound."""

    call: Call
    writes_out: bool
    workspace_bytes: int
    library: bool


_ready: dict[tuple[Any, ...], _Ready] = {}
_caches: dict[Path, TimingCache] = {}


def timing_cache(folder: Path | None = None) -> TimingCache:
    """The timings of this user on this machine, shared by all callers in the process."""
    path = (folder or CACHE_FOLDER) / "timings.jsonl"
    if path not in _caches:
        _caches[path] = TimingCache(path)
    return _caches[path]


def target_of(device: torch.device) -> str:
    """The target on which kernels for tensors on a device run."""
    return (gpu_target(device) or "cpu") if device.type == "cuda" else "cpu"


def _run(
    problem: Problem, tensors: Sequence[Tensor | None], algorithm: str | None, out: Tensor | None
) -> Tensor:
    inputs = [t for t in tensors if t is not None]
    device, *others = {t.device for t in inputs}
    if others:
        raise UsageError(
            "tensors must be on one device", seen={str(t.device) for t in inputs}, fix="move them"
        )
    if out is not None:
        _check_out(out, problem.output, device)
    if problem.output_is_empty:
        return problem.output.empty(device) if out is None else out
    attrs = tuple(problem.attrs.items())
    key = (problem.op, problem.inputs, problem.outputs, attrs, problem.math, algorithm, device)
    with torch.no_grad(), current(device):
        ready = _ready.get(key)
        if ready is None:
            ready = _ready[key] = _choose(problem, inputs, target_of(device), algorithm)
        buffers = {}
        if ready.workspace_bytes:
            buffers["workspace"] = torch.empty(
                ready.workspace_bytes, dtype=torch.uint8, device=device
            )
        if ready.writes_out:
            direct = out if out is not None and _is_free(out, inputs) else None
            buffers["out"] = problem.output.empty(device) if direct is None else direct
        float32 = problem.first is not None and problem.first.dtype == "float32"
        rounds = ready.library and device.type == "cuda" and float32
        with float32_math(problem.math) if rounds else contextlib.nullcontext():
            made: Tensor = ready.call(*inputs, **buffers)
        return made if out is None or buffers.get("out") is out else out.copy_(made)


def _choose(problem: Problem, inputs: list[Tensor], target: str, algorithm: str | None) -> _Ready:
    """The fastest kernel for the problem, from the cache or by a search."""
    options = SearchOptions(
        algorithms=None if algorithm is None else (algorithm,),
        max_workspace_bytes=WORKSPACE_BYTES if algorithm is None else None,
    )
    check_algorithm(problem.op, target, algorithm)
    try:
        best = search.find(
            problem, {}, target=target, cache=timing_cache(), options=options, inputs=inputs
        )[0]
    except CompileError as error:
        raise KernelError(
            f"no kernel can carry out this {problem.op} on {target}"
            if algorithm is None
            else f"{algorithm} cannot carry out this {problem.op} on {target}",
            seen=error.seen,
            fix="choose another algorithm: kernels.find lists those that fit",
        ) from error
    return _bound(problem, best)


def check_algorithm(op: str, target: str, algorithm: str | None) -> None:
    known = {k.algorithm for k in catalog.candidates(op, target)}
    if algorithm is not None and algorithm not in known:
        raise UsageError(
            f"{op} has no algorithm of this name on {target}",
            seen=algorithm,
            fix=f"use one of {', '.join(sorted(known))}",
        )


def _bound(problem: Problem, trial: Trial) -> _Ready:
    row = catalog.kernel(trial.kernel)
    return _Ready(
        call=row.load().bind(problem, {}, **trial.config),
        writes_out=row.writes_out,
        workspace_bytes=row.workspace_bytes(problem, trial.config),
        library=row.source not in search.OWN,
    )


def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current GPU: it must be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _check_out(out: Tensor, meta: TensorMeta, device: torch.device) -> None:
    if out.device != device or not meta.matches(out):
        raise UsageError(
            "out= does not have the result's shape, type, format and device",
            seen=f"{meta_of(out)} on {out.device}",
            fix=f"give {meta} on {device}",
        )


def _is_free(out: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Whether a kernel may write into it: nothing that it reads lies there, and it is aligned."""
    storage = out.untyped_storage().data_ptr()
    shared = any(t.untyped_storage().data_ptr() == storage for t in inputs)
    return not shared and out.data_ptr() % ALIGNMENT == 0


def _require_tensor(given: object) -> None:
    """Refuse what is no tensor whose numbers lie in memory as its strides say."""
    if not isinstance(given, Tensor) or given.layout != torch.strided:
        seen = f"{given.layout} tensor" if isinstance(given, Tensor) else type(given).__name__
        fix = "give a dense torch.Tensor: torch.as_tensor(array), or tensor.to_dense()"
        raise UsageError("kernels compute with dense tensors of torch", seen=seen, fix=fix)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy of one whose strides no kernel knows."""
    _require_tensor(tensor)
    return _aligned(tensor if meta_of(tensor).format != "strided" else tensor.contiguous())


def _untransposed(tensor: Tensor) -> tuple[Tensor, bool]:
    """A matrix as it lies in memory, and whether the caller's view of it is transposed."""
    _require_tensor(tensor)
    if tensor.dim() >= 2 and not tensor.is_contiguous() and tensor.mT.is_contiguous():
        return _aligned(tensor.mT), True
    return _aligned(tensor.contiguous()), False


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of a view that begins where a bulk copy cannot.

    A copy, not another kernel: which kernel is fastest is remembered for all addresses.
    """
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)
