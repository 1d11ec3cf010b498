"""``tessella kernels``: the catalog, and find: every algorithm for one problem on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer import Argument, Option

from tessella.cli.output import Json, Output, grid, output
from tessella.core.device import default_target, torch_device
from tessella.core.errors import UsageError
from tessella.core.record import to_plain
from tessella.kernels import catalog
from tessella.kernels.sparse.two_four import prune_two_four
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.inputs import sample_inputs
from tessella.search.report import ATTENTION, COLUMNS, PROBLEMS, Report, cells, find, title
from tessella.search.roofline import svg


def register(app: typer.Typer) -> None:
    app.command("kernels")(kernels)


def kernels(
    op: Annotated[
        str | None, Argument(help="Only this operation; with --input, search it.")
    ] = None,
    input: Annotated[str | None, Option(help="Shape of the input, such as 1x128x128x128.")] = None,
    weight: Annotated[str | None, Option(help="Shape of the weight or second matrix.")] = None,
    bias: Annotated[bool, Option("--bias", help="Add a bias.")] = False,
    residual: Annotated[bool, Option("--residual", help="Add a tensor like the result.")] = False,
    activation: Annotated[str | None, Option(help="relu, gelu, silu, …")] = None,
    stride: Annotated[int, Option(help="Of a convolution.")] = 1,
    padding: Annotated[int, Option(help="Of a convolution.")] = 0,
    dilation: Annotated[int, Option(help="Of a convolution.")] = 1,
    groups: Annotated[int, Option(help="Of a convolution.")] = 1,
    causal: Annotated[bool, Option("--causal", help="Of attention: no key after a query.")] = False,
    transpose_a: Annotated[bool, Option("--transpose-a", help="The input is [K, M].")] = False,
    transpose_b: Annotated[bool, Option("--transpose-b", help="The weight is [N, K].")] = False,
    dtype: Annotated[
        str, Option(help="float32, float16, bfloat16, int8, float8_e4m3fn.")
    ] = "float32",
    out_dtype: Annotated[str | None, Option(help="Type of the result, if another.")] = None,
    math: Annotated[
        str, Option(help="How float32 products may be rounded: ieee or tf32.")
    ] = "ieee",
    channels_last: Annotated[bool, Option("--channels-last", help="NHWC.")] = False,
    constant_weight: Annotated[
        bool, Option("--constant-weight", help="As in a plan: packing the weight is not timed.")
    ] = False,
    sparse: Annotated[
        bool, Option("--sparse", help="Let two of each four weights be zero; it is constant then.")
    ] = False,
    algorithm: Annotated[list[str] | None, Option(help="Only this one; may be repeated.")] = None,
    max_workspace_mb: Annotated[float | None, Option(help="Refuse what needs more.")] = None,
    seconds: Annotated[float, Option(help="About how long to measure.")] = 0.5,
    plot: Annotated[Path | None, Option(help="Draw a roofline into this SVG file.")] = None,
    cache: Annotated[
        Path | None, Option(help="Folder of timings; default ~/.cache/tessella.")
    ] = None,
    json: Json = False,
) -> None:
    """List the kernels, or run all that fit a problem: time, workspace and error of each.

    Example: tessella kernels conv2d --input 1x128x128x128 --weight 128x128x3x3 --padding 1

    Of attention, input is the queries and weight the keys; the values are like the keys.
    """
    with output(json_only=json) as out:
        if input is None:
            _list(out, op)
            return
        window = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        transposes = {"transpose_a": transpose_a, "transpose_b": transpose_b}
        arguments = {
            **(window if op and op.startswith("conv") else transposes if op == "matmul" else {}),
            "activation": activation,
            "out_dtype": out_dtype,
            "math": math,
        }
        if op == ATTENTION:
            arguments = {"is_causal": causal, "math": math}
        operands = _operands(op, input, weight, dtype, channels_last, bias, residual, arguments)
        if sparse and (second := operands[1]) is not None:
            operands[1] = prune_two_four(second)
        report = find(
            op or "",
            *operands,
            max_workspace_bytes=None if max_workspace_mb is None else int(max_workspace_mb * 1e6),
            algorithms=algorithm or None,
            constant_weight=constant_weight or sparse,
            budget_s=seconds,
            folder=cache,
            **arguments,
        )
        if plot is not None:
            plot.parent.mkdir(parents=True, exist_ok=True)
            plot.write_text(svg(report), encoding="utf-8")
            out.note(f"roofline: {plot}")
        out.result(_plain(report), grid(COLUMNS, [cells(f) for f in report], title=title(report)))


def _list(out: Output, op: str | None) -> None:
    """The rows of the catalog."""
    found = [k for k in catalog.rows() if op is None or k.op in (op, "*")]
    rows = [(k.id, k.op, " ".join((*k.targets, *k.needs)), k.source) for k in found]
    plain = [
        {"id": k.id, "op": k.op, "targets": list(k.targets), "needs": list(k.needs),
         "source": k.source}
        for k in found
    ]  # fmt: skip
    out.result({"kernels": plain}, grid(("kernel", "operation", "targets, needs", "source"), rows))


def _plain(report: Report) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "problem": to_plain(report.problem),
        "target": report.target,
        "limits": to_plain(report.limits),
        "findings": [to_plain(finding) for finding in report],
    }


def _operands(
    op: str | None,
    input: str,
    weight: str | None,
    dtype: str,
    channels_last: bool,
    bias: bool,
    residual: bool,
    arguments: dict[str, Any],
) -> list[torch.Tensor | None]:
    """Random tensors of the requested shapes, on this machine's target."""
    if op not in PROBLEMS or op.endswith("grad"):
        known = [name for name in PROBLEMS if not name.endswith("grad")]
        raise UsageError("cannot search this operation", seen=op, fix=f"use {', '.join(known)}")
    if weight is None:
        raise UsageError(
            "a search needs two shapes", seen="no --weight", fix="add --weight KxCxRxS"
        )
    first, second = (_meta(shape, dtype, channels_last) for shape in (input, weight))
    if op == ATTENTION:
        return _random(op, (first, second, second))
    if (out_dtype := arguments["out_dtype"]) is not None:
        _check_dtype(out_dtype)
    result = PROBLEMS[op](first, second, **arguments).output
    shape = result.shape
    channels = shape[1] if op.startswith("conv") else shape[-1]
    narrow = getattr(torch, dtype).itemsize == 1  # int8, fp8: the epilogue is in float32
    extra = TensorMeta(shape=(channels,), dtype="float32" if narrow else dtype)
    scaled = dtype == out_dtype == "int8"  # an int32 result is the plain sum
    like = _meta("x".join(map(str, shape)), dtype, channels_last)
    metas = (
        first,
        second,
        extra if bias else None,
        like if residual else None,
        TensorMeta(shape=(channels,), dtype="float32") if scaled else None,
    )
    return _random(op, metas)


def _random(op: str, metas: tuple[TensorMeta | None, ...]) -> list[torch.Tensor | None]:
    """Random tensors for the operands of an operation."""
    problem = Problem(op=op, inputs=metas, outputs=())
    tensors = iter(sample_inputs(problem, torch_device(default_target())))
    return [None if meta is None else next(tensors) for meta in metas]


def _meta(shape: str, dtype: str, channels_last: bool) -> TensorMeta:
    try:
        sizes = tuple(int(size) for size in shape.lower().replace("×", "x").split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 0:
        raise UsageError(
            "a shape is numbers with x between them",
            seen=shape,
            fix="for example --input 1x128x56x56",
        )
    _check_dtype(dtype)
    last = channels_last and len(sizes) in (4, 5)
    return TensorMeta(shape=sizes, dtype=dtype, format="channels_last" if last else "contiguous")


def _check_dtype(name: str) -> None:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise UsageError(
            "a type is one of torch's", seen=name, fix="for example float16, bfloat16 or int8"
        )
