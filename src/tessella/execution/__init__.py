"""How steps run: bound to kernels and memory, for the compiler's races and checks as for the runtime.

Nothing here chooses a kernel, and nothing here needs a graph.
"""
