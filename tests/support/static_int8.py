"""A graph in int8 by ONNX Runtime's static quantization, as a peer of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)

from tessella.graph.graph import Graph
from tessella.graph.onnx import write
from tessella.kernels.shared import onednn


class Images(CalibrationDataReader):
    """ONNX Runtime's way to be shown batches."""

    def __init__(self, batches: Sequence[torch.Tensor]) -> None:
        self._left = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._left, None)
        return None if batch is None else {"image": batch.numpy()}


def answers_in_int8(
    graph: Graph, shown: Sequence[torch.Tensor], images: torch.Tensor, folder: Path
) -> torch.Tensor:
    """The answers to images after a calibration with the batches that are shown.

    Weights have 7 bits where ONNX Runtime's products saturate, too (``reduce_range``).
    """
    write(graph, folder / "net.onnx")
    quantize_static(
        folder / "net.onnx",
        folder / "int8.onnx",
        Images(shown),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        weight_type=QuantType.QInt8,
        activation_type=QuantType.QUInt8,
        reduce_range=onednn.saturates(),
    )
    session = onnxruntime.InferenceSession(folder / "int8.onnx")
    return torch.from_numpy(session.run(None, {"image": images.numpy()})[0])
