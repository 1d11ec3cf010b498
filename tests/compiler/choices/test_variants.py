"""The layout of a network: the faster one, and what has lost is not measured to its end."""

from __future__ import annotations

from typing import Any

import pytest

from tessella.compiler.choices import choose_kernels, variants
from tessella.core.events import Event
from tessella.search.tuning import NotInLock, Trial
from tests.support.choices import tuner_of
from tests.support.networks import captured


def test_a_lock_that_knows_the_problem_but_not_the_kernel_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel's new version, say: the other layout may have been the plan's."""
    turns: list[str] = []

    def trials(*_: Any) -> tuple[Trial, ...]:
        if len(turns) == 2:
            error = NotInLock("the lock does not say")
            error.is_known = True
            raise error
        return (Trial(kernel="reference", time_us=10.0),)

    monkeypatch.setattr(choose_kernels, "trials", trials)
    graph = captured("lenet")
    with pytest.raises(NotInLock):
        variants._fastest_layout(
            graph, 2, "fp32", tuner_of(graph), lambda event: turns.append(event.name)
        )


@pytest.mark.parametrize(
    ("contiguous_us", "layout", "is_left"),
    [(1.0, "contiguous", False), (30.0, "channels_last", True), (None, "channels_last", True)],
)
def test_a_layout_that_has_lost_is_left(
    contiguous_us: float | None, layout: str, is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: a lock that was made so does not know the rest of it."""
    times, asked, graph = (
        {"channels_last": 10.0, "contiguous": contiguous_us},
        [],
        captured("lenet"),
    )

    def trials(*_: Any) -> tuple[Trial, ...]:
        if (time_us := times[asked[-1][0]]) is None:
            raise NotInLock("the lock does not say")
        asked[-1][1] += 1
        return (Trial(kernel="reference", time_us=time_us),)

    def emit(event: Event) -> None:
        if event.name == "layout":
            asked.append([event.text.split()[0], 0])

    monkeypatch.setattr(choose_kernels, "trials", trials)
    tuner = tuner_of(graph)
    assert variants._fastest_layout(graph, 2, "fp32", tuner, emit) == layout
    (first, all_of_it), (second, so_many) = asked
    assert (first, second) == ("channels_last", "contiguous")
    assert (so_many < all_of_it / 2) is is_left
