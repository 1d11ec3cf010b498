"""Open networks that answer: beside a fresh command, bounded in number, ended when idle."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
from torch.testing import assert_close

from tessella.artifacts.checkpoint import Checkpoint, Position, save_checkpoint
from tessella.core.preprocess import encode
from tessella.nn import zoo
from tessella.studio import warm
from tessella.studio.quick import NoAnswer
from tessella.studio.warm import MOST_PROCESSES, Answers, Opened
from tests.support.studio.workspaces import CLASSES, RECORD, digits


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    network = zoo.network("lenet", classes=4, channels=1, size=(28, 28))
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("warm") / "checkpoint"
    save_checkpoint(
        path, network=network, preprocess=RECORD, labels=CLASSES,
        weights=zoo.build(network).state_dict(), metrics={}, position=Position(step=1, epoch=1.0),
    )  # fmt: skip
    (path.parent / "picture").write_bytes(encode(digits()[0][0]))
    return path


@contextlib.asynccontextmanager
async def ended(answers: Answers):
    """Processes that end with the test, also with one that fails: what pytest tells is readable."""
    try:
        yield answers
    finally:
        await answers.close()


def reference(checkpoint) -> torch.Tensor:
    """Probabilities in float64."""
    module = zoo.load(Checkpoint(checkpoint)).double()
    pixels = torch.from_numpy(RECORD((checkpoint.parent / "picture").read_bytes(), name="p")[None])
    with torch.no_grad():
        return module(pixels.double()).softmax(1)[0]


def test_one_process_answers_all_and_a_failure_is_no_end(checkpoint, tmp_path):
    """What it says is what the network says; the bad question costs it nothing."""
    picture = str(checkpoint.parent / "picture")
    opened = Opened(path=checkpoint, stamp=1)

    async def story():
        answers = Answers(tmp_path)
        started = time.perf_counter()
        first = await answers.ask(opened, {"image": picture, "top": 4})
        first_s = time.perf_counter() - started
        (pid,) = answers.pids()
        with pytest.raises(NoAnswer, match="no image here"):
            await answers.ask(opened, {"image": "nothing.png"})
        with pytest.raises(NoAnswer, match="not a request"):
            await answers.ask(opened, {"image": picture, "top": 10**9})
        folder = tmp_path / "layers"
        looked, _ = await asyncio.gather(
            answers.ask(opened, {"image": picture, "layers": str(folder)}),
            answers.ask(opened, {"image": picture, "top": 1}),
        )
        await answers.ask(opened, {"image": picture, "layers": str(folder), "layer": 2})
        with pytest.raises(NoAnswer, match="not a request"):
            await answers.ask(opened, {"image": picture, "layers": str(folder), "layer": -1})
        assert {f.name[:4] for f in folder.iterdir()} == {"0000", "0002"}
        started = time.perf_counter()
        assert await answers.ask(opened, {"image": picture, "top": 4}) == first
        took_s = time.perf_counter() - started
        assert answers.pids() == [pid]
        await answers.close()
        assert not psutil.pid_exists(pid)
        return first, looked, first_s / took_s

    first, layers, times = asyncio.run(story())
    expected = reference(checkpoint)
    found = {t["label"]: t["score"] for t in first["top"]}
    assert_close(
        torch.tensor([found[name] for name in CLASSES]).double(), expected, rtol=1e-5, atol=1e-6
    )
    assert layers["layers"][0]["name"] == layers["layer"]["name"] == "conv1"
    assert times > 2  # a fresh process takes 4 s, one that is open 0.1


def test_processes_are_few_and_a_killed_one_is_told(checkpoint, tmp_path):
    """Several people at once, one with what cannot be opened, and a process that is killed."""
    picture = {"image": str(checkpoint.parent / "picture")}
    opened = [Opened(path=checkpoint, stamp=stamp) for stamp in range(MOST_PROCESSES + 1)]
    missing = Opened(path=tmp_path / "none", stamp=0)
    pids: set[int] = set()

    async def story():
        async with ended(Answers(tmp_path)) as answers:
            asked = asyncio.gather(
                *(answers.ask(o, picture) for o in (*opened, missing)), return_exceptions=True
            )
            while not asked.done():
                pids.update(answers.pids())
                await asyncio.sleep(0.01)
            *found, refused = await asked
            assert all(answer == found[0] for answer in found)
            assert isinstance(refused, NoAnswer)
            assert "no model here" in str(refused)
            assert 1 <= len(answers.pids()) <= MOST_PROCESSES
            last = list(answers._open)[-1]
            os.kill(answers.pids()[-1], 9)  # memory ran out, say
            with pytest.raises(NoAnswer, match="ended"):
                await answers.ask(last, picture)
            assert await answers.ask(last, picture) == found[0]
            pids.update(answers.pids())

    asyncio.run(story())
    assert len(pids) > len(opened)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_an_answer_that_is_too_long_ends_its_process(tmp_path):
    """What is left of its line would be the answer to the next question."""
    process = warm._Process(Opened(path=tmp_path, stamp=0), tmp_path)

    async def story():
        process._child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "print('x' * 999); print('{}', flush=True); input(); input()",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=100,
        )  # fmt: skip
        with pytest.raises(NoAnswer, match="too long"):
            await process.ask({"image": "a.png"})
        assert process.ended

    asyncio.run(story())


def test_a_process_that_nobody_asks_ends(checkpoint, tmp_path):
    opened = Opened(path=checkpoint, stamp=0)

    async def story():
        async with ended(Answers(tmp_path, idle_s=0.1)) as answers:
            await answers.ask(opened, {"image": str(checkpoint.parent / "picture")})
            end = time.monotonic() + 60
            while answers.pids() and time.monotonic() < end:
                await asyncio.sleep(0.1)
            assert not answers.pids()

    asyncio.run(story())


def test_a_person_can_ask_in_a_terminal(checkpoint):
    asked = json.dumps({"image": str(checkpoint.parent / "picture"), "top": 2})
    done = subprocess.run(
        [sys.executable, "-m", "tessella", "ask", str(checkpoint)],
        input=f"{asked}\nnonsense\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    ready, answer, refused = map(json.loads, done.stdout.splitlines())
    assert ready == {"ready": str(checkpoint)}
    assert len(answer["top"]) == 2
    assert refused["wrong"] == "this is not a request"
