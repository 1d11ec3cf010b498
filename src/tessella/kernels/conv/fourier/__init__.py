"""Convolution by Fourier transforms: of the whole image, and of tiles."""
