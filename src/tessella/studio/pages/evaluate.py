"""The Evaluation page: how good a network is on a split, how sure that is, and where it errs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nicegui import ui

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Run
from tessella.core.count import counted
from tessella.core.errors import ArtifactError, TessellaError
from tessella.core.record import digest, parse_json
from tessella.jobs import commands
from tessella.jobs.job import JobSpec
from tessella.studio import charts, parts, pictures
from tessella.studio.confusion import Confusion, figures, measures
from tessella.studio.context import Context
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.watching import watch
from tessella.studio.workspace import best_checkpoint, open_dataset, readable

LISTED = 48  # images with the largest losses
CHANCE = 0.05  # a difference with a larger p is told as one that may be chance
TOLD = {"macro_f1": "mean F1", "macro_precision": "mean precision", "macro_recall": "mean recall"}
MISSING = "Open another run from Monitor."
NONE = ""  # of the models to compare with
# What drawing a report raises where one of its values is missing or is of another kind.
DAMAGES = (TessellaError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def register(context: Context) -> None:
    @ui.page("/evaluate", response_timeout=RESPONSE_S)
    async def evaluate(
        run: str = "", checkpoint: str = "", split: str = "", against: str = ""
    ) -> None:
        space = context.workspace
        runs = readable(await asyncio.to_thread(space.runs))
        subtitle = "How good it is, and how sure that is."
        with frame("Evaluation", subtitle, space.root, step="Explore"):
            points = await asyncio.to_thread(_points, context, runs)
            run = run or next(iter(points), "")
            if not run:
                with parts.empty("There is no checkpoint yet", "Train a network first."):
                    parts.button("Train a network", lambda: ui.navigate.to("/train"))
                return
            try:
                asked = await asyncio.to_thread(
                    _asked, context, runs, points, run, checkpoint, split, against
                )
                await _Page(context, runs, points, asked).show()
            except TessellaError as error:
                parts.refused(error, MISSING)


def _points(context: Context, runs: dict[str, Run]) -> dict[str, Checkpoint]:
    """The best checkpoint of each run that has one which can be read."""
    found = {}
    for ref, run in runs.items():
        try:
            found[ref] = best_checkpoint(run)
        except TessellaError:  # told where it is asked for
            continue
    return found


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a page is about.

    Attributes:
        run: its ref.
        rival: the checkpoint to compare with.
        data: the folder of the dataset that the network was trained on, where it is here.
    """

    run: str
    checkpoint: Checkpoint
    rival: Checkpoint | None
    data: Path | None
    dataset: Dataset | None
    split: str


def _asked(
    context: Context,
    runs: dict[str, Run],
    points: dict[str, Checkpoint],
    run: str,
    checkpoint: str,
    split: str,
    against: str,
) -> _Asked:
    """Open what a page's address names; takes a while, so not for the event loop.

    Adds the run to ``runs`` and ``points``.

    Raises:
        TessellaError: something of it is missing or cannot be read.
    """
    space = context.workspace
    if run not in runs:  # a trial of a sweep is not among them
        runs[run] = space.run(run)
    points[run] = best_checkpoint(runs[run])
    chosen = space.checkpoint(checkpoint) if checkpoint else points[run]
    data = space.find_dataset(chosen.info.dataset_hash)
    dataset = None if data is None else open_dataset(data)
    splits = () if dataset is None else dataset.info.splits
    split = split or next((n for n in ("test", "val", *splits) if n in splits), "test")
    if dataset is not None:
        dataset.split(split)  # a UsageError where there is none
    rival = space.checkpoint(against) if against else None
    return _Asked(
        run=run, checkpoint=chosen, rival=rival, data=data, dataset=dataset, split=split
    )  # fmt: skip


class _Page:
    """The choosers at the left, and what was measured of them."""

    def __init__(
        self,
        context: Context,
        runs: dict[str, Run],
        points: dict[str, Checkpoint],
        asked: _Asked,
    ) -> None:
        self._context, self._checkpoint, self._rival = context, asked.checkpoint, asked.rival
        self._run, self._ref = asked.run, context.workspace.ref(asked.checkpoint.path)
        self._data, self._dataset, self._split = asked.data, asked.dataset, asked.split
        splits = [] if self._dataset is None else sorted(self._dataset.info.splits)
        with parts.box("split"):
            with parts.box("stack"):
                with parts.card("What is measured"):
                    self._choosers(runs, points, splits)
                with parts.card("How to do the same"):
                    self._command = parts.Command()
            self._box = parts.box("stack")

    # --- what is asked ------------------------------------------------------------------

    def _choosers(
        self, runs: dict[str, Run], points: dict[str, Checkpoint], splits: list[str]
    ) -> None:
        space = self._context.workspace
        names = self._context.run_names({r: runs[r] for r in points})
        parts.field(
            ui.select(names, value=self._run, label="Run",
                      on_change=lambda e: self._go(run=e.value, checkpoint=NONE))
        )  # fmt: skip
        own = {space.ref(p.path): _epoch(p) for p in runs[self._run].checkpoints()}
        parts.field(
            ui.select(own, value=self._ref, label="Checkpoint",
                      on_change=lambda e: self._go(checkpoint=e.value))
        )  # fmt: skip
        if splits and self._dataset is not None:
            noun = parts.noun_of(self._dataset.info.task.name)
            counts = {
                s: f"{s} ({counted(self._dataset.info.splits[s].count, noun)})" for s in splits
            }
            parts.field(
                ui.select(counts, value=self._split, label="Split",
                          on_change=lambda e: self._go(split=e.value))
            )  # fmt: skip
        if self._split != "test":
            text("p", "The network was trained on this split, or chosen by it: measured here it "
                 "flatters. An import with a test split keeps images for this.").classes(
                "muted small")  # fmt: skip
        info = self._checkpoint.info
        others = {
            space.ref(p.path): names[r]
            for r, p in points.items()
            if p.info.labels == info.labels and p.info.task.name == info.task.name
        }
        others |= {ref: f"this run, {line}" for ref, line in own.items()}
        others.pop(self._ref, None)
        rival = NONE if self._rival is None else space.ref(self._rival.path)
        others = {NONE: "nothing", **others}
        if rival not in others:
            others[rival] = rival
        parts.field(
            ui.select(others, value=rival, label="Compare with",
                      on_change=lambda e: self._go(against=e.value))
        )  # fmt: skip
        self._trust = ui.switch("Run the Python code that this checkpoint brings")
        self._trust.set_visibility(".py" in info.network.name)
        self._trust.on_value_change(lambda: self._show_command())

    def _go(self, **changed: str) -> None:
        rival = NONE if self._rival is None else self._context.workspace.ref(self._rival.path)
        query = {"run": self._run, "checkpoint": self._ref, "split": self._split, "against": rival}
        ui.navigate.to(
            parts.address("/evaluate", **{k: v for k, v in (query | changed).items() if v})
        )

    def _file(self) -> Path:
        """The file of the report for the chosen checkpoints and split."""
        weights = [
            (self._context.workspace.ref(c.path), c.info.files["model.safetensors"].sha256)
            for c in (self._checkpoint, self._rival) if c is not None
        ]  # fmt: skip
        key = digest([weights, self._split, self._checkpoint.info.dataset_hash])[:24]
        return self._context.workspace.own("judgements") / f"{key}.json"

    def _spec(self, out: str) -> JobSpec:
        if self._data is None:
            raise ArtifactError("the dataset of this checkpoint is not in the workspace")
        space = self._context.workspace
        return commands.judge(
            self._ref, space.ref(self._data), split=self._split, errors=LISTED, out=out,
            against=None if self._rival is None else space.ref(self._rival.path),
            trust_code=bool(self._trust.value),
        )  # fmt: skip

    def _show_command(self) -> None:
        known = self._data is not None
        self._command.show(commands.shown(self._spec("evaluation.json")) if known else "")

    # --- what is shown ------------------------------------------------------------------

    async def show(self) -> None:
        """Draw the report, the progress of the job that makes it, or what begins one."""
        file = self._file()
        self._show_command()
        plain, problem = await asyncio.to_thread(_read, file)
        self._box.clear()
        with self._box:
            if self._dataset is None:
                parts.note("The dataset that this network was trained on is not in the workspace.")
                return
            if plain is not None:
                try:
                    _Judgement(self._context, plain, self._dataset, self._data, self._split)
                except DAMAGES as error:
                    self._box.clear()  # the cards drawn so far
                    problem = f"{type(error).__name__}: {error}"
            if problem:
                parts.note(f"The report cannot be read: {problem}", "bad")
                parts.plain_button("Measure again", self._measure, "refresh")
            if plain is not None or problem:
                return
            job = self._context.job_for(file)
            if job is not None and not job.ended:
                await watch(self._context, job, self._box, self.show, title="Measuring")
                return
            with parts.empty("Not measured yet", "One pass over the split gives its measures with "
                             "intervals, calibration, curves and the largest losses."):  # fmt: skip
                parts.button("Measure", self._measure, icon="fact_check")

    async def _measure(self) -> None:
        with parts.errors_shown():
            job = self._context.store.submit(self._spec(self._context.workspace.ref(self._file())))
            self._file().unlink(missing_ok=True)
            await watch(self._context, job, self._box, self.show, title="Measuring")


def _read(file: Path) -> tuple[dict[str, Any] | None, str]:
    """A report and why it cannot be read; neither where there is none."""
    try:
        plain = parse_json(file.read_bytes(), where=file.name)
    except FileNotFoundError:
        return None, ""
    except (TessellaError, OSError) as error:
        return None, str(error)
    return (plain, "") if isinstance(plain, dict) else (None, "it is no object")


def _epoch(point: Checkpoint) -> str:
    metric = point.info.task.metric
    score = point.info.metrics.get(metric)
    line = f"epoch {point.info.position.epoch:.4g}"
    return line if score is None else f"{line}, {parts.score(metric, score)}"


class _Judgement:
    """The cards of a report that ``tessella evaluate --out`` wrote."""

    def __init__(
        self, context: Context, plain: dict[str, Any], dataset: Dataset, data: Path | None,
        split: str,
    ) -> None:  # fmt: skip
        self._plain, self._dataset, self._split = plain, dataset, split
        self._ref = "" if data is None else context.workspace.ref(data)
        self._level = f"{plain['level']:.0%}".replace("%", " %")
        self._numbers()
        if plain.get("comparison"):
            self._comparison(plain["comparison"])
        report, curves = plain["report"], plain["curves"]
        if curves:
            with parts.box("duo"):
                if plain["calibration"]:
                    self._calibration(plain["calibration"])
                self._curve(curves)
            with parts.card("Classes"):
                figures(report["per_class"], [c["average_precision"] for c in curves])
            with parts.card("What is taken for what"):
                Confusion(context, report, data, split).mistakes()
        elif report.get("classes"):
            with parts.card("Classes"):
                measures(report["classes"])
        self._mistakes()

    def _numbers(self) -> None:
        plain = self._plain
        noun = parts.noun_of(self._dataset.info.task.name)
        with parts.card(f"{counted(plain['count'], noun)} of {plain['split']}"):
            value = plain["measures"][plain["score"]]
            parts.stats([
                (plain["score"], parts.score(plain["score"], value["value"])),
                (f"interval of {self._level}", self._interval(plain["score"], value)),
            ])  # fmt: skip
            columns = [parts.Column(title="measure")]
            columns += [
                parts.Column(title=t, classes="r")
                for t in ("value", f"{self._level} from", "to")
            ]  # fmt: skip
            rows = [
                (TOLD.get(name, name.replace("_", " ")),
                 *(parts.score(name, m[k]) for k in ("value", "low", "high")))
                for name, m in plain["measures"].items()
            ]  # fmt: skip
            parts.table(columns, rows)

    @staticmethod
    def _interval(name: str, measure: dict[str, float]) -> str:
        return f"{parts.score(name, measure['low'])} to {parts.score(name, measure['high'])}"

    def _comparison(self, found: dict[str, Any]) -> None:
        score, gap, p = self._plain["score"], found["difference"], found["p_value"]
        low, high = gap["low"], gap["high"]
        may_be_chance = low <= 0 <= high if p is None else p > CHANCE
        with parts.card("Compared, image by image"):
            text("p", found["other"]).classes("mono small cut").props["title"] = found["other"]
            numbers = [
                (f"its {score}", parts.score(score, found["other_value"])),
                ("this one's minus its", parts.score(score, gap["value"])),
                (f"interval of {self._level}", self._interval(score, gap)),
            ]
            if p is not None:
                numbers += [
                    ("right here alone", f"{found['only_this']:,}"),
                    ("right there alone", f"{found['only_other']:,}"),
                    ("p, McNemar's exact test", f"{p:.3g}"),
                ]
            parts.stats(numbers)
            if may_be_chance:
                parts.note("The difference may be chance: more images would tell.", "warn")
            else:
                better = "This one is better" if gap["value"] > 0 else "The other one is better"
                parts.note(f"{better}, by more than chance makes likely.")

    def _calibration(self, found: dict[str, Any]) -> None:
        with parts.card("Calibration", "whether probabilities are what they say"):
            numbers = [("calibration error", f"{100 * found['error']:.2f} %")]
            if found["temperature"] is not None:
                numbers += [
                    (f"with scores over {found['temperature']:.3g}",
                     f"{100 * found['scaled_error']:.2f} %"),
                ]  # fmt: skip
            parts.stats(numbers)
            bins = [(b["confidence"], b["accuracy"], b["count"]) for b in found["bins"]]
            ui.echart(charts.reliability(bins)).classes("chart")

    def _curve(self, curves: list[dict[str, Any]]) -> None:
        with parts.card("Precision and recall", "of a class, by its probability"):
            worst = min(range(len(curves)), key=lambda n: curves[n]["average_precision"] or 2.0)
            names = {n: c["label"] for n, c in enumerate(curves)}
            chooser = ui.element("div")
            said = text("p", "").classes("muted small")
            chart = ui.echart(charts.precision_recall([], None)).classes("chart")

            def draw(number: int) -> None:
                curve = curves[number]
                points = list(zip(curve["recall"], curve["precision"], strict=True))
                chart.options["series"][0]["data"] = points
                chart.update()
                average = curve["average_precision"]
                said.text = (
                    "No image of the split is of this class."
                    if average is None
                    else f"average precision {average:.3f}"
                )

            with chooser:
                chosen = ui.select(
                    names, value=worst, label="Class", on_change=lambda e: draw(e.value)
                )
                parts.field(chosen)
            draw(worst)

    def _mistakes(self) -> None:
        found = self._plain["mistakes"]
        with parts.card("Largest losses", "what surprised it most, worst first"):
            if not found:
                text("p", "None was listed.").classes("muted small")
                return
            area = parts.box("thumbs flips")

            def draw(wrong_alone: bool) -> None:
                shown = [m for m in found if m["wrong"] or not wrong_alone]
                area.clear()
                with area:
                    for mistake in shown:
                        self._tile(mistake)
                    if not shown:
                        text("p", "None of these is wrong.").classes("muted small")

            if any(m["wrong"] is not None for m in found):
                ui.switch("Wrong answers alone", on_change=lambda e: draw(bool(e.value))).props(
                    "dense"
                ).move(target_index=1)
            draw(False)

    def _tile(self, mistake: dict[str, Any]) -> None:
        said = mistake["said"]
        words = f"{mistake['truth']} → {said}" if said else mistake["truth"]
        title = f"{mistake['path']}: {words}"
        with pictures.thumb(self._dataset, self._ref, self._split, mistake["index"], title) as link:
            link.props["title"] = title
            text("div", words)
            text("div", f"loss {mistake['loss']:.3g}")
