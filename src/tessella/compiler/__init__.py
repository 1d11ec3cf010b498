"""The compiler: from a graph to a plan."""

from tessella.artifacts.build import Input
from tessella.compiler import budget
from tessella.compiler.budget import Front, Labelled
from tessella.compiler.calibration import DTYPES as KINDS
from tessella.compiler.calibration import METHOD, Calibration, load_calibration
from tessella.compiler.explanation import PassRecord, explain
from tessella.compiler.pipeline import calibrate, compile_graph, layers
from tessella.compiler.quantization_aware import quantization_aware, read_quantized
from tessella.compiler.retune import retune
from tessella.compiler.settings import About, Measuring
from tessella.compiler.slow_precisions import warnings_for

__all__ = [
    "KINDS", "METHOD", "About", "Calibration", "Front", "Input", "Labelled", "Measuring",
    "PassRecord", "budget", "calibrate", "compile_graph", "explain", "layers", "load_calibration",
    "quantization_aware", "read_quantized", "retune", "warnings_for",
]  # fmt: skip
