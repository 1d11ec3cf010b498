"""Collectives over several GPUs: how they are linked and what a transfer must cost at least."""
