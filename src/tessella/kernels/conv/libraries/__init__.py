"""Convolution by libraries: the candidates beside ours, under their own names."""
