"""Device code: a ring of stages in shared memory, its barriers, and where a role is in it."""

from __future__ import annotations

from tessella.device.hopper import gl, gluon, mbarrier


@gluon.constexpr_function
def several(count, shape):
    """The shape of a buffer of so many tiles."""
    return [count, *shape]


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """So many barriers in shared memory, each of which waits for so many arrivals a round.

    Those that nobody uses may not be made: Triton gives their place to what a reduction exchanges,
    and an ordinary store to a barrier that is still valid may come undone (PTX asks for
    ``mbarrier.inval`` first). On an H200 some warps of attention then read a barrier for "no key is
    hidden", and waited for the others for ever.
    """
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


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
