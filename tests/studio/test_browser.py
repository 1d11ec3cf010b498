"""The pages in Chromium: they live, follow a run by its new points, and ask nobody else."""

import itertools
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from selenium.webdriver.common.by import By

from tessella.artifacts.run import Run
from tessella.core.events import EventLog, metric
from tessella.jobs import commands
from tessella.jobs.job import JobSpec
from tessella.jobs.store import Store
from tessella.studio.workspace import best_checkpoint
from tests.support.studio.browsing import (
    PAGES,
    alive,
    enter,
    fill,
    fit,
    go,
    press,
    resize,
    see,
    series,
    shown,
    traffic,
    until,
)
from tests.support.studio.workspaces import HOSTILE, make_run, write_evaluation, write_trace
from tests.support.training import write_dataset

pytestmark = pytest.mark.browser

SIZES = ((1366, 768), (2560, 1440), (420, 900))
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


def test_a_run_whose_dataset_was_moved_goes_on_with_it_where_it_lies_now(studio, chromium):
    path = studio.root / "runs" / "moved"
    make_run(path, dataset="datasets/before", epochs=2, steps=2, done=False)
    spec = commands.train(Run(path).recipe, "runs/moved", name="long")
    store = Store(studio.root / "jobs.db")
    stopped = store.submit(replace(spec, priority=3))
    store.abort(stopped.id)
    enter(chromium, studio, "/train?run=runs/moved")
    see(chromium, "tessella train lenet datasets/digits")
    go(chromium, studio, "/monitor?run=runs/moved")
    press(chromium, "Resume")
    job = until(lambda: next((j for j in store.jobs() if j.status == "waiting"), None))
    assert job.argv[:5] == ("train", "lenet", "datasets/digits", "--out", "runs/moved")
    assert job.argv[-1] == "--resume"
    assert (job.name, job.priority) == ("long", 3)
    store.abort(job.id)
    see(chromium, "aborted")
    press(chromium, "Resume")  # its command names the new place
    until(lambda: store.job(job.id).status == "waiting")
    for one in (job, stopped):
        if not store.job(one.id).ended:
            store.abort(one.id)
        store.delete(one.id)
        store.purge(one.id)
    store.close()
    shutil.rmtree(path)


def test_the_trash_asks_and_a_job_that_waits_offers_no_second_copy(studio, chromium):
    path = studio.root / "runs" / "old"
    make_run(path, dataset="datasets/digits", epochs=1, steps=2)
    resize(chromium, 1366, 768)
    enter(chromium, studio, "/monitor?run=runs/old")
    until(lambda: chromium.find_elements(By.CSS_SELECTOR, "[title='Delete this run']"))[0].click()
    press(chromium, "Move to the trash")
    see(chromium, "Empty the trash: frees")
    label = chromium.find_element(By.XPATH, "//button[contains(., 'Empty the trash')]").text
    press(chromium, label.splitlines()[-1])
    see(chromium, "1 thing of")
    assert not path.exists()
    assert list((studio.root / ".studio" / "trash").iterdir())
    press(chromium, "Delete for good")
    see(chromium, "The trash is empty")
    assert not list((studio.root / ".studio" / "trash").iterdir())

    store = Store(studio.root / "jobs.db")
    argv = ("import", "x", "--out", "datasets/new")
    job = store.submit(JobSpec(name="mine", kind="import", argv=argv))
    copy = "[title='Submit the same job again']"
    go(chromium, studio, f"/monitor?job={job.id}")
    until(lambda: chromium.find_elements(By.CSS_SELECTOR, "[title^='Name, priority']"))
    assert not chromium.find_elements(By.CSS_SELECTOR, copy)
    store.abort(job.id)
    until(lambda: chromium.find_elements(By.CSS_SELECTOR, copy))
    store.delete(job.id)
    store.purge(job.id)
    store.close()


def test_the_learning_rate_is_drawn_as_the_recipe_changes(studio, chromium):
    def curve() -> list:
        return chromium.execute_script(
            "const box = document.querySelector('.nicegui-echart');"
            "return getElement(Number(box.id.slice(1)))?.chart?.getOption()?.series[0].data ?? []"
        )

    enter(chromium, studio, "/train")
    until(lambda: len(curve()) == 200)
    see(chromium, "--solver adamw --lr 0.002 --policy onecycle")  # of few pictures, 32 a batch
    until(lambda: curve()[0] == [0, pytest.approx(0.002 / 25)])
    fill(chromium, "Batch size", "16")  # what nobody has touched follows the defaults
    see(chromium, "--solver adamw --lr 0.0014 --policy onecycle")
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


# Every text that a chart draws, as [text, left, top, right, bottom] on its canvas.
DRAWN = """
const out = [];
for (const box of document.querySelectorAll('.nicegui-echart')) {
  const chart = getElement(Number(box.id.slice(1)))?.chart;
  const texts = [];
  for (const e of chart?.getZr().storage.getDisplayList(true) ?? []) {
    if (!(e.style?.text) || e.ignore || e.invisible) continue;
    const r = e.getBoundingRect().clone();
    const m = e.getComputedTransform?.() ?? e.transform;
    if (m) r.applyTransform(m);
    texts.push([e.style.text, r.x, r.y, r.x + r.width, r.y + r.height]);
  }
  out.push({width: chart?.getWidth() ?? 0, height: chart?.getHeight() ?? 0, texts});
}
return out;
"""


def overlaps(a, b):
    """Whether two texts cover each other, by more than the room around letters."""
    across = min(a[3], b[3]) - max(a[1], b[1])
    along = min(a[4], b[4]) - max(a[2], b[2])
    return across > 2 and along > 2


def drawn_charts(chromium):
    """All charts of the page; no text of one is cut at an edge, or is a number's long tail."""
    charts = until(lambda: (found := chromium.execute_script(DRAWN)) and all(
        c["texts"] for c in found) and found, what="charts")  # fmt: skip
    for chart in charts:
        for text in chart["texts"]:
            assert text[1] > -2, text
            assert text[2] > -2, text
            assert text[3] < chart["width"] + 2, text
            assert text[4] < chart["height"] + 2, text
            assert not re.fullmatch(r"-?\d+\.\d{5,}.*", text[0]), text
    return charts


def assert_readable(chromium, count):
    """No text of a chart lies over another, is cut at an edge, or is a number's long tail."""
    charts = drawn_charts(chromium)
    for chart in charts:
        texts = chart["texts"]
        pairs = itertools.combinations(texts, 2)
        assert not [(a, b) for a, b in pairs if overlaps(a, b)][:3]
    assert sum(len(c["texts"]) for c in charts) >= count


@pytest.mark.parametrize("classes", [2, 20, 200])
def test_the_confusion_matrix_is_readable_at_1280_pixels(studio, chromium, classes):
    """Every name or every n-th, the numbers of 20 classes, no zeros, and the worst mistakes."""
    checkpoint = best_checkpoint(Run(studio.root / "runs" / "first"))
    words = itertools.cycle(("Norwegian", "American", "ice", "snow"))
    labels = [
        f"{word} forest cat number {i}" for i, word in zip(range(classes), words, strict=False)
    ]
    confusion = np.diag(np.arange(classes) + 101)
    confusion[0, 1] = confusion[classes - 1, 0] = 77
    write_evaluation(studio.root, checkpoint, labels, confusion)
    resize(chromium, 1280, 900)
    enter(chromium, studio, "/explore?run=runs/first")
    see(chromium, "Where it errs")
    fit(chromium, 1280, "the matrix")
    assert classes + 2 in series(chromium).values()
    assert_readable(chromium, 2 * min(classes, 33))
    drawn = [t[0] for c in chromium.execute_script(DRAWN) for t in c["texts"]]
    assert "0" not in drawn
    assert ("77" in drawn) == (classes < 200)
    see(chromium, f"{labels[-1]}\t{labels[0]}\t\n77")


def test_the_names_of_classes_are_whole_at_1280_pixels(studio, chromium):
    """Twenty long names have no room side by side; what differs in two of them is shown."""
    classes = 20
    names = tuple(f"a forest cat of Norway, number {i:02d}" for i in range(classes))
    counts = {"train": 40, "val": 20}
    folder = write_dataset(studio.root / f"datasets/cats{classes}", classes=names, **counts)
    resize(chromium, 1280, 900)
    enter(chromium, studio, f"/data?dataset=datasets/cats{classes}")
    see(chromium, "images in each, by split")
    (chart,) = drawn_charts(chromium)
    drawn = [text[0] for text in chart["texts"]]
    assert [d for d in drawn if d.startswith("a forest")] == [
        f"a forest ca…ber {i:02d}" for i in range(classes)
    ]
    shutil.rmtree(folder)  # other tests have the workspace, too


def test_charts_and_the_profile_are_whole_at_1280_pixels(studio, chromium):
    """An epoch of 3.3809… steps has a short label; a table shows its last column."""
    make_run(studio.root / "runs" / "odd", dataset="datasets/digits", epochs=3, steps=21)
    log = EventLog(studio.root / "runs" / "odd" / "events.jsonl")
    log(metric(71, 71 / 21, loss=0.123456789, lr=0.00123456789))
    log.close()
    layer = ("features.stage3.block2.conv1", "conv2d.onednn_blocked_avx512", "memory traffic")
    write_trace(studio.root, "plans/digits.plan", 8, [layer] * 20)
    resize(chromium, 1280, 900)
    enter(chromium, studio, "/monitor?run=runs/odd")
    until(lambda: series(chromium).get("loss"))
    assert_readable(chromium, 20)
    go(chromium, studio, "/plan?plan=plans/digits.plan")
    see(chromium, "Where the time goes")
    hidden = """
        return [...document.querySelectorAll('.table-box')]
          .map(e => e.scrollWidth - e.clientWidth).filter(n => n > 0)
    """
    assert chromium.execute_script(hidden) == []
