"""Operators of torch that have no operation of ours: run as they are, visibly."""
