"""The Serve page: a running server's requests, latencies, batches and what its engine has left.

It reads the server's ``/metrics`` while it is open. The server is one that this workspace's queue
started, or any whose address a person writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from nicegui import ui

from tessella.core.errors import TessellaError
from tessella.jobs import commands
from tessella.jobs.job import Job
from tessella.studio import charts, parts
from tessella.studio.context import Context
from tessella.studio.feed import Point
from tessella.studio.plan_front import title_of
from tessella.studio.serving import Address, Histogram, Model, Reading, address, read
from tessella.studio.serving_load import WINDOW_S, Load, Window, to_watch
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.workspace import plain_name

INTERVAL_S = 1.5  # a reading of three models takes 2 ms of the server's processor
MOST_POINTS, KEPT_POINTS = 1200, 900  # of a chart: half an hour; then the oldest are dropped
QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
MOST_ROWS = 12  # of who fills a server
DOORS = {"http": "tensors over HTTP", "pictures": "pictures over HTTP", "grpc": "gRPC"}
STAGES = {  # what happens in them; in the order of a request
    "receive": "its body arrives",
    "decode": "parsed, pictures decoded",
    "queue": "waits for the engine",
    "copy": "joined with others, split",
    "compute": "in the engine",
    "answer": "the response is made",
}
ADVICE = "Open the address that tessella serve printed, such as http://127.0.0.1:8000."


def register(context: Context) -> None:
    @ui.page("/serve", response_timeout=RESPONSE_S)
    async def serve(address: str = "") -> None:
        _page(context, address)


def _page(context: Context, written: str) -> None:
    served = [(job, place) for job in context.store.jobs(kind="serve", status="running")
              if (place := _place_of(job)) is not None]  # fmt: skip
    with frame("Serve", "Who asks a server, how fast it answers, what its engine has left.",
               context.workspace.root):  # fmt: skip
        try:
            place = address(written) if written else served[0][1] if served else None
        except TessellaError as error:
            parts.refused(error, ADVICE)
            return
        plan = next((f.ref for f in context.workspace.plans() if f.item is not None), None)
        _Page(served, place, plan)


def _place_of(job: Job) -> Address | None:
    """Where a job of the queue serves, on this machine."""
    scheme = "https" if "--tls-cert" in job.argv else "http"
    port = job.argv[job.argv.index("--port") + 1] if "--port" in job.argv[:-1] else "8000"
    try:
        return address(f"{scheme}://127.0.0.1:{port}")
    except TessellaError:
        return None


class _Page:
    """The address, and beneath it what the server there does.

    Args:
        place: the server to watch from the start. Another machine is asked only when a person
            presses the button: a link could name any.
        plan: the newest of the workspace, which the advice serves.
    """

    def __init__(
        self, served: Sequence[tuple[Job, Address]], place: Address | None, plan: str | None
    ) -> None:
        self._plan = plan
        self._place = place if place is not None and place.is_loopback else None
        with parts.card():
            with parts.box("row-line"):
                first = place.url if place is not None else "http://127.0.0.1:8000"
                self._address = parts.field(ui.input("Address", value=first)).style("width:290px")
                self._token = parts.field(ui.input("Token, if it wants one", password=True))
                self._token.props('autocomplete="off"').style("width:220px")
                parts.button("Watch", self._watch, icon="monitor_heart")
                self._state = parts.badge("waiting")
            for job, its_place in served:
                with parts.link("/serve", "small", address=its_place.url):
                    text("span", f"{its_place.url}: {job.name}")
            self._problem = text("div", "").classes("note bad")
        self._body = parts.box("stack")
        self._begin()
        ui.timer(INTERVAL_S, self._refresh)

    def _watch(self) -> None:
        with parts.errors_shown():
            self._place = address(self._address.value or "")
            self._begin()

    def _begin(self) -> None:
        """Show this server from now on, and forget what another one did."""
        self._window, self._shown = Window(), None
        self._say("")
        self._body.clear()
        self._state.set_visibility(self._place is not None)
        parts.show_status(self._state, "waiting")
        if self._place is not None:
            return
        with self._body, parts.empty("No server is watched", ADVICE):
            if self._plan is not None:
                name = plain_name(title_of(Path(self._plan))) or "model"
                parts.Command(commands.shown(commands.serve({name: self._plan})))
            with parts.link("/plan"):
                text("span", "Serve a plan of this workspace")

    async def _refresh(self) -> None:
        place = self._place
        if place is None:
            return
        try:
            now = await read(place, self._token.value or "")
        except TessellaError as error:
            if place is self._place:
                self._say(str(error))
                parts.show_status(self._state, "failed")
            return
        if place is not self._place:  # another one was chosen meanwhile
            return
        goes_on = self._window.add(now)
        self._say("")
        parts.show_status(self._state, "running")
        if self._shown is None:
            self._body.clear()
            with self._body:
                self._shown = _Shown()
        if not goes_on:
            ui.notify("The server was started again: it counts from zero.")
        self._shown.show(now, self._window.loads())

    def _say(self, problem: str) -> None:
        self._problem.text = problem[:1].upper() + problem[1:]
        self._problem.set_visibility(bool(problem))

    _shown: _Shown | None


class _Shown:
    """What a server does: all of its models in a table, and one of them in curves."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._model: Model | None = None
        self._offered: Model | None = None
        self._chosen = False
        self._models: list[Model] = []
        with parts.card("Models", f"the last {WINDOW_S:.0f} seconds"):
            self._table = parts.box("stack")
            self._machine = text("p", "").classes("muted small")
        with parts.card():
            with parts.box("row-line"):
                self._choice = parts.field(ui.select([], label="Model", on_change=self._choose))
                self._choice.style("width:290px")
            self._numbers = parts.box("stack")
        with parts.box("duo"):
            self._rates = _Lines("Requests a second", ("answered", "refused", "failed"))
            self._latency = _Lines("Latency in ms", tuple(name for name, _ in QUANTILES))
            self._engine = _Lines(
                "The engine's time in %", ("computes", "of its best rate"), most=100
            )
            with parts.card("Batch sizes", "executions"):
                box = parts.box("chart low")
                with box:
                    self._batches = ui.echart(charts.bars([], [("executions", [])]))
                    self._batches.style("height:100%")
            with parts.card("Where the time goes", "ms of answered requests"):
                self._stages = parts.box("stack")
            self._instances_card = parts.card("Instances", "of this model, with one queue")
            with self._instances_card:
                self._instances = parts.box("stack")
            self._instances_card.set_visibility(False)
            with parts.card("Who fills it", "answered requests"):
                self._doors = parts.box("stack")
                self._clients = parts.box("stack")

    def show(self, now: Reading, loads: dict[Model, Load]) -> None:
        """Bring the page to another reading."""
        self._machine.text = _memory(now)
        if new := sorted(now.models.keys() - set(self._models)):
            self._models += new  # a model keeps its place, which is the choice's value
            self._choice.set_options({i: _named(model) for i, model in enumerate(self._models)})
        if not loads:
            return
        if self._model not in loads or not self._chosen:
            self._offered = to_watch(loads, self._model)
            self._choice.set_value(self._models.index(self._offered))
        _drawn_again(self._table, _models_table, loads)
        if self._model is None:
            return
        one, minute = loads[self._model], (now.time - self._began) / 60
        self._numbers.clear()
        with self._numbers:
            parts.stats(_numbers(one))
        self._rates.add(minute, (one.answered, one.refused, one.failed))
        self._latency.add(minute, [_ms(one.whole, q) for _, q in QUANTILES])
        self._engine.add(minute, (100 * one.busy, 100 * one.of_best))
        names, counts = _bars(one.batches)
        options = self._batches.options
        if options["series"][0]["data"] != counts or options["xAxis"]["data"] != names:
            options["series"][0]["data"], options["xAxis"]["data"] = counts, names
            self._batches.update()
        _drawn_again(self._stages, _stages_table, one)
        self._instances_card.set_visibility(bool(one.instances))
        if one.instances:
            _drawn_again(self._instances, _instances_table, one)
        _drawn_again(self._doors, _doors_table, loads)
        _drawn_again(self._clients, _clients_table, loads)

    def _choose(self) -> None:
        place = self._choice.value
        model = self._models[place] if isinstance(place, int) else None
        if model != self._model:
            self._chosen = model != self._offered  # by a person
            self._model = model
            for lines in (self._rates, self._latency, self._engine):
                lines.clear()


def _drawn_again(box: ui.element, draw: object, told: object) -> None:
    box.clear()
    with box:
        draw(told)  # type: ignore[operator]


class _Lines:
    """Curves over the minutes since the page began to watch."""

    def __init__(self, title: str, names: tuple[str, ...], *, most: float | None = None) -> None:
        self._points: list[list[Point]] = [[] for _ in names]
        with parts.card(title, "over minutes"):
            options = charts.lines([(name, []) for name in names], y_max=most)
            options["xAxis"]["min"] = "dataMin"
            options["yAxis"]["min"] = 0
            with parts.box("chart low"):
                self._chart = ui.echart(options).style("height:100%")

    def add(self, minute: float, values: Sequence[float | None]) -> None:
        """Add a point to each curve that has a value."""
        new: list[tuple[int, list[Point]]] = []
        for i, value in enumerate(values):
            if value is not None:
                new.append((i, [(round(minute, 3), float(f"{value:.4g}"))]))
                self._points[i] += new[-1][1]
        if max(map(len, self._points)) > MOST_POINTS:
            self._points = [points[-KEPT_POINTS:] for points in self._points]
            charts.replace(self._chart, self._points)
        elif new:
            charts.append(self._chart, new)

    def clear(self) -> None:
        self._points = [[] for _ in self._points]
        charts.replace(self._chart, self._points)


def _named(model: Model) -> str:
    name, version = model
    return f"{name[:80]} (version {version[:20]})"


def _ms(histogram: Histogram, q: float) -> float | None:
    seconds = histogram.quantile(q)
    return None if seconds is None else 1000 * seconds


def _written(histogram: Histogram, q: float) -> str:
    """A percentile in ms; beyond the histogram's last bound it is at least that."""
    ms = _ms(histogram, q)
    if ms is None:
        return "–"
    finite = [b for b in histogram.bounds if math.isfinite(b)]
    beyond = bool(finite) and ms >= 1000 * finite[-1]
    return f"{'> ' if beyond else ''}{ms:.3g}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _numbers(one: Load) -> list[tuple[str, str]]:
    return [
        ("answered/s", _rate(one.answered)),
        ("refused/s", _rate(one.refused)),
        *((f"{name}, ms", _written(one.whole, q)) for name, q in QUANTILES),
        ("samples/s", _rate(one.samples)),
        ("samples a batch", f"{one.batches.mean:.3g}"),
        ("the engine computes", f"{100 * one.busy:.0f} %"),
        ("of its best rate", f"{100 * one.of_best:.0f} %"),
        ("waiting now", f"{one.waiting:.0f}"),
    ]


def _left(*titles: str) -> list[parts.Column]:
    return [parts.Column(title=title) for title in titles]


def _right(*titles: str) -> list[parts.Column]:
    return [parts.Column(title=title, classes="r") for title in titles]


def _models_table(loads: dict[Model, Load]) -> None:
    numbers = _right("requests/s", "refused/s", "failed/s", "p50 ms", "p99 ms", "batch")
    parts.table([*_left("model"), *numbers, *_left("the engine computes")], [
        (_named(model), _rate(one.answered), _rate(one.refused), _rate(one.failed),
         _written(one.whole, 0.5), _written(one.whole, 0.99), f"{one.batches.mean:.3g}",
         parts.Bar(fraction=one.busy, text=f"{100 * one.busy:.0f} %"))
        for model, one in sorted(loads.items())
    ])  # fmt: skip


def _stages_table(one: Load) -> None:
    mean = one.whole.mean or 1.0
    percentiles = _right(*(name for name, _ in QUANTILES))
    parts.table([*_left("stage"), *percentiles, *_left("share")], [
        (parts.Lines(lines=(name, what)), *(_written(stage, q) for _, q in QUANTILES),
         parts.Bar(fraction=stage.mean / mean, text=f"{100 * stage.mean / mean:.0f} %"))
        for name, what in STAGES.items() if (stage := one.stages.get(name)) is not None
    ])  # fmt: skip


def _instances_table(one: Load) -> None:
    numbers = _right("executions/s", "samples/s", "restarts")
    parts.table([*_left("instance"), *numbers, *_left("computes")], [
        (f"{number[:3]} on {instance.device}{'' if instance.is_up else ' (starts again)'}",
         _rate(instance.executions), _rate(instance.samples), f"{instance.restarts:.0f}",
         parts.Bar(fraction=instance.busy, text=f"{100 * instance.busy:.0f} %"))
        for number, instance in sorted(one.instances.items())
    ])  # fmt: skip


def _doors_table(loads: dict[Model, Load]) -> None:
    counts = {
        (_named(model), DOORS.get(door, door[:20])): count
        for model, one in loads.items()
        for door, count in one.doors.items()
    }
    if not _shares(("model", "way"), counts):
        text("p", "None was answered in this time.").classes("muted")


def _clients_table(loads: dict[Model, Load]) -> None:
    counts = {
        (_named(model), client[:50]): count
        for model, one in loads.items()
        for client, count in one.clients.items()
    }
    _shares(("model", "client"), counts)


def _shares(titles: tuple[str, str], counts: dict[tuple[str, str], float]) -> bool:
    """A table of requests, most first; False if there are none."""
    counts = {key: count for key, count in counts.items() if count}
    total = sum(counts.values())
    if total:
        parts.table([*_left(*titles), *_right("requests"), *_left("share")], [
            (*key, f"{count:.0f}",
             parts.Bar(fraction=count / total, text=f"{100 * count / total:.0f} %"))
            for key, count in sorted(counts.items(), key=lambda entry: -entry[1])[:MOST_ROWS]
        ])  # fmt: skip
    return total > 0


def _bars(batches: Histogram) -> tuple[list[str], list[float]]:
    """What the buckets of batch sizes are called, and how many executions each had; without the
    larger ones that nobody used."""
    last = max((i for i, count in enumerate(batches.counts) if count), default=0)
    names, low = [], 1
    for bound in batches.bounds[: last + 1]:
        high = f"{bound:.0f}" if math.isfinite(bound) else ""
        names.append(high if high == str(low) else f"{low}–{high}")
        low = int(bound) + 1 if high else low
    return names, list(batches.counts[: last + 1])


def _memory(now: Reading) -> str:
    """Memory of the server's machine, in words."""
    used, total = now.host_bytes
    told = [f"Memory: {parts.nbytes(now.process_bytes)} of the process that runs the engines"]
    if total:
        told.append(f"{parts.nbytes(used)} of {parts.nbytes(total)} of its machine are in use")
    told += [
        f"GPU {gpu}: {parts.nbytes(taken)} of {parts.nbytes(whole)}"
        for gpu, (taken, whole) in now.gpu_bytes.items()
    ]
    return " · ".join(told)
