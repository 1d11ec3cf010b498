"""Data that calibrates a network or judges a model, in whatever form it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tessella import compiler
from tessella.api.sources import Opened
from tessella.artifacts.dataset import Dataset, Split
from tessella.compiler.samples import COUNT, CalibrationSet, labelled, of_split
from tessella.core.device import torch_device
from tessella.core.errors import DataError, UsageError
from tessella.core.task import TaskRecord

Data = Dataset | Split | str | Path
Batches = Sequence[Mapping[str, torch.Tensor]]
CalibrationData = compiler.Calibration | CalibrationSet | Data | Batches
JudgingData = compiler.Labelled | Data


def calibrated(
    network: Opened,
    data: CalibrationData,
    target: str,
    *,
    on: str | None = None,
    **settings: Any,
) -> compiler.Calibration:
    """The calibration that ``data`` is, or one that is computed from it on the target's device.

    Args:
        on: another target on whose device it is computed, where the plan's is not here.
    """
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
        record, inputs = network.preprocess, network.graph.inputs
        if record is None or len(inputs) != 1:
            raise UsageError(
                "a dataset calibrates a network of one input that says how images become it",
                seen=", ".join(map(repr, inputs)),
                fix="give preprocess=, or batches of inputs by name",
            )
        (image,), device = inputs, torch_device(on or target)
        data = of_split(data, record, image.name, device=device, count=count)
    return compiler.calibrate(network.graph, data, target=target, **settings)


def judging(network: Opened, data: JudgingData) -> compiler.Labelled:
    """Labelled samples, or a dataset's validation split, or a split, as the network sees it."""
    if isinstance(data, compiler.Labelled):
        return data
    record, inputs, labels = network.preprocess, network.graph.inputs, network.labels
    if record is None or len(inputs) != 1:
        raise UsageError(
            "a dataset judges a network of one input that says how images become it",
            seen=", ".join(map(repr, inputs)),
            fix="give preprocess=, or data=compiler.budget.of_tensors(inputs, labels)",
        )
    if record.volume is not None:
        raise UsageError(
            "a budget is judged by pictures, and this network is of volumes",
            seen="×".join(map(str, record.sides)),
            fix="choose a precision, and compare: tessella evaluate PLAN --against RUN",
        )
    if not isinstance(data, Split):
        dataset = data if isinstance(data, Dataset) else Dataset(data)
        labels = labels or dataset.classes
        data = split_of(dataset, "val", labels, network.task)
    if data.task.name != network.task.name:
        raise DataError(
            "the samples have another task than the model",
            seen=f"{data.task.name}, the model's is {network.task.name}",
            fix="use the dataset that the model was trained on, or one like it",
        )
    (image,) = inputs
    return labelled(data, record, image.name, labels, network.task)


def split_of(data: Data, split: str, labels: tuple[str, ...], task: TaskRecord) -> Split:
    """The split to measure a model on; its task and classes must be the model's, in their order.

    Raises:
        DataError: a label would count another class than it names, or is of another kind.
    """
    if isinstance(data, Split):
        return data
    dataset = data if isinstance(data, Dataset) else Dataset(data)
    if dataset.info.task.name != task.name:
        raise DataError(
            "the dataset has another task than the model",
            seen=f"{dataset.info.task.name} in {dataset.path}, the model's is {task.name}",
            fix="use the dataset that the model was trained on, or one like it",
        )
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
