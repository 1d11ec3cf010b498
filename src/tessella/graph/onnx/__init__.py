"""ONNX files become graphs, and graphs ONNX files."""

from tessella.graph.onnx.read import read, supported
from tessella.graph.onnx.write import write

__all__ = ["read", "supported", "write"]
