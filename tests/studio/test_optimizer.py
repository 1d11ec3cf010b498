"""The optimizer's pages in Chromium: forms show what applies, plans and runs are compared."""

from dataclasses import replace

import pytest
from selenium.webdriver.common.by import By

from tessella.artifacts.plan import load_plan
from tessella.jobs.store import Store
from tests.support.studio.browsing import (
    choose,
    enter,
    fill,
    fit,
    go,
    press,
    resize,
    see,
    series,
    shown,
    until,
)
from tests.support.studio.workspaces import CLASSES, make_run

pytestmark = pytest.mark.browser


def test_the_compile_form_shows_what_applies_and_its_command(studio, chromium):
    resize(chromium, 1366, 768)
    enter(chromium, studio, "/plan?source=runs/first")
    see(chromium, "tessella compile runs/first --out plans/first.plan --target cpu")
    assert not {"Points it may lose", "Calibrated with", "Plan to follow"} & shown(chromium)
    choose(chromium, "Precision", "int8")
    see(chromium, "--precision int8 --batch 1,8,32 --calibration datasets/digits")
    see(chromium, "A quarter of the memory; scales from calibration.")
    choose(chromium, "Method", "entropy")
    choose(chromium, "Split", "val")
    fill(chromium, "Images", "64")
    see(chromium, "--calibration-split val --calibration-samples 64 --calibration-method entropy")
    press(chromium, "Budget")
    until(lambda: "Points it may lose" in shown(chromium))
    until(lambda: "Calibrated with" not in shown(chromium))
    fill(chromium, "Points it may lose", "1.5")
    see(chromium, "--budget 1.5 --data datasets/digits --front plans/first-budget.front")
    press(chromium, "Like a plan")
    until(lambda: not {"Target", "Points it may lose"} & shown(chromium))
    choose(chromium, "Plan to follow", "small")
    see(chromium, "a precision for each layer, batch 1..8..8")
    see(chromium, "--precision fp32 --batch 1,8,8 --calibration datasets/digits")
    see(chromium, "--lock plans/small.plan")
    fit(chromium, 1366, "the form")


def test_a_plan_for_several_targets_shows_the_program_of_this_machine(studio, chromium):
    plan = load_plan(studio.root / "plans" / "digits.plan")
    gpu = replace(plan.manifest.fingerprint, target="sm_80", arch="sm_80")
    other = replace(plan, manifest=replace(plan.manifest, fingerprint=gpu, untuned=True))
    both = replace(plan, manifest=replace(plan.manifest, untuned=True), others=(other,))
    path = both.save(studio.root / "plans" / "several.plan")
    try:
        enter(chromium, studio, "/plan?plan=plans/several.plan")
        see(chromium, "This is its program for cpu; it has others for sm_80, untuned.")
        see(chromium, "tessella tune plans/several.plan")
        see(chromium, "cpu, sm_80")
        fill(chromium, "Also for", "sm_80")
        see(chromium, "--target cpu,sm_80 --precision fp32")
    finally:
        path.unlink()


def test_a_point_of_the_front_is_opened_and_kept(studio, chromium):
    resize(chromium, 1366, 768)
    enter(chromium, studio, "/plan?plan=plans/small.plan")
    until(lambda: {"chosen", "float32", "another plan"} <= set(series(chromium)))
    flips = until(lambda: chromium.find_elements(By.CSS_SELECTOR, ".flips img"), what="pictures")
    assert len(flips) == 2
    chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", flips[0])
    until(lambda: all(f.get_property("naturalWidth") == 28 for f in flips), what="their loading")
    link = chromium.find_element(By.CSS_SELECTOR, "a[href*='small.front%2F0.plan']")
    chromium.execute_script("arguments[0].click()", link)
    see(chromium, "Keep this plan as")
    fill(chromium, "Keep this plan as", "kept")
    press(chromium, "Save")
    until(lambda: "kept.plan" in chromium.current_url, what="the kept plan")
    kept = studio.root / "plans" / "kept.plan"
    assert kept.read_bytes() == (studio.root / "plans" / "small.front" / "0.plan").read_bytes()
    kept.unlink()


def test_two_plans_are_compared_step_by_step(studio, chromium):
    resize(chromium, 1366, 768)
    enter(chromium, studio, "/diff?a=plans/digits.plan&b=plans/small.plan")
    see(chromium, "Every step is the same.")
    see(chromium, "signal to noise: features.conv1")
    switch = chromium.find_element(By.CSS_SELECTOR, ".q-toggle")
    switch.click()
    see(chromium, "classifier")
    see(chromium, "tessella diff plans/digits.plan plans/small.plan")
    for width in (1366, 2560):
        resize(chromium, width, 900)
        fit(chromium, width, "the difference")


def test_a_sweep_is_counted_queued_and_compared(studio, chromium):
    resize(chromium, 1366, 768)
    enter(chromium, studio, "/train")
    fill(chromium, "Name of the run", "swept")
    switch = until(
        lambda: next(
            (t for t in chromium.find_elements(By.CSS_SELECTOR, ".q-toggle")
             if t.is_displayed() and t.text.startswith("Sweep")), None,
        ),
        what="the switch",
    )  # fmt: skip
    chromium.execute_script("arguments[0].click()", switch)
    until(lambda: "Learning rates" in shown(chromium))
    fill(chromium, "Learning rates", "0.1, 0.01")
    fill(chromium, "Batch sizes", "32, 64")
    see(chromium, "4 trainings, queued")
    press(chromium, "Start 4 trainings")
    until(lambda: "/compare?group=swept" in chromium.current_url, what="the comparison")
    see(chromium, "swept-lr0.01-b64")
    see(chromium, "waiting")
    store = Store(studio.root / "jobs.db")
    jobs = [j for j in store.jobs() if j.group == "swept"]
    assert {j.name for j in jobs} == {
        f"swept-lr{lr}-b{size}" for lr in ("0.1", "0.01") for size in (32, 64)
    }
    # one of them begins: it appears with its curve, and leads
    make_run(studio.root / "runs" / "swept-lr0.01-b64", dataset="datasets/digits", epochs=3)
    until(lambda: series(chromium).get("swept-lr0.01-b64") == 3, what="its curve")
    first = chromium.find_element(By.CSS_SELECTOR, "table.t tbody tr").text
    assert first.startswith("swept-lr0.01-b64")
    press(chromium, "Abort all")
    see(chromium, "aborted")
    store.close()


def test_names_in_a_front_and_a_comparison_stay_text(studio, chromium):
    enter(chromium, studio, "/plan?plan=plans/small.plan")
    press(chromium, "Refused: 1")
    see(chromium, f"conv1 in {CLASSES[2]}")
    go(chromium, studio, "/diff?a=plans/digits.plan&b=plans/small.plan")
    see(chromium, "Step by step")
    assert not chromium.find_elements(By.CSS_SELECTOR, "img[src='x']")
