"""receipt: how much accuracy a plan's precisions cost, measured on samples; part of a manifest."""

from __future__ import annotations

from dataclasses import dataclass

from tessella.core.errors import UsageError

MAX_FLIPS = 1000  # that are written down; ``Receipt.flipped`` counts all
SHOWN = 20  # that are printed with a plan


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A sample to which the plan gives another answer than float32 does.

    Attributes:
        index: position of the sample in the data.
        path: the sample's file, empty where there is none.
        label, before, after: the true answer, float32's and the plan's; classes of a
            classification.
        probability_before, probability: softmax probabilities of ``before`` and ``after``; None of
            other tasks.
        change: what became another, in words: boxes that vanished, pixels of another class.
    """

    index: int
    path: str
    label: str
    before: str
    after: str
    probability_before: float | None = None
    probability: float | None = None
    change: str = ""

    def __str__(self) -> str:
        if self.probability_before is None or self.probability is None:
            said = self.change or f"{self.before} → {self.after}"
            return f"{self.path or self.index}: {self.label}; {said}"
        return (
            f"{self.path or self.index}: {self.label}; {self.before} "
            f"({self.probability_before:.3f}) → {self.after} ({self.probability:.3f})"
        )


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """A plan judged by labelled samples that it was not calibrated with, beside the float32 plan.

    Attributes:
        metric: name of the metric; higher is better.
        samples: number of samples.
        before, after: the metric of the float32 plan, and of this one.
        loss: percentage points below float32; ``low`` to ``high`` is the 95 % confidence interval.
        resamples: how often samples were drawn again for the interval (bootstrap); None where it is
            exact.
        p_value: probability that chance alone loses and wins right answers this unevenly (McNemar's
            exact test); None for metrics that do not count answers.
        budget: percentage points that the plan was allowed to lose.
        flipped: number of answers that changed; ``flips``: the first ``MAX_FLIPS`` of them.
    """

    metric: str
    samples: int
    before: float
    after: float
    loss: float
    low: float
    high: float
    p_value: float | None
    budget: float
    flipped: int
    flips: tuple[Flip, ...] = ()
    resamples: int | None = None

    def __post_init__(self) -> None:
        listed = len(self.flips) == min(self.flipped, MAX_FLIPS)
        if not listed or not 0 < self.samples >= self.flipped or self.low > self.high:
            raise UsageError(
                "a receipt that contradicts itself",
                seen=f"{self.flipped} flips, {len(self.flips)} listed, of {self.samples} samples, "
                f"{self.low} to {self.high} points",
            )

    @property
    def within(self) -> bool:
        """Whether the loss is no larger than the budget; 0: no answer may change at all."""
        return self.loss <= self.budget + 1e-9 and not (self.budget == 0 and self.flipped)

    @property
    def resolved(self) -> bool:
        """Whether the samples suffice to say that the loss is within the budget."""
        return self.high <= self.budget

    def __str__(self) -> str:
        drawn = "" if self.resamples is None else f" from {self.resamples} resamples"
        lines = [
            f"{self.metric}: {100 * self.after:.2f} on {self.samples:,} samples, "
            f"{100 * self.before:.2f} in float32: loses {self.loss:.2f} points of {self.metric} "
            f"({self.low:.2f} to {self.high:.2f} with 95 % confidence{drawn}), "
            f"allowed {self.budget:g}; {self.flipped} answers changed"
            f"{'' if self.p_value is None else f', p = {self.p_value:.2g}'}"
        ]
        lines += [f"  {flip}" for flip in self.flips[:SHOWN]]
        if self.flipped > SHOWN:
            lines.append(f"  … {self.flipped - SHOWN} more")
        return "\n".join(lines)
