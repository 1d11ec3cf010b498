"""Convolution for Hopper, in Gluon: TMA into shared memory, WGMMA out of it."""
