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

Without a configuration ``bind`` and ``workspace_bytes`` take the first.

One that has been far behind wherever it was measured says where, and is tried there only by name,
or for a report (``benchmarks.behind`` counts; some dozen compilations less for each network)::

    def outclassed(problem: Problem) -> str | None: ...          # None, or what was measured

Ids are never reused: plans name them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, cast

import torch

from tessella.core.architectures import ARCHITECTURES, Feature, has, is_gpu
from tessella.core.dtype import FP8
from tessella.core.errors import CompileError, UsageError
from tessella.core.record import same_json
from tessella.device.machine import gpu_target
from tessella.device.x86 import code
from tessella.operations.epilogue import floor_refusal, is_gamma
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
        targets: where it can run: ``cpu``, ``reference``, ``gpu``, or one GPU's (``sm_90``).
        needs: what a GPU must have, of ``core.architectures``.
        tensor_cores: Triton multiplies its 16-bit numbers and int8, so the GPU must have tensor
            cores that Triton writes for; float32 does without.
        source: who wrote it: ``tessella``, ``onednn``, ``mkl``, ``cudnn``, ``cublaslt``,
            ``cusparselt``, ``aten``, ``user``.
        version: raised when its code changes, so that old timings of it are not believed.
        writes_out: it writes its result into ``out=buffer``, else it returns a new tensor.
        sliced_out: the result may be a slice of a larger buffer.
        in_place: ``out`` may be an input, whose numbers end there.
        gamma: it has the factor behind an epilogue's activation.
        floor: its ReLU may raise lower numbers to another than 0.
        views: its output may share memory with its input, which must live as long.
        overwrites: the operand whose memory its result takes; nothing may need it afterwards
            (``Problem.is_dying``).
        last_resort: tried only where no other kernel fits.
        unproven: compiled, but never run on a GPU in its present form, so that it might hang: it
            takes part only where its algorithm is asked for by name.
        sparse: it takes layers whose constant weight is 2:4 sparse, and no others.
        isa: the instruction set that its machine code is of: the one of the processor's widest
            vectors, or one that extends it (``device.x86.code.EXTENDED``).
    """

    id: str
    op: str
    module: str
    targets: tuple[str, ...]
    source: str
    needs: tuple[Feature, ...] = ()
    tensor_cores: bool = False
    version: int = 1
    writes_out: bool = True
    sliced_out: bool = False
    in_place: bool = False
    gamma: bool = False
    floor: bool = False
    views: bool = False
    overwrites: str | None = None
    last_resort: bool = False
    unproven: bool = False
    sparse: bool = False
    isa: str | None = None

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

    def runs_on(self, target: str) -> bool:
        """Whether it is for this target, by what the row says."""
        if target in self.targets:
            return True
        if not is_gpu(target) or "gpu" not in self.targets:
            return False
        return ARCHITECTURES[target].has >= set(self.needs)

    def load(self) -> KernelModule:
        if self.module not in _modules:
            _modules[self.module] = importlib.import_module(self.module)
        return cast(KernelModule, _modules[self.module])

    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot carry a problem out, or None."""
        if reason := problem.misfit:
            return reason
        if isinstance(problem.attrs.get("padding"), str) and not self._knows_words:
            return "padding must be numbers"
        sliced = any(meta.strides is not None for meta in problem.outputs)
        if sliced and not self.sliced_out:
            return "does not write into a slice of a larger buffer"
        if not is_gamma(gamma := problem.epilogue.gamma):
            return f"gamma is a number above zero that float32 holds, not {gamma!r}"
        if gamma != 1 and not self.gamma:
            return "has no factor behind the activation (gamma)"
        if reason := floor_refusal(problem.epilogue):
            return reason
        if problem.epilogue.floor != 0 and (reason := self._floor_refusal(problem)):
            return reason
        if self.isa and (reason := code.refusal(self.isa)):
            return reason
        if (
            self.targets == ("gpu",)
            and self.source != "user"
            and (reason := self._lacking(problem))
        ):
            return reason
        return self.load().fits(problem)

    def _floor_refusal(self, problem: Problem) -> str | None:
        """Why its ReLU has no other floor than 0 here, or None; see ``Epilogue.on_device``."""
        if not self.floor:
            return "its ReLU knows no floor but 0"
        if problem.epilogue.residual is not None and "cpu" not in self.targets:
            return "a floor stands where a residual has its factor"
        return None

    @property
    def _knows_words(self) -> bool:
        """Whether it may take a padding that is a word, ``same``, as torch's own functions do."""
        return self.last_resort or self.source == "user"

    def _lacking(self, problem: Problem) -> str | None:
        """Why the GPU that kernels are asked about has no such products, or None.

        Where it has no tensor cores for bfloat16 or fp8, Triton does not convert them either. ATen
        computes them in another way.
        """
        target, types = gpu_target(), {meta.dtype for meta in (*problem.given, *problem.outputs)}
        wanted: dict[Feature, bool] = {
            "fp8_mma": bool(types & set(FP8)),
            "bf16_mma": "bfloat16" in types,
            "tf32_mma": problem.math == "tf32" and "float32" in types,
            "fp16_mma": self.tensor_cores and "float16" in types,
            "int8_mma": self.tensor_cores and "int8" in types,
        }
        for feature, used in wanted.items():
            if used and not has(target, feature):
                return f"{target} has no {feature.removesuffix('_mma')}"
        return None

    def outclassed(self, problem: Problem) -> str | None:
        """What was measured against trying it on such a problem, where others fit too, or None."""
        outclassed = getattr(self.load(), "outclassed", None)
        return outclassed(problem) if outclassed else None

    def configs(self, problem: Problem) -> tuple[Config, ...]:
        """The ways to run it, the most promising first; ``({},)`` if there is only one."""
        configs = getattr(self.load(), "configs", None)
        return _configs(configs, problem) if configs else ({},)

    def knows(self, problem: Problem, config: Config) -> bool:
        """Whether it can be run so: as it proposes, or as plans of an earlier version have it."""
        former = getattr(self.load(), "former_configs", None)
        ways = (*self.configs(problem), *(former(problem) if former else ()))
        return any(same_json(config, way) for way in ways)

    def workspace_bytes(self, problem: Problem, config: Config) -> int:
        """Scratch memory that a call needs beside its inputs and outputs."""
        workspace_bytes = getattr(self.load(), "workspace_bytes", None)
        return workspace_bytes(problem, **config) if workspace_bytes else 0


# Those that were loaded: to ask Python takes thirty times as long, and a build asks 70,000 times.
_modules: dict[str, ModuleType] = {}
_known_configs: dict[tuple[Any, ...], tuple[Config, ...]] = {}


def _configs(
    propose: Callable[[Problem], tuple[Config, ...]], problem: Problem
) -> tuple[Config, ...]:
    """What a kernel proposes. Weighing tiles takes up to 10 ms, and networks repeat layers."""
    p = problem  # its own key, a hash of its text, takes ten times as long
    where = p.constant, p.in_place, p.dying
    key = propose, gpu_target(), p.op, p.inputs, p.outputs, repr(p.attrs), where, p.math
    if key not in _known_configs:
        _known_configs[key] = propose(problem)
    return _known_configs[key]


_TORCH = ("cpu", "gpu")
_ALL = ("reference", *_TORCH)


def _rows(
    ops: str, algorithm: str, module: str, *targets: str, source: str = "tessella", **flags: Any
) -> tuple[Kernel, ...]:
    """A row ``OP.algorithm`` for each operation that one module carries out."""
    return tuple(
        Kernel(
            id=f"{op}.{algorithm}",
            op=op,
            module=f"tessella.kernels.{module}",
            targets=targets,
            source=source,
            **flags,
        )
        for op in ops.split()
    )


def _cpu(ops: str, algorithm: str, module: str, **flags: Any) -> tuple[Kernel, ...]:
    return _rows(ops, algorithm, module, "cpu", **flags)


def _x86(ops: str, algorithm: str, module: str, **flags: Any) -> tuple[Kernel, ...]:
    """Rows of one module that writes machine code, for each instruction set that it writes."""
    return tuple(
        row
        for isa in ("avx512", "avx2")
        for row in _cpu(ops, algorithm.format(isa), module, isa=isa, **flags)
    )


def _int8(
    op: str, algorithm: str, module: str, *, sliced_out: bool = True, **flags: Any
) -> tuple[Kernel, ...]:
    """The row of a layer of int8 in machine code."""
    return _cpu(op, algorithm, module, sliced_out=sliced_out, gamma=True, **flags)


def _gpu(ops: str, algorithm: str, module: str, **flags: Any) -> tuple[Kernel, ...]:
    return _rows(ops, algorithm, module, "gpu", **flags)


def _dot(ops: str, algorithm: str, module: str, **flags: Any) -> tuple[Kernel, ...]:
    """Rows of products in plain Triton."""
    return _gpu(ops, algorithm, module, tensor_cores=True, **flags)


def _hopper(ops: str, algorithm: str, module: str, **flags: Any) -> tuple[Kernel, ...]:
    """Rows of what is written with Hopper's own instructions."""
    return _gpu(ops, f"{algorithm}.sm90", module, needs=("tma", "wgmma"), **flags)


def _aten(ops: str, module: str, algorithm: str = "aten", **flags: Any) -> tuple[Kernel, ...]:
    """Rows of what runs through torch, wherever that does."""
    return _rows(ops, algorithm, module, *_TORCH, source="aten", **flags)


_NEW: dict[str, Any] = {"writes_out": False}
_FLOORED: dict[str, Any] = {"source": "onednn", "floor": True, **_NEW}
_INTO: dict[str, Any] = {"sliced_out": True, "floor": True}
_ADDS: dict[str, Any] = {
    "views": True,
    "overwrites": "residual",
    **_NEW,
}  # the result takes the residual's memory
_CONV, _DGRAD, _WGRAD = (f"conv1d{of} conv2d{of} conv3d{of}" for of in ("", "_dgrad", "_wgrad"))
_ATTENTION = "scaled_dot_product_attention"
_ACTIVATIONS = "relu relu6 sigmoid tanh silu gelu hardswish hardsigmoid mish leaky_relu elu"
_FUNCTIONS = "clamp exp log sqrt rsqrt reciprocal neg abs erf sin cos"
_SUMS = "add sub mul div pow"

KERNELS: tuple[Kernel, ...] = (
    # convolution; the newest instructions first: a plan that nobody tunes takes the first that fits
    *_cpu("conv2d", "amx_bf16", "shared.amx_bfloat16", version=4, isa="amx_bf16", **_INTO),
    *_x86("conv2d", "{}", "shared.x86_convolution", version=3, gamma=True, **_INTO),
    *_x86("conv2d", "{}_depthwise_rows", "conv.x86_depthwise_rows", version=2, **_INTO),
    *_x86("conv2d", "{}_depthwise", "conv.x86_depthwise", version=2, **_INTO),
    *_x86("conv2d", "{}_sum", "conv.x86_sum", **_ADDS),
    *_x86("conv2d", "{}_few", "shared.x86_few", sliced_out=True),
    *_x86("conv2d conv3d", "{}_winograd", "conv.x86_winograd", **_INTO),
    *_int8("conv2d", "amx_int8", "shared.amx_int8", version=2, isa="amx_int8"),
    *_int8("conv2d", "avx512_vnni_int8", "shared.x86_vnni_int8", version=2, isa="avx512_vnni"),
    *_int8("conv2d", "avx2_vnni_int8", "shared.x86_vnni_int8", version=2, isa="avx2_vnni"),
    *_int8("conv2d", "avx2_int8", "shared.x86_int8", version=2, isa="avx2"),
    *_cpu("conv2d", "onednn", "conv.libraries.onednn", **_FLOORED),
    *_cpu("conv2d", "onednn_sum", "conv.libraries.onednn_sum", source="onednn", **_ADDS),
    *_cpu("conv2d", "onednn_linear", "conv.libraries.onednn_linear", **_FLOORED),
    *_cpu("conv3d", "onednn", "conv.libraries.onednn_volumes", source="onednn", **_NEW),
    *_cpu("conv2d", "onednn_int8", "conv.libraries.onednn_int8", source="onednn", **_NEW),
    *_gpu("conv2d", "cudnn", "conv.libraries.cudnn", source="cudnn", **_NEW),
    *_gpu("conv2d", "cudnn_graph", "conv.libraries.cudnn_graph", source="cudnn"),
    *_hopper(
        "conv2d conv3d",
        "implicit_gemm",
        "conv.hopper.implicit_gemm",
        version=5,
        sliced_out=True,
        gamma=True,
        floor=True,
    ),
    *_hopper("conv2d", "pointwise", "conv.hopper.pointwise", version=2, gamma=True, floor=True),
    *_hopper("conv2d", "direct", "conv.hopper.direct", version=2, gamma=True, floor=True),
    *_hopper("conv2d_chain", "back_to_back", "conv.hopper.chain", version=3, **_NEW),
    *_hopper("conv2d_pool", "direct", "conv.hopper.pooled", gamma=True),
    *_dot(
        "conv2d",
        "implicit_gemm.sm80",
        "conv.ampere.implicit_gemm",
        needs=("cp_async",),
        version=2,
        sliced_out=True,
        gamma=True,
    ),
    *_dot(
        "conv2d conv2d_pool",
        "direct.sm80",
        "conv.ampere.direct",
        needs=("cp_async",),
        gamma=True,
    ),
    *_gpu("conv2d conv1d conv3d", "direct", "conv.direct", version=3, gamma=True, floor=True),
    *_dot("conv2d conv1d conv3d", "gemm", "conv.gemm", gamma=True, floor=True),
    *_dot("conv2d conv1d conv3d", "implicit_gemm", "conv.implicit_gemm", gamma=True, floor=True),
    *_dot(
        "conv2d conv1d conv3d",
        "implicit_precomp_gemm",
        "conv.implicit_precomp_gemm",
        gamma=True,
        floor=True,
    ),
    *_gpu("conv2d", "winograd", "conv.winograd.fused", needs=("cp_async",), version=2),
    *_gpu("conv2d", "winograd_nonfused", "conv.winograd.nonfused", needs=("cp_async",), version=2),
    *_gpu("conv2d", "fft", "conv.fourier.fft", version=2),
    *_gpu("conv2d", "fft_tiling", "conv.fourier.fft_tiling", version=2),
    *_aten(_CONV, "conv.libraries.aten", **_NEW),
    *_dot("conv_transpose2d conv_transpose3d", "spread", "conv.transposed", sliced_out=True),
    *_aten("conv_transpose2d conv_transpose3d", "conv.libraries.transposed", **_NEW),
    # its gradients
    *_hopper("conv2d_dgrad", "implicit_gemm", "conv.hopper.dgrad"),
    *_hopper("conv2d_wgrad", "implicit_gemm", "conv.hopper.wgrad"),
    *_dot("conv2d_dgrad", "implicit_gemm", "conv.dgrad"),
    *_dot("conv2d_wgrad", "implicit_gemm", "conv.wgrad"),
    *_gpu(
        "conv2d_dgrad conv2d_wgrad",
        "cudnn",
        "conv.libraries.backward_cudnn",
        source="cudnn",
        **_NEW,
    ),
    *_aten(f"{_DGRAD} {_WGRAD}", "conv.libraries.backward_aten", **_NEW),
    # matrix products
    *_cpu("linear", "amx_bf16", "gemm.amx_bfloat16", version=4, isa="amx_bf16"),
    *_x86("linear", "{}", "gemm.x86", version=3),
    *_x86("linear", "{}_few", "gemm.x86_few"),
    *_int8("linear", "amx_int8", "gemm.amx_int8", version=2, isa="amx_int8", sliced_out=False),
    *_int8(
        "linear",
        "avx512_vnni_int8",
        "gemm.x86_vnni_int8",
        version=2,
        isa="avx512_vnni",
        sliced_out=False,
    ),
    *_int8(
        "linear",
        "avx2_vnni_int8",
        "gemm.x86_vnni_int8",
        version=2,
        isa="avx2_vnni",
        sliced_out=False,
    ),
    *_int8("linear", "avx2_int8", "gemm.x86_int8", version=2, isa="avx2", sliced_out=False),
    *_cpu("linear", "onednn", "gemm.onednn", source="onednn", **_NEW),
    *_cpu("linear", "onednn_int8", "gemm.onednn_int8", source="onednn", **_NEW),
    *_cpu("linear", "mkl", "gemm.mkl", source="mkl", **_NEW),
    *_gpu("linear matmul", "cublaslt", "gemm.cublaslt", source="cublaslt", version=2),
    *_hopper("linear matmul", "wgmma", "gemm.wgmma", version=4, gamma=True, floor=True),
    *_hopper("linear matmul", "skinny", "gemm.skinny_sm90", gamma=True),
    *_dot("linear matmul", "skinny", "gemm.skinny", gamma=True),
    *_dot("linear matmul", "tiled", "gemm.tiled", version=2, gamma=True),
    *_gpu(
        "linear conv2d",
        "cusparselt",
        "sparse.cusparselt",
        source="cusparselt",
        needs=("sparse_mma",),
        sparse=True,
        gamma=True,
    ),
    *_hopper("linear conv2d", "sparse", "sparse.wgmma", sparse=True, gamma=True),
    *_hopper("linear matmul", "fma", "gemm.fma_sm90", gamma=True),
    *_aten("linear matmul", "gemm.aten"),
    *_hopper("linear_norm", "normed", "gemm.normed", gamma=True, **_NEW),
    # the other layers
    *_x86(
        "max_pool2d avg_pool2d adaptive_avg_pool2d", "{}", "pool.x86", version=2, sliced_out=True
    ),
    *_x86("mean", "{}", "pool.x86"),
    *_cpu("max_pool2d", "shifted", "pool.shifted"),
    *_aten("max_pool2d avg_pool2d adaptive_avg_pool2d", "pool.aten", **_NEW),
    *_x86("layer_norm", "{}", "norm.x86", in_place=True),
    *_aten("batch_norm layer_norm", "norm.aten", **_NEW),
    *_gpu("group_factors", "moments", "norm.group", **_NEW),
    *_x86("group_factors", "{}", "norm.x86_groups", **_NEW),
    *_aten("softmax log_softmax", "softmax.aten"),
    *_aten("mean sum", "reduce.aten"),
    *_hopper(_ATTENTION, "flash", "attention.flash_sm90", version=5, gamma=True, **_NEW),
    *_dot(_ATTENTION, "flash", "attention.flash", gamma=True, **_NEW),
    *_dot(_ATTENTION, "windows", "attention.windows", gamma=True, **_NEW),
    *_gpu(_ATTENTION, "cudnn", "attention.cudnn", source="cudnn", **_NEW),
    *_x86(_ATTENTION, "{}", "attention.x86", **_NEW),
    *_cpu(_ATTENTION, "amx_bf16", "attention.amx", isa="amx_bf16", **_NEW),
    *_aten(_ATTENTION, "attention.aten", **_NEW),
    # recurrent layers
    *_x86("lstm gru rnn", "{}", "recurrent.x86", **_NEW),
    *_cpu("lstm", "onednn", "recurrent.onednn", source="onednn", **_NEW),
    *_gpu("lstm gru rnn", "cudnn", "recurrent.cudnn", source="cudnn", **_NEW),
    *_aten("lstm gru rnn", "recurrent.steps", "steps", **_NEW),
    # boxes of a map
    *_cpu("peak_boxes", "numpy", "detect.numpy_peaks"),
    *_x86("deformable_attention", "{}", "detect.x86"),
    *_cpu("deformable_attention", "bags", "detect.summed_bags"),
    *_gpu("deformable_attention", "sampled", "detect.sampled", version=2),
    *_cpu("nms", "numpy", "detect.numpy_nms"),
    *_gpu("nms", "rounds", "detect.nms_rounds"),
    *_gpu("pyramid_roi_align", "regions", "detect.regions"),
    # element by element
    *_aten(
        f"{_ACTIVATIONS} {_FUNCTIONS} {_SUMS}",
        "pointwise.elementwise",
        sliced_out=True,
        in_place=True,
    ),
    # between floating numbers and int8 or fp8
    *_gpu("quantize dequantize", "tiled", "quant.tiled", version=2),
    *_x86("quantize dequantize", "{}", "quant.x86"),
    *_x86("quantize", "{}_picture", "quant.x86_picture"),
    *_aten("quantize dequantize", "quant.aten"),
    *_gpu(
        f"pointwise {_ACTIVATIONS} softplus {_FUNCTIONS} {_SUMS} maximum minimum to batch_norm"
        " softmax log_softmax layer_norm rms_norm mean sum amax amin adaptive_avg_pool2d quantize"
        " dequantize",
        "generated",
        "pointwise.generated",
        version=3,
        sliced_out=True,
    ),
    *_x86(
        "pointwise add sub mul div relu relu6 sigmoid tanh silu gelu hardswish hardsigmoid clamp"
        " leaky_relu neg batch_norm",
        "{}",
        "pointwise.x86",
        sliced_out=True,
        in_place=True,
    ),
    *_aten("pointwise", "pointwise.sequence", sliced_out=True),
    *_gpu("pointwise", "generated_several", "pointwise.generated_several", version=3, **_NEW),
    *_gpu(
        "max_pool2d avg_pool2d adaptive_avg_pool2d pointwise",
        "windows",
        "pool.windows",
        version=4,
        sliced_out=True,
    ),
    *_gpu("mean sum adaptive_avg_pool2d pointwise", "columns", "reduce.columns", version=3),
    # moving elements
    *_cpu("to", "avx512_planes", "transform.x86_planes", isa="avx512"),
    *_x86("cat", "{}", "transform.x86_join", sliced_out=True),
    *_aten("to cat", "transform.copy", sliced_out=True),
    *_aten("cat", "transform.join", "in_place", sliced_out=True),
    *_gpu("cat", "rows", "transform.join_rows", version=2),
    *_gpu("pad", "rows", "transform.pad_rows"),
    *_aten("interpolate", "transform.resize"),
    *_gpu("interpolate", "rows", "transform.resize_rows", version=2, sliced_out=True),
    *_x86("interpolate", "{}", "transform.x86_repeat", sliced_out=True),
    *_cpu("interpolate", "repeat", "transform.repeat_pixels"),
    *_gpu("image_to_tensor", "pointwise", "transform.image"),
    *_x86("image_to_tensor", "{}", "transform.x86_image"),
    *_aten("image_to_tensor", "transform.image_aten"),
    *_gpu("rearrange", "rows", "transform.rearrange_rows"),
    *_gpu("rearrange", "tiles", "transform.rearrange_tiles"),
    *_x86("rearrange", "{}", "transform.x86_rearrange"),
    *_aten("rearrange", "transform.rearrange_aten"),
    *_aten("reshape permute", "transform.views", "view", views=True, **_NEW),
    *_aten(
        "slice select split expand", "transform.views", "view", views=True, sliced_out=True, **_NEW
    ),
    # what a user wrote, and what has no kernel of its own
    *_rows("user", "operator", "user.step", *_ALL, source="user", **_NEW),
    *_gpu("fallback", "ranked", "detect.ranked", **_NEW),
    *_gpu("fallback", "gathered", "detect.gathered", **_NEW),
    *_gpu("fallback", "gridded", "detect.gridded", **_NEW),
    *_rows("fallback", "aten", "fallback.aten", *_ALL, source="aten", views=True, **_NEW),
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
        floor=True,
    ),
)

BY_ID: dict[str, Kernel] = {kernel.id: kernel for kernel in KERNELS}


def rows() -> tuple[Kernel, ...]:
    """The table, and what users have registered."""
    return (*KERNELS, *_REGISTERED.values())


def candidates(op: str, target: str) -> tuple[Kernel, ...]:
    """The kernels that may carry out ``op`` on ``target``, in the table's order, users' last."""
    return tuple(k for k in rows() if k.op in (op, "*") and k.runs_on(target))


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
