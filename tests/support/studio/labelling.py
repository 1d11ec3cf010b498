"""The studio's labelling tool of masks, as a person uses it in Chromium."""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt
from selenium.webdriver import Chrome
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.support.studio.browsing import until

Mask = npt.NDArray[np.uint8]


class Tool:
    """The open labelling tool, by the pixels of its picture."""

    def __init__(self, chromium: Chrome, size: int = 64) -> None:
        self.chromium, self.size = chromium, size
        self.svg = until(lambda: chromium.find_elements(By.CSS_SELECTOR, ".editor svg"))[0]
        chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", self.svg)

    def _move(self, chain: ActionChains, place: tuple[float, float]) -> None:
        """To a pixel of the picture, whatever part of it is seen and however large."""
        script = "const r = arguments[0].getBoundingClientRect(); return [r.left, r.top, r.width]"
        left, top, width = self.chromium.execute_script(script, self.svg)
        x, y = (v * width / self.size for v in place)
        chain.w3c_actions.pointer_action.move_to_location(round(left + x), round(top + y))

    def click(self, *places: tuple[float, float]) -> None:
        for place in places:
            chain = ActionChains(self.chromium, duration=20)
            self._move(chain, place)
            chain.click().perform()

    def drag(self, *places: tuple[float, float]) -> None:
        chain = ActionChains(self.chromium, duration=20)
        self._move(chain, places[0])
        chain.click_and_hold()
        for place in places[1:]:
            self._move(chain, place)
        chain.release().perform()

    def keys(self, *pressed: str) -> None:
        self.chromium.execute_script("arguments[0].focus()", self.svg)
        ActionChains(self.chromium).send_keys(*pressed).perform()

    def with_control(self, key: str) -> None:
        chain = ActionChains(self.chromium).key_down(Keys.CONTROL).send_keys(key)
        chain.key_up(Keys.CONTROL).perform()

    def shown(self) -> Mask:
        """Where the canvas shows something."""
        script = (
            "const c = document.querySelector('.editor canvas');"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "return Array.from({length: c.width * c.height}, (_, i) => d[4 * i + 3])"
        )
        return np.array(self.chromium.execute_script(script), np.uint8).reshape(
            self.size, self.size
        )

    def count(self) -> int:
        """How many patches are shown."""
        return cv2.connectedComponents((self.shown() > 0).astype(np.uint8))[0] - 1
