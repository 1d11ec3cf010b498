"""The evaluation page: its numbers against independent ones, and what can be clicked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from selenium.webdriver.common.by import By
from sklearn import metrics

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Run
from tessella.jobs import commands
from tessella.jobs.store import Store
from tessella.studio.workspace import best_checkpoint
from tests.support.cli import context
from tests.support.studio.browsing import choose, enter, fit, press, resize, see, series, until
from tests.support.studio.judgements import judgement_of, scores_of, write_judgement


@pytest.fixture(scope="module")
def judged(studio):
    """Reports of the first run alone, and of it beside the second; their scores."""
    data = Dataset(studio.root / "datasets" / "digits")
    first, second = (best_checkpoint(Run(studio.root / "runs" / n)) for n in ("first", "second"))
    truth_N, paths = data.val.labels, [e.path for e in data.val]
    ours = scores_of(truth_N, 4, sharp=1.5, seed=0)
    theirs = scores_of(truth_N, 4, sharp=0.3, seed=1)
    about = {"split": "val", "paths": paths}
    alone = judgement_of(ours, truth_N, data.classes, **about)
    both = judgement_of(ours, truth_N, data.classes, **about, rival_NK=theirs)
    write_judgement(studio.root, first, data.val, alone)
    write_judgement(studio.root, first, data.val, both, rival=second)
    yield ours, theirs, truth_N, second.path.relative_to(studio.root.resolve()).as_posix()
    shutil.rmtree(studio.root / ".studio" / "judgements")


def test_the_numbers_are_those_of_the_scores(client, judged):
    ours, theirs, truth, rival = judged
    page = client.get(f"/evaluate?run=runs/first&split=val&against={rival}").text
    right, other = ours.argmax(1) == truth, theirs.argmax(1) == truth
    count, hits = len(truth), int(right.sum())
    low = stats.beta.ppf(0.025, hits, count - hits + 1)
    high = stats.beta.ppf(0.975, hits + 1, count - hits)
    assert f"{100 * low:.2f} % to {100 * high:.2f} %" in page
    one, two = int((right & ~other).sum()), int((other & ~right).sum())
    p = min(1.0, 2 * stats.binom.cdf(min(one, two), one + two, 0.5))
    assert f'"{p:.3g}"' in page
    assert "by more than chance makes likely" in page
    chances = _chances(ours)
    sure = chances.max(1)
    bins = np.minimum(np.ceil(sure * 15).astype(int), 15)
    gaps = [abs(right[bins == b].sum() - sure[bins == b].sum()) for b in range(1, 16)]
    assert f"{100 * sum(gaps) / count:.2f} %" in page
    losses = -np.log(chances[np.arange(count), truth])
    assert f"loss {losses.max():.3g}" in page


def test_a_damaged_report_is_told(studio, client, judged):
    (file, *_) = sorted((studio.root / ".studio" / "judgements").iterdir())
    kept = {f: f.read_bytes() for f in file.parent.iterdir()}
    whole = json.loads(kept[file])
    changed = [
        whole | {"curves": whole["curves"][:2]}, whole | {"curves": [1] * 4},
        whole | {"measures": [1]}, whole | {"measures": {**whole["measures"], "loss": []}},
        whole | {"mistakes": [[]]}, whole | {"level": 10**400}, whole | {"report": [1]},
    ]  # fmt: skip
    bad = (b"{}", b"[1]", b"null", b'{"level": 0.95', b'{"level": 0.95, "measures": 3}')
    for content in (*bad, *(json.dumps(plain).encode() for plain in changed)):
        for path in kept:
            path.write_bytes(content)
        page = client.get("/evaluate?run=runs/first&split=val")
        assert page.status_code == 200
        assert "The report cannot be read" in page.text
        assert "Measure again" in page.text
        assert "Largest losses" not in page.text
    for path, content in kept.items():
        path.write_bytes(content)


def test_the_page_asks_what_the_command_does():
    spec = commands.judge("runs/a", "datasets/b", split="val", against="runs/c", errors=48)
    asked = context(spec.argv).params
    assert (asked["model"], asked["data"]) == (Path("runs/a"), Path("datasets/b"))
    assert (asked["split"], asked["against"], asked["errors"]) == ("val", Path("runs/c"), 48)
    assert not asked["trust_code"]


@pytest.mark.browser
def test_an_evaluation_is_looked_at_compared_and_started(studio, chromium, judged):
    ours, _, truth, _ = judged
    tiles = lambda: chromium.find_elements(By.CSS_SELECTOR, ".thumbs.flips .thumb")  # noqa: E731
    resize(chromium, 1280, 900)
    enter(chromium, studio, "/evaluate?run=runs/first&split=val")
    see(chromium, "Largest losses")
    until(lambda: series(chromium).get("measured", 0) > 3, what="the diagram of calibration")
    assert len(tiles()) == 48
    chromium.execute_script("[...document.querySelectorAll('.q-toggle')].at(-1).click()")
    worst = np.argsort(-_losses(ours, truth))[:48]
    wrong = int((ours[worst].argmax(1) != truth[worst]).sum())
    until(lambda: len(tiles()) == wrong, what="the wrong ones alone")
    average = metrics.average_precision_score(truth == 1, _chances(ours)[:, 1])
    choose(chromium, "Class", "one")
    see(chromium, f"average precision {average:.3f}\n")
    choose(chromium, "Compare with", "second (lenet)")
    see(chromium, "Compared, image by image")
    for width in (1280, 390):
        resize(chromium, width, 900)
        fit(chromium, width, "an evaluation")
    assert not chromium.find_elements(By.CSS_SELECTOR, "img[src='x']")

    enter(chromium, studio, "/evaluate?run=runs/second&split=val")
    press(chromium, "Measure")
    see(chromium, "Next in the queue")
    store = Store(studio.root / "jobs.db")
    (job,) = (j for j in store.jobs() if "evaluate" in j.argv)
    assert job.argv[2:6] == ("--data", "datasets/digits", "--split", "val")
    store.claim(job.id)
    store.settle(job.id, "failed", exit_code=1, error="the images have gone")
    see(chromium, "Not measured yet")
    see(chromium, "the images have gone")
    store.delete(job.id)
    store.close()


def _losses(scores_NK: np.ndarray, truth_N: np.ndarray) -> np.ndarray:
    return -np.log(_chances(scores_NK)[np.arange(len(truth_N)), truth_N])


def _chances(scores_NK: np.ndarray) -> np.ndarray:
    powers = np.exp(scores_NK.astype(float))
    return powers / powers.sum(1, keepdims=True)
