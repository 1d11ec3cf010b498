"""What a collective over a ring of GPUs costs at least: transfers only, no start-up time.

``N`` bytes, ``k`` GPUs in a ring, ``S`` pieces, ``B`` bytes a second over each link in each
direction. In one time step every link may carry one piece.
"""

from __future__ import annotations

from tessella.core.errors import UsageError


def ring_broadcast_us(nbytes: int, gpus: int, pieces: int, bytes_per_s: float) -> float:
    """Microseconds for one GPU to send ``nbytes`` along the ring to all others, in ``pieces``.

    The first piece crosses k − 1 links, a step each; the other S − 1 follow one step apart. So
    there are S + k − 2 steps of N/(S·B), together ``N·(S + k − 2)/(S·B)``: N/B for many pieces,
    however many GPUs.
    """
    _check(nbytes, gpus, bytes_per_s)
    if pieces < 1:
        raise UsageError("a message is sent in at least one piece", seen=pieces)
    if gpus == 1:
        return 0.0
    return 1e6 * nbytes * (pieces + gpus - 2) / (pieces * bytes_per_s)


def ring_all_reduce_us(nbytes: int, gpus: int, bytes_per_s: float) -> float:
    """Microseconds until every GPU has the sum of all GPUs' ``nbytes``, by a ring.

    The message is cut into k pieces. In k − 1 steps each piece travels once around the ring and is
    summed on its way (reduce-scatter), in k − 1 more the sums travel on to all (all-gather). Every
    link is busy in each of the 2·(k − 1) steps of N/(k·B).
    """
    _check(nbytes, gpus, bytes_per_s)
    return 1e6 * nbytes * 2 * (gpus - 1) / (gpus * bytes_per_s)


def _check(nbytes: int, gpus: int, bytes_per_s: float) -> None:
    if nbytes < 0 or gpus < 1 or bytes_per_s <= 0:
        raise UsageError(
            "a transfer needs bytes ≥ 0, GPUs ≥ 1 and a bandwidth above 0",
            seen=f"{nbytes} bytes, {gpus} GPUs, {bytes_per_s} bytes/s",
        )
