"""Rewrites, graph → graph, one a file; ``compiler.pipeline`` lists them, each with its why."""
