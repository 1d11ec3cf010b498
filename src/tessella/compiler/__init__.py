"""The compiler: from a graph to a plan."""

from tessella.compiler.explanation import PassRecord, explain
from tessella.compiler.pipeline import Input, compile_graph

__all__ = ["Input", "PassRecord", "compile_graph", "explain"]
