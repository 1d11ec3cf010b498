"""ONNX files quantized by ONNX Runtime: what its int8 and OpenVINO's are timed on."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tessella.kernels.shared import onednn

Arrays = Mapping[str, np.ndarray]


def quantized(file: bytes, seen: Arrays) -> bytes:
    """The file with int8 weights, a scale for each channel, and uint8 activations (QDQ), by ONNX
    Runtime's static quantization.

    Where the processor's products of int8 saturate, weights have 7 bits, as ours have there and as
    ONNX Runtime's documentation advises (``reduce_range``).

    Args:
        seen: the inputs that activations are scaled by, by name.
    """
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with _quiet(), tempfile.TemporaryDirectory() as folder:
        given, prepared, made = (Path(folder, f"{n}.onnx") for n in ("given", "prepared", "made"))
        given.write_bytes(file)
        quant_pre_process(given, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            made,
            _reader(seen),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8,
            reduce_range=onednn.saturates(),
        )
        return made.read_bytes()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that ONNX Runtime writes to the root logger."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _reader(seen: Arrays) -> Any:
    """The inputs as ONNX Runtime asks for them: once, then None."""
    from onnxruntime.quantization import CalibrationDataReader

    class Once(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = [dict(seen)]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self._left.pop() if self._left else None

    return Once()
