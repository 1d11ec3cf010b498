"""The compiler: from a graph to a plan."""

from tessella.compiler.pipeline import compile_graph

__all__ = ["compile_graph"]
