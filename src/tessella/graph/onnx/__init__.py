"""ONNX files become graphs."""

from tessella.graph.onnx.read import read, supported

__all__ = ["read", "supported"]
