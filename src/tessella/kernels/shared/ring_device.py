"""Device code: where a role is in a ring of stages in shared memory."""

from __future__ import annotations

from tessella.device.hopper import gl, gluon


@gluon.constexpr_function
def several(count, shape):
    """The shape of a buffer of so many tiles."""
    return [count, *shape]


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and the parity of the round that it is in."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """The stage of the ring before this one.

    A variable that follows ``stage`` through a loop would not do: where a name is set to another
    one's value, Triton 3.6 takes both for one outside the loop, and carries neither.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def skip(stage, phase, count, STAGES: gl.constexpr):
    """The stage so many places further on in the ring, and its parity."""
    position = stage + count
    return position % STAGES, (phase + position // STAGES) & 1
