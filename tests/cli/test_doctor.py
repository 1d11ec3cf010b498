"""``tessella doctor --report``: a file is written whatever happens, and shown again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tessella.cli import doctor
from tessella.core.errors import TessellaError
from tessella.kernels import catalog
from tessella.search.kernel_report import survey
from tessella.search.kernel_report.process import Ended
from tessella.telemetry import gpus, readings
from tessella.telemetry.links import Link
from tests.support.cli import Tessella
from tests.support.kernels import scripted_process
from tests.support.nvml import H200, FakeNvml

ROWS = ("linear.tiled", "linear.skinny", "linear.onednn")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A machine with one GPU, whose kernels do what is written down."""

    def machine(answers) -> None:
        process = scripted_process.scripted(scripted_process.greeting, answers, [])
        monkeypatch.setattr(survey, "Process", process)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(catalog, "KERNELS", tuple(map(catalog.kernel, ROWS)))

    monkeypatch.chdir(tmp_path)
    return machine


def answers(kernel: str, problem: str, place: int):
    if kernel == "linear.skinny":
        return Ended(why="SIGSEGV when it ran")
    ratio = {"linear int8": 0.5, "linear bfloat16": 0.9}.get(problem, 2.0)
    best = 1.5 if problem == "linear bfloat16" and place else ratio
    return scripted_process.right(
        kernel, problem, configs=2, time_us=1.0, peer="linear.aten", peer_us=best, ratio=best
    )


def test_a_report_is_written_shown_and_read(tessella: Tessella, machine) -> None:
    machine(answers)
    said = tessella("doctor", "--report")
    assert said.code == 0, said.err
    assert "tessella-report.json" in said.err
    assert "kernels on cuda:0" in said.err
    lines = said.out.splitlines()
    assert lines[0] == "cuda:0: a GPU, sm_89"
    problems = json.loads(Path("tessella-report.json").read_text())["problems"]["sm_89"]
    asked = sum(name.startswith("linear ") for name in problems)
    gemm, _ = (line.split() for line in lines if line.startswith("gemm"))  # and the processor's
    # right in two configurations each; of skinny two crashes, and the rest is left
    assert gemm == ["gemm", str(2 * asked), "0", "0", "2", "0", "0", "1", "of", str(asked)]
    assert "  crashed: linear.skinny on linear 1024 rows float16: SIGSEGV when it ran" in lines
    assert any("not run: 1 kernel: ended its process 2 times" in line for line in lines)
    again = tessella("doctor", "--read")
    assert again.out == said.out
    read = tessella("doctor", "tessella-report.json", "--read", "--json")
    assert read.json == json.loads(Path("tessella-report.json").read_text())


def test_ctrl_c_writes_what_is_there(tessella: Tessella, machine) -> None:
    def stopped(kernel: str, problem: str, place: int):
        if problem == "linear int8":
            raise KeyboardInterrupt
        return answers(kernel, problem, place)

    machine(stopped)
    said = tessella("doctor", "mine/r.json", "--report")
    assert said.code == 130
    report = json.loads(Path("mine/r.json").read_text())
    assert report["ended"] == "stopped"
    assert report["devices"][0]["rows"]
    assert "left out:" in said.out


def test_a_machine_that_stops_leaves_a_file(tessella: Tessella, machine, monkeypatch) -> None:
    monkeypatch.setattr("tessella.cli.doctor.SAVED_S", 0.0)

    class Stopped(TessellaError):
        pass

    def frozen(kernel: str, problem: str, place: int):
        if problem == "linear int8":
            raise Stopped("the machine froze")
        return answers(kernel, problem, place)

    machine(frozen)
    assert tessella("doctor", "r.json", "--report").code == 1
    report = json.loads(Path("r.json").read_text())
    assert report["ended"] == "stopped"
    assert report["devices"][0]["rows"]


def test_what_a_stranger_wrote_moves_no_cursor(tessella: Tessella, machine) -> None:
    machine(answers)
    assert tessella("doctor", "r.json", "--report").code == 0
    assert tessella("doctor", "r.json", "--report").code == 0  # a report may be replaced
    report = json.loads(Path("r.json").read_text())
    report["devices"][0]["trouble"] = "[/red] \x1b]0;mine\x07 [bold]x"
    report["devices"][0]["chip"]["name"] = "a \x1b[2J chip"
    Path("r.json").write_text(json.dumps(report))
    said = tessella("doctor", "r.json", "--read").out
    assert "[/red] �]0;mine� [bold]x" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("r.json",), "add --report"),
        (("--report", "--read"), "give one of them"),
        (("file", "--report"), "no report"),
        (("--report", "--minutes", "0"), "--minutes is above zero"),
        (("--report", "--minutes", "nan"), "--minutes is above zero"),
        (("file/r.json", "--report"), "could not be written"),
        (("--read",), "the report cannot be read"),
    ],
)
def test_what_cannot_work_is_said_at_once(tessella: Tessella, machine, words, told) -> None:
    machine(lambda *_: pytest.fail("it began"))
    Path("file").write_text("")
    said = tessella("doctor", *words)
    assert said.code in (2, 4)
    assert told in said.err


def test_what_joined_gpus_should_take_at_least_is_told(
    tessella: Tessella, monkeypatch: pytest.MonkeyPatch
) -> None:
    """102.2 MB over 18 NVLinks of 25 GB/s: 227 µs once between two GPUs, either way."""
    monkeypatch.setattr(gpus, "nvml", FakeNvml(H200))
    one = readings.readings()
    two = dataclasses.replace(one, gpus=2 * one.gpus)
    monkeypatch.setattr(doctor.readings, "readings", lambda path: two)
    link = Link(first=0, second=1, nvlinks=18, pcie=None)
    monkeypatch.setattr(doctor, "gpu_links", lambda: (link,))
    told = tessella("doctor").out
    assert "all-reduce of 102 MB (a ResNet-50) over 2 GPUs, by a ring: 227 µs" in told
    assert "broadcast of 102 MB (a ResNet-50) over 2 GPUs, by a ring: 227 µs" in told
