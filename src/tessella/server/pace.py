"""How long an engine takes for how many samples, learned from the executions that were."""

from __future__ import annotations

from time import perf_counter_ns

# How long one piece of a large request may hold up the others. 32 ResNet-50 images take a CPU
# 0.4 s; at 100 ms a piece they lose 3 % of their rate.
TURN_NS = 100 * 10**6
TRUST_NS = 10**9  # how long a measured time alone may refuse requests of an idle engine


class Pace:
    """How long executions take, by the number of samples, learned from those that were."""

    def __init__(self) -> None:
        self._ns: dict[int, float] = {}
        self._since_ns = 0
        self._expected: dict[tuple[int, int], int] = {}  # since the last time that was taken

    def is_old(self, now_ns: int) -> bool:
        """Whether nothing was timed for ``TRUST_NS``: the machine may be as quick again by now."""
        return now_ns - self._since_ns > TRUST_NS

    def has(self, samples: int) -> bool:
        """Whether just so many were timed."""
        return samples in self._ns

    def took(self, samples: int, ns: int) -> None:
        self._since_ns = perf_counter_ns()
        before = self._ns.get(samples, ns)
        self._ns[samples] = 0.8 * before + 0.2 * ns
        self._expected.clear()

    def expected_ns(self, samples: int, largest: int) -> int:
        """The time for as many samples, in executions of the largest size; 0 if none was timed."""
        if samples <= largest and (timed := self._ns.get(samples)) is not None:
            return int(timed)
        if not self._ns:
            return 0
        known = self._expected.get((samples, largest))
        if known is None:
            full, rest = divmod(samples, largest)
            known = int(full * self._one_ns(largest) + (self._one_ns(rest) if rest else 0))
            self._expected[samples, largest] = known
        return known

    def most_samples(self, largest: int) -> int:
        """The largest piece of a request that holds up the others for ``TURN_NS`` at most."""
        longest_ns = self.expected_ns(largest, largest)
        return largest if longest_ns <= TURN_NS else max(1, largest * TURN_NS // longest_ns)

    def _one_ns(self, samples: int) -> float:
        """The time of the next size up, or the largest one's in proportion."""
        if samples in self._ns:
            return self._ns[samples]
        sizes = [size for size in self._ns if size >= samples]
        if sizes:
            return self._ns[min(sizes)]
        size = max(self._ns)
        return self._ns[size] * samples / size
