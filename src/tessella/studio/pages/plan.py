"""Plan: compile a checkpoint, see which kernels were chosen and why, verify it, serve it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from nicegui import run as threads
from nicegui import ui

from tessella.artifacts.plan import Candidate, Plan
from tessella.artifacts.program import Bucket
from tessella.core.device import default_target
from tessella.core.errors import TessellaError, UsageError
from tessella.core.record import digest, parse_json
from tessella.jobs import commands
from tessella.jobs.job import Job, JobSpec
from tessella.studio import parts
from tessella.studio.desk import Desk
from tessella.studio.feed import Feed
from tessella.studio.pages.data import field, plain_name
from tessella.studio.pages.explore import best_of, number_of
from tessella.studio.theme import frame, text
from tessella.studio.workspace import Found

TARGETS = {"cpu": "cpu", "sm_90": "sm_90 (H100, H200)", "reference": "reference"}
PRECISIONS = ["fp32", "tf32", "bf16", "fp16"]


def register(desk: Desk) -> None:
    @ui.page("/plan")
    async def plan(plan: str = "", source: str = "", job: str = "") -> None:
        found = await threads.io_bound(desk.workspace.plans)
        if not plan and not source and not job and found and found[0].item is not None:
            plan = found[0].ref
        opened = await threads.io_bound(desk.workspace.plan, plan) if plan else None
        with frame("Plan", "The network as one file, tuned for this machine.", desk.workspace.root):
            with parts.box("split"):
                with parts.box("stack"):
                    form = _Compile(desk, source)
                    _list(found, plan)
                with parts.box("stack"):
                    form.progress_box(job)
                    if opened is not None:
                        _Plan(desk, opened, plan)
                    elif not job:
                        with parts.empty("No plan yet" if not found else "Choose a plan",
                                         "Compile a run at the left: the network is fused, laid "
                                         "out, and every kernel chosen by measuring."):  # fmt: skip
                            pass


def _list(found: list[Found[Plan]], here: str) -> None:
    with parts.card("Plans", str(len(found)), tight=True):
        if not found:
            text("p", "None yet.").classes("muted small")
        with parts.box("list"):
            for entry in found:
                with parts.link("/plan", f"item {'here' * (entry.ref == here)}", plan=entry.ref):
                    text("span", entry.path.stem).classes("name cut")
                    if entry.item is None:
                        text("span", "cannot be read").classes("detail")
                        text("span", entry.problem or "").classes("detail cut")
                        continue
                    text("span", parts.nbytes(entry.path.stat().st_size)).classes("detail num")
                    manifest = entry.item.manifest
                    line = f"{manifest.fingerprint.target} · {manifest.precision}"
                    text("span", line).classes("detail cut")


class _Compile:
    """The form that makes a plan."""

    def __init__(self, desk: Desk, source: str) -> None:
        self._desk = desk
        runs = [f for f in desk.workspace.runs() if f.item is not None and f.item.checkpoints()]
        names = {f.ref: f"{f.path.name} ({f.item.recipe.network})" for f in runs if f.item}
        with parts.card("Compile"):
            if not names:
                text("p", "Train a network first: a plan is made of a checkpoint.").classes("muted")
                self._source = None
                return
            self._source = field(
                ui.select(names, value=source if source in names else next(iter(names)),
                          label="Best checkpoint of", on_change=self._changed)
            )  # fmt: skip
            self._name = field(ui.input("Name", on_change=self._changed))
            with parts.box("fields"):
                self._target = field(
                    ui.select(TARGETS, value=default_target(), label="Target",
                              on_change=self._changed)
                )  # fmt: skip
                self._precision = field(
                    ui.select(PRECISIONS, value="fp32", label="Precision", on_change=self._changed)
                )
                self._batch = field(
                    ui.input(
                        "Batch: least, usual, most", value="1, 8, 32", on_change=self._changed
                    ),
                    "wide",
                )
            self._problem = text("div", "").classes("note bad")
            parts.button("Compile", self._start, icon="bolt")
            self._command = parts.Command()
        self._changed()

    def progress_box(self, job: str) -> None:
        """Where a compilation shows its progress."""
        self._box = ui.element("div").classes("stack")
        self._box.set_visibility(False)
        if job:
            with parts.telling():
                self._watch(self._desk.store.job(job))

    def _spec(self) -> JobSpec:
        source = self._source.value
        name = plain_name(self._name.value or Path(source).name)
        return commands.compile_plan(
            source,
            f"plans/{name}.plan",
            target=self._target.value,
            precision=self._precision.value,
            batches=_batches(self._batch.value or ""),
        )

    def _changed(self) -> None:
        try:
            self._command.show(commands.shown(self._spec()))
            self._problem.text = ""
        except TessellaError as error:
            self._problem.text = str(error)
        self._problem.set_visibility(bool(self._problem.text))

    def _start(self) -> None:
        with parts.telling():
            name = plain_name(self._name.value or Path(self._source.value).name)
            self._desk.workspace.new_path("plan", name)
            self._watch(self._desk.store.submit(self._spec()))

    def _watch(self, job: Job) -> None:
        feed = Feed(job.events_path)
        self._box.clear()
        self._box.set_visibility(True)
        with self._box, parts.card(f"Compiling {job.name}"):
            track = parts.Track()
            problem = text("div", "").classes("note bad")
        problem.set_visibility(False)

        def look() -> None:
            feed.read()
            now = self._desk.store.job(job.id)
            line = feed.phase or now.status
            track.show(
                feed.fraction, f"{line} · {feed.done} of {feed.total}" if feed.total else line
            )
            if now.status == "done":
                timer.cancel()
                ref = job.argv[job.argv.index("--out") + 1]
                ui.navigate.to(parts.address("/plan", plan=ref))
            elif now.ended:
                timer.cancel()
                problem.text = feed.error or now.error or "The compilation was stopped."
                problem.set_visibility(True)

        with self._box:
            timer = ui.timer(0.5, look)


def _batches(written: str) -> tuple[int, ...]:
    numbers = [n.strip() for n in written.split(",")]
    if len(numbers) not in (1, 3) or not all(n.isdigit() and int(n) > 0 for n in numbers):
        raise UsageError(
            "a batch is one size, or the smallest, the usual and the largest",
            seen=written,
            fix="8, or 1, 8, 32",
        )
    return tuple(int(n) for n in numbers)


class _Plan:
    """One plan: numbers, steps, why each kernel, accuracy receipt, service."""

    def __init__(self, desk: Desk, plan: Plan, ref: str) -> None:
        self._desk, self._plan, self._ref = desk, plan, ref
        self._bucket = plan.program.buckets[-1]
        self._head()
        with parts.card() as _:
            with parts.box("row-line wrap"):
                text("h2", "Steps").classes("grow")
                sizes = {b.batch: f"batch {b.batch}" for b in plan.program.buckets}
                ui.toggle(sizes, value=self._bucket.batch, on_change=self._choose).props(
                    "unelevated dense no-caps padding='4px 12px' toggle-color=teal-9"
                )
            self._steps = ui.element("div").classes("stack")
        self._show_steps()
        with parts.box("duo"):
            self._receipt()
            self._service()
        with parts.card("How to do the same"):
            parts.Command(plan.manifest.rebuild)

    def _head(self) -> None:
        manifest, path = self._plan.manifest, self._desk.workspace.path(self._ref)
        weights = sum(t.numel() * t.element_size() for t in self._plan.weights.values())
        with parts.card():
            text("h2", path.stem).style("font-size:19px")
            parts.stats(
                [
                    ("target", manifest.fingerprint.target),
                    ("precision", manifest.precision),
                    ("steps", str(len(self._bucket.steps))),
                    (
                        "one batch of " + str(self._bucket.batch),
                        total_time(self._plan, self._bucket),
                    ),
                    ("file", parts.nbytes(path.stat().st_size)),
                    ("weights", parts.nbytes(weights)),
                    ("arena", parts.nbytes(self._bucket.arena_bytes)),
                ]
            )
            text("p", f"Built from {manifest.built_from} for {manifest.fingerprint.name} "
                 f"({manifest.fingerprint.arch}).").classes("muted small")  # fmt: skip

    def _choose(self, event) -> None:
        self._bucket = next(b for b in self._plan.program.buckets if b.batch == event.value)
        self._show_steps()

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
                "" if time_us is None else parts.Bar(
                    fraction=time_us / slowest if slowest else 0.0, text=f"{time_us:,.1f} µs"),
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
        box = None

        def show(step: str) -> None:
            rows, marked = _rows(tried[step])
            box.clear()
            with box:
                parts.table(
                    [
                        parts.Column(title="kernel", classes="m nowrap"),
                        parts.Column(title="time"),
                        parts.Column(title="or why not"),
                    ],
                    rows,
                    marked,
                )

        with parts.box("row-line wrap"):
            text("h2", "Why this kernel").classes("grow")
            field(
                ui.select(names, value=next(iter(names)), label="Step",
                          on_change=lambda e: show(e.value))
            ).style("width:min(420px,100%)")  # fmt: skip
        box = ui.element("div")
        show(next(iter(names)))

    def _receipt(self) -> None:
        """Accuracy that the plan carries, and its comparison with the checkpoint."""
        manifest = self._plan.manifest
        with parts.card("Accuracy receipt"):
            if manifest.accuracy:
                text("p", "Measured on the checkpoint:").classes("muted small")
                parts.stats([(n.replace("/", " "), number_of(n, v))
                             for n, v in sorted(manifest.accuracy.items())])  # fmt: skip
            else:
                text("p", "This plan carries none.").classes("muted")
            self._report = ui.element("div").classes("stack")
        self._show_report()

    def _verify_spec(self, out: str) -> JobSpec | None:
        """The comparison with the checkpoint, if both it and its dataset are in the workspace."""
        space = self._desk.workspace
        built_from = space.root / self._plan.manifest.built_from
        dataset = None
        for found in space.runs():
            if found.item is not None and built_from.is_relative_to(found.path):
                dataset = space.find_dataset(found.item.info.dataset_hash)
                source = best_of(found.item).path if built_from == found.path else built_from
                break
        if dataset is None:
            return None
        return commands.verify(
            self._ref,
            space.ref(source),
            space.ref(dataset),
            target=self._plan.manifest.fingerprint.target,
            out=out,
        )

    def _report_path(self) -> Path:
        stat = self._desk.workspace.path(self._ref).stat()
        key = digest([self._ref, stat.st_mtime_ns, stat.st_size])[:24]
        return self._desk.workspace.own("verifications") / f"{key}.json"

    def _show_report(self) -> None:
        self._report.clear()
        with self._report:
            if self._report_path().exists():
                told = parse_json(self._report_path().read_bytes(), where="verification")
                parts.stats([
                    ("accuracy of the plan", f"{100 * told['plan_accuracy']:.2f} %"),
                    ("same answer", f"{100 * told['agreement']:.2f} % of {told['samples']:,}"),
                    ("largest difference", f"{told['max_abs_diff']:.2g}"),
                ])  # fmt: skip
                if told["flips"]:
                    columns = [
                        parts.Column(title=t) for t in ("image", "truth", "checkpoint", "plan")
                    ]
                    parts.table(columns, [(f["path"], f["truth"], f["checkpoint"], f["plan"])
                                          for f in told["flips"][:100]])  # fmt: skip
                return
            spec = self._verify_spec(self._desk.workspace.ref(self._report_path()))
            if spec is None:
                text("p", "Its checkpoint or dataset is not in this workspace, so there is nothing "
                     "to compare with.").classes("muted small")  # fmt: skip
                return
            parts.plain_button("Compare with the checkpoint", lambda: self._verify(spec), "balance")
            parts.Command(commands.shown(self._verify_spec("report.json")))

    def _verify(self, spec: JobSpec) -> None:
        with parts.telling():
            job = self._desk.store.submit(spec)
        self._report.clear()
        with self._report:
            text("p", "Comparing, sample by sample …").classes("muted small")

        def look() -> None:
            now = self._desk.store.job(job.id)
            if now.ended:
                timer.cancel()
                self._show_report()
                if now.status != "done":
                    with self._report:
                        parts.note(now.error or "The comparison was stopped.", "bad")

        with self._report:
            timer = ui.timer(0.7, look)

    # --- service ------------------------------------------------------------------------

    def _service(self) -> None:
        with parts.card("Serve", "Open Inference Protocol over HTTP"):
            with parts.box("row-line"):
                self._port = field(ui.number("Port", value=8000, precision=0, min=1, max=65_535))
                self._port.style("width:120px")
                self._start = parts.button("Serve", self._serve, icon="cloud_upload")
                self._stop = parts.plain_button("Stop", self._stop_serving, "stop")
                self._state = parts.badge("waiting")
            self._line = parts.Command()
            self._curl = parts.Command()
        self._shown = ""
        self._refresh()
        ui.timer(1.0, self._refresh)

    def _name(self) -> str:
        return plain_name(Path(self._ref).stem) or "model"

    def _serve_spec(self) -> JobSpec:
        gpus = 1 if self._plan.manifest.fingerprint.target.startswith("sm_") else 0
        port = int(self._port.value or 8000)
        return commands.serve({self._name(): self._ref}, port=port, gpus=gpus)

    def _serving(self) -> Job | None:
        """The job that serves this plan now."""
        ending = f"={self._ref}"
        return next(
            (j for j in self._desk.store.jobs()
             if j.kind == "serve" and not j.ended and any(a.endswith(ending) for a in j.argv)),
            None,
        )  # fmt: skip

    def _refresh(self) -> None:
        job = self._serving()
        self._start.set_visibility(job is None)
        self._stop.set_visibility(job is not None)
        self._state.set_visibility(job is not None)
        port = int(self._port.value or 8000)
        if job is not None:
            self._state.classes(remove=self._state.text, add=job.status)
            self._state.text = job.status
            port = int(job.argv[job.argv.index("--port") + 1])
        lines = commands.shown(self._serve_spec()), curl(self._name(), port, self._plan)
        if self._shown != str(lines):
            self._shown = str(lines)
            self._line.show(lines[0])
            self._curl.show(lines[1])

    def _serve(self) -> None:
        with parts.telling():
            self._desk.store.submit(self._serve_spec())
        self._refresh()

    def _stop_serving(self) -> None:
        job = self._serving()
        if job is not None:
            with parts.telling():
                self._desk.store.abort(job.id)


def curl(name: str, port: int, plan: Plan) -> str:
    """A request to try: an image where the plan takes images, its metadata otherwise."""
    url = f"http://127.0.0.1:{port}/v2/models/{name}"
    if plan.manifest.preprocess is None:
        return f"curl -s {url}"
    return f"curl -s {url}/classify --data-binary @picture.png"


def total_time(plan: Plan, bucket: Bucket) -> str:
    """The measured times of a bucket's steps, together."""
    times = [c.time_us for c in plan.tuning if c.chosen and c.batch == bucket.batch and c.time_us]
    if not times:
        return "not measured"
    total = sum(times)
    return f"{total / 1000:.2f} ms" if total >= 1000 else f"{total:.0f} µs"


def _candidates(plan: Plan, batch: int) -> dict[str, list[Candidate]]:
    out: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in plan.tuning:
        if candidate.batch == batch:
            out[candidate.step].append(candidate)
    return dict(out)


def _rows(candidates: list[Candidate]) -> tuple[list[tuple[parts.Cell, ...]], list[bool]]:
    """Fastest first, the refused ones last."""
    ordered = sorted(candidates, key=lambda c: (c.time_us is None, c.time_us or 0.0, c.kernel))
    slowest = max((c.time_us or 0.0 for c in ordered), default=0.0) or 1.0
    rows: list[tuple[parts.Cell, ...]] = []
    for c in ordered:
        shown: parts.Cell = ""
        if c.time_us is not None:
            spread = "" if c.spread_us is None else f" ± {c.spread_us:.1f}"
            shown = parts.Bar(fraction=c.time_us / slowest, text=f"{c.time_us:,.1f}{spread} µs")
        rows.append((c.kernel, shown, c.refused or ("chosen" if c.chosen else "slower")))
    return rows, [c.chosen for c in ordered]
