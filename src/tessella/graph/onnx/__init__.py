"""ONNX files become graphs, and graphs ONNX files."""

from tessella.graph.onnx.metadata import Metadata, read_metadata
from tessella.graph.onnx.read import read, supported
from tessella.graph.onnx.write import write

__all__ = ["Metadata", "read", "read_metadata", "supported", "write"]
