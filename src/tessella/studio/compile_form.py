"""The form for a compilation; it shows only the fields that apply."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nicegui import ui
from nicegui.element import Element

from tessella.artifacts.build import ROUNDED, BuildRequest, read_batch
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.outline import Outline
from tessella.studio import parts
from tessella.studio.compile_request import (
    METHODS,
    PRECISIONS,
    TARGETS,
    USUAL_METHOD,
    USUAL_SAMPLES,
    WAYS,
    How,
    describe_followed,
    followed,
    joined,
    precisions_for,
    requested,
    rounds,
)
from tessella.studio.parts import E
from tessella.studio.theme import text
from tessella.studio.usual_target import usual_target


class CompileForm:
    """The fields of a build request. ``on_change`` is called after each change.

    Args:
        sources: titles of the runs that have a checkpoint, by ref.
        classes: each run's classes. homes: the dataset that a run was trained on, if it is there.
        datasets: those that can calibrate or judge, by ref. plans: those to follow, by ref.
        like: the plan to follow at first; empty for none.
    """

    def __init__(
        self,
        sources: dict[str, str],
        source: str,
        *,
        classes: dict[str, tuple[str, ...]],
        homes: dict[str, str | None],
        datasets: dict[str, Dataset],
        plans: dict[str, Outline],
        like: str,
        on_change: Callable[[], None],
    ) -> None:
        self._classes, self._homes = classes, homes
        self._datasets, self._plans, self._on_change = datasets, plans, on_change
        self._like = like
        self._ready = False
        self._source = parts.field(
            ui.select(
                sources, value=source, label="Best checkpoint of", on_change=self._run_changed
            )
        )
        self._name = parts.field(ui.input("Name", on_change=self._changed))
        self._how = ui.toggle(
            {how: title for how, (title, _) in WAYS.items()},
            value="lock" if like in plans else "one",
            on_change=self._changed,
        ).props("unelevated dense no-caps spread toggle-color=teal-9 size=13px")
        self._how_help = text("p", "").classes("muted small")
        self._precision_fields()
        self._calibration_fields()
        with parts.box("fields"):
            self._batch = self._add(
                ui.input("Batch: least, usual, most", value="1, 8, 32", on_change=self._changed),
                "A program is tuned for these sizes and the powers of two between.",
                "wide",
            )
            self._also = self._add(
                ui.input("Also for", on_change=self._changed),
                "Further targets, as sm_80, sm_90: one plan with a program for each.",
                "wide",
            )
        self._uint8 = ui.switch("Images as bytes", on_change=self._changed).props("dense")
        self._uint8_help = text(
            "p", "The plan takes uint8 images and scales them itself: a quarter of the bytes."
        ).classes("muted small")
        with ui.expansion("More") as self._more:
            self._limit = self._add(
                ui.number("Time limit (seconds)", min=1, on_change=self._changed),
                "What was measured is kept: building again goes on there.",
            )
        self._ready = True
        self._run_changed()

    def _add(self, element: E, help_: str, classes: str = "") -> E:
        """A field with its line of help."""
        parts.field(element, classes)
        element.props["hint"] = help_
        return element

    def _precision_fields(self) -> None:
        with parts.box("fields"):
            self._target = parts.field(
                ui.select(TARGETS, value=usual_target(), label="Target", on_change=self._changed)
            )
            self._precision = self._add(
                ui.select(["fp32"], value="fp32", label="Precision", on_change=self._changed), ""
            )
            self._points = self._add(
                ui.number("Points it may lose", value=0.3, min=0, max=99,
                          on_change=self._changed).props("step=any"),
                "",
            )  # fmt: skip
            self._judge = self._add(
                ui.select({}, label="Judged by", on_change=self._changed),
                "Its validation split, by running each plan.",
            )
            followed_ = {r: Path(r).stem for r in self._plans}
            first = self._like if self._like in followed_ else next(iter(followed_), None)
            self._lock = self._add(
                ui.select(followed_, value=first, label="Plan to follow",
                          on_change=self._changed),
                "",
                "wide",
            )  # fmt: skip

    def _calibration_fields(self) -> None:
        with parts.box("fields") as self._calibrating:
            self._calibrate = self._add(
                ui.select({}, label="Calibrated with", on_change=self._dataset_changed),
                "Images like those that the plan will see.",
                "wide",
            )
            self._split = self._add(
                ui.select(["train"], value="train", label="Split", on_change=self._changed),
                "Not the one that judges.",
            )
            self._samples = self._add(
                ui.number("Images", value=USUAL_SAMPLES, min=1, precision=0,
                          on_change=self._changed),
                "Drawn evenly.",
            )  # fmt: skip
            self._method = self._add(
                ui.select(list(METHODS), value=USUAL_METHOD, label="Method",
                          on_change=self._changed),
                "",
                "wide",
            )  # fmt: skip

    # --- the request -------------------------------------------------------------------

    def request(self) -> BuildRequest:
        """The request that the fields describe.

        Raises:
            UsageError: a setting is missing or impossible.
        """
        how: How = self._how.value
        limit = self._limit.value
        settings: dict[str, Any] = {
            "source": self._source.value,
            "target": joined(self._target.value, self._also.value),
            "precision": self._precision.value,
            "batch": read_batch(self._batch.value or ""),
            "input": "uint8" if self._uint8.value else "float32",
            "budget": self._points.value,
            "data": self._judge.value,
            "lock": self._lock.value,
            "time_limit_s": None if limit in (None, "") else float(limit),
            **self._calibration(),
        }
        if how == "lock" and self._lock.value:
            settings |= followed(self._plans[self._lock.value])
        return requested(how, (self._name.value or "").strip(), **settings)

    def suggest(self, name: str) -> None:
        """Show the name that the plan gets if nobody types one."""
        if self._name.props.get("placeholder") != name:
            self._name.props["placeholder"] = name
            self._name.update()

    def _calibration(self) -> dict[str, Any]:
        """The settings of a calibration that differ from the usual ones."""
        if not self._calibrating.visible or not self._calibrate.value:
            return {}
        samples, method, split = self._samples.value, self._method.value, self._split.value
        count = None if samples in (None, "", USUAL_SAMPLES) else int(samples)
        return {
            "calibration": self._calibrate.value,
            "calibration_split": None if split == "train" else split,
            "calibration_samples": count,
            "calibration_method": None if method == USUAL_METHOD else method,
        }

    # --- fields that apply -------------------------------------------------------------------

    def _run_changed(self) -> None:
        """Offer the datasets that suit the chosen run."""
        if not self._ready:
            return
        self._ready = False
        run = self._source.value
        home = self._homes.get(run)
        names = {ref: d.info.name for ref, d in self._datasets.items()}
        judges = {r: n for r, n in names.items()
                  if self._datasets[r].classes == self._classes[run]
                  and "val" in self._datasets[r].info.splits}  # fmt: skip
        self._judge.set_options(judges, value=home if home in judges else next(iter(judges), None))
        first = home if home in names else next(iter(names), None)
        self._calibrate.set_options(names, value=first)
        self._ready = True
        self._dataset_changed()

    def _dataset_changed(self) -> None:
        if not self._ready:
            return
        chosen = self._datasets.get(self._calibrate.value or "")
        splits = list(chosen.info.splits) if chosen is not None else ["train"]
        usual = "train" if "train" in splits else splits[0]
        if list(self._split.options) != splits:
            self._split.set_options(splits, value=usual)
        self._changed()

    def _changed(self) -> None:
        """Show the fields that apply with their help, then call ``on_change``."""
        if not self._ready:
            return
        self._ready = False  # a field that is changed here must not come back
        how: How = self._how.value
        self._how_help.text = WAYS[how][1]
        chosen = joined(self._target.value, self._also.value).split(",")
        offered = precisions_for([t for t in chosen if t in TARGETS], how)
        value = self._precision.value if self._precision.value in offered else "fp32"
        shown = {p: "any" if how == "budget" and p == "fp32" else p for p in offered}
        if self._precision.options != shown or self._precision.value != value:
            self._precision.set_options(shown, value=value)
        budget = "The least exact that a layer may get."
        self._hint(self._precision, budget if how == "budget" else PRECISIONS[value][1])
        self._precision.props["label"] = "Least exact" if how == "budget" else "Precision"
        self._hint(self._method, METHODS[self._method.value])
        judge = self._datasets.get(self._judge.value or "")
        score = "the score" if judge is None else judge.info.task.score
        self._hint(self._points, f"Percentage points of {score}; 0: no answer may change.")
        self._points.set_visibility(how == "budget")
        self._judge.set_visibility(how == "budget")
        self._lock.set_visibility(how == "lock")
        for element in (self._target, self._precision, self._batch, self._also, self._uint8,
                        self._uint8_help, self._more):  # fmt: skip
            element.set_visibility(how != "lock")
        self._calibrating.set_visibility(self._calibrates(how, value))
        self._ready = True
        self._on_change()

    def _calibrates(self, how: How, precision: str) -> bool:
        if how == "lock":
            plan = self._plans.get(self._lock.value or "")
            if plan is not None:
                self._hint(self._lock, describe_followed(plan))
            return plan is not None and rounds(plan)
        return how == "one" and precision in ROUNDED

    def _hint(self, element: Element, help_: str) -> None:
        if element.props.get("hint") != help_:
            element.props["hint"] = help_
            element.update()
