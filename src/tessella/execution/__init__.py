"""How steps run, bound to kernels and memory: the compiler's races and checks, and the runtime.

Nothing here chooses a kernel, and nothing here needs a graph.
"""
