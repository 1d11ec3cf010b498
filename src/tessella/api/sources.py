"""Sources of a compilation, captured as graphs: a checkpoint, a run, a module, an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tessella import compiler, graph
from tessella.api.checkpoints import open_checkpoint
from tessella.artifacts.build import is_network, read_batch, span_of
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.run import Run
from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess
from tessella.core.spec import DimRange, TensorSpec
from tessella.core.task import CLASSIFICATION, TaskRecord
from tessella.graph import onnx
from tessella.nn import zoo
from tessella.tasks import of
from tessella.tasks.finished import finished

ANY = DimRange(min=1, opt=2, max=8)  # for what does not depend on the batch
Batch = int | str | Sequence[int] | DimRange
_SPEC = (
    "from tessella.core.spec import TensorSpec; "
    "inputs=[TensorSpec(name='image', dtype='float32', shape=(1, 3, 224, 224))]"
)
Source = Checkpoint | Run | torch.nn.Module | graph.Graph | str | Path


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A captured network, its name, and the facts of it that a plan records.

    Attributes:
        is_quantized: whether it was trained with the roundings of an INT8 plan, which it has.
    """

    graph: graph.Graph
    name: str
    preprocess: Preprocess | None
    labels: tuple[str, ...] = ()
    accuracy: Mapping[str, float] = field(default_factory=dict)
    weights_sha256: str | None = None
    task: TaskRecord = CLASSIFICATION
    is_quantized: bool = False

    def about(self, rebuild: str) -> compiler.About:
        """The facts that a plan records; ``rebuild`` is the command that builds it again."""
        return compiler.About(
            built_from=self.name,
            rebuild=rebuild,
            preprocess=self.preprocess,
            labels=self.labels,
            accuracy=self.accuracy,
            weights_sha256=self.weights_sha256,
            task=self.task,
        )


def batch_range(batch: Batch) -> DimRange:
    """``8``, ``(1, 8, 32)``, or the same as a command line's text, as a range."""
    if isinstance(batch, DimRange):
        return batch
    if isinstance(batch, str):
        batch = read_batch(batch)
    return span_of((batch,) if isinstance(batch, int) else tuple(batch))


def opened(
    source: Source,
    batch: DimRange,
    *,
    inputs: Sequence[TensorSpec] | None,
    trust_code: bool,
    preprocess: Preprocess | None = None,
) -> Opened:
    """Capture a network. Arguments as for ``compile``; a checkpoint has its own ``preprocess``."""
    if inputs is not None and not all(isinstance(spec, TensorSpec) for spec in inputs):
        raise UsageError(
            "inputs describe tensors: they are a list of TensorSpec",
            seen=f"inputs={inputs!r}"[:200],
            fix=_SPEC,
        )
    is_file = isinstance(source, str | Path) and Path(source).suffix == ".onnx"
    if inputs is not None and isinstance(source, graph.Graph):
        raise UsageError(
            "a graph says itself what it takes",
            seen=f"inputs={', '.join(map(str, inputs))}",
            fix="leave out inputs; sizes that an ONNX file leaves open, and a value for an input "
            "that shapes depend on, are said when the file is read: "
            "tessella.graph.onnx.read(path, inputs=…, bound={name: tensor})",
        )
    if isinstance(source, graph.Graph):
        return Opened(graph=source, name=source.name, preprocess=preprocess)
    if isinstance(source, str | Path) and is_file:
        read = onnx.read(Path(source), batch=batch, inputs=inputs or ())
        said = onnx.read_metadata(source)
        record = said.preprocess if preprocess is None else preprocess
        return Opened(
            graph=read, name=str(source), preprocess=record, labels=said.labels, task=said.task
        )
    name = str(source)
    if isinstance(source, str | Path) and is_network(name):
        source, usual = zoo.untrained(name, inputs[0].shape[1:] if inputs else None)
        inputs = inputs or [TensorSpec(name="image", dtype="float32", shape=(1, *usual))]
    elif isinstance(source, torch.nn.Module):
        name = type(source).__name__
    if isinstance(source, torch.nn.Module):
        if inputs is None:
            raise UsageError(
                "a module does not say what it takes",
                seen=name,
                fix=_SPEC,
            )
        specs = tuple(replace(s, shape=(batch, *s.shape[1:])) for s in inputs)
        return Opened(graph=graph.capture(source, specs), name=name, preprocess=preprocess)
    checkpoint = open_checkpoint(source)
    info = checkpoint.info
    return Opened(
        graph=_captured(checkpoint, batch, trust_code=trust_code),
        name=str(source.path if isinstance(source, Checkpoint | Run) else source),
        preprocess=info.preprocess,
        labels=info.labels,
        accuracy=info.metrics,
        weights_sha256=checkpoint.weights_sha256,
        task=info.task,
        is_quantized=checkpoint.is_quantized,
    )


def _captured(checkpoint: Checkpoint, batch: DimRange, *, trust_code: bool) -> graph.Graph:
    """A checkpoint's graph: of its module, or the one with roundings that it was trained as."""
    info = checkpoint.info
    if checkpoint.is_quantized:
        return onnx.read(checkpoint.quantized(), batch=batch, name=info.network.name)
    image = TensorSpec(name="image", dtype="float32", shape=(batch, *info.preprocess.input_shape))
    module, head = zoo.load(checkpoint, trust_code=trust_code), of(info.task).head
    module = finished(module, head, info.task.numbers)
    return graph.capture(module, (image,), name=info.network.name, outputs=(head.OUTPUT,))
