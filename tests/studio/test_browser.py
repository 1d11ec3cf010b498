"""The pages in Chromium: they live, follow a run by its new points, and ask nobody else."""

import json

import pytest
from selenium.webdriver.common.by import By

from tessella.core.events import EventLog, metric
from tests.support.studio.browsing import (
    PAGES,
    alive,
    enter,
    fill,
    fit,
    go,
    resize,
    see,
    series,
    shown,
    traffic,
    until,
)
from tests.support.studio.workspaces import HOSTILE, make_run

pytestmark = pytest.mark.browser

SIZES = ((1366, 768), (2560, 1440))
MOST_BYTES_A_POLL = 2_500


def test_every_page_fits_asks_only_this_machine_and_runs_no_name(studio, chromium):
    enter(chromium, studio)
    for path in PAGES:
        go(chromium, studio, path)
        for width, height in SIZES:
            resize(chromium, width, height)
            fit(chromium, width, path)
        assert not chromium.find_elements(By.CSS_SELECTOR, "img[src='x']")
    go(chromium, studio, "/data?dataset=datasets/digits")
    see(chromium, HOSTILE)
    asked, _ = traffic(chromium)
    outside = [u for u in asked if not u.startswith((studio.url, "data:", "blob:", "chrome"))]
    assert len(asked) > 50
    assert not outside
    errors = [e["message"] for e in chromium.get_log("browser") if e["level"] == "SEVERE"]
    assert not errors


def test_a_chart_still_drawn_for_a_wider_screen_does_not_widen_the_page(studio, chromium):
    resize(chromium, 1366, 768)
    enter(chromium, studio, "/monitor?run=runs/second")
    until(lambda: chromium.find_elements(By.CSS_SELECTOR, ".nicegui-echart canvas"))
    script = """
        const picture = document.querySelector(".nicegui-echart canvas").parentElement
        picture.style.width = "3000px"
        return document.documentElement.scrollWidth
    """
    until(lambda: chromium.execute_script(script) <= 1366, what="the page fitting")


def test_the_theme_follows_the_system_until_one_is_chosen(studio, chromium):
    def dark() -> bool:
        return "body--dark" in chromium.find_element(By.TAG_NAME, "body").get_attribute("class")

    resize(chromium, 1366, 768, "dark")
    enter(chromium, studio)
    until(dark)
    resize(chromium, 1366, 768, "light")
    until(lambda: not dark())
    toggle = chromium.find_element(By.CSS_SELECTOR, "[aria-label='Change theme']")
    toggle.click()  # light
    toggle.click()  # dark
    until(dark)
    until(lambda: "tessella_theme=dark" in chromium.execute_script("return document.cookie"))
    go(chromium, studio, "/train")
    until(dark)


def test_a_run_from_a_terminal_grows_by_its_new_points_only(studio, chromium):
    """10,000 points are there; what a look then brings must not depend on them."""
    path = studio.root / "runs" / "growing"
    make_run(path, dataset="datasets/digits", epochs=10, steps=1000, done=False)
    enter(chromium, studio, "/monitor?run=runs/growing")
    until(lambda: series(chromium).get("loss", 0) > 1000, what="the history")
    before = series(chromium)["loss"]
    assert before <= 1500
    traffic(chromium)
    log = EventLog(path / "events.jsonl")
    for step in range(10_000, 10_005):
        log(metric(step, step / 1000, loss=0.5, lr=0.001))
    until(lambda: series(chromium)["loss"] == before + 5, what="growth")
    carried: list[str] = []

    def arrived() -> bool:
        carried.extend(f for f in traffic(chromium)[1] if "studio.append" in f)
        return sum(f.count("10.00") for f in carried) >= 4

    until(arrived, what="the new points in the traffic")
    assert max(len(f) for f in carried) < MOST_BYTES_A_POLL
    log.close()


def test_a_run_that_goes_back_to_a_checkpoint_is_drawn_again(studio, chromium):
    path = studio.root / "runs" / "resumed"
    make_run(path, dataset="datasets/digits", epochs=2, steps=20, done=False)
    enter(chromium, studio, "/monitor?run=runs/resumed")
    until(lambda: series(chromium).get("loss") == 40)
    log = EventLog(path / "events.jsonl")
    log._file.write(json.dumps({"kind": "phase", "name": "resume", "step": 19, "time": 1.0}) + "\n")
    log(metric(20, 1.05, loss=0.7, lr=0.001))
    until(lambda: series(chromium).get("loss") == 21, what="a shorter curve")
    log.close()


def test_the_learning_rate_is_drawn_as_the_recipe_changes(studio, chromium):
    def curve() -> list:
        return chromium.execute_script(
            "const box = document.querySelector('.nicegui-echart');"
            "return getElement(Number(box.id.slice(1)))?.chart?.getOption()?.series[0].data ?? []"
        )

    enter(chromium, studio, "/train")
    until(lambda: len(curve()) == 200)
    see(chromium, "--solver adamw --lr 0.0028 --policy onecycle")
    until(lambda: curve()[0] == [0, pytest.approx(0.0028 / 25)])
    fill(chromium, "Batch size", "32")  # what nobody has touched follows the defaults
    see(chromium, "--solver adamw --lr 0.002 --policy onecycle")
    fill(chromium, "Learning rate", "0.015")
    until(lambda: curve()[0] == [0, 0.0006])
    fill(chromium, "Batch size", "64")
    see(chromium, "--batch-size 64 --solver adamw --lr 0.015 --policy onecycle")
    assert not any("--recipe" in line for line in shown(chromium))
    alive(chromium)


def test_a_hostile_name_stays_text_in_a_chart(studio, chromium):
    enter(chromium, studio, "/data?dataset=datasets/digits")
    until(lambda: series(chromium).get("train") == 4)
    chromium.execute_script(
        "const box = document.querySelector('.nicegui-echart');"
        "const chart = getElement(Number(box.id.slice(1))).chart;"
        "for (let i = 0; i < 4; i++)"
        "  chart.dispatchAction({type: 'showTip', seriesIndex: 0, dataIndex: i})"
    )
    chromium.execute_async_script("setTimeout(arguments[0], 300)")
    assert not chromium.find_elements(By.CSS_SELECTOR, "img[src='x']")
