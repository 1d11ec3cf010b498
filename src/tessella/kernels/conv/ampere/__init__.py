"""Convolutions by the instructions that GPUs have from Ampere on: `mma.sync` and `cp.async`."""
