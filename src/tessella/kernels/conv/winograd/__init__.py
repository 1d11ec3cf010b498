"""Winograd convolution: fused in one kernel, and as transforms around a matrix product."""
