"""What each operation becomes in ONNX, in the versions 17 to 21 of its operators."""

from __future__ import annotations

from tessella.graph.onnx.export import Export
from tessella.graph.onnx.export_detect import DETECT
from tessella.graph.onnx.export_elements import ELEMENTS
from tessella.graph.onnx.export_layers import LAYERS
from tessella.graph.onnx.export_moving import MOVING
from tessella.graph.onnx.export_recurrent import RECURRENT

EXPORTS: dict[str, Export] = {**LAYERS, **ELEMENTS, **MOVING, **RECURRENT, **DETECT}
