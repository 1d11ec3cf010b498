"""quantization_aware: a network as a module that is trained with the roundings of its INT8 plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessella import compiler
from tessella.api.checkpoints import open_checkpoint
from tessella.api.samples import CalibrationData, calibrated
from tessella.api.sources import ANY, Source, opened
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import RunInfo
from tessella.core.device import default_target
from tessella.core.errors import UsageError
from tessella.core.events import Emit, phase, silent
from tessella.core.preprocess import Preprocess
from tessella.core.spec import TensorSpec
from tessella.graph.quantization_aware import QuantizationAware
from tessella.tasks import of
from tessella.training.quantizing import Quantizer


def quantization_aware(
    source: Source,
    calibration: CalibrationData,
    *,
    precisions: Mapping[str, str] | None = None,
    target: str | None = None,
    inputs: Sequence[TensorSpec] | None = None,
    preprocess: Preprocess | None = None,
    trust_code: bool = False,
) -> QuantizationAware:
    """A network as a module that rounds as its INT8 plan will; train it on as any other.

    >>> net = ts.quantization_aware(module, batches, inputs=inputs).train()
    >>> loss(net(images), labels).backward()  # and so on, at a low rate
    >>> plan = ts.compile(net.eval().graph())  # needs no calibration

    In evaluation mode it computes what the plan computes. Batch norms are folded, and dropout is
    off.

    Args:
        source, inputs, preprocess, trust_code: as for ``compile``.
        calibration: what ``calibrate`` made, its file, or the data that it gets: training images.
        precisions: another precision for single layers, by the names of ``compiler.layers``:
            ``fp32`` keeps one from rounding, ``int8`` rounds one that would not be.
        target: of the plan; by default what this machine has. It decides how far weights reach,
            and what evaluation computes.
    """
    target = target or default_target()
    network = opened(source, ANY, inputs=inputs, preprocess=preprocess, trust_code=trust_code)
    found = calibrated(network, calibration, target)
    return compiler.quantization_aware(network.graph, found, target=target, precisions=precisions)


def quantizer(*, emit: Emit = silent) -> Quantizer:
    """What makes the network of a recipe with ``quantize``: of its ``init``, or of the checkpoint
    that is resumed.
    """

    def network(info: RunInfo, start: Checkpoint | None) -> QuantizationAware:
        if start is not None:
            return compiler.read_quantized(start.quantized())
        began = open_checkpoint(info.recipe.init)
        _require_same(info, began)
        if began.is_quantized:
            module = compiler.read_quantized(began.quantized())
            module.load_state_dict(began.weights())
            return module
        emit(phase("calibrate", "scales for int8, by training images"))
        return quantization_aware(began, Dataset(info.recipe.dataset))

    return network


def _require_same(info: RunInfo, began: Checkpoint) -> None:
    """Refuse a start with another network than the run's: it is taken whole, with its head."""
    head = of(info.task).head
    if head.FINISHES or head.TAUGHT:
        raise UsageError(
            f"networks of {info.task.name} cannot be trained with the roundings of a plan yet",
            seen="quantize='int8'",
            fix="compile the trained network with precision int8 and a calibration",
        )
    if began.info.network != info.network or began.info.labels != info.labels:
        raise UsageError(
            "quantization-aware training goes on with the same network and classes",
            seen=f"{began.info.network.name} of {len(began.info.labels)} classes at "
            f"{began.info.network.height}×{began.info.network.width} in {began.path}, "
            f"{info.network.name} of {len(info.labels)} at "
            f"{info.network.height}×{info.network.width} now",
            fix="give as init a run of this network on this dataset",
        )
