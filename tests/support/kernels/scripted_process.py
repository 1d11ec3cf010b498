"""A process of a kernel report that starts nothing: its answers are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessella.core.record import to_plain
from tessella.search.kernel_report.process import Ended
from tessella.search.kernel_report.record import Chip, Row

Answer = dict[str, Any] | Ended
CHIP = Chip(name="a GPU", arch="sm_89", units=8)


def greeting(target: str | None = "sm_89") -> dict[str, Any]:
    return {"target": target, "chip": to_plain(CHIP), "codes": {"avx2": None, "avx512": "no"}}


def right(kernel: str, problem: str, *, configs: int = 1, **more: Any) -> dict[str, Any]:
    told = Row(
        kernel=kernel, source="tessella", family="gemm", problem=problem, outcome="right", **more
    )
    return {"row": to_plain(told), "configs": configs}


def scripted(
    greets: Callable[[], Answer], answers: Callable[[str, str, int], Answer], started: list[str]
) -> type:
    """A class in the place of ``Process``.

    Args:
        greets: what a process with a GPU says first.
        started: the names of devices, as they are asked for.
    """

    class Scripted:
        def __init__(self, device: str, modules: Sequence[str]) -> None:
            started.append(device)
            self.is_alive, self._device = True, device

        def greeting(self) -> Answer:
            return greeting("cpu") if self._device == "cpu" else self._noted(greets())

        def ask(self, kernel: str, problem: str, place: int, limit_s: float) -> Answer:
            return self._noted(answers(kernel, problem, place))

        def _noted(self, answer: Answer) -> Answer:
            self.is_alive = self.is_alive and not isinstance(answer, Ended)
            return answer

        def end(self) -> bool:
            self.is_alive = False
            return True

    return Scripted
