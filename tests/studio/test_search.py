"""The search page: a sweep as JSON, the form's command, and the plot and the table in Chromium."""

from __future__ import annotations

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By

from tessella.artifacts.files import to_document
from tessella.artifacts.sweep import Axis, TrialList, note_all, note_trial, open_sweep
from tessella.core.errors import ArtifactError
from tessella.jobs import commands
from tessella.jobs.store import Store
from tessella.studio import workspace
from tests.support.cli import context
from tests.support.studio.browsing import enter, fill, fit, press, resize, see, until
from tests.support.studio.workspaces import HOSTILE, make_sweep

NUMBERS = """
return [...document.querySelectorAll('table.t tbody tr')].map(r => Number(r.dataset.number))
"""


def test_the_list_of_trials_survives_a_kill_and_refuses_damage(tmp_path):
    made = make_sweep(tmp_path / "s", 12)
    one = replace(made.trials[3], state="failed", error="killed")
    note_trial(tmp_path / "s", one)
    file = tmp_path / "s" / "trials.jsonl"
    with file.open("ab") as half:
        half.write(b'{"number": 7, "sta')
    found = {t.number: t for t in TrialList(tmp_path / "s").read()}
    assert found == {t.number: t for t in made.trials} | {one.number: one}
    assert open_sweep(tmp_path / "s")[1].trials[-1].state == "failed"
    for line in (b"[1]\n", b'{"number": "a"}\n', b'{"number": 1, "state": "odd"}\n', b"\xff\n"):
        file.write_bytes(line)
        with pytest.raises(ArtifactError):
            TrialList(tmp_path / "s").read()


@pytest.mark.parametrize(
    ("name", "value"),
    [("number", 10**300), ("number", -1), ("seconds", 1e308), ("seconds", -0.5),
     ("seconds", 10**4000), ("validations", -1)],
    ids=lambda v: str(v)[:12],
)  # fmt: skip
def test_numbers_that_no_trial_has_are_told_as_damage(studio, client, name, value):
    folder = studio.root / "sweeps" / "strange"
    made = make_sweep(folder, 3)
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    changed = [{**line, name: value} for line in lines]
    (folder / "trials.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    try:
        with pytest.raises(ArtifactError):
            TrialList(folder).read()
        page = client.get("/search?sweep=sweeps/strange")
        assert page.status_code == 404
        assert "What went wrong" in page.text
        assert client.get("/api/sweep", params={"ref": "sweeps/strange"}).status_code == 400
        note_all(folder, made.trials)
        assert client.get("/search?sweep=sweeps/strange").status_code == 200
    finally:
        shutil.rmtree(folder)


def test_a_sweep_that_many_ask_for_at_once_is_read_once(tmp_path, monkeypatch):
    make_sweep(tmp_path / "s", 3)
    read = []

    def slowly(path, known):
        read.append(path)
        time.sleep(0.1)
        return open_sweep(path, known)

    monkeypatch.setattr(workspace, "open_sweep", slowly)
    found = []
    askers = [
        threading.Thread(target=lambda: found.append(workspace.read_sweep(tmp_path / "s")))
        for _ in range(4)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert read == [tmp_path / "s"]
    assert len({id(sweep) for sweep in found}) == 1


def test_the_trials_as_json_and_what_has_not_changed(studio, client):
    folder = studio.root / "sweeps" / "growing"
    made = make_sweep(folder, 40)
    told = client.get("/api/sweep", params={"ref": "sweeps/growing"}).json()
    assert [t[0] for t in told["trials"]] == [t.number for t in made.trials]
    assert [a["path"] for a in told["axes"]][:2] == ["solver.lr", "batch_size"]
    assert told["axes"][0]["importance"] == 0.7
    assert told["percent"] is True
    for row, trial in zip(told["trials"], made.trials, strict=True):
        assert row[1:3] == [trial.state, trial.score]
        assert row[6] == list(trial.values.values())
    asked = {"ref": "sweeps/growing", "known": told["stamp"]}
    assert client.get("/api/sweep", params=asked).status_code == 204
    note_trial(folder, replace(made.trials[0], number=40, score=0.999))
    assert client.get("/api/sweep", params=asked).json()["trials"][0][:3] == [40, "complete", 0.999]
    for ref in ("../../etc", "sweeps/none", "runs/first"):
        refused = client.get("/api/sweep", params={"ref": ref})
        assert refused.status_code == 400
        assert refused.json()["error"]
    shutil.rmtree(folder)


def test_trials_are_not_runs_beside_others(client):
    page = client.get("/monitor?run=sweeps/rates/trial-0023")
    assert page.status_code == 200
    assert client.get("/explore?run=sweeps/rates/trial-0023").status_code == 200
    assert "trial-0023" not in client.get("/").text
    assert "What went wrong" not in page.text


def test_the_form_asks_what_the_command_does():
    vary = {"solver.lr": "1e-4..1e-2 log", "network": "resnet18, timm/vit"}
    more = {"settings": {"ema": 0.9}, "gpus": 2}
    spec = commands.search("lenet", "-odd", "sweeps/a", vary=vary, trials=7, epochs=2.5, **more)
    asked = context(spec.argv).params
    assert dict(v.split("=", 1) for v in asked["vary"]) == vary
    assert (asked["network"], asked["dataset"], asked["trials"]) == ("lenet", Path("-odd"), 7)
    assert (asked["epochs"], asked["sampler"], asked["pruner"]) == (2.5, "tpe", "asha")
    assert json.loads(spec.files["recipe.json"]) == {"ema": 0.9}
    assert Path(asked["recipe"]).name == "recipe.json"
    assert (spec.kind, spec.gpus, spec.resume_argv) == ("sweep", 2, ("--resume",))


@pytest.mark.browser
def test_a_search_is_watched_sorted_narrowed_and_started(studio, chromium):
    folder = studio.root / "sweeps" / "watched"
    made = make_sweep(folder, 30)
    best = made.best
    shutil.copytree(studio.root / "sweeps/rates" / f"trial-{best.number:04d}",
                    folder / f"trial-{best.number:04d}")  # fmt: skip
    numbers = lambda: chromium.execute_script(NUMBERS)  # noqa: E731
    resize(chromium, 1366, 900)
    enter(chromium, studio, "/search?sweep=sweeps/watched")
    until(lambda: numbers() == [t.number for t in made.trials], what="the best first")
    see(chromium, f"{100 * best.score:.2f} %\nbest val accuracy")
    press(chromium, "solver.lr")
    by_rate = sorted(made.trials, key=lambda t: -t.values["solver.lr"])
    until(lambda: numbers() == [t.number for t in by_rate], what="the highest rate first")

    svg = chromium.find_element(By.CSS_SELECTOR, ".parallel svg")
    axis = chromium.find_elements(By.CSS_SELECTOR, ".parallel .axis line")[-1]
    x, y1, y2 = (float(axis.get_attribute(n)) for n in ("x1", "y1", "y2"))
    middle = [d / 2 for d in (svg.size["width"], svg.size["height"])]
    at = lambda y: (svg, round(x - middle[0]), round(y - middle[1]))  # noqa: E731
    chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", svg)
    drag = ActionChains(chromium).move_to_element_with_offset(*at(y1)).click_and_hold()
    drag.move_to_element_with_offset(*at(y1 + 0.3 * (y2 - y1))).release().perform()
    scores = [t.score for t in made.trials if t.score is not None]
    least = max(scores) - 0.3 * (max(scores) - min(scores))
    kept = {t.number for t in made.trials if t.score is not None and t.score > least + 0.005}
    until(lambda: kept <= set(numbers()) and len(numbers()) < 20, what="the best alone")
    see(chromium, "trials are in the marked ranges")

    note_trial(folder, replace(best, number=30, score=0.999))
    until(lambda: 30 in numbers(), what="a new trial")
    assert not chromium.find_elements(By.CSS_SELECTOR, "img[src='x']")
    for width in (1366, 390):
        resize(chromium, width, 900)
        fit(chromium, width, "a search")
    resize(chromium, 1366, 900)

    enter(chromium, studio, "/search?sweep=sweeps/rates")
    press(chromium, "Train longer")
    until(lambda: "/train" in chromium.current_url)
    see(chromium, "--epochs 12")

    enter(chromium, studio, "/search?dataset=datasets/digits")
    fill(chromium, "Name", "started-here")
    fill(chromium, "Trials", "5")
    see(chromium, "--out sweeps/started-here")
    press(chromium, "Start the search")
    see(chromium, "Next in the queue")
    store = Store(studio.root / "jobs.db")
    (job,) = (j for j in store.jobs() if j.kind == "sweep")
    assert job.argv[:3] == ("sweep", "resnet18", "datasets/digits")
    assert job.argv[job.argv.index("--trials") + 1] == "5"
    store.abort(job.id)
    store.delete(job.id)
    store.close()
    shutil.rmtree(folder)


def test_a_form_like_a_sweep_has_its_settings(client):
    page = client.get("/search?like=sweeps/rates").text
    assert "--vary 'solver.lr=0.0001..0.1 log'" in json.loads(f'"{_escaped(page)}"')
    assert HOSTILE not in page


def test_a_form_like_a_sweep_names_its_own_settings_and_exact_values(studio, client):
    folder = studio.root / "sweeps" / "deep"
    make_sweep(folder, 2)
    info = open_sweep(folder)[0]
    axes = (
        Axis(path="network_options.depth", choices=(2, None, True, 0.1)),
        Axis(path="seed", low=1234567, high=2345678),
        Axis(path="label_smoothing", low=0.12345678, high=0.3),
        Axis(path="nothing.such", low=1, high=2),
        Axis(path="network_options.a=b", low=1, high=2),
    )
    content = to_document("sweep", 1, replace(info, axes=axes))
    (folder / "sweep.json").write_bytes(content)
    try:
        page = client.get("/search?like=sweeps/deep")
    finally:
        shutil.rmtree(folder)
    assert page.status_code == 200
    command = json.loads(f'"{_escaped(page.text)}"')
    for wanted in ("'network_options.depth=2, null, true, 0.1'", "seed=1234567..2345678",
                   "label_smoothing=0.12345678..0.3"):  # fmt: skip
        assert f"--vary {wanted}" in command
    assert command.count("--vary") == 3
    assert "no such setting: nothing.such, network_options.a=b." in page.text


def _escaped(page: str) -> str:
    """The text of the first command in a page, as its JSON has it."""
    begin = page.index("tessella sweep")
    return page[begin : page.index('"', begin)]
