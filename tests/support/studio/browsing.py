"""What browser tests do again and again: open, find by words, wait, read charts and traffic."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from PIL import Image
from selenium.common.exceptions import (
    JavascriptException,
    StaleElementReferenceException,
    WebDriverException,
)
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.support.studio.served import Served

T = TypeVar("T")
PICTURES = Path(__file__).parents[3] / "docs" / "images"
MOST_PICTURE_BYTES = 300_000


def enter(chromium: Chrome, studio: Served, path: str = "/") -> None:
    """Open a page with the token, as a person does first, and wait until it lives."""
    chromium.get(f"{studio.url}/?token={studio.token}")
    go(chromium, studio, path)


def go(chromium: Chrome, studio: Served, path: str) -> None:
    chromium.get(studio.url + path)
    alive(chromium)


def alive(chromium: Chrome) -> None:
    """Wait for the page's socket: before that, clicks lead nowhere."""
    until(lambda: chromium.execute_script("return window.socket?.connected === true"))
    until(lambda: chromium.find_elements(By.CSS_SELECTOR, "main.page"))


def until(condition: Callable[[], T], seconds: float = 60.0, what: str = "it") -> T:
    """Wait until ``condition`` returns something true; return that.

    An element that was drawn again in the meantime is asked for once more. Looking takes the page
    and its driver work, which jobs that are waited for would do: it becomes rarer.
    """
    end, problem, pause_s = time.monotonic() + seconds, "", 0.1
    while time.monotonic() < end:
        try:
            if found := condition():
                return found
        except (StaleElementReferenceException, JavascriptException) as error:
            problem = f": {error.msg}"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.5)
    raise AssertionError(f"{what} did not happen in {seconds:.0f} s{problem}")


def see(chromium: Chrome, words: str, seconds: float = 60.0) -> None:
    """Wait until the page shows these words."""

    def shown() -> bool:
        return words in chromium.execute_script("return document.body.innerText")

    until(shown, seconds, f"seeing {words!r}")


def button(chromium: Chrome, label: str) -> WebElement:
    """A button, or what can be pressed like one, with this line on it."""

    def found() -> WebElement | None:
        pressable = "button, .q-expansion-item__container > .q-item"
        for element in chromium.find_elements(By.CSS_SELECTOR, pressable):
            if element.is_displayed() and label in element.text.splitlines():
                return element
        return None

    return until(found, what=f"a button {label!r}")


def press(chromium: Chrome, label: str) -> None:
    """Click a button; again, if it was moving or drawn anew just then."""

    def pressed() -> bool:
        found = button(chromium, label)
        try:
            chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
            found.click()
        except WebDriverException:
            return False
        return True

    until(pressed, what=f"pressing {label!r}")


def field(chromium: Chrome, label: str) -> WebElement:
    """The field with this label, in the middle of the screen."""
    script = """
        return [...document.querySelectorAll('.q-field input')]
          .find(f => f.ariaLabel === arguments[0] && f.closest('.q-field').offsetParent)
    """
    found = until(lambda: chromium.execute_script(script, label), what=f"a field {label!r}")
    chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    return found


def fill(chromium: Chrome, label: str, value: str) -> None:
    """Type into the field with this label."""
    found = field(chromium, label)
    found.send_keys(Keys.CONTROL, "a")
    found.send_keys(value)
    found.send_keys(Keys.TAB)
    wanted = {value, f"{value}.0"}  # a number field may write 5 as 5.0
    until(lambda: found.get_attribute("value") in wanted, what=f"{label!r} being {value!r}")


def choose(chromium: Chrome, label: str, option: str) -> None:
    """Choose from the drop-down with this label, and wait until it has closed."""
    script = "arguments[0].closest('.q-field').click()"
    chromium.execute_script(script, field(chromium, label))

    def menus() -> list[WebElement]:
        return chromium.find_elements(By.CSS_SELECTOR, ".q-menu .q-item")

    def taken() -> bool:
        for item in menus():
            try:
                if item.text == option:
                    item.click()
                    return True
            except WebDriverException:  # it is moving, or was drawn anew: look again
                return False
        return False

    until(taken, what=f"an option {option!r}")
    until(lambda: not menus(), what=f"the choice of {label!r} closing")


def shown(chromium: Chrome) -> set[str]:
    """The labels of the fields that are in sight."""
    script = """
        return [...document.querySelectorAll('.q-field')].filter(f => f.offsetParent)
          .map(f => f.querySelector('.q-field__label')?.textContent)
    """
    return set(chromium.execute_script(script))


def series(chromium: Chrome) -> dict[str, int]:
    """How many points each line of each chart on the page has, by name."""
    return chromium.execute_script(
        """
        const counts = {};
        for (const box of document.querySelectorAll('.nicegui-echart')) {
          const chart = getElement(Number(box.id.slice(1)))?.chart;
          for (const s of chart?.getOption()?.series ?? []) counts[s.name] = s.data.length;
        }
        return counts;
        """
    )


def traffic(chromium: Chrome) -> tuple[list[str], list[str]]:
    """Since the last call: addresses that were asked for, and what came through the socket."""
    asked, received = [], []
    for entry in chromium.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.append(message["params"]["request"]["url"])
        elif message["method"] == "Network.webSocketFrameReceived":
            received.append(message["params"]["response"]["payloadData"])
    return asked, received


def resize(chromium: Chrome, width: int, height: int, theme: str = "light") -> None:
    """A screen of this size on a system in this theme."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": theme}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def fit(chromium: Chrome, width: int, page: str) -> None:
    """Wait until nothing reaches beyond the screen: charts follow its size a moment later."""
    script = "return document.documentElement.scrollWidth"
    until(lambda: chromium.execute_script(script) <= width, what=f"{page} fitting into {width}")


def take_picture(chromium: Chrome, name: str) -> None:
    """Write a picture for the README: few colours, so that it stays small."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.png"
    chromium.save_screenshot(str(path))
    image = Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    assert path.stat().st_size < MOST_PICTURE_BYTES


PAGES = (
    "/",
    "/data",
    "/data?dataset=datasets/digits",
    "/data?like=datasets/digits",
    "/image?dataset=datasets/digits&split=val&index=79",
    "/train",
    "/train?dataset=datasets/digits&run=runs/first",
    "/search",
    "/search?sweep=sweeps/rates",
    "/search?like=sweeps/rates",
    "/monitor",
    "/monitor?run=runs/second",
    "/explore",
    "/explore?run=runs/first",
    "/evaluate",
    "/evaluate?run=runs/first&split=val",
    "/plan",
    "/plan?plan=plans/digits.plan",
    "/plan?source=runs/first",
    "/plan?like=plans/digits.plan",
    "/plan?plan=plans/small.plan",
    "/plan?plan=plans/small.front/0.plan",
    "/diff",
    "/diff?a=plans/digits.plan&b=plans/small.plan",
    "/serve",
    "/compare",
    "/compare?run=runs/first&run=runs/second",
    "/trash",
)
