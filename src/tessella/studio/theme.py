"""The frame around every page: the header with the steps, the workspace and the theme."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from tessella.core.version import VERSION

STATIC = Path(__file__).parent / "static"
# The documents as a site: a wheel has it inside, a checkout where ``make docs`` builds it.
SITE = next(
    (
        site
        for site in (Path(__file__).parent / "site", Path(__file__).parents[3] / "build" / "docs")
        if (site / "index.html").exists()
    ),
    None,
)

STEPS = (
    ("Data", "/data"),
    ("Train", "/train"),
    ("Monitor", "/monitor"),
    ("Explore", "/explore"),
    ("Plan", "/plan"),
    ("Serve", "/serve"),
)
RESPONSE_S = 60.0  # that a page may take to be built: a busy machine reads large plans slowly
_THEMES = {"auto": None, "light": False, "dark": True}
_ICONS = {"auto": "brightness_auto", "light": "light_mode", "dark": "dark_mode"}

# Colours the empty page before anything has loaded, so that dark does not start with a white flash.
_FIRST_PAINT = {
    "auto": "html{background:#f5f6f3}@media(prefers-color-scheme:dark){html{background:#121615}}",
    "light": "html{background:#f5f6f3}",
    "dark": "html{background:#121615}",
}


@contextmanager
def frame(title: str, subtitle: str, root: Path, *, step: str = "") -> Iterator[None]:
    """Everything around a page's content: ``with frame("Data", "…", workspace.root): …``.

    Args:
        step: the step of the header that the page belongs to, if it is not the title.
    """
    client = ui.context.client
    client.title = f"{title} · Tessella"
    chosen = client.request.cookies.get("tessella_theme", "auto")
    theme = chosen if chosen in _THEMES else "auto"
    ui.colors(primary="#128577", dark="#1a1f1d", dark_page="#121615")
    ui.add_head_html(
        f"<style>{_FIRST_PAINT[theme]}</style>"
        f'<link rel="stylesheet" href="/static/studio.css?v={VERSION}">'
        f'<script src="/static/studio.js?v={VERSION}"></script>'
    )
    _header(step or title, theme, root)
    with ui.element("main").classes("page"):
        with ui.element("div").classes("head"):
            with ui.element("div"):
                text("h1", title)
                text("p", subtitle)
        yield


def _header(title: str, theme: str, root: Path) -> None:
    with ui.element("header").classes("top"), ui.element("div").classes("top-inner"):
        with ui.element("a").classes("brand").props('href="/"'):
            ui.element("img").props('src="/static/logo.svg" alt=""')
            text("span", "Tessella")
        with ui.element("nav").classes("steps grow"):
            for number, (name, path) in enumerate(STEPS, 1):
                link = ui.element("a").classes("step").props(f'href="{path}"')
                if name == title:
                    link.classes("here").props('aria-current="page"')
                with link:
                    text("i", str(number))
                    text("span", name)
        with ui.element("div").classes("place"):
            ui.icon("folder_open", size="17px")
            text("span", root.name).classes("cut")
            ui.tooltip(str(root))
        if SITE is not None:
            ui.button("?", color=None).props(
                'flat round dense href="/site/index.html" target="_blank" '
                'aria-label="Documentation"'
            )
        _theme_button(theme)


def _theme_button(theme: str) -> None:
    dark = ui.dark_mode(_THEMES[theme])
    names = list(_THEMES)
    state = {"theme": theme}

    def change() -> None:
        state["theme"] = names[(names.index(state["theme"]) + 1) % len(names)]
        dark.value = _THEMES[state["theme"]]
        button.props(f"icon={_ICONS[state['theme']]}")
        tip.text = f"Theme: {state['theme']}"
        ui.run_javascript(f"studio.theme('{state['theme']}')")

    button = ui.button(icon=_ICONS[theme], on_click=change, color=None).props(
        'flat round dense aria-label="Change theme"'
    )
    with button:
        tip = ui.tooltip(f"Theme: {theme}")


def text(tag: str, content: str) -> TextElement:
    """An HTML element with text in it; the text is never read as HTML."""
    return TextElement(tag=tag, text=content)
