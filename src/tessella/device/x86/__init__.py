"""Kernels for processors with AVX-512, as machine code that is written when a step is bound."""
