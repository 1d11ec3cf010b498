"""Convolution by cuDNN's graph interface: scale, bias, residual, relu and requantize in one plan.

It is the only way to cuDNN's own int8, and needs the package ``nvidia-cudnn-frontend`` (extra
``cudnn``). cuDNN proposes plans by its heuristics; each is a configuration here.

cuDNN 9.19 launches these kernels so that they may start while the one before still runs, and reads
a residual without waiting: behind a kernel of ours that makes it, some of the result was wrong.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Mapping
from typing import Any

import torch

from tessella.core.errors import KernelError
from tessella.device.packing import with_packed
from tessella.device.streams import is_captured
from tessella.kernels.catalog import Call, Config
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

MOST_PLANS = 8
TYPES = {"int8": "INT8", "float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}
_submitting = threading.Lock()  # a handle has one stream at a time, and serves all engines
PRODUCTS = {"int8": "INT32", "float16": "FLOAT", "bfloat16": "FLOAT"}


def fits(problem: Problem) -> str | None:
    x, weight, epilogue = problem["input"], problem["weight"], problem.epilogue
    if x.dtype not in PRODUCTS or x.dtype != weight.dtype:
        return f"int8, float16 or bfloat16, not {x.dtype} × {weight.dtype}"
    if problem.output.dtype not in TYPES:
        return f"cannot make {problem.output.dtype}"
    if epilogue.activation not in (None, "relu"):
        return f"fuses relu only, not {epilogue.activation}"
    if epilogue.alpha != 1:
        return "no alpha; a scale does the same"
    added = (epilogue.bias, epilogue.residual, epilogue.scale)
    if any(t is not None and t.dtype not in TYPES for t in added):
        return "the epilogue's tensors must be int8 or floating"
    tensors = (x, epilogue.residual, problem.output)
    if not all(t is None or t.has("channels_last") for t in tensors):
        return "needs channels_last"
    if 0 in (*x.shape, *problem.output.shape):
        return "empty"
    if importlib.util.find_spec("cudnn") is None:
        return "needs cuDNN's graph interface: pip install 'tessella[cudnn]'"
    return None


def configs(problem: Problem) -> tuple[Config, ...]:
    return tuple({"plan": i} for i in range(MOST_PLANS))


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], *, plan: int = 0) -> Call:
    held = with_packed(constants, ("conv2d.cudnn_graph",), _pixels_innermost)
    library, handle = _library(), _handle(torch.cuda.current_device())
    graph, tensors, out_tensor = _proposed(problem)
    count = graph.get_execution_plan_count()
    if plan >= count:
        raise KernelError(
            "cuDNN proposes fewer plans",
            seen=f"plan {plan} of {count}",
            fix=f"choose a plan below {count}",
        )
    try:
        graph.build_plan_at_index(plan)
    except library.cudnnGraphNotSupportedError as error:
        raise _refused(error) from error
    nbytes = graph.get_workspace_size_plan_at_index(plan)
    beta = torch.full((1, 1, 1, 1), float(problem.epilogue.beta), device="cuda")
    with torch.inference_mode(False):  # else it could not be written outside of that mode
        fence = torch.zeros(1, device="cuda") if problem.epilogue.residual is not None else None

    def convolve(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        operands = dict(zip(problem.operation.operands, problem.operands(held, inputs)))
        weight = operands["weight"]
        assert weight is not None
        operands |= {"weight": _pixels_innermost(weight), "beta": beta}
        given = {tensor: operands[name] for name, tensor in tensors.items()}
        workspace = torch.empty(nbytes, dtype=torch.uint8, device=out.device)
        if fence is not None and not is_captured():
            fence.zero_()  # waits for the residual, and cuDNN for this; our graphs see to it
        with _submitting:
            library.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute_plan_at_index({**given, out_tensor: out}, workspace, plan, handle=handle)
        return out

    return convolve


def described(problem: Problem, **context: Any) -> tuple[Any, dict[str, Any], Any]:
    """The problem as a cuDNN graph: the graph, its inputs by name (``beta``, too), its result.

    Args:
        context: of the graph; a handle, where there is a GPU.
    """
    library, attrs, epilogue = _library(), problem.attrs, problem.epilogue
    x, weight, residual = problem["input"], problem["weight"], epilogue.residual
    kind = library.data_type
    graph = library.pygraph(
        io_data_type=_type(x),
        intermediate_data_type=kind.FLOAT,
        compute_data_type=kind.FLOAT,
        **context,
    )
    tensors: dict[str, Any] = {
        "input": _tensor(graph, "x", x.shape, _type(x)),
        "weight": _tensor(graph, "weight", weight.shape, _type(weight)),
    }
    if residual is not None and epilogue.beta != 0:
        tensors["residual"] = _tensor(graph, "residual", residual.shape, _type(residual))
    for name, vector in (("bias", epilogue.bias), ("scale", epilogue.scale)):
        if vector is not None:
            shape = (1, problem.output.shape[1], 1, 1)
            tensors[name] = _tensor(graph, name, shape, _type(vector))
    product = getattr(kind, PRODUCTS[x.dtype])
    y = graph.conv_fprop(
        image=tensors["input"],
        weight=tensors["weight"],
        padding=list(attrs["padding"]),
        stride=list(attrs["stride"]),
        dilation=list(attrs["dilation"]),
        compute_data_type=product,
    )
    y.set_data_type(product)
    if "scale" in tensors:
        y = graph.mul(a=y, b=tensors["scale"])
    if "bias" in tensors:
        y = graph.add(a=y, b=tensors["bias"])
    if "residual" in tensors:
        added = tensors["residual"]
        if epilogue.beta != 1:
            tensors["beta"] = _tensor(graph, "beta", (1, 1, 1, 1), kind.FLOAT)
            added = graph.mul(a=added, b=tensors["beta"])
        y = graph.add(a=y, b=added)
    if epilogue.activation == "relu":
        y = graph.relu(input=y)
    y.set_output(True).set_data_type(_type(problem.output))
    y.set_dim(list(problem.output.shape)).set_stride(_strides(problem.output.shape))
    return graph, tensors, y


_known: dict[tuple[int, str], tuple[Any, dict[str, Any], Any]] = {}


def _proposed(problem: Problem) -> tuple[Any, dict[str, Any], Any]:
    """The graph with cuDNN's plans for it on this GPU, the most promising first."""
    key = torch.cuda.current_device(), problem.key
    if key in _known:
        return _known[key]
    library = _library()
    graph, tensors, out = described(problem, handle=_handle(key[0]))
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([library.heur_mode.A, library.heur_mode.FALLBACK])
    except library.cudnnGraphNotSupportedError as error:
        raise _refused(error) from error
    _known[key] = graph, tensors, out
    return _known[key]


def _refused(error: Exception) -> KernelError:
    said = " ".join(str(error).split())
    return KernelError(
        f"cuDNN has no plan for this convolution: {said[:200]}",
        seen="its graph interface refused",
        fix="let another kernel do it",
    )


@functools.cache
def _library() -> Any:
    # an extra, which few machines have
    return importlib.import_module("cudnn")


@functools.cache
def _handle(device: int) -> Any:
    with torch.cuda.device(device):
        return _library().create_handle()


def _type(meta: TensorMeta) -> Any:
    return getattr(_library().data_type, TYPES[meta.dtype])


def _strides(shape: tuple[int, ...]) -> list[int]:
    return list(TensorMeta(shape=shape, dtype="int8", format="channels_last").dense_strides)


def _tensor(graph: Any, name: str, shape: tuple[int, ...], kind: Any) -> Any:
    return graph.tensor(name=name, dim=list(shape), stride=_strides(shape), data_type=kind)


def _pixels_innermost(weight: torch.Tensor) -> torch.Tensor:
    return weight.contiguous(memory_format=torch.channels_last)
