"""What is decided by measurement, most of it on concrete shapes: layouts, kernels, memory."""
