"""Scripts in every text that somebody else may have written: none runs in a real browser."""

import contextlib
import time
from urllib.parse import quote

import pytest
from selenium.webdriver.common.by import By

from tests.support.studio.browsing import alive, enter, resize, until
from tests.support.studio.hostile import ALL, MARK, SVG, make_hostile_workspace
from tests.support.studio.served import serve, stop

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

LEAST_SHOWN = 300  # texts with a script that are in sight: else this test would prove little

# Open what opens, and hover over every point of every chart.
STIR = """
for (const e of document.querySelectorAll('.q-expansion-item .q-item, .q-select')) e.click();
for (const box of document.querySelectorAll('.nicegui-echart')) {
  const chart = getElement(Number(box.id.slice(1)))?.chart;
  (chart?.getOption()?.series ?? []).forEach((s, seriesIndex) => {
    for (let dataIndex = 0; dataIndex < Math.min(4, s.data.length); dataIndex++)
      chart.dispatchAction({type: 'showTip', seriesIndex, dataIndex});
  });
}
for (const e of document.querySelectorAll('input[type=file]'))
  e.dispatchEvent(new CustomEvent('unsent', {detail: {name: arguments[0], error: arguments[0]}}));
"""
COUNT = """
const found = document.evaluate("count(//text()[contains(., 'localStorage.ran')])"
  + " + count(//@*[contains(., 'localStorage.ran')])", document, null, 1, null);
return found.numberValue;
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    root = tmp_path / "work"
    root.mkdir()
    pages = make_hostile_workspace(root, monkeypatch)
    process, served = serve(root, scheduler=False)
    yield served, pages
    stop(process)


def ran(chromium):
    return chromium.execute_script(f"return {MARK} ?? null")


def test_no_stored_script_runs(hostile, chromium):
    studio, pages = hostile
    resize(chromium, 1366, 900)
    enter(chromium, studio)
    # the mark works: as an image of ours, the script would run
    chromium.execute_script(f"document.body.innerHTML += '<img src=x onerror={MARK}=0>'")
    until(lambda: ran(chromium) == "0")
    chromium.execute_script(f"delete {MARK}")

    shown = 0
    for page in pages:
        chromium.get(studio.url + quote(page, safe="/?=&"))
        alive(chromium)
        chromium.execute_script(STIR, ALL)
        time.sleep(0.2)  # what runs late, runs in here
        assert ran(chromium) is None, page
        shown += int(chromium.execute_script(COUNT))
        links = chromium.execute_script(
            "return [...document.querySelectorAll('[href], [src], [action]')]"
            ".map(e => e.getAttribute('href') ?? e.getAttribute('src') ?? '')"
        )
        assert not [link for link in links if link.strip().lower().startswith("javascript:")]
        assert not chromium.find_elements(By.CSS_SELECTOR, "img[src='x']"), page
    print(f"{len(pages)} pages, {shown} scripts in sight")
    assert shown > LEAST_SHOWN
    open_pictures_alone(chromium, studio)


def open_pictures_alone(chromium, studio):
    """Open an SVG, and HTML under a picture's name, by their addresses."""
    upload = {}
    with contextlib.closing(studio.client()) as client:
        for name, content in (("a.svg", SVG), ("<b>.png", f"<html>{ALL}</html>")):
            about = {"name": name, "nbytes": len(content)}
            upload[name] = client.post("/api/uploads", params=about).json()["id"]
            url = f"/api/uploads/{upload[name]}"
            client.put(url, params={"offset": 0}, content=content.encode())
    for path in (
        "/pictures/own/networks/ab/network.svg",
        *(f"/pictures/upload/{u}" for u in upload.values()),
        f"/pictures/resize?source=upload:{upload['a.svg']}&height=8&width=8&mode=squash",
        f"/pictures/example?dataset={quote(ALL)}&split=val&index=0",
        f"/api/uploads/{quote(ALL, safe='')}",
        f"/{quote(ALL)}",
    ):
        chromium.get(studio.url + path)
        time.sleep(0.2)
        chromium.get(f"{studio.url}/static/logo.svg")  # a place with the same storage
        assert ran(chromium) is None, path
