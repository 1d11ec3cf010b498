"""A build that cannot be finished now: it says why, what is kept, and how to go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tessella.core.errors import BuildStopped
from tessella.core.memory import is_out_of_memory
from tessella.search.allowance import Allowance, OutOfTime


@dataclass
class Progress:
    """Which batch size is being built, and which are done; None while variants are compared."""

    batch: int | None = None
    done: list[int] = field(default_factory=list)

    def begin(self, batch: int) -> None:
        if self.batch is not None:
            self.done.append(self.batch)
        self.batch = batch


@contextmanager
def stopping(cache: Path | None, allowance: Allowance) -> Iterator[Progress]:
    """Turn the end of time or memory inside into an error that says how to go on.

    Args:
        cache: the timing cache's file, to which every measurement was written when it was made.

    Raises:
        BuildStopped: the allowance is used up, or something did not fit in memory.
    """
    progress = Progress()
    try:
        yield progress
    except OutOfTime as error:
        raise BuildStopped(
            f"{allowance.seconds:g} s of measuring are over, and the plan is not finished",
            seen=f"{_where(progress)}; what was measured {_kept(cache)}",
            fix="build it again with the same cache: it goes on where this build stopped"
            if cache
            else "give a cache (--cache FILE), so that a second build goes on, or more time",
        ) from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _out_of_memory(progress, cache, str(error)) from error


def _out_of_memory(progress: Progress, cache: Path | None, text: str) -> BuildStopped:
    if progress.done:
        fix = f"build it for batches up to {max(progress.done)}, which fits"
    elif progress.batch is not None and progress.batch > 1:
        fix = f"build it for batches below {progress.batch}"
    else:
        fix = "build it for smaller batches, or in a precision of 16 or 8 bits"
    seen = (text.strip().splitlines() or ["no memory"])[0][:160]
    return BuildStopped(
        "the build does not fit in memory",
        seen=f"{_where(progress)}: {seen}; what was measured {_kept(cache)}",
        fix=fix,
    )


def _where(progress: Progress) -> str:
    return "comparing variants" if progress.batch is None else f"at batch {progress.batch}"


def _kept(cache: Path | None) -> str:
    return f"is kept in {cache}" if cache else "is lost with this process: there is no cache"
