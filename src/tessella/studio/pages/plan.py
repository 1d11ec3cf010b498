"""The Plan page: compile a checkpoint, see its kernels, times, accuracy and memory, serve it."""

from __future__ import annotations

import asyncio
import shlex
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from nicegui import ui
from nicegui.events import ValueChangeEventArguments

from tessella.artifacts.build import BuildRequest, is_network
from tessella.artifacts.outline import Candidate, Outline
from tessella.artifacts.program import Bucket
from tessella.core.count import with_spread
from tessella.core.errors import TessellaError
from tessella.jobs import commands
from tessella.jobs.job import Job
from tessella.studio import parts
from tessella.studio.compile_form import CompileForm
from tessella.studio.context import Context
from tessella.studio.feed import Feed
from tessella.studio.keeping import shown_label, tools
from tessella.studio.plan_accuracy import Accuracy, show_layers
from tessella.studio.plan_front import precision_named, rebuilt, show_front, title_of
from tessella.studio.plan_profile import Profile
from tessella.studio.plan_service import Service
from tessella.studio.standing import standing
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.workspace import Found, readable

MISSING = (
    "Choose a plan at the left, or compile a run: a damaged plan is built again by its command."
)


def register(context: Context) -> None:
    @ui.page("/plan", response_timeout=RESPONSE_S)
    async def plan(plan: str = "", source: str = "", job: str = "", like: str = "") -> None:
        found = await asyncio.to_thread(context.workspace.plans)
        if not plan and not source and not job and not like:
            plan = next((f.ref for f in found if f.item is not None), "")
        opened: Outline | TessellaError | None = None
        try:  # before the frame: NiceGUI sends an unfinished page where the first await is
            opened = await asyncio.to_thread(context.workspace.plan, plan) if plan else None
            if like:
                source = (await asyncio.to_thread(context.workspace.plan, like)).manifest.built_from
        except TessellaError as error:
            opened = error
        with frame(
            "Plan", "The network as one file, tuned for this machine.", context.workspace.root
        ):
            with parts.box("split"):
                with parts.box("stack"):
                    built = opened.manifest.built_from if isinstance(opened, Outline) else ""
                    made_of = context.workspace.ref(built) if built else ""
                    form = _Compile(context, source or made_of, found, like)
                    _list(context, found, plan)
                with parts.box("stack"):
                    try:
                        form.progress_box(job)
                    except TessellaError as error:
                        opened = error
                    if isinstance(opened, TessellaError):
                        parts.refused(opened, MISSING)
                    elif opened is not None:
                        _Plan(context, opened, plan, found)
                    elif not job:
                        parts.empty("No plan yet" if not found else "Choose a plan",
                                    "Compile a run at the left: the network is fused, laid out, "
                                    "and every kernel chosen by measuring.")  # fmt: skip


def _list(context: Context, found: list[Found[Outline]], here: str) -> None:
    with parts.card("Plans", str(len(found)), tight=True):
        if not found:
            text("p", "None yet.").classes("muted small")
        with parts.box("list"):
            for entry in found:
                with parts.link("/plan", f"item {'here' * (entry.ref == here)}", plan=entry.ref):
                    title = context.labels.title(entry.ref, entry.path.stem)
                    text("span", title).classes("name cut")
                    if entry.item is None:
                        text("span", "cannot be read").classes("detail")
                        text("span", entry.problem or "").classes("detail cut")
                        continue
                    text("span", parts.nbytes(entry.path.stat().st_size)).classes("detail num")
                    line = f"{', '.join(entry.item.targets)} · {precision_named(entry.item)}"
                    text("span", line).classes("detail cut")


class _Compile:
    """The form of a compilation, its command, and the progress of the job."""

    def __init__(
        self, context: Context, source: str, plans: list[Found[Outline]], like: str
    ) -> None:
        self._context = context
        self._form: CompileForm | None = None
        runs = readable(context.workspace.runs())
        names = context.run_names(
            {
                ref: run
                for ref, run in runs.items()
                if any((run.path / "checkpoints").glob("step-*/checkpoint.json"))
            }
        )
        with parts.card("Compile"):
            if not names:
                text("p", "Train a network first: a plan is made of a checkpoint.").classes("muted")
                return
            datasets = readable(context.workspace.datasets())
            by_hash = {d.info.content_hash: ref for ref, d in datasets.items()}
            form = CompileForm(
                names,
                next((r for r in names if Path(source).is_relative_to(r)), next(iter(names))),
                classes={ref: run.info.labels for ref, run in runs.items()},
                homes={ref: by_hash.get(run.info.dataset_hash) for ref, run in runs.items()},
                datasets=datasets,
                plans=readable(plans),
                like=like,
                on_change=self._changed,
            )
            self._form = form
            self._problem = text("div", "").classes("note bad")
            parts.button("Compile", lambda: self._start(form.request), icon="bolt")
            self._command = parts.Command()
        self._changed()

    def progress_box(self, job: str) -> None:
        """Add the box in which a compilation shows its progress, at this place of the page.

        Raises:
            JobError: there is no such job.
        """
        self._box = ui.element("div").classes("stack")
        self._box.set_visibility(False)
        if job:
            self._watch(self._context.store.job(job))

    def _changed(self) -> None:
        if self._form is None:  # still in the constructor
            return
        problem = ""
        try:
            request = self._form.request()
            self._form.suggest(Path(request.out or "").stem)
            self._command.show(request.command())
        except TessellaError as error:
            problem = str(error)
        self._problem.text = problem
        self._problem.set_visibility(bool(problem))

    def _start(self, ask: Callable[[], BuildRequest]) -> None:
        with parts.errors_shown():
            request = ask()
            self._context.workspace.new_path("plan", Path(request.out or "").stem)
            self._watch(self._context.store.submit(commands.compile_plan(request)))
            ui.run_javascript("window.scrollTo({top: 0})")  # to where the progress is

    def _stop(self, job: Job) -> None:
        with parts.errors_shown():
            self._context.store.abort(job.id)

    def _watch(self, job: Job) -> None:
        feed = Feed(job.events_path)
        self._box.clear()
        self._box.set_visibility(True)
        with self._box, parts.card(f"Compiling {job.name}"):
            track = parts.Track()
            problem = text("div", "").classes("note bad")
            stop = parts.plain_button("Stop", lambda: self._stop(job), "stop")
        problem.set_visibility(False)

        def refresh(now: Job) -> None:
            feed.read()
            track.show(feed.fraction, standing(self._context.store, now, feed))
            if now.status == "done":
                ref = job.argv[job.argv.index("--out") + 1]
                ui.navigate.to(parts.address("/plan", plan=ref))
            elif now.ended:
                stop.set_visibility(False)
                problem.text = feed.error or now.error or "The compilation was stopped."
                problem.set_visibility(True)

        with self._box:
            self._context.follow(job, refresh, interval_s=0.5)


class _Plan:
    """One plan: its numbers, the budget's search, the steps, why each kernel was chosen."""

    def __init__(
        self, context: Context, plan: Outline, ref: str, plans: list[Found[Outline]]
    ) -> None:
        self._context, self._plan, self._ref = context, plan, ref
        self._bucket = plan.program.buckets[-1]
        self._head()
        show_front(context, context.workspace.path(ref))
        with parts.card() as _:
            with parts.box("row-line wrap"):
                text("h2", "Steps").classes("grow")
                sizes = {b.batch: f"batch {b.batch}" for b in plan.program.buckets}
                ui.toggle(sizes, value=self._bucket.batch, on_change=self._choose).props(
                    "unelevated dense no-caps padding='4px 12px' toggle-color=teal-9"
                )
            self._steps = ui.element("div").classes("stack")
        self._show_steps()
        self._profile = Profile(context, plan, ref)
        with parts.box("duo"):
            with parts.box("stack"):
                Accuracy(context, plan, ref)
                _memory(plan)
            with parts.box("stack"):
                show_layers(plan, self._bucket)
                Service(context, plan, ref)
                self._difference([f.ref for f in plans if f.item is not None and f.ref != ref])
        with parts.card("How to do the same"):
            path = context.workspace.path(ref)
            beside = context.workspace.ref(context.workspace.free_path(path))
            again = rebuilt(path, plan.manifest.rebuild, out=beside)
            if _can_run(context, again):
                parts.Command(again)
            else:
                text("p", "What it was made of is not in this workspace. It was built by:"
                     ).classes("muted small")  # fmt: skip
                text("pre", again).classes("log").style("height:auto")

    def _head(self) -> None:
        plan, manifest = self._plan, self._plan.manifest
        path = self._context.workspace.path(self._ref)
        weights = sum(t.nbytes for t in plan.weights.values())
        numbers = [
            ("target", manifest.fingerprint.target),
            ("precision", precision_named(plan)),
            ("input", manifest.main_input.dtype),
            ("steps", str(len(self._bucket.steps))),
            (f"one batch of {self._bucket.batch}", total_time(plan, self._bucket)),
            ("file", parts.nbytes(path.stat().st_size)),
            ("weights", parts.nbytes(weights)),
            ("memory", parts.nbytes(self._bucket.held_bytes)),
        ]
        if manifest.fingerprint.target.startswith("sm_"):
            code = sum(map(len, plan.compiled.cubins.values()))
            count = len(plan.compiled.kernels)
            compiled = f"{parts.nbytes(code)}, {count} kernels" if count else "none"
            numbers.append(("machine code", compiled))
        with parts.card():
            with parts.box("row-line"):
                title = self._context.labels.title(self._ref, title_of(path))
                text("h2", title).style("font-size:19px").classes("cut grow")
                tools(self._context, "plan", self._ref)
            shown_label(self._context, self._ref)
            parts.stats(numbers)
            text("p", f"Built from {manifest.built_from} for {manifest.fingerprint.name} "
                 f"({manifest.fingerprint.arch}).").classes("muted small")  # fmt: skip
            for note in filter(None, (plan.unrounded, plan.found_wrong)):
                parts.note(note, "warn")
            if manifest.untuned:
                parts.note("A cost model chose its kernels, and nothing was measured. On the "
                           "machine that will run it, this measures them:")  # fmt: skip
                parts.Command(shlex.join(("tessella", "tune", self._ref)))
            if plan.others:
                others = ", ".join(o.target + ", untuned" * o.manifest.untuned for o in plan.others)
                text("p", f"This is its program for {plan.target}; it has others for {others}."
                     ).classes("muted small")  # fmt: skip
            if manifest.imports:
                modules = ", ".join(sorted(set(manifest.imports.values())))
                parts.note(f"It needs operators of your own: import {modules} before it is loaded.")

    def _choose(self, event: ValueChangeEventArguments[int]) -> None:
        self._bucket = next(b for b in self._plan.program.buckets if b.batch == event.value)
        self._show_steps()
        self._profile.show(self._bucket.batch)

    def _show_steps(self) -> None:
        tried = _candidates(self._plan, self._bucket.batch)
        chosen = {s: c for s, all_ in tried.items() for c in all_ if c.chosen}
        slowest = max((c.time_us or 0.0 for c in chosen.values()), default=0.0)
        shapes = {b.name: b for b in self._bucket.buffers}
        rows: list[tuple[parts.Cell, ...]] = []
        for index, step in enumerate(self._bucket.steps):
            out = shapes[step.outputs[0]]
            took = chosen.get(step.outputs[0])
            time_us = took.time_us if took else None
            rows.append((
                str(index),
                step.title,
                step.layer,
                f"{out.dtype} {'×'.join(str(d) for d in out.shape)}",
                str(len(tried.get(step.outputs[0], ()))) if step.outputs[0] in tried else "",
                "" if took is None or time_us is None else parts.Bar(
                    fraction=time_us / slowest if slowest else 0.0,
                    text=f"{with_spread(time_us, took.spread_us)} µs{' ~' * took.noisy}"),
            ))  # fmt: skip
        self._steps.clear()
        with self._steps:
            parts.table(
                [
                    parts.Column(title="#", classes="r"),
                    parts.Column(title="kernel", classes="m nowrap"),
                    parts.Column(title="layer", classes="m"),
                    parts.Column(title="output", classes="m nowrap"),
                    parts.Column(title="tried", classes="r"),
                    parts.Column(title="time"),
                ],
                rows,
            )
            self._why(tried)

    def _why(self, tried: dict[str, list[Candidate]]) -> None:
        """Every candidate of one step, with its time or why it was refused."""
        if not tried:
            return
        layers = {s.outputs[0]: s.layer or s.kernel for s in self._bucket.steps}
        order = {s.outputs[0]: i for i, s in enumerate(self._bucket.steps)}
        names = {
            n: f"{order[n]}  {layers[n]}" for n in sorted(tried, key=lambda n: order.get(n, 0))
            if n in order
        }  # fmt: skip
        if not names:
            return
        first = next((n for n in names if len(tried[n]) > 1), next(iter(names)))

        def show(step: str) -> None:
            rows, marked = _rows(tried[step])
            config = next(s.config for s in self._bucket.steps if s.outputs[0] == step)
            box.clear()
            with box:
                parts.table(
                    [
                        parts.Column(title="kernel", classes="m nowrap"),
                        parts.Column(title="time"),
                        parts.Column(title="workspace", classes="r"),
                        parts.Column(title="or why not"),
                    ],
                    rows,
                    marked,
                )
                if config:
                    listed = ", ".join(f"{k} {v}" for k, v in sorted(config.items()))
                    text("p", f"Configuration of the chosen one: {listed}").classes("muted small")

        with parts.box("row-line wrap"):
            text("h2", "Why this kernel").classes("grow")
            parts.field(
                ui.select(names, value=first, label="Step",
                          on_change=lambda e: show(e.value))
            ).style("width:min(420px,100%)")  # fmt: skip
        box = ui.element("div").classes("stack")
        show(first)

    def _difference(self, others: list[str]) -> None:
        """A card that leads to the comparison with another plan."""
        with parts.card("Compare with another plan", "steps, times, memory"):
            if not others:
                text("p", "There is no other plan.").classes("muted small")
                return
            other = parts.field(ui.select(others, value=others[0], label="Plan"))

            def go() -> None:
                ui.navigate.to(parts.address("/diff", a=other.value, b=self._ref))

            parts.plain_button("Compare", go, "difference")


def _can_run(context: Context, rebuild: str) -> bool:
    """Whether a plan's ``rebuild`` is a command whose source is here; Python has others."""
    words = shlex.split(rebuild) if rebuild.startswith("tessella compile ") else []
    if len(words) < 3:
        return False
    return is_network(words[2]) or (context.workspace.root / words[2]).exists()


def _memory(plan: Outline) -> None:
    """The memory of the values at each batch size, beside the least possible."""
    with parts.card("Memory", "values, beside the weights"):
        columns = [parts.Column(title="batch", classes="r"), parts.Column(title="held")]
        columns += [parts.Column(title=t, classes="r") for t in ("least", "×")]
        most = max(b.held_bytes for b in plan.program.buckets) or 1
        parts.table(
            columns,
            [
                (str(b.batch), parts.Bar(fraction=b.held_bytes / most, inner=b.peak_bytes / most,
                                         text=parts.nbytes(b.held_bytes)),
                 parts.nbytes(b.peak_bytes), f"{b.packing:.2f}")
                for b in plan.program.buckets
            ],
        )  # fmt: skip
        text("p", "The least is what lives at once at the peak: no way to lay the values out holds "
             "less.").classes("muted small")  # fmt: skip


def total_time(plan: Outline, bucket: Bucket) -> str:
    """The sum of the measured times of a bucket's steps."""
    times = [c.time_us for c in plan.tuning if c.chosen and c.batch == bucket.batch and c.time_us]
    if not times:
        return "not measured"
    total = sum(times)
    shown = f"{total / 1000:.2f} ms" if total >= 1000 else f"{total:.0f} µs"
    return shown + ", on a busy machine" * plan.is_noisy


def _candidates(plan: Outline, batch: int) -> dict[str, list[Candidate]]:
    out: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in plan.tuning:
        if candidate.batch == batch:
            out[candidate.step].append(candidate)
    return dict(out)


def _rows(candidates: list[Candidate]) -> tuple[list[tuple[parts.Cell, ...]], list[bool]]:
    """Fastest first, the refused ones last."""
    ordered = sorted(candidates, key=lambda c: (c.time_us is None, c.time_us or 0.0, c.kernel))
    slowest = max((c.time_us or 0.0 for c in ordered), default=0.0) or 1.0
    chosen = next((c for c in ordered if c.chosen), None)
    rows: list[tuple[parts.Cell, ...]] = []
    for c in ordered:
        shown: parts.Cell = ""
        if c.time_us is not None:
            shown = parts.Bar(
                fraction=c.time_us / slowest, text=f"{with_spread(c.time_us, c.spread_us)} µs"
            )
        other = "close" if chosen is not None and c.is_close_to(chosen) else "slower"
        if c.time_us is None:
            other = "estimated slower"
        why = c.refused or ("chosen" if c.chosen else other)
        if c.noisy:
            why = f"{why}; the machine was busy"
        if c.program_us is not None:
            why = f"{why}: a close call; the whole program takes {c.program_us:,.0f} µs with it"
        scratch = parts.nbytes(c.workspace_bytes) if c.workspace_bytes else ""
        rows.append((c.kernel, shown, scratch, why))
    return rows, [c.chosen for c in ordered]
