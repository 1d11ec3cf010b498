"""What a layer does to its result before storing it, in each language that kernels have."""
