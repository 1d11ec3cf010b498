"""Pictures that ask for much, sent over HTTP: refused within a budget, and nobody else waits."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from tessella.core.confined import Budget
from tessella.server import Limits, Server
from tests.support.engines import RECORD, Scores, expected_scores, repository
from tests.support.pictures.encoded import png
from tests.support.pictures.hostile import PROMISES, exif_of, good_pictures, peak_bytes, scans_of

GOOD = good_pictures()
PATH = "/v2/models/flowers/classify"


@pytest.mark.parametrize(("what", "content", "why"), PROMISES, ids=[p[0] for p in PROMISES])
def test_what_promises_much(http: httpx.Client, what: str, content: bytes, why: str) -> None:
    before, start = peak_bytes(), time.perf_counter()
    answer = http.post(PATH, content=content)
    assert answer.status_code == 400
    assert why in answer.json()["error"]
    assert peak_bytes() - before < 100 << 20
    # it answers in 0.1 s, but its decoding process takes seconds to start on a busy machine
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("kind", GOOD)
def test_every_format_has_the_scores_of_its_pixels(http: httpx.Client, kind: str) -> None:
    answer = http.post(f"{PATH}?top=4", content=GOOD[kind])
    (found,) = answer.json()["predictions"]
    scores = expected_scores(RECORD(GOOD[kind])[None])[0]
    assert [p["score"] for p in found] == pytest.approx(sorted(scores)[::-1], rel=1e-4)


def test_tags_that_share_their_bytes(http: httpx.Client) -> None:
    before = peak_bytes()
    assert http.post(PATH, content=exif_of(5_000, 60_000)).status_code == 200
    assert peak_bytes() - before < 100 << 20


def test_a_budget_is_kept_and_told_while_others_are_answered() -> None:
    slow, large = scans_of(2_048, 8_000), png(8_192, 8_000, 8, 2, b"")
    limits = Limits(image=Budget(nbytes=128 << 20, seconds=1.0))
    with (
        Server(repository({"flowers": Scores()}, limits=limits), limits=limits) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.post(PATH, content=GOOD["gif"]).status_code == 200  # a process is there
        answers: list[httpx.Response] = []

        def attack() -> None:
            answers.append(httpx.post(f"{server.url}{PATH}", content=slow, timeout=60))

        threads = [threading.Thread(target=attack) for _ in range(5)]
        before = peak_bytes()
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        for _ in range(5):
            assert http.post(PATH, content=GOOD["jpeg"]).status_code == 200
        assert len(answers) < len(threads)  # at most 4 processes work on 5 × 1 s
        for thread in threads:
            thread.join()
        assert {a.status_code for a in answers} == {400}
        assert all("takes longer than 1 s to decode" in a.json()["error"] for a in answers)
        told = http.post(PATH, content=large)
        assert told.status_code == 400
        assert "takes more than 134,217,728 bytes to decode" in told.json()["error"]
        assert http.post(PATH, content=GOOD["gif"]).status_code == 200
        assert peak_bytes() - before < 100 << 20
