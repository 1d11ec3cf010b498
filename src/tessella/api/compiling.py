"""compile, pareto, calibrate, explain and export: a network becomes a plan, or a file."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tessella import compiler, graph, runtime
from tessella.api import locks, requests
from tessella.api.requests import CompileCall
from tessella.api.samples import (
    Batches,
    CalibrationData,
    Data,
    JudgingData,
    calibrated,
    judging,
)
from tessella.api.sources import ANY, Batch, Opened, Source, batch_range, opened
from tessella.artifacts.build import BuildRequest, is_network
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.files import write_atomic
from tessella.artifacts.plan import Plan, read_back
from tessella.compiler.rewrites import fold_constants
from tessella.core.architectures import is_gpu
from tessella.core.device import default_target, is_here, suiting, using
from tessella.core.dtype import plain_precision
from tessella.core.errors import CompileError, TessellaError, UsageError
from tessella.core.events import Emit, phase, silent, warning
from tessella.core.preprocess import Preprocess, denormalize
from tessella.core.reporter import reported
from tessella.core.spec import TensorSpec
from tessella.graph import onnx
from tessella.search.tuning import require_cache


def compile(
    source: Source,
    *,
    batch: Batch = (1, 8, 32),
    target: str | Sequence[str] | None = None,
    precision: str = "fp32",
    precisions: Mapping[str, str] | None = None,
    calibration: CalibrationData | None = None,
    budget: float | None = None,
    data: JudgingData | None = None,
    inputs: Sequence[TensorSpec] | None = None,
    input: compiler.Input = "float32",
    preprocess: Preprocess | None = None,
    samples: Mapping[str, torch.Tensor] | None = None,
    cache: str | Path | None = None,
    lock: Plan | str | Path | None = None,
    time_limit_s: float | None = None,
    untuned: bool = False,
    trust_code: bool = False,
    device: str | None = None,
    emit: Emit | None = None,
) -> Plan:
    """Turn a network into a plan: fused, laid out, every kernel chosen by measurement.

    Args:
        source: a checkpoint, a run (its best checkpoint), a path of one of these or of an ONNX
            file, ``file.py:NAME`` of a function or class that makes a torch module, a network's
            name, a torch module (then ``inputs`` says what it takes, as it does of
            an ONNX file with open sizes), or a graph: what ``tessella.graph.onnx.read`` makes of a
            file, perhaps with some inputs bound.
        batch: one size, or the smallest, the usual and the largest.
        target: ``cpu``, a GPU's (``sm_90``) or ``reference``; by default what this machine has. For
            several (``"cpu,sm_80"``) the plan has a program each, and ``load`` takes the one for
            the machine that is there. Those that are not here are built as ``untuned`` says.
        precision: ``fp32``, ``tf32``, ``bf16``, ``fp16``, ``int8`` or ``fp8``.
        precisions: another one for single layers, by the names that ``compiler.layers`` lists;
            behind it ``+2:4`` may stand (``int8+2:4``): two of each four weights are then left.
        calibration: for int8 and fp8: what ``calibrate`` made, its file, or the data that it gets.
        budget: percentage points of the task's score on ``data`` (top-1 accuracy, ``map``,
            ``miou``, …) that the plan may lose: the fastest one that does not is searched, with a
            precision for each layer. See ``pareto``.
        input: ``uint8`` for a plan that takes images as bytes [N, H, W, C] of the network's size,
            as decoders give them, and scales them itself: a quarter of the bytes to send.
        preprocess: how images become the input; a checkpoint says so itself.
        samples: inputs by name to check the plan with, for networks that random ones do not fit.
        cache: timing cache file, read and added to.
        lock: a plan of this network on this device, or its ``lock`` in a file: what was measured
            then decides, nothing is measured, and the plan has the same bytes. A plan that a budget
            chose also says which layer gets which precision.
        time_limit_s: how long to measure at most, for each target. A build that needs longer raises
            ``BuildStopped``; the next one with the same ``cache`` goes on there.
        untuned: measure nothing: a cost model chooses each kernel. So ``target`` may be a GPU that
            this machine does not have; there, ``tune`` measures.
        trust_code: let a checkpoint of a user's own Python network run the code that it brings.
        device: where to measure: a GPU by its number, ``cuda:1``, or ``cpu``; by default the
            current GPU. Without ``target`` the plan is for it.
        emit: told what happens; by default bars show it on a terminal and in a notebook.
    """
    given = {k: v for k, v in locals().items() if k not in ("device", "emit")}
    with using(device), reported(emit) as told:
        call = requests.compile_call(**given)
        return _compile(call, told) if budget is None else _search(call, told).plan


def pareto(
    source: Source,
    *,
    data: JudgingData,
    budget: float = 0.3,
    metric: compiler.budget.Metric | None = None,
    batch: Batch = (1, 8, 32),
    target: str | None = None,
    precision: str = "fp32",
    calibration: CalibrationData | None = None,
    inputs: Sequence[TensorSpec] | None = None,
    input: compiler.Input = "float32",
    preprocess: Preprocess | None = None,
    cache: str | Path | None = None,
    time_limit_s: float | None = None,
    trust_code: bool = False,
    device: str | None = None,
    emit: Emit | None = None,
) -> compiler.Front:
    """The Pareto front of a network: no plan of it is worse than another in accuracy,
    time and memory.

    >>> front = pareto("runs/flowers", data="datasets/flowers", budget=0.3)
    >>> print(front)
    >>> front.plan.save("flowers.plan")

    Args:
        source, batch, target, inputs, input, preprocess, cache, time_limit_s, trust_code,
            device: as for ``compile``.
        data: what the plans are judged by: a dataset (its validation split), a split, or
            ``compiler.budget.of_tensors(inputs, labels)``.
        budget: percentage points of the metric below float32 that the chosen plan may lose. With 0
            it changes no answer.
        metric: of outputs by name and labels: higher is better, and 1 is a hundred points. By
            default the score of the data's task: top-1 accuracy, ``map``, ``miou``, ``r2``.
        precision: the least exact that a layer may get; ``fp32``: all that suit the target.
        calibration: as for ``compile``; by default a dataset's training split, else a part of
            ``data`` that does not judge.
    """
    given = {k: v for k, v in locals().items() if k not in ("device", "emit")}
    with using(device), reported(emit) as told:
        return _search(requests.compile_call(**given), told)


def build(request: BuildRequest, *, emit: Emit = silent) -> tuple[Plan, compiler.Front | None]:
    """Build the plan of a request; write it, and a budget's table and chart, to the paths in it.

    Returns:
        The plan, and with a budget the Pareto front that was found.

    Raises:
        UsageError: the table has no point of that number.
    """
    call = requests.compile_call(**requests.keywords(request))
    if request.budget is None:
        plan, front = _compile(call, emit), None
    else:
        front = _search(call, emit)
        plan = front.plan if request.point is None else _point(front, request)
        if request.chart is not None:
            write_atomic(Path(request.chart), compiler.budget.svg(front).encode())
        if request.front is not None:
            front.save(request.front)
    if request.out is not None:
        plan.save(request.out)
    return plan, front


def _point(front: compiler.Front, request: BuildRequest) -> Plan:
    """The plan of the front that the request numbers; its command has that number."""
    point = request.point or 0
    if point >= len(front):
        raise UsageError(
            "the table has no such point", seen=point, fix=f"use 0 to {len(front) - 1}"
        )
    plan = front[point].plan
    rebuild = f"{plan.manifest.rebuild} --point {point}"
    return replace(plan, manifest=replace(plan.manifest, rebuild=rebuild))


def _compile(call: CompileCall, emit: Emit) -> Plan:
    """One plan, in the requested precisions or those that a budget chose for the lock's plan."""
    request = call.request
    network = _open(call, emit)
    if network.is_quantized and request.precision == "fp32":
        request = replace(request, precision="int8")  # its roundings are there whatever is asked
        call = replace(call, request=request)
    chosen = locks.chosen_by_budget(call.arguments["lock"])
    if chosen is not None and request.precision == "fp32" and not request.precisions:
        known = chosen.manifest
        request = replace(request, precision=known.precision, precisions=dict(known.precisions))
        call = replace(call, request=request)
    kinds = {request.precision, *map(plain_precision, (request.precisions or {}).values())}
    rounds = chosen is not None or kinds & set(compiler.KINDS)
    calibration = call.arguments["calibration"] if rounds else None
    plan, *others = (
        _program(call, network, target, calibration, emit) for target in request.targets
    )
    if others:
        plan = replace(plan, others=tuple(others))
        plan = plan.at(suiting(plan.targets) or plan.target)
    plan = call.with_imports(plan)
    return plan if chosen is None else locks.as_judged(plan, chosen)


def _program(
    call: CompileCall,
    network: Opened,
    target: str,
    calibration: CalibrationData | None,
    emit: Emit,
) -> Plan:
    """The plan for one target of the request: measured, if the machine is here."""
    request = call.request
    if len(request.targets) > 1:
        emit(phase("target", f"the program for {target}"))
    untuned = request.untuned or (len(request.targets) > 1 and not is_here(target))
    kinds = {request.precision, *map(plain_precision, (request.precisions or {}).values())}
    _warn_of_slow(network, kinds, target, emit, callers=5)  # a generator is one
    rounded = sorted(kinds & set(compiler.KINDS))
    plan = compiler.compile_graph(
        network.graph,
        target=target,
        batch=request.span,
        precision=request.precision,
        precisions=request.precisions,
        calibration=_calibration(network, calibration, target, rounded, emit, untuned=untuned),
        input=request.input,
        samples=call.arguments.get("samples"),
        about=network.about(call.rebuild()),
        measuring=compiler.Measuring(untuned=True) if untuned else _measuring(call),
        emit=emit,
    )
    if plan.unrounded:
        emit(warning(plan.unrounded))
    return finished(plan, emit)


def _warn_of_slow(
    network: Opened, precisions: Iterable[str], target: str, emit: Emit, *, callers: int
) -> None:
    """Tell of precisions in which a target is slower; Python's callers by a warning.

    Args:
        callers: how many functions up is whoever called this module.
    """
    for text in compiler.warnings_for(network.graph, precisions, target):
        emit(warning(text))
        if emit is silent:
            warnings.warn(text, stacklevel=1 + callers)


def _search(call: CompileCall, emit: Emit) -> compiler.Front:
    """The Pareto front that a search within a budget finds."""
    request, arguments = call.request, call.arguments
    target = request.target or default_target()
    network = _open(call, emit)
    _warn_of_slow(network, {request.precision}, target, emit, callers=3)
    data, calibration = arguments["data"], arguments["calibration"]
    if isinstance(data, str | Path):
        data = Dataset(data)
    if calibration is None and isinstance(data, Dataset) and "train" in data.info.splits:
        calibration = data
    record = network.preprocess
    kinds = [k for k in compiler.budget.offered(target, request.precision) if k in compiler.KINDS]
    return compiler.budget.search(
        network.graph,
        target=target,
        batch=request.span,
        data=judging(network, data),
        run=_predictor,
        feed=partial(_as_pixels, record=record)
        if request.input == "uint8" and record
        else lambda batch: batch,
        finish=lambda plan: call.with_imports(finished(plan, emit)),
        budget=arguments["budget"],
        metric=arguments.get("metric"),
        least=request.precision,
        calibration=_calibration(network, calibration, target, kinds, emit),
        input=request.input,
        about=network.about(call.rebuild()),
        measuring=_measuring(call),
        emit=emit,
    )


def _open(call: CompileCall, emit: Emit) -> Opened:
    request, source = call.request, call.arguments["source"]
    if isinstance(source, str | Path) and is_network(str(source)):
        emit(phase("network", f"{source} is as its code makes it: nothing is loaded into it"))
    return opened(
        source,
        request.span,
        inputs=request.inputs or None,
        preprocess=request.preprocess,
        trust_code=request.trust_code,
    )


def _measuring(call: CompileCall) -> compiler.Measuring:
    request, lock = call.request, call.arguments.get("lock")
    if request.cache is not None:
        require_cache(Path(request.cache))
    return compiler.Measuring(
        cache=None if request.cache is None else Path(request.cache),
        lock=None if lock is None else locks.lines_of(lock),
        time_limit_s=request.time_limit_s,
        untuned=request.untuned,
    )


def calibrate(
    source: Source,
    data: Data | Batches,
    *,
    method: str = compiler.METHOD,
    kinds: Sequence[str] = ("int8",),
    inputs: Sequence[TensorSpec] | None = None,
    preprocess: Preprocess | None = None,
    trust_code: bool = False,
) -> compiler.Calibration:
    """The range of a network's values on a user's data, as int8 and fp8 need it.

    >>> calibrate("runs/flowers", "datasets/flowers").save("flowers.calibration")

    Args:
        source, inputs, preprocess, trust_code: as for ``compile``.
        data: a dataset, of whose training split 512 images are drawn; a split; or batches of
            inputs by name. Judge the plan by other data.
        method: ``min-max``, ``percentile``, ``entropy`` or ``mse``.
        kinds: ``int8``, ``fp8`` or both.
    """
    network = opened(source, ANY, inputs=inputs, preprocess=preprocess, trust_code=trust_code)
    return calibrated(network, data, default_target(), method=method, kinds=kinds)


def explain(
    source: Source,
    *,
    batch: Batch = (1, 8, 32),
    target: str | None = None,
    precision: str = "fp32",
    inputs: Sequence[TensorSpec] | None = None,
    input: compiler.Input = "float32",
    preprocess: Preprocess | None = None,
    trust_code: bool = False,
) -> tuple[compiler.PassRecord, ...]:
    """The passes of ``compile`` on a network's graph, up to where kernels are measured.

    Args: as for ``compile``.
    """
    network = opened(
        source, batch_range(batch), inputs=inputs, preprocess=preprocess, trust_code=trust_code
    )
    return compiler.explain(
        network.graph,
        target=target or default_target(),
        precision=precision,
        input=input,
        preprocess=network.preprocess,
    )


def export(
    source: Source,
    out: str | Path,
    *,
    opset: int = 17,
    inputs: Sequence[TensorSpec] | None = None,
    trust_code: bool = False,
) -> graph.Graph:
    """Write a network as an ONNX file, for any batch, as it is before the compiler changes it;
    only what depends on constants alone is computed.

    A checkpoint's labels and preprocessing record go into the file's metadata, where ``compile``
    and ``classify`` find them.

    Args:
        source, inputs, trust_code: as for ``compile``.
        opset: the version of ONNX's operators, 17 to 21.

    Returns:
        The network's graph.

    Raises:
        CompileError: ONNX has no word for one of its operations; the message lists all of them.
    """
    network = opened(source, ANY, inputs=inputs, trust_code=trust_code)
    fold_constants.apply(network.graph)
    metadata = onnx.Metadata(
        preprocess=network.preprocess, labels=network.labels, task=network.task
    )
    known = network.preprocess is not None or network.labels
    onnx.write(network.graph, out, opset=opset, metadata=metadata if known else None)
    return network.graph


def _calibration(
    network: Opened,
    data: CalibrationData | None,
    target: str,
    kinds: Sequence[str],
    emit: Emit,
    untuned: bool = False,
) -> compiler.Calibration | None:
    if data is None:
        return None
    emit(phase("calibrate", f"scales for {' and '.join(kinds) or 'the check'}"))
    return calibrated(network, data, target, on="cpu" if untuned else None, kinds=kinds)


def finished(plan: Plan, emit: Emit) -> Plan:
    """The plan with its kernels' machine code, once it was read and loaded as its file will be.

    Raises:
        CompileError: it cannot be.
    """
    try:
        read_back(plan)
        if plan.manifest.untuned and is_gpu(plan.manifest.fingerprint.target):
            return plan  # whose GPU need not be here: it is tested where it is first loaded
        plan, left_out = runtime.add_kernels(plan)
        runtime.load(plan, every_size=True).close()
    except TessellaError as error:
        raise CompileError(
            "the plan that was built cannot be loaded again",
            seen=error,
            fix="compile for one batch size (batch=8); and tell us of this network: a plan that is "
            "made should load",
        ) from error
    for kernel, reason in left_out.items():
        emit(phase("kernels", f"{kernel} is compiled where the plan is loaded: {reason}"))
    return plan


def _predictor(plan: Plan) -> compiler.budget.Predict:
    engine = runtime.load(plan)
    return lambda batch: engine(**batch)


def _as_pixels(batch: Mapping[str, torch.Tensor], record: Preprocess) -> Mapping[str, torch.Tensor]:
    """Normalized images as the bytes that a plan with ``input="uint8"`` takes."""
    return {
        name: torch.from_numpy(denormalize(tensor.numpy(), record))
        if tuple(tensor.shape[1:]) == record.input_shape
        else tensor
        for name, tensor in batch.items()
    }
