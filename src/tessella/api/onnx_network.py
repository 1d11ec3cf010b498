"""An ONNX file that says how images become its input: a network that answers without a plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tessella.core.device import default_target, torch_device
from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess
from tessella.core.task import TaskRecord
from tessella.device.float32_math import float32_math
from tessella.graph import onnx
from tessella.graph.graph import Graph
from tessella.graph.interpret import interpret


@dataclass(frozen=True, kw_only=True)
class OnnxNetwork:
    """A file's graph, run operation by operation in plain torch, and what it says of its images.

    Attributes:
        path: of the file.
        graph: of one input, the images, and of outputs whose first are the scores.
        preprocess, labels, task: as ``tessella export`` wrote them beside the network.
    """

    path: Path
    graph: Graph
    preprocess: Preprocess
    labels: tuple[str, ...]
    task: TaskRecord

    @classmethod
    def open(cls, path: Path) -> OnnxNetwork:
        """Read a file.

        Raises:
            CompileError: it is no ONNX file, or has operators that are not known.
            UsageError: it has not one input, or does not say how images become it.
        """
        said, graph = onnx.read_metadata(path), onnx.read(path)
        if said.preprocess is None or len(graph.inputs) != 1:
            raise UsageError(
                "this ONNX file does not say how images become its input",
                seen=", ".join(str(value.name) for value in graph.inputs),
                fix="export it from a checkpoint (tessella export), or compile it and call the "
                "plan with arrays",
            )
        return cls(
            path=path, graph=graph, preprocess=said.preprocess, labels=said.labels, task=said.task
        )

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """The scores of normalized images, [batch, …] on the CPU, in IEEE float32."""
        (image,) = self.graph.inputs
        with float32_math("ieee"):
            made = interpret(self.graph, {image.name: images.to(torch_device(default_target()))})
        return made[self.graph.outputs[0].name].float().cpu()
