"""The accuracy of a plan: its receipt, the samples whose answer changed, each layer's precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from nicegui import ui

from tessella.artifacts.dataset import Dataset, Split
from tessella.artifacts.outline import Outline
from tessella.artifacts.program import Bucket, Step
from tessella.artifacts.receipt import Receipt
from tessella.artifacts.run import Run
from tessella.core.dtype import PRECISIONS, dtype_name
from tessella.core.errors import TessellaError
from tessella.core.record import digest, parse_json
from tessella.jobs import commands
from tessella.jobs.job import Job, JobSpec
from tessella.studio import parts, pictures
from tessella.studio.context import Context
from tessella.studio.theme import text
from tessella.studio.workspace import best_checkpoint, open_dataset

FLIPS = 48  # shown; the plan lists more
LAYERS = ("conv1d", "conv2d", "conv3d", "linear", "matmul")
FULL_DB = 60.0  # a bar's length: float16 would have about so much
NAMES = {dtype: name for name, dtype in reversed(PRECISIONS.items())}  # fp32 before tf32


@dataclass(frozen=True, kw_only=True)
class ChangedAnswer:
    """A sample whose answer changed; ``before`` and ``after`` may have their probabilities."""

    path: str
    truth: str
    before: str
    after: str
    index: int | None = None
    change: str = ""

    @property
    def told(self) -> str:
        """The change in the task's words, or the answers before and after."""
        return self.change or f"{self.before} → {self.after}"


class Flip(TypedDict):
    """A sample for which checkpoint and plan disagree: its file and the labels."""

    path: str
    truth: str
    checkpoint: str
    plan: str


class Verification(TypedDict):
    """The JSON that ``tessella verify --out`` writes, as far as it is shown."""

    samples: int
    score: str
    plan_score: float
    agreement: float
    max_abs_diff: float
    flips: list[Flip]


class Accuracy:
    """The card: the budget's receipt, the checkpoint's metrics, and a comparison of the two."""

    def __init__(self, context: Context, plan: Outline, ref: str) -> None:
        self._context, self._plan, self._ref = context, plan, ref
        self._source, self._data = self._origin()
        manifest = plan.manifest
        with parts.card("Accuracy"):
            if manifest.receipt is not None:
                self._receipt(manifest.receipt)
            if manifest.accuracy:
                text("p", "Measured on the checkpoint:").classes("muted small")
                parts.stats([(parts.metric_name(n), parts.score(n, v))
                             for n, v in sorted(manifest.accuracy.items())])  # fmt: skip
            elif manifest.receipt is None:
                text("p", "This plan carries no figures.").classes("muted")
            self._report = ui.element("div").classes("stack")
        self._show_report()

    def _origin(self) -> tuple[Path | None, Path | None]:
        """The checkpoint that the plan was built from, and its dataset; None if not in here."""
        space = self._context.workspace
        built_from = space.root / self._plan.manifest.built_from
        for found in space.runs():
            if found.item is not None and built_from.is_relative_to(found.path):
                try:
                    source = (
                        self._checkpoint(found.item) if built_from == found.path else built_from
                    )
                except TessellaError:  # a checkpoint that is damaged is no origin
                    return None, None
                return source, space.find_dataset(found.item.info.dataset_hash)
        return None, None

    def _checkpoint(self, run: Run) -> Path | None:
        """The run's checkpoint with the plan's weights; its best where the plan does not say."""
        hashed = self._plan.manifest.weights_sha256
        if hashed is None:
            return best_checkpoint(run).path
        return next((c.path for c in run.checkpoints() if c.weights_sha256 == hashed), None)

    # --- the receipt -------------------------------------------------------------

    def _receipt(self, receipt: Receipt) -> None:
        parts.stats(
            [
                (f"{receipt.metric}, this plan", f"{100 * receipt.after:.2f} %"),
                ("in float32", f"{100 * receipt.before:.2f} %"),
                (
                    f"points of {receipt.metric} lost, of {receipt.budget:g} allowed",
                    f"{receipt.loss:.2f}",
                ),
                ("95 % lie between", interval(receipt)),
                (f"answers changed of {receipt.samples:,}", f"{receipt.flipped:,}"),
            ]
        )
        if not receipt.resolved:
            parts.note(
                f"With {receipt.samples:,} samples the loss may be {receipt.high:.2f} points (95 %)"
                f", more than the {receipt.budget:g} allowed: more samples would tell.",
                "warn",
            )
        if receipt.p_value is not None and receipt.flipped:
            text("p", f"By chance alone, right answers are lost and won this unevenly with "
                 f"p = {receipt.p_value:.2g} (McNemar).").classes("muted small")  # fmt: skip
        self._flips(
            [
                ChangedAnswer(
                    path=f.path,
                    truth=f.label,
                    before=_with_share(f.before, f.probability_before),
                    after=_with_share(f.after, f.probability),
                    change=f.change,
                    index=f.index,
                )
                for f in receipt.flips
            ],
            receipt.flipped,
        )

    def _flips(self, flips: Sequence[ChangedAnswer], count: int) -> None:
        """The samples with their pictures, where the dataset is at hand."""
        if not flips:
            return
        if not self._thumbnails(flips[:FLIPS]):
            columns = [parts.Column(title=t) for t in ("image", "truth", "before → plan")]
            parts.table(columns, [(f.path, f.truth, f.told) for f in flips[:FLIPS]])
        if count > min(len(flips), FLIPS):
            text("p", f"… and {count - min(len(flips), FLIPS):,} more").classes("muted small")

    def _thumbnails(self, flips: Sequence[ChangedAnswer]) -> bool:
        """Show the samples as pictures; False if none of them is at hand."""
        if self._data is None:
            return False
        dataset, ref = open_dataset(self._data), self._context.workspace.ref(self._data)
        places = _places(dataset, flips)
        if places:
            with parts.box("thumbs flips"):
                for flip in flips:
                    _flip(flip, dataset, ref, places)
        return bool(places)

    # --- the comparison -----------------------------------------------------------------

    def _comparison(self, source: Path, data: Path, out: str) -> JobSpec:
        space = self._context.workspace
        target = self._plan.manifest.fingerprint.target
        return commands.verify(
            self._ref, space.ref(source), space.ref(data), target=target, out=out
        )

    def _report_path(self) -> Path:
        stat = self._context.workspace.path(self._ref).stat()
        key = digest(["score", self._ref, stat.st_mtime_ns, stat.st_size])[:24]
        return self._context.workspace.own("verifications") / f"{key}.json"

    def _show_report(self) -> None:
        self._report.clear()
        with self._report:
            if self._report_path().exists():
                self._show_comparison(
                    parse_json(self._report_path().read_bytes(), where="verification")
                )
                return
            if self._source is None or self._data is None:
                text("p", "Its checkpoint or dataset is not in this workspace, so there is nothing "
                     "to compare with.").classes("muted small")  # fmt: skip
                return
            report = self._context.workspace.ref(self._report_path())
            spec = self._comparison(self._source, self._data, report)
            parts.plain_button("Compare with the checkpoint", lambda: self._verify(spec), "balance")
            shown = self._comparison(self._source, self._data, "report.json")
            parts.Command(commands.shown(shown))

    def _show_comparison(self, report: Verification) -> None:
        text("p", "Compared with the checkpoint, sample by sample:").classes("muted small")
        parts.stats([
            (f"{report['score']} of the plan", parts.score(report["score"], report["plan_score"])),
            ("same answer", f"{100 * report['agreement']:.2f} % of {report['samples']:,}"),
            ("largest difference", f"{report['max_abs_diff']:.2g}"),
        ])  # fmt: skip
        flips = [
            ChangedAnswer(path=f["path"], truth=f["truth"], before=f["checkpoint"], after=f["plan"])
            for f in report["flips"]
        ]
        self._flips(flips, len(flips))

    def _verify(self, spec: JobSpec) -> None:
        with parts.errors_shown():
            job = self._context.store.submit(spec)
            self._report.clear()
            with self._report:
                text("p", "Comparing, sample by sample …").classes("muted small")
                self._context.follow(job, self._show_end)

    def _show_end(self, now: Job) -> None:
        if now.ended:
            self._show_report()
            if now.status != "done":
                with self._report:
                    parts.note(now.error or "The comparison was stopped.", "bad")


def _with_share(answer: str, probability: float | None) -> str:
    return answer if probability is None else f"{answer} {100 * probability:.0f} %"


def interval(receipt: Receipt) -> str:
    """The 95 % confidence interval of the loss, in points."""
    return f"{receipt.low:.2f} … {receipt.high:.2f}".replace("-", "−")


def _places(dataset: Dataset, flips: Sequence[ChangedAnswer]) -> dict[str, int]:
    """The samples' indices in the validation split, by path; those not there are left out."""
    if "val" not in dataset.info.splits:
        return {}
    split = dataset.split("val")
    known = {f.path: f.index for f in flips if f.index is not None and _is(split, f)}
    if missing := {f.path for f in flips} - known.keys():
        known |= {e.path: i for i, e in enumerate(split) if e.path in missing}
    return known


def _is(split: Split, flip: ChangedAnswer) -> bool:
    index = flip.index or 0
    return 0 <= index < len(split) and split[index].path == flip.path


def _flip(flip: ChangedAnswer, dataset: Dataset, ref: str, places: dict[str, int]) -> None:
    if flip.path in places:
        box = pictures.thumb(dataset, ref, "val", places[flip.path], f"{flip.truth}: {flip.path}")
    else:
        box = parts.box("thumb")
    with box:
        text("b", flip.truth).classes("cut small")
        text("div", flip.told).props["title"] = (
            f"{flip.path}: {flip.before} before, {flip.after} by this plan"
        )


# --- layer by layer ---------------------------------------------------------------------


def show_layers(plan: Outline, bucket: Bucket) -> None:
    """The card with each layer's precision and its signal-to-noise ratio."""
    found = [(s, precision_of(plan, bucket, s)) for s in bucket.steps if s.op in LAYERS]
    if not found:
        return
    counts = Counter(p for _, p in found)
    hint = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    with parts.card("Precision by layer", hint):
        snr = plan.manifest.snr_db
        if snr:
            text("p", "Signal to noise: the power of a layer's product over that of the error "
                 "which rounding makes, in the calibration. 20 dB is an error of a tenth."
                 ).classes("muted small")  # fmt: skip
        columns = [parts.Column(title="layer", classes="m"), parts.Column(title="operation")]
        columns += [parts.Column(title="precision", classes="m")]
        columns += [parts.Column(title="signal to noise")] if snr else []
        parts.table(columns, [_layer(step, name, snr) for step, name in found])


def _layer(step: Step, precision: str, snr: dict[str, float]) -> tuple[parts.Cell, ...]:
    row: tuple[parts.Cell, ...] = (step.layer or step.outputs[0], step.op, precision)
    if not snr:
        return row
    found = snr.get(step.layer or step.outputs[0])
    bar = "" if found is None else parts.Bar(fraction=found / FULL_DB, text=f"{found:.1f} dB")
    return (*row, bar)


def precision_of(plan: Outline, bucket: Bucket, step: Step) -> str:
    """The precision in which a layer multiplies: that of the values which it reads."""
    types = {b.name: b.dtype for b in bucket.buffers}
    types |= {s.name: s.dtype for s in plan.manifest.inputs}
    types |= {n: dtype_name(t.dtype) for n, t in plan.weights.items()}
    dtype = types.get(step.inputs[0] or "", "")
    if dtype == "float32" and plan.manifest.precision == "tf32":
        return "tf32"
    return NAMES.get(dtype, dtype)
