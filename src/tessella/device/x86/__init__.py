"""An assembler for processors with AVX-512: kernels write machine code when a step is bound."""
