"""The profile of a plan: the time of each step beside what the machine's limits allow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nicegui import ui

from tessella.artifacts.outline import Outline
from tessella.core.errors import CorruptArtifact, TessellaError
from tessella.core.record import digest, parse_json
from tessella.jobs import commands
from tessella.jobs.job import Job, JobSpec
from tessella.studio import parts
from tessella.studio.context import Context
from tessella.studio.theme import text

STEPS = 1  # the thread of a trace with the steps; the other threads hold what would be possible


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step in a trace: its time in the whole program and alone, and the machine's limit.

    Attributes:
        flops: None for a step that does not calculate with floats. of_peak: their share of the
            machine's peak, 0 to 1.
        bound: what limits the step, in words.
    """

    name: str
    kernel: str
    time_us: float
    alone_us: float
    limit_us: float
    nbytes: int
    flops: float | None
    bound: str
    of_peak: float | None
    noisy: bool


@dataclass(frozen=True, kw_only=True)
class Trace:
    batch: int
    whole_us: float
    steps: list[TracedStep]
    noisy: bool


class Profile:
    """The card: a button that measures, then the trace that ``tessella profile`` has written."""

    def __init__(self, context: Context, plan: Outline, ref: str) -> None:
        self._context, self._plan, self._ref = context, plan, ref
        self._batch = plan.program.buckets[-1].batch
        with parts.card("Where the time goes"):
            self._box = ui.element("div").classes("stack")
        self.show(self._batch)

    def show(self, batch: int) -> None:
        """Show the profile at this batch size, or the button that measures it."""
        self._batch = batch
        self._box.clear()
        with self._box:
            path = self._path()
            if path.is_file():
                try:
                    _show_trace(trace_of(path))
                except TessellaError as error:
                    parts.note(str(error), "bad")
                with parts.box("row-line wrap"):
                    name = f"/pictures/trace/{path.stem}"
                    parts.plain_button("Download for Perfetto",
                                       lambda: ui.download.from_url(name), "download")  # fmt: skip
                    parts.plain_button("Measure again", self._measure, "refresh")
            else:
                line = f"Not measured yet at batch {batch}: each step by itself and in the whole "
                text("p", f"{line}program, beside what this machine could reach.").classes("muted")
                parts.plain_button("Measure each step", self._measure, "timer")
            parts.Command(commands.shown(self._spec("trace.json")))

    def _path(self) -> Path:
        stat = self._context.workspace.path(self._ref).stat()
        key = digest([self._ref, stat.st_mtime_ns, stat.st_size, self._batch])[:24]
        return self._context.workspace.own("traces") / f"{key}.json"

    def _spec(self, trace: str) -> JobSpec:
        target = self._plan.manifest.fingerprint.target
        return commands.profile(self._ref, batch=self._batch, target=target, trace=trace)

    def _measure(self) -> None:
        batch = self._batch
        with parts.errors_shown():
            spec = self._spec(self._context.workspace.ref(self._path()))
            job = self._context.store.submit(spec)
            self._box.clear()
            with self._box:
                text("p", f"Measuring each step at batch {batch} …").classes("muted")
                self._context.follow(job, partial(self._show_end, batch))

    def _show_end(self, batch: int, now: Job) -> None:
        if now.ended:
            if batch == self._batch:
                self.show(batch)
            if now.status != "done":
                with self._box:
                    parts.note(now.error or "The measurement was stopped.", "bad")


def trace_of(path: Path) -> Trace:
    """The numbers in a trace file.

    Raises:
        CorruptArtifact: the file is no trace of a plan.
    """
    read = parse_json(path.read_bytes(), where=path.name)
    try:
        return Trace(
            batch=int(read["otherData"]["batch"]),
            whole_us=float(read["otherData"]["whole_program_us"]),
            steps=[
                TracedStep(
                    name=str(e["name"]),
                    kernel=str(e["args"]["kernel"]),
                    time_us=float(e["dur"]),
                    alone_us=float(e["args"]["alone_us"]),
                    limit_us=float(e["args"]["limit_us"]),
                    nbytes=int(e["args"]["bytes"]),
                    flops=e["args"]["flops"],
                    bound=str(e["args"]["bound"]),
                    of_peak=e["args"]["share_of_peak"],
                    noisy=bool(e["args"].get("noisy")),
                )
                for e in read["traceEvents"]
                if e["ph"] == "X" and e["tid"] == STEPS
            ],
            noisy=bool(read["otherData"].get("noisy")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptArtifact(
            "this is not a trace of a plan", seen=f"{path.name}: {error!r}", fix="measure again"
        ) from error


def _show_trace(trace: Trace) -> None:
    steps = trace.steps
    total = sum(s.time_us for s in steps) or 1e-3
    limit = sum(min(s.limit_us, s.time_us) for s in steps)
    longest = max((s.time_us for s in steps), default=1.0) or 1e-3
    parts.stats(
        [
            (
                f"whole program, batch {trace.batch}",
                f"{trace.whole_us:,.1f} µs{' ~' * trace.noisy}",
            ),
            ("its steps", f"{total:,.1f} µs"),
            ("what the machine allows", f"{limit:,.1f} µs"),
            ("reached", f"{100 * limit / total:.0f} %"),
        ]
    )
    text("p", "Dark: what the machine's measured limits allow; light: the time above that."
         ).classes("muted small")  # fmt: skip
    if (noisy := sum(s.noisy for s in steps)) or trace.noisy:
        whole = "the whole program and " * trace.noisy
        parts.note(f"Other work on the machine disturbed {whole}{noisy} of {len(steps)} steps (~ "
                   "behind their times): measure again when it is quiet.")  # fmt: skip
    columns = [
        parts.Column(title="#", classes="r"),
        parts.Column(title="layer, kernel", classes="m mid"),
    ]
    columns += [parts.Column(title="time, share"), parts.Column(title="alone", classes="r")]
    columns += [parts.Column(title="rates", classes="r"), parts.Column(title="limited by, of peak")]
    rows: list[tuple[parts.Cell, ...]] = []
    for index, step in enumerate(steps):
        time_us = max(step.time_us, 1e-3)
        share = f"{100 * time_us / total:.1f} %"
        rates = [f"{step.nbytes / time_us / 1e3:,.1f} GB/s"]
        rates += [] if step.flops is None else [f"{step.flops / time_us / 1e3:,.1f} GFLOP/s"]
        peak = [] if step.of_peak is None else [f"{100 * step.of_peak:.0f} % of peak"]
        rows.append((
            str(index),
            parts.Lines(lines=(step.name, step.kernel)),
            parts.Bar(fraction=time_us / longest, inner=step.limit_us / longest,
                      text=f"{step.time_us:,.1f} µs, {share}"),
            f"{step.alone_us:,.1f} µs{' ~' * step.noisy}",
            parts.Lines(lines=tuple(rates)),
            parts.Lines(lines=(step.bound, *peak)),
        ))  # fmt: skip
    parts.table(columns, rows)
