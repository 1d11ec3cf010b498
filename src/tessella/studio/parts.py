"""The parts of pages: cards, empty states, numbers, commands, tables, pictures, form fields.

Text reaches the browser as text, attributes as attributes; the one place that writes HTML,
``table``, escapes every cell. So a class may be called ``<img onerror=…>``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TypeVar
from urllib.parse import urlencode

from nicegui import ui
from nicegui.element import Element
from nicegui.elements.mixins.text_element import TextElement
from nicegui.events import GenericEventArguments

from tessella.core.errors import TessellaError, UsageError
from tessella.studio.theme import text
from tessella.tasks import named, names

E = TypeVar("E", bound=Element)
PERCENT = {measure for name in names() for measure in named(name).charts.PERCENT}


def card(title: str = "", hint: str = "", *, tight: bool = False) -> Element:
    """A surface with an optional heading; used as ``with card(…):``, like the other parts."""
    section = ui.element("section").classes("card tight" if tight else "card")
    if title:
        with section, box("card-head"):
            text("h2", title)
            if hint:
                text("span", hint).classes("hint")
    return section


def box(classes: str) -> Element:
    """A ``div`` with CSS classes."""
    return ui.element("div").classes(classes)


def link(path: str, classes: str = "", **query: str) -> Element:
    """A link to another page of the studio."""
    element = ui.element("a").classes(classes)
    element.props["href"] = address(path, **query)
    return element


def address(path: str, **query: str | int) -> str:
    """A path of the studio with a query."""
    return f"{path}?{urlencode(query)}" if query else path


def picture(source: str, alt: str = "") -> Element:
    """An image by URL, loaded when it comes into view."""
    element = ui.element("img")
    element.props.update({"src": source, "alt": alt, "loading": "lazy", "decoding": "async"})
    return element


def empty(title: str, advice: str) -> Element:
    """The text of a place that has nothing to show yet, and what to do about it."""
    area = box("empty")
    with area:
        text("h2", title)
        text("p", advice)
    return area


def stats(values: Sequence[tuple[str, str]]) -> None:
    """Numbers in a row: (label, value)."""
    with box("stats"):
        for label, value in values:
            with box("stat"):
                text("b", value)
                text("span", label)


def note(content: str, kind: str = "") -> None:
    """A line that a person should read; kind ``warn`` or ``bad`` colours it."""
    text("div", content).classes(f"note {kind}")


def refused(error: TessellaError, advice: str) -> None:
    """Show why an artifact is missing or cannot be read; the page becomes a 404."""
    ui.context.client.status_code = 404
    with card("What went wrong"):
        message = str(error)
        note(message[:1].upper() + message[1:], "bad")
        text("p", advice).classes("muted")


def badge(status: str) -> TextElement:
    """A job's or run's state: running, done, failed, waiting, aborted."""
    return text("span", status).classes(f"badge {status}")


def show_status(shown: TextElement, status: str) -> None:
    """Bring a badge to another state."""
    if shown.text != status:
        shown.classes(remove=shown.text, add=status)
        shown.text = status


def field(element: E, classes: str = "") -> E:
    """Give a form's field the look that all of them share."""
    return element.props("outlined dense stack-label hide-bottom-space").classes(classes)


class Command:
    """The command line that does the same as the page, with a button that copies it.

    It runs in the workspace's folder as it stands; ``instead`` is shown while there is none.
    """

    def __init__(self, line: str = "", *, instead: str = "") -> None:
        self._instead = text("p", instead).classes("muted small")
        with box("command") as self._box:
            self._code = text("code", "")
            ui.button(icon="content_copy", on_click=self._copy, color=None).props(
                'flat dense size=sm aria-label="Copy the command"'
            )
        self.show(line)

    def show(self, line: str) -> None:
        """Show this line; an empty one hides the box: no command is shown that cannot run."""
        self._code.text = line
        self._box.set_visibility(bool(line))
        self._instead.set_visibility(bool(self._instead.text) and not line)

    def _copy(self) -> None:
        ui.clipboard.write(self._code.text)
        ui.notify("Copied", timeout=900)


def button(label: str, on_click: Callable[..., object], *, icon: str | None = None) -> ui.button:
    """The main button of a form; there is one."""
    return (
        ui.button(label, on_click=on_click, icon=icon, color=None)
        .props("unelevated")
        .classes("main")
    )


def plain_button(label: str, on_click: Callable[..., object], icon: str | None = None) -> ui.button:
    return ui.button(label, on_click=on_click, icon=icon, color=None).props("flat").classes("plain")


@contextmanager
def errors_shown() -> Iterator[None]:
    """Show an error that we raise to the user instead of only logging it."""
    try:
        yield
    except TessellaError as error:
        tell(error)


def tell(error: TessellaError) -> None:
    """Show an error at the foot of the page."""
    ui.notify(str(error), type="negative", multi_line=True, timeout=12_000, close_button="Close")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A table cell that is a bar: ``fraction`` of the column's width, with a text beside it.

    Attributes:
        inner: the part of the column's width that is drawn dark, if it has two parts.
    """

    fraction: float
    text: str
    inner: float | None = None


@dataclass(frozen=True, kw_only=True)
class Link:
    """A table cell that leads to another page of the studio."""

    to: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A table cell of several lines, the first in front."""

    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Column:
    title: str
    classes: str = ""  # r: to the right, m: monospaced


Cell = str | Bar | Link | Lines


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], marked: Sequence[bool] = ()
) -> None:
    """A table as one element, so that a plan of a thousand steps is one message to the browser."""
    head = "".join(f'<th class="{c.classes}">{escape(c.title)}</th>' for c in columns)
    body = "".join(
        f'<tr class="{"chosen" if marked and marked[i] else ""}">'
        + "".join(
            f'<td class="{c.classes}">{_cell(v)}</td>' for c, v in zip(columns, row, strict=True)
        )
        + "</tr>"
        for i, row in enumerate(rows)
    )
    html = f'<table class="t"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    ui.html(html, sanitize=True).classes("table-box")


def _cell(value: Cell) -> str:
    if isinstance(value, Link):
        return f'<a href="{escape(value.to)}">{escape(value.text)}</a>'
    if isinstance(value, Lines):
        first, *under = map(escape, value.lines)
        return first + "".join(f'<div class="muted">{line}</div>' for line in under)
    if isinstance(value, Bar):
        whole = _pixels(value.fraction)
        inner = whole if value.inner is None else min(whole, _pixels(value.inner))
        rest = f'<i class="rest" style="width:{whole - inner}px"></i>' if whole > inner else ""
        return (
            f'<div class="bar"><i style="width:{inner}px"></i>{rest}'
            f"<span>{escape(value.text)}</span></div>"
        )
    return escape(value)


def _pixels(fraction: float) -> int:
    return round(100 * min(1.0, max(0.0, fraction)))


class Track:
    """A progress bar with a line of text under it."""

    def __init__(self) -> None:
        self._width = "width:0%"
        self.box = box("stack").style("gap:6px")
        with self.box:
            with box("track"):
                self._fill = ui.element("div").style(self._width)
            self._text = text("span", "").classes("muted small num")

    def show(self, fraction: float, line: str) -> None:
        """Fill the bar to ``fraction`` (0 to 1) and write ``line`` under it."""
        self.box.set_visibility(True)
        width = f"width:{100 * min(1.0, max(0.0, fraction)):.1f}%"
        if width != self._width:
            self._width = width
            self._fill.style(replace=width)
        if line != self._text.text:
            self._text.text = line


def slider(label: str, least: float, most: float, step: float, value: float) -> ui.slider:
    """A slider; an answer that arrives while it still moves does not set it back."""
    element = ui.slider(min=least, max=most, step=step, value=value)
    element.LOOPBACK = False
    element.props["loopback"] = False
    element.props["aria-label"] = label
    return element


def drop_zone(
    title: str,
    hint: str,
    accept: str,
    on_sent: Callable[[str, str], Awaitable[None]],
    *,
    folders: bool = False,
) -> None:
    """A place to drop a file or click; calls ``on_sent(upload_id, file_name)`` when it has arrived.

    With ``folders`` it takes a folder, too, dropped or chosen: all of its files are one upload.

    The file goes through ``/api/uploads`` in chunks; the name is the browser's and is only shown.
    """
    with box("stack").style("gap:8px"):
        with box("drop") as zone:
            text("b", title)
            text("span", hint)
            chooser = ui.element("input").props('type="file"')
            chooser.props.update({"accept": accept, "aria-label": title})
        if folders:
            with box("row-line"):
                opener = plain_button("Choose a folder", lambda: None, "drive_folder_upload")
            opener.on("click", js_handler=f"() => studio.chooseFolder({chooser.id})")
            zone.on("drop", js_handler=f"(e) => studio.dropFolder(e, {chooser.id})")
        track = Track()
        track.box.set_visibility(False)
    chooser.on("change", js_handler="(e) => studio.upload(e.target, [...e.target.files])")
    zone.on("dragenter", js_handler="(e) => studio.mark(e, true)")
    zone.on("dragleave", js_handler="(e) => studio.mark(e, false)")
    zone.on("drop", js_handler="(e) => studio.mark(e, false)")
    detail = "(e) => emit(e.detail)"
    chooser.on(
        "sending",
        lambda e: track.show(
            e.args["sent"] / max(1, e.args["nbytes"]),
            f"{e.args['name']}: {nbytes(e.args['sent'])} of {nbytes(e.args['nbytes'])}",
        ),
        js_handler=detail,
    )

    async def arrived(event: GenericEventArguments) -> None:
        track.box.set_visibility(False)
        await on_sent(event.args["id"], event.args["name"])

    chooser.on("sent", arrived, js_handler=detail)
    chooser.on(
        "unsent",
        lambda e: ui.notify(f"{e.args['name']}: {e.args['error']}", type="negative"),
        js_handler=detail,
    )


def score(metric: str, value: float) -> str:
    """A metric's value for people: in percent where a task says so, as of accuracies."""
    return f"{100 * value:.2f} %" if metric.rpartition("/")[2] in PERCENT else f"{value:.4g}"


def metric_name(metric: str) -> str:
    """A metric's name for people: ``val/pixel_accuracy`` is ``val pixel accuracy``."""
    return metric.replace("/", " ").replace("_", " ")


def ago(moment: float) -> str:
    """How long ago a moment (seconds since 1970) was; nothing for 0."""
    seconds = time.time() - moment
    if not moment:
        return ""
    if seconds < 60:
        return "just now"
    for unit, size in (("day", 86_400), ("hour", 3600)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return f"{int(seconds // 60)} min ago"


def sides_of(written: str) -> tuple[int, int, int]:
    """``64`` or ``64x128x128`` as (slices, height, width).

    Raises:
        UsageError: it is neither.
    """
    first, _, rest = written.lower().replace("×", "x").partition("x")
    slices = size_of(first)[0]
    height, width = size_of(rest or first)
    return slices, height, width


def size_of(written: str) -> tuple[int, int]:
    """``224`` or ``224x320`` as (height, width).

    Raises:
        UsageError: it is neither.
    """
    numbers = [n.strip() for n in written.lower().replace("×", "x").split("x")]
    if len(numbers) in (1, 2) and all(
        re.fullmatch("[0-9]{1,5}", n) and 0 < int(n) <= 16_384 for n in numbers
    ):
        return int(numbers[0]), int(numbers[-1])
    raise UsageError("a size is one number or height x width", seen=written[:40], fix="224x320")


def noun_of(task: str) -> str:
    """What an example of a task is called."""
    return "volume" if named(task).volumes else "image"


def nbytes(size: float) -> str:
    """A size for people: 12 B, 3.4 MB."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def duration(seconds: float) -> str:
    """A time for people: 12 s, 3 min 20 s, 2 h 5 min."""
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
