"""train · compile · verify · load · serve: each a few lines that compose the rooms below."""

from __future__ import annotations

import datetime
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessella import compiler, graph, runtime, server
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset, Split
from tessella.artifacts.plan import Plan, load_plan, to_bytes
from tessella.artifacts.run import Recipe, Run
from tessella.compiler.samples import COUNT, CalibrationSet, labelled, of_split
from tessella.core.device import default_target, torch_device
from tessella.core.errors import ArtifactError, DataError, UsageError
from tessella.core.events import Emit, phase, silent
from tessella.core.preprocess import Preprocess, denormalize
from tessella.core.record import from_plain, to_plain
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import onnx
from tessella.kernels.float32_math import float32_math
from tessella.nn import zoo
from tessella.runtime.engine import Engine
from tessella.training import loop
from tessella.training.evaluate import Evaluation, evaluate

Batch = int | Sequence[int] | DimRange
CalibrationData = (
    compiler.Calibration
    | CalibrationSet
    | Dataset
    | Split
    | str
    | Path
    | Sequence[Mapping[str, torch.Tensor]]
)
JudgingData = compiler.Labelled | Dataset | Split | str | Path
Model = Checkpoint | Engine


def train(
    network: str,
    dataset: Dataset | str | Path,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    emit: Emit = silent,
    **settings: Any,
) -> Run:
    """Train a network on a dataset.

    Args:
        network: a zoo name, ``timm/NAME``, ``file.py:Class`` or ``net.prototxt``.
        dataset: a dataset or its folder.
        out: the run's folder; by default ``runs/NETWORK-DATE``.
        resume: go on where the run in ``out`` stopped; the loss curve is that of an unbroken run.
        emit: told what happens.
        settings: fields of ``Recipe`` (epochs, batch_size, solver, precision, backend, gpus, …).

    Returns:
        The run; ``run.best("val/accuracy")`` is its best checkpoint.
    """
    folder = dataset.path if isinstance(dataset, Dataset) else Path(dataset)
    recipe = recipe_from({"network": network, "dataset": str(folder), **settings})
    if out is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        out = Path("runs") / f"{network.replace('/', '-')}-{stamp}"
    return loop.train(recipe, Path(out), resume=resume, emit=emit)


def recipe_from(settings: Mapping[str, Any]) -> Recipe:
    """A recipe from keyword settings; nested records may be given as dicts."""
    known = Recipe.__dataclass_fields__
    if unknown := sorted(set(settings) - set(known)):
        raise UsageError(
            "unknown training setting", seen=", ".join(unknown), fix=f"use {', '.join(known)}"
        )
    plain = {name: to_plain(value) for name, value in settings.items()}
    for name in ("epochs", "val_interval", "snapshot_interval"):
        if isinstance(plain.get(name), int):
            plain[name] = float(plain[name])
    try:
        return from_plain(Recipe, plain, where="recipe")
    except ArtifactError as error:
        if isinstance(error.__cause__, UsageError):  # a record's own words are the clearest
            raise error.__cause__ from None
        raise UsageError(error.wrong, seen=error.seen, fix="correct the setting") from error


def compile(
    source: Checkpoint | Run | torch.nn.Module | str | Path,
    *,
    batch: Batch = (1, 8, 32),
    target: str | None = None,
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
    trust_code: bool = False,
    emit: Emit = silent,
) -> Plan:
    """Turn a network into a plan: fused, laid out, every kernel chosen by measurement.

    Args:
        source: a checkpoint, a run (its best checkpoint), a path of one of these or of an ONNX
            file, or a torch module (then ``inputs`` says what it takes).
        batch: one size, or the smallest, the usual and the largest.
        target: ``cpu``, ``sm_90`` or ``reference``; by default what this machine has.
        precision: ``fp32``, ``tf32``, ``bf16``, ``fp16``, ``int8`` or ``fp8``.
        precisions: another one for single layers, by the names that ``compiler.layers`` lists.
        calibration: for int8 and fp8: what ``calibrate`` made, its file, or the data that it gets.
        budget: percentage points of top-1 accuracy on ``data`` that the plan may lose: the fastest
            one that does not is searched, with a precision for each layer. See ``pareto``.
        input: ``uint8`` for a plan that takes images as bytes [N, H, W, C] of the network's size,
            as decoders give them, and scales them itself: a quarter of the bytes to send.
        preprocess: how images become the input; a checkpoint says so itself.
        samples: inputs by name to check the plan with, for networks that random ones do not fit.
        cache: timing cache file, read and added to.
        lock: a plan of this network on this device, or its ``lock`` in a file: what was measured
            then decides, nothing is measured, and the plan has the same bytes. A plan that a budget
            chose also says which layer gets which precision.
        time_limit_s: how long to measure at most. A build that needs longer raises
            ``BuildStopped``; the next one with the same ``cache`` goes on there.
        trust_code: let a checkpoint of a user's own Python network run the code that it brings.
    """
    if budget is not None:
        if data is None or precisions or samples or lock:
            raise UsageError(
                "a budget needs labelled data, and chooses the precisions of the layers itself",
                fix="give data=, and leave out precisions, samples and lock",
            )
        return pareto(
            source,
            data=data,
            budget=budget,
            batch=batch,
            target=target,
            precision=precision,
            calibration=calibration,
            inputs=inputs,
            input=input,
            preprocess=preprocess,
            cache=cache,
            time_limit_s=time_limit_s,
            trust_code=trust_code,
            emit=emit,
        ).plan
    target = target or default_target()
    span = batch_range(batch)
    network, built_from, details = _as_graph(source, span, inputs, trust_code)
    details = {"preprocess": preprocess, **details}
    built_from = _source_name(source, built_from)
    chosen = _chosen_by_budget(lock)
    if chosen is not None and precision == "fp32" and not precisions:
        precision, precisions = chosen.manifest.precision, chosen.manifest.precisions
    wanted = {precision, *(precisions or {}).values()} & set(compiler.KINDS)
    found = None
    if calibration is not None and (wanted or chosen):
        emit(phase("calibrate", f"scales for {' and '.join(sorted(wanted)) or 'the check'}"))
        record, device = details["preprocess"], torch_device(target)
        found = _calibrated(network, calibration, record, device, kinds=sorted(wanted))
    plan = compiler.compile_graph(
        network,
        target=target,
        batch=span,
        precision=precision,
        precisions=precisions,
        calibration=found,
        input=input,
        samples=samples,
        about=compiler.About(
            built_from=built_from,
            rebuild=f"tessella compile {built_from} --target {target} --precision {precision}"
            f" --batch {_sizes(span)}{' --uint8' if input == 'uint8' else ''}"
            f"{_shown('calibrate', calibration)}",
            **details,
        ),
        measuring=compiler.Measuring(
            cache=None if cache is None else Path(cache),
            lock=None if lock is None else _lock(lock),
            time_limit_s=time_limit_s,
        ),
        emit=emit,
    )
    plan = _carrying(plan, emit)
    return plan if chosen is None else _as_judged(plan, chosen)


def pareto(
    source: Checkpoint | Run | torch.nn.Module | str | Path,
    *,
    data: JudgingData,
    budget: float = 0.3,
    metric: compiler.budget.Metric = compiler.budget.top1,
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
    emit: Emit = silent,
) -> compiler.Front:
    """What precision buys: plans of which none is worse than another in accuracy, time and memory.

    >>> front = pareto("runs/flowers", data="datasets/flowers", budget=0.3)
    >>> print(front)
    >>> front.plan.save("flowers.plan")

    Args:
        source, batch, target, inputs, input, preprocess, cache, time_limit_s, trust_code: as for
            ``compile``.
        data: what the plans are judged by: a dataset (its validation split), a split, or
            ``compiler.budget.of_tensors(inputs, labels)``.
        budget: percentage points of the metric below float32 that the chosen plan may lose. With 0
            it changes no answer.
        metric: of outputs by name and labels: higher is better, and 1 is a hundred points.
        precision: the least exact that a layer may get; ``fp32``: all that suit the target.
        calibration: as for ``compile``; by default a dataset's training split, else a part of
            ``data`` that does not judge.
    """
    target = target or default_target()
    span = batch_range(batch)
    network, built_from, details = _as_graph(source, span, inputs, trust_code)
    details = {"preprocess": preprocess, **details}
    built_from, record = _source_name(source, built_from), details["preprocess"]
    if isinstance(data, str | Path):
        data = Dataset(data)
    if calibration is None and isinstance(data, Dataset) and "train" in data.info.splits:
        calibration = data
    named = _shown("data", data)
    if not isinstance(data, compiler.Labelled):
        data = _judging(network, data, record, details.get("labels", ()))
    found = None
    if calibration is not None:
        kinds = [k for k in compiler.budget.offered(target, precision) if k in compiler.KINDS]
        emit(phase("calibrate", f"scales for {' and '.join(kinds) or 'the check'}"))
        found = _calibrated(network, calibration, record, torch_device(target), kinds=kinds)
    return compiler.budget.search(
        network,
        target=target,
        batch=span,
        data=data,
        run=_running,
        feed=partial(_as_pixels, record=record) if input == "uint8" else lambda batch: batch,
        finish=lambda plan: _carrying(plan, emit),
        budget=budget,
        metric=metric,
        least=precision,
        calibration=found,
        input=input,
        about=compiler.About(
            built_from=built_from,
            rebuild=f"tessella compile {built_from} --target {target} --precision {precision}"
            f" --batch {_sizes(span)} --budget {budget:g}{named}"
            f"{' --uint8' if input == 'uint8' else ''}{_shown('calibrate', calibration)}",
            **details,
        ),
        measuring=compiler.Measuring(
            cache=None if cache is None else Path(cache), time_limit_s=time_limit_s
        ),
        emit=emit,
    )


def _judging(
    network: graph.Graph, data: Dataset | Split, record: Preprocess | None, labels: tuple[str, ...]
) -> compiler.Labelled:
    """A dataset's validation split, or a split, as the network sees it."""
    if record is None or len(network.inputs) != 1:
        raise UsageError(
            "a dataset judges a network of one input that says how images become it",
            seen=", ".join(map(repr, network.inputs)),
            fix="give preprocess=, or data=compiler.budget.of_tensors(inputs, labels)",
        )
    if isinstance(data, Dataset):
        labels = labels or data.classes
        data = _samples(data, "val", labels)
    return labelled(data, record, network.inputs[0].name, labels)


def _running(plan: Plan) -> compiler.budget.Predict:
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


def _source_name(source: Checkpoint | Run | torch.nn.Module | str | Path, name: str) -> str:
    if isinstance(source, torch.nn.Module):
        return name
    return str(source.path if isinstance(source, Checkpoint | Run) else source)


def _sizes(span: DimRange) -> str:
    return ",".join(str(n) for n in dict.fromkeys((span.min, span.opt, span.max)))


def _carrying(plan: Plan, emit: Emit) -> Plan:
    """The plan with its kernels' machine code."""
    plan, left_out = runtime.carry(plan)
    for kernel, reason in left_out.items():
        emit(phase("carry", f"{kernel} is compiled where the plan is loaded: {reason}"))
    return plan


def _chosen_by_budget(lock: Plan | str | Path | None) -> Plan | None:
    """The plan behind a lock, if a budget chose its precisions."""
    if isinstance(lock, str | Path) and zipfile.is_zipfile(lock):
        lock = load_plan(lock)
    return lock if isinstance(lock, Plan) and lock.manifest.receipt is not None else None


def _as_judged(plan: Plan, judged: Plan) -> Plan:
    """The plan with another one's receipt, if they are the same: what was found out holds."""
    known = judged.manifest
    manifest = replace(plan.manifest, receipt=known.receipt, rebuild=known.rebuild)
    same = replace(plan, manifest=manifest)
    return same if to_bytes(same) == to_bytes(judged) else plan


def calibrate(
    source: Checkpoint | Run | torch.nn.Module | str | Path,
    data: Dataset | Split | str | Path | Sequence[Mapping[str, torch.Tensor]],
    *,
    method: str = compiler.METHOD,
    kinds: Sequence[str] = ("int8",),
    inputs: Sequence[TensorSpec] | None = None,
    preprocess: Preprocess | None = None,
    trust_code: bool = False,
) -> compiler.Calibration:
    """What int8 and fp8 need to know of a network's values, from a user's data.

    >>> calibrate("runs/flowers", "datasets/flowers").save("flowers.calibration")

    Args:
        source, inputs, preprocess, trust_code: as for ``compile``.
        data: a dataset, of whose training split 512 images are drawn; a split; or batches of
            inputs by name. Judge the plan by other data.
        method: ``min-max``, ``percentile``, ``entropy`` or ``mse``.
        kinds: ``int8``, ``fp8`` or both.
    """
    network, _, details = _as_graph(source, DimRange(min=1, opt=2, max=8), inputs, trust_code)
    record, device = details.get("preprocess", preprocess), torch_device(default_target())
    return _calibrated(network, data, record, device, method=method, kinds=kinds)


def _calibrated(
    network: graph.Graph,
    data: CalibrationData,
    record: Preprocess | None,
    device: torch.device,
    **settings: Any,
) -> compiler.Calibration:
    """The calibration in ``data``, or one that is made with it."""
    if isinstance(data, compiler.Calibration):
        return data
    if isinstance(data, str | Path) and Path(data).is_file():
        return compiler.load_calibration(data)
    count = COUNT
    if isinstance(data, CalibrationSet):
        settings["method"], count = data.method, data.samples
        data = Dataset(data.dataset).split(data.split)
    if isinstance(data, str | Path):
        data = Dataset(data)
    if isinstance(data, Dataset):
        data = data.train
    if isinstance(data, Split):
        if record is None or len(network.inputs) != 1:
            raise UsageError(
                "a dataset calibrates a network of one input that says how images become it",
                seen=", ".join(map(repr, network.inputs)),
                fix="give preprocess=, or batches of inputs by name",
            )
        data = of_split(data, record, network.inputs[0].name, device=device, count=count)
    return compiler.calibrate(network, data, **settings)


def _shown(option: str, data: CalibrationData | JudgingData | None) -> str:
    """How a command names it, where it has a place."""
    if isinstance(data, Dataset):
        data = data.path
    return f" --{option} {data}" if isinstance(data, str | Path | CalibrationSet) else ""


def _lock(source: Plan | str | Path) -> str:
    """What decided a plan, from the plan, its file, or a file with these lines alone."""
    if isinstance(source, Plan):
        return source.lock
    if not Path(source).is_file():
        raise UsageError("there is no lock here", seen=source, fix="give a plan or its lock")
    if zipfile.is_zipfile(source):
        return load_plan(source).lock
    return Path(source).read_text(encoding="utf-8", errors="replace")


def explain(
    source: Checkpoint | Run | torch.nn.Module | str | Path,
    *,
    batch: Batch = (1, 8, 32),
    target: str | None = None,
    precision: str = "fp32",
    inputs: Sequence[TensorSpec] | None = None,
    input: compiler.Input = "float32",
    preprocess: Preprocess | None = None,
    trust_code: bool = False,
) -> tuple[compiler.PassRecord, ...]:
    """What ``compile`` does to a network's graph before it measures kernels, pass by pass.

    Args: as for ``compile``.
    """
    network, _, details = _as_graph(source, batch_range(batch), inputs, trust_code)
    return compiler.explain(
        network,
        target=target or default_target(),
        precision=precision,
        input=input,
        preprocess=details.get("preprocess", preprocess),
    )


def export(
    source: Checkpoint | Run | torch.nn.Module | str | Path,
    out: str | Path,
    *,
    opset: int = 17,
    inputs: Sequence[TensorSpec] | None = None,
    trust_code: bool = False,
) -> graph.Graph:
    """Write a network as an ONNX file, for any batch, as it is before the compiler changes it.

    Args:
        source, inputs, trust_code: as for ``compile``.
        opset: the version of ONNX's operators, 17 to 21.

    Returns:
        The network's graph.

    Raises:
        CompileError: ONNX has no word for one of its operations; the message lists all of them.
    """
    network, _, _ = _as_graph(source, DimRange(min=1, opt=2, max=8), inputs, trust_code)
    onnx.write(network, out, opset=opset)
    return network


def batch_range(batch: Batch) -> DimRange:
    """``8`` or ``(1, 8, 32)`` as a range."""
    if isinstance(batch, DimRange):
        return batch
    sizes = (batch,) if isinstance(batch, int) else tuple(batch)
    if len(sizes) not in (1, 3):
        raise UsageError(
            "a batch is one size, or the smallest, the usual and the largest",
            seen=sizes,
            fix="write batch=8 or batch=(1, 8, 32)",
        )
    return DimRange(min=sizes[0], opt=sizes[len(sizes) // 2], max=sizes[-1])


def _as_graph(
    source: Checkpoint | Run | torch.nn.Module | str | Path,
    batch: DimRange,
    inputs: Sequence[TensorSpec] | None,
    trust_code: bool,
) -> tuple[graph.Graph, str, dict[str, Any]]:
    """The captured network, its name, and what a plan should know besides."""
    if isinstance(source, torch.nn.Module):
        if inputs is None:
            raise UsageError(
                "a module does not say what it takes",
                seen=type(source).__name__,
                fix="pass inputs=[TensorSpec(name='image', dtype='float32', "
                "shape=(1, 3, 224, 224))]",
            )
        specs = tuple(replace(s, shape=(batch, *s.shape[1:])) for s in inputs)
        return graph.capture(source, specs), type(source).__name__, {}
    if isinstance(source, str | Path) and Path(source).suffix == ".onnx":
        return onnx.read(Path(source), batch=batch), str(source), {}
    checkpoint = open_checkpoint(source)
    info = checkpoint.info
    image = TensorSpec(name="image", dtype="float32", shape=(batch, *info.preprocess.input_shape))
    module = zoo.load(checkpoint, trust_code=trust_code)
    captured = graph.capture(module, (image,), name=info.network.name, outputs=("scores",))
    details = {
        "preprocess": info.preprocess,
        "labels": info.labels,
        "accuracy": dict(info.metrics),
    }
    return captured, info.network.name, details


def open_checkpoint(source: Checkpoint | Run | str | Path) -> Checkpoint:
    """A checkpoint from itself, from a run (its best, else its latest), or from their path."""
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, str | Path):
        if Path(source).is_file():
            raise UsageError(
                "this is a file, and a checkpoint or a run is a folder",
                seen=source,
                fix="give the folder of a run or of a checkpoint; a .plan is compiled already",
            )
        if not (Path(source) / "run.json").exists():
            return Checkpoint(source)
        source = Run(source)
    scored = any("val/accuracy" in c.info.metrics for c in source.checkpoints())
    return source.best("val/accuracy") if scored else source.latest()


def load(path: str | Path | Plan, *, compiled: bool = True) -> Engine:
    """A plan, ready to run; needs neither model code nor compiler.

    Args:
        compiled: run the machine code that a plan for a GPU carries; without, its kernels are
            compiled from Tessella's own sources, for a plan by someone you do not trust.

    >>> engine = load("flowers.plan")
    >>> scores = engine(image=images)["scores"]
    """
    return runtime.load(path, compiled=compiled)


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A sample for which plan and checkpoint disagree."""

    path: str
    truth: str
    checkpoint: str
    plan: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A plan beside its checkpoint, on the same samples.

    Attributes:
        agreement: fraction of samples with the same answer.
        max_abs_diff: largest difference between two scores.
        flips: samples with another answer.
    """

    samples: int
    checkpoint_accuracy: float
    plan_accuracy: float
    agreement: float
    max_abs_diff: float
    preprocess_hash: str
    flips: tuple[Flip, ...]


def verify(
    plan: Plan | Engine | str | Path,
    *,
    against: Checkpoint | Run | str | Path,
    data: Dataset | Split | str | Path,
    split: str = "val",
    batch_size: int = 32,
    trust_code: bool = False,
    emit: Emit = silent,
) -> Verification:
    """Run a plan and the checkpoint that it came from on a split, and compare sample by sample.

    Raises:
        ArtifactError: the two do not prepare their inputs in the same way.
    """
    engine = plan if isinstance(plan, Engine) else load(plan)
    checkpoint = open_checkpoint(against)
    record = checkpoint.info.preprocess
    if engine.preprocess is None or engine.preprocess.hash != record.hash:
        raise ArtifactError(
            "plan and checkpoint prepare their inputs differently",
            seen=f"{engine.preprocess} and {record}",
            fix="compile the plan from this checkpoint",
        )
    labels = checkpoint.info.labels
    samples = _samples(data, split, labels)
    eager = eager_predictor(checkpoint, trust_code=trust_code)
    planned = engine_predictor(engine)
    a = evaluate(eager, samples, record, labels, batch_size=batch_size, emit=emit)
    b = evaluate(planned, samples, record, labels, batch_size=batch_size, emit=emit)
    first, second = a.predictions, b.predictions
    differ = np.flatnonzero(first != second)
    return Verification(
        samples=len(samples),
        checkpoint_accuracy=a.accuracy,
        plan_accuracy=b.accuracy,
        agreement=1.0 - len(differ) / len(samples),
        max_abs_diff=float(np.abs(a.scores - b.scores).max()),
        preprocess_hash=record.hash,
        flips=tuple(
            Flip(
                path=samples[int(i)].path,
                truth=labels[samples[int(i)].label],
                checkpoint=labels[int(first[i])],
                plan=labels[int(second[i])],
            )
            for i in differ
        ),
    )


def _samples(data: Dataset | Split | str | Path, split: str, labels: tuple[str, ...]) -> Split:
    """The split to measure a model on; its classes must be the model's, in the same order.

    Raises:
        DataError: a label would count another class than it names.
    """
    if isinstance(data, Split):
        return data
    dataset = data if isinstance(data, Dataset) else Dataset(data)
    if dataset.classes != labels:
        raise DataError(
            "the dataset's classes are not those of the model",
            seen=f"{_some(dataset.classes)} in {dataset.path}; the model knows {_some(labels)}",
            fix="use the dataset that the model was trained on, or one with the same classes",
        )
    return dataset.split(split)


def _some(labels: tuple[str, ...]) -> str:
    """The first five of many names."""
    more = f" … ({len(labels)} in all)" if len(labels) > 5 else ""
    return ", ".join(map(repr, labels[:5])) + more


def eager_predictor(
    checkpoint: Checkpoint, *, trust_code: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The checkpoint's network in plain torch, on the GPU where there is one; scores on the CPU.

    It is a reference: float32 products are IEEE, where torch would let cuDNN round them to TF32.
    """
    device = torch_device(default_target())
    module = zoo.load(checkpoint, trust_code=trust_code).to(device)

    def predict(images: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), float32_math("ieee"):
            scores: torch.Tensor = module(images.to(device))
        return scores.float().cpu()

    return predict


def engine_predictor(engine: Engine) -> Callable[[torch.Tensor], torch.Tensor]:
    """A classifier's engine as a function from normalized images to scores."""
    (image,), (scores, *_) = engine.inputs, engine.outputs
    record = engine.preprocess if image.dtype == "uint8" else None

    def predict(images: torch.Tensor) -> torch.Tensor:
        array = images.numpy()
        if record is not None:  # the plan scales them itself
            array = denormalize(array, record)
        return torch.from_numpy(engine(**{image.name: array})[scores.name])

    return predict


def open_model(path: str | Path, *, compiled: bool = True) -> Model:
    """A checkpoint (a folder, or the best of a run) or a plan; ``compiled`` as for ``load``."""
    path = Path(path)
    return load(path, compiled=compiled) if path.is_file() else open_checkpoint(path)


def predictor(
    model: Model, *, trust_code: bool = False
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Preprocess, tuple[str, ...]]:
    """How a model predicts, how its inputs are made, and what its outputs are called."""
    if isinstance(model, Checkpoint):
        info = model.info
        return eager_predictor(model, trust_code=trust_code), info.preprocess, info.labels
    if model.preprocess is None:
        raise UsageError(
            "this plan does not say how images become its input",
            seen=", ".join(str(s) for s in model.inputs),
            fix="compile it from a checkpoint, or call the engine with arrays",
        )
    return engine_predictor(model), model.preprocess, model.labels


def classify(
    model: Model, images: Sequence[str | Path], *, top: int = 5, trust_code: bool = False
) -> list[list[tuple[str, float]]]:
    """The ``top`` labels of each image file with their probabilities (softmax of the scores)."""
    predict, record, labels = predictor(model, trust_code=trust_code)
    answers = []
    for image in images:
        path = Path(image)
        if not path.is_file():
            raise UsageError("there is no image here", seen=path)
        pixels = record(path.read_bytes(), name=path.name)
        probabilities = predict(torch.from_numpy(pixels[None])).float().softmax(1)[0]
        best = probabilities.topk(min(top, len(labels)))
        answers.append(
            [(labels[int(i)], float(p)) for p, i in zip(best.values, best.indices, strict=True)]
        )
    return answers


def evaluate_split(
    model: Model,
    data: Dataset | Split | str | Path,
    *,
    split: str = "val",
    batch_size: int = 32,
    trust_code: bool = False,
    emit: Emit = silent,
) -> Evaluation:
    """Accuracy, confusion matrix and per-class figures of a checkpoint or a plan on a split."""
    predict, record, labels = predictor(model, trust_code=trust_code)
    samples = _samples(data, split, labels)
    return evaluate(predict, samples, record, labels, batch_size=batch_size, emit=emit)


def serve(
    models: Mapping[str, str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    max_delay_us: int = 0,
    folder: str | Path | None = None,
    compiled: bool = True,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve plans over HTTP (Open Inference Protocol) until the process is told to stop.

    >>> serve({"flowers": "flowers.plan"}, port=8000)

    Args:
        token: what clients must send; needed unless ``host`` is this machine's own.
        max_delay_us: how long a request may wait for others to share its batch.
        folder: NAME.plan files that clients may load too.
        compiled: as for ``load``.
        ready: called with the server's URL when it takes requests.
    """
    server.serve(
        {name: Path(path) for name, path in models.items()},
        host=host,
        port=port,
        token=token,
        max_delay_us=max_delay_us,
        folder=None if folder is None else Path(folder),
        compiled=compiled,
        ready=ready,
    )


__all__ = [
    "Verification", "calibrate", "classify", "compile", "evaluate_split", "explain", "load",
    "load_plan", "pareto", "serve", "train", "verify",
]  # fmt: skip
