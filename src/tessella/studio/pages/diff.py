"""The Difference page: two plans side by side, with their steps, times and memory."""

from __future__ import annotations

import asyncio

from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from tessella.artifacts.comparison import BucketPair, Comparison, StepPair, compare
from tessella.core.errors import TessellaError
from tessella.core.record import canonical_json, from_plain
from tessella.core.spec import TensorSpec
from tessella.jobs import commands
from tessella.studio import parts
from tessella.studio.context import Context
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.workspace import readable

MOST_LETTERS = 160  # of a manifest's value

MISSING = "Choose two plans at the left; plans are made on the Plan page."
# The manifest's fields in words for people; the others are shown as they are.
ABOUT = {"rebuild": "command", "built_from": "built from", "snr_db": "signal to noise"}


def register(context: Context) -> None:
    @ui.page("/diff", response_timeout=RESPONSE_S)
    async def diff(a: str = "", b: str = "") -> None:
        space = context.workspace
        known = list(readable(await asyncio.to_thread(space.plans)))
        subtitle = "What differs between two plans."
        with frame("Difference", subtitle, space.root, step="Plan"), parts.box("split"):
            with parts.box("stack"):
                _chooser(known, a, b)
            with parts.box("stack"):
                if not a or not b:
                    parts.empty("Nothing to compare yet", MISSING)
                    return
                try:
                    before = await asyncio.to_thread(space.plan, a)
                    after = await asyncio.to_thread(space.plan, b)
                    found = await asyncio.to_thread(compare, before, after)
                except TessellaError as error:
                    parts.refused(error, MISSING)
                    return
                _Difference(found, a, b)


def _chooser(known: list[str], a: str, b: str) -> None:
    refs = list(dict.fromkeys((*known, *filter(None, (a, b)))))
    chosen = {"a": a, "b": b}

    def go(name: str, value: str) -> None:
        ui.navigate.to(parts.address("/diff", **(chosen | {name: value})))

    with parts.card("Plans"):
        for name, title in (("a", "From (a)"), ("b", "To (b)")):
            parts.field(ui.select(refs, value=chosen[name] or None, label=title,
                            on_change=lambda e, name=name: go(name, e.value)))  # fmt: skip
        if a and b:
            parts.plain_button(
                "Swap", lambda: ui.navigate.to(parts.address("/diff", a=b, b=a)), "swap_vert"
            )
            with parts.link("/plan", plan=b):
                text("span", f"Open {b}")


class _Difference:
    def __init__(self, found: Comparison, a: str, b: str) -> None:
        self._found, self._all = found, False
        self._pair = found.buckets[-1] if found.buckets else None
        self._head()
        self._manifests()
        with parts.card():
            with parts.box("row-line wrap"):
                text("h2", "Step by step").classes("grow")
                if self._pair is not None:
                    ui.switch("also equal ones", on_change=self._equal_ones).props("dense size=sm")
                    sizes = {p.batch: f"batch {p.batch}" for p in found.buckets}
                    ui.toggle(sizes, value=self._pair.batch, on_change=self._choose).props(
                        "unelevated dense no-caps padding='4px 12px' toggle-color=teal-9"
                    )
            self._steps = ui.element("div").classes("stack")
        self._show()
        with parts.card("How to do the same"):
            parts.Command(commands.shown(commands.diff(a, b)))

    def _head(self) -> None:
        found, counts = self._found, self._found.weights
        with parts.card():
            text("h2", "The plans are the same" if found.same else "b beside a")
            numbers = [
                ("weights, bytes", f"{parts.nbytes(found.weight_bytes[0])} → "
                 f"{parts.nbytes(found.weight_bytes[1])}"),
                ("constants equal", f"{counts['equal']:,} of {sum(counts.values()):,}"),
            ]  # fmt: skip
            parts.stats(numbers)
            if not found.buckets:
                parts.note("The plans share no batch size.", "warn")
                return
            columns = [parts.Column(title="batch", classes="r")]
            columns += [
                parts.Column(title=t, classes="r")
                for t in ("same", "changed", "added", "removed", "a", "b", "b / a", "arena",
                          "peak")
            ]  # fmt: skip
            parts.table(columns, [_total(p) for p in found.buckets])

    def _manifests(self) -> None:
        rows = [(_named(d.name), _value(d.a), _value(d.b)) for d in self._found.differences]
        for name, sizes in (("a", self._found.only_a), ("b", self._found.only_b)):
            if sizes:
                listed = ", ".join(map(str, sizes))
                sides = (listed, "") if name == "a" else ("", listed)
                rows.append((f"batches only in {name}", *sides))
        with parts.card("What they are"):
            if not rows:
                text("p", "Nothing differs.").classes("muted")
                return
            columns = [parts.Column(title="", classes="nowrap")]
            parts.table([*columns, *(parts.Column(title=t) for t in "ab")], rows)

    def _choose(self, event: ValueChangeEventArguments[int]) -> None:
        self._pair = next(p for p in self._found.buckets if p.batch == event.value)
        self._show()

    def _equal_ones(self, event: ValueChangeEventArguments[bool | None]) -> None:
        self._all = bool(event.value)
        self._show()

    def _show(self) -> None:
        self._steps.clear()
        with self._steps:
            if self._pair is None:
                text("p", "The plans share no batch size.").classes("muted")
                return
            steps = [s for s in self._pair.steps if self._all or s.change != "same"]
            if not steps:
                text("p", "Every step is the same.").classes("muted")
                return
            sides = [side for s in steps for side in (s.a, s.b) if side is not None]
            slowest = max((s.time_us or 0.0 for s in sides), default=0.0) or 1.0
            columns = [parts.Column(title="change", classes="nowrap")]
            columns += [parts.Column(title="layer", classes="m nowrap")]
            columns += [parts.Column(title="kernel", classes="m")]
            columns += [parts.Column(title="a", classes="r"), parts.Column(title="b")]
            columns += [parts.Column(title="b / a", classes="r")]
            columns += [parts.Column(title="differs", classes="wide")]
            parts.table(columns, [_step(s, slowest) for s in steps])


def _total(pair: BucketPair) -> tuple[str, ...]:
    times = ("" if t is None else f"{t:,.1f} µs" for t in pair.total_us)
    return (
        str(pair.batch),
        *(str(pair.count(c)) for c in ("same", "changed", "added", "removed")),
        *times,
        "" if pair.ratio is None else f"{pair.ratio:.2f}",
        _both(*map(parts.nbytes, pair.arena_bytes)),
        _both(*map(parts.nbytes, pair.peak_bytes)),
    )


def _both(a: str, b: str) -> str:
    return a if a == b else f"{a} → {b}"


def _step(pair: StepPair, slowest: float) -> tuple[parts.Cell, ...]:
    """A row of the table: a step in both plans; the bar is the time in b."""
    kernels = [side.kernel for side in (pair.a, pair.b) if side is not None]
    before = pair.a.time_us if pair.a is not None else None
    after = pair.b.time_us if pair.b is not None else None
    return (
        pair.change,
        pair.layer or pair.name,
        _both(kernels[0], kernels[-1]),
        "" if before is None else f"{before:,.1f} µs",
        "" if after is None else parts.Bar(fraction=after / slowest, text=f"{after:,.1f} µs"),
        "" if pair.ratio is None else f"{pair.ratio:.2f}",
        _what(pair),
    )


def _what(pair: StepPair) -> str:
    """The fields in which a step differs; of outputs both names."""
    if pair.a is None or pair.b is None:
        return ", ".join(side.outputs[0] for side in (pair.a, pair.b) if side is not None)
    words = [name for name in pair.differs if name != "outputs"]
    if "outputs" in pair.differs:
        words.append(f"{', '.join(pair.a.outputs)} → {', '.join(pair.b.outputs)}")
    return "; ".join(words)


def _named(name: str) -> str:
    """A manifest's field in words for people: ``snr_db.conv1`` as "signal to noise: conv1"."""
    first, _, rest = name.partition(".")
    title = ABOUT.get(first, first.replace("_", " "))
    return f"{title}: {rest}" if rest else title


def _value(value: object) -> str:
    if isinstance(value, list) and all(isinstance(v, dict) and "shape" in v for v in value):
        return ", ".join(str(from_plain(TensorSpec, v, where="manifest")) for v in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and all(isinstance(v, float) for v in value):
        value = [float(f"{v:.6g}") for v in value]
    shown = "" if value is None else value if isinstance(value, str) else canonical_json(value)
    return shown if len(shown) <= MOST_LETTERS else f"{shown[:MOST_LETTERS]}…"
