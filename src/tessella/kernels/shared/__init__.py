"""What kernels of several families share, so that no family imports another."""
