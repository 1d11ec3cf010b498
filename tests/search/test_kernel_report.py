"""Every kernel on one machine: what goes wrong is a row, and nothing private is in the file."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch

from tessella.core.architectures import is_gpu
from tessella.core.errors import CorruptArtifact, UnknownVersion, UsageError
from tessella.core.record import to_plain
from tessella.device.machine import aimed_at
from tessella.device.x86 import code
from tessella.kernels import catalog
from tessella.kernels.shared import onednn
from tessella.search.kernel_report import record, survey, trying
from tessella.search.kernel_report.privacy import Privacy
from tessella.search.kernel_report.problems import draw, problems_of
from tessella.search.kernel_report.process import Ended, Process
from tessella.search.kernel_report.record import DeviceReport, KernelReport, Row, read_report
from tessella.search.timing import Timing
from tests.support.kernels import planted, scripted_process

planted.unregister()  # importing it registers them, for the child processes

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernel-report.md"
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# of which there is no problem without a network, or none here
WITHOUT = {"cat.in_place", "user.operator", "fallback.aten", "reference"}
# of torch's operators, which a report does not try
OPERATORS = {"fallback.ranked", "fallback.gathered", "fallback.gridded"}


@pytest.mark.parametrize("target", ["cpu", "sm_75", "sm_89", "sm_90", "sm_120"])
def test_every_kernel_takes_one_of_the_problems(target: str) -> None:
    problems = problems_of(target)
    with aimed_at(target):
        missed = {
            row.id
            for row in catalog.KERNELS
            if row.runs_on(target)
            and not (row.isa and code.refusal(row.isa))
            and (row.source != "cusparselt" or torch.backends.cusparselt.is_available())
            and all(row.op != p.op or row.refusal(p) for p in problems.values())
        }
    assert missed == WITHOUT | (OPERATORS if is_gpu(target) else set()), (
        "give search/kernel_report/problems.py one that they take"
    )
    assert all(name.split()[0] == problem.op for name, problem in problems.items())


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_numbers_of_a_problem_are_as_it_says(target: str) -> None:
    for name, problem in problems_of(target).items():
        if max(meta.nbytes for meta in problem.given) > 4 << 20:
            continue
        constants, inputs = draw(problem, CPU)
        problem.require_constants(constants)
        if (weight := constants.get(1)) is not None and weight.dtype == torch.int8:
            assert weight.abs().max() == (onednn.NARROW if onednn.saturates() else 127)
        assert len(constants) + len(inputs) == len(problem.given), name
        rest = [m for i, m in enumerate(problem.inputs) if m and i not in problem.constant]
        for meta, tensor in zip(rest, inputs, strict=True):
            assert meta.matches(tensor), name


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    """A machine with names of its own; what must not be told."""
    home = tmp_path / "zebulon quill"
    home.mkdir()
    for name, value in {
        "HOME": str(home), "USER": "zebulon", "LOGNAME": "zebulon", "HOSTNAME": "quagga-07",
        "API_TOKEN": planted.SECRET,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "quagga-07.example")
    monkeypatch.syspath_prepend(ROOT)
    return ("zebulon", "quill", "quagga", planted.SECRET, str(tmp_path), str(ROOT), sys.prefix)


def surveyed(
    monkeypatch: pytest.MonkeyPatch, *ids: str, minutes: float = 20.0, stop_after: int = 999
) -> KernelReport:
    """A report of a few kernels; Ctrl-C is pressed after so many rows."""
    monkeypatch.setattr(catalog, "KERNELS", tuple(map(catalog.kernel, ids)))
    monkeypatch.setattr(survey, "LIMIT_S", {"cpu": 300.0, "cuda": 300.0})  # on a busy machine
    made, count = survey.Survey(minutes, [planted.__name__]), 0

    def changed() -> None:
        nonlocal count
        count += 1
        if count == stop_after:
            raise KeyboardInterrupt

    made.run(changed=changed)
    return made.report()


def test_what_goes_wrong_is_a_row_and_nothing_private_is_told(
    monkeypatch: pytest.MonkeyPatch, private: tuple[str, ...], tmp_path: Path
) -> None:
    with planted.registered():
        report = surveyed(monkeypatch, "relu.aten", "batch_norm.aten", "conv2d.cudnn", "neg.aten")
    cpu, gpu = report.devices
    rows = {row.kernel: row for row in cpu.rows}
    real = ("relu.aten", "batch_norm.aten", "neg.aten")
    assert rows.keys() == {*planted.IDS, *real}
    told = {id.partition(".")[0]: rows[id] for id in planted.IDS}
    assert told["relu"].outcome == "wrong"
    assert told["relu"].error is not None
    assert told["relu"].bound is not None
    assert told["relu"].error > told["relu"].bound
    assert (told["sigmoid"].outcome, told["sigmoid"].why) == ("crashed", "SIGILL when it ran")
    assert told["tanh"].outcome == "timed out"
    assert told["exp"].outcome == "failed"
    assert str(told["exp"].why).startswith("RuntimeError: <")
    assert (told["abs"].outcome, told["abs"].why) == ("failed", "out of memory")
    for id in real:  # those behind a crash are tried all the same
        assert rows[id].outcome == "right"
        assert rows[id].time_us
        assert rows[id].peer is None
    first, second = (row for row in cpu.rows if row.kernel == "neg.planted")
    assert (first.config, second.config) == ({"tile": 1}, {"tile": 2})
    for row in (first, second):
        assert (row.outcome, row.peer) == ("right", "neg.aten")
        assert row.time_us
        assert row.peer_us
        assert row.ratio == pytest.approx(row.peer_us / row.time_us, rel=1e-2, abs=5e-4)
    assert report.ended == "complete"
    assert cpu.left_out == ()
    assert cpu.chip is not None
    assert cpu.chip.arch.startswith(os.uname().machine)
    assert gpu.not_run == {gpu_reason(): ("conv2d.cudnn",)}
    text = json.dumps(to_plain(report), allow_nan=False)
    for word in private:
        assert word.lower() not in text.lower(), word
    path = tmp_path / "report.json"
    path.write_text(text)
    assert read_report(path) == report


def gpu_reason() -> str:
    return "no NVIDIA GPU is here" if torch.version.cuda else "this torch is built without CUDA"


def test_a_process_ends_itself_when_an_order_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    process = Process("cpu", [])
    assert isinstance(process.greeting(), dict)
    answer = process.ask("conv3d.aten", "conv3d float32", 0, limit_s=1e-3)
    assert isinstance(answer, Ended)
    assert not answer.in_time
    assert not process.is_alive


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch):
    """A report of two kernels of a GPU that is not here, by a process with these answers."""

    def on_gpu(answers, greets=scripted_process.greeting, **options):
        started: list[str] = []
        process = scripted_process.scripted(greets, answers, started)
        monkeypatch.setattr(survey, "Process", process)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        report = surveyed(monkeypatch, "matmul.tiled", "matmul.wgmma.sm90", **options)
        return report, started

    return on_gpu


def test_each_gpu_has_a_part(on_gpu) -> None:
    def answers(kernel: str, problem: str, place: int):
        return scripted_process.right(kernel, problem, configs=9, config={"place": place})

    report, started = on_gpu(answers)
    assert [device.device for device in report.devices] == started == ["cuda:0", "cuda:1", "cpu"]
    asked = [name for name, p in problems_of("sm_89").items() if p.op == "matmul"]
    for device in report.devices[:2]:
        rows = [(row.problem, row.config["place"]) for row in device.rows]
        assert rows[: len(asked)] == [(name, 0) for name in asked]  # further ones come last
        assert sorted(rows) == sorted((n, i) for n in asked for i in range(survey.CONFIGS))
        assert device.not_run == {"needs a GPU with tma and wgmma": ("matmul.wgmma.sm90",)}
    assert set(report.problems) == {"sm_89", "cpu"}
    assert "matmul batch float16" in report.problems["sm_89"]


def test_ctrl_c_keeps_what_is_known(on_gpu) -> None:
    report, started = on_gpu(lambda k, p, _: scripted_process.right(k, p), stop_after=2)
    first, *others = report.devices
    assert (report.ended, len(first.rows), started) == ("stopped", 2, ["cuda:0"])
    assert len(first.left_out) == sum(p.op == "matmul" for p in problems_of("sm_89").values()) - 2
    assert not any(device.rows or device.left_out for device in others)


def test_a_kernel_that_crashes_again_and_again_is_dropped(on_gpu) -> None:
    gone = {"gone": f"an illegal memory access in {Path.home()}/x"}
    report, started = on_gpu(lambda *_: gone)
    device = report.devices[0]
    assert [row.outcome for row in device.rows] == ["crashed"] * survey.STRIKES
    assert {row.why for row in device.rows} == {"an illegal memory access in <path>"}
    assert started.count("cuda:0") == survey.STRIKES  # whose GPU is lost gets another process
    (why,) = (why for why, kernels in device.not_run.items() if kernels == ("matmul.tiled",))
    assert "ended its process 2 times" in why
    assert device.left_out == ()


def test_a_kernel_whose_compiler_is_missing_is_not_run(on_gpu) -> None:
    report, _ = on_gpu(lambda *_: {"missing": "No module named 'triton'"})
    device = report.devices[0]
    assert device.rows == ()
    assert device.not_run["No module named 'triton'"] == ("matmul.tiled",)


def test_time_that_is_over_is_no_fault_of_a_kernel(on_gpu, monkeypatch) -> None:
    monkeypatch.setattr(survey, "LEAST_S", -600.0)  # begin whatever the clock says
    report, _ = on_gpu(lambda *_: Ended(why="it took long", in_time=False), minutes=1e-9)
    assert report.ended == "out of time"
    for device in report.devices[:2]:
        assert device.rows == ()
        assert device.left_out[0].startswith("matmul.tiled on matmul ")
    monkeypatch.setattr(survey, "LEAST_S", 1.0)
    report, started = on_gpu(lambda *_: Ended(why=""), minutes=1e-9)
    assert report.ended == "out of time"
    assert started == []


def test_a_process_that_does_not_end_is_told(on_gpu) -> None:
    stuck = Ended(why="it took too long when it ran", in_time=False, is_stuck=True)
    report, started = on_gpu(lambda *_: stuck)
    device = report.devices[0]
    assert [row.outcome for row in device.rows] == ["timed out"]
    assert "restart the machine" in str(device.trouble)
    assert device.left_out
    assert started.count("cuda:0") == 1


@pytest.mark.parametrize(
    ("greets", "starts", "trouble"),
    [
        (lambda: Ended(why="SIGILL when it started"), survey.STARTS, "no process starts: SIGILL"),
        (lambda: Ended(why="it took long", in_time=False), 1, "no process starts: it took long"),
        (lambda: scripted_process.greeting(None), 1, "older than all targets"),
    ],
)
def test_a_device_that_no_process_can_use_is_told(on_gpu, greets, starts, trouble) -> None:
    report, started = on_gpu(lambda *_: {}, greets)
    assert trouble in str(report.devices[0].trouble)
    assert started.count("cuda:0") == starts
    assert report.ended == "complete"


def test_a_peer_that_cannot_be_timed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(runs, **options):
        if len(runs) > 1:
            raise RuntimeError("it waits, which a graph cannot")
        return {name: Timing(time_us=2.0, spread_us=0.1) for name in runs}

    monkeypatch.setattr(trying, "measure", measure)
    doing: list[str] = []
    bench = trying.Bench("cpu", CPU, doing.append)
    row, _ = bench.try_kernel(catalog.kernel("max_pool2d.shifted"), "max_pool2d float32", 0)
    assert (row.outcome, row.time_us, row.peer, row.peer_us) == ("right", 2.0, None, None)
    assert doing[-2:] == ["when max_pool2d.aten ran beside it", "when it was timed"]


def test_words_are_hidden_and_ours_are_not(private: tuple[str, ...]) -> None:
    privacy = Privacy.of_this_machine()
    for text in (
        "cannot open /usr/lib/x.so.1: no such file", "see ~/notes/a.txt", r"C:\Users\me\a.txt",
        "write to someone@example.org", "run by Zebulon on QUAGGA-07.example",
    ):  # fmt: skip
        hidden = privacy.text(text)
        assert "<" in hidden
        assert not any(w in hidden.lower() for w in ("lib", "notes", "users", "@", "zeb", "quag"))
    for text in (
        "sm_86 has no fp8", "made torch.float32 (2, 3) instead of (2, 4)", "5.1e-3 of 1e-4",
        "writes C / groups channels", "SIGILL when it ran",
    ):  # fmt: skip
        assert privacy.text(text) == text
    assert privacy.text("two\nlines") == "two lines"
    assert privacy.text("not\udcff a letter").encode()
    assert len(privacy.text("long " * 1000)) < 500
    assert privacy.name("zebulon's own 64-core") == "<user>'s own 64-core"


EMPTY = KernelReport(
    tessella="0.1.0", date="2026-01-01", minutes=5.0, ended="complete", system="Linux", cores=1,
    memory_bytes=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "error", "told"),
    [
        ({"version": 99}, UnknownVersion, "version 99, this one reads 1"),
        ({"kind": "another"}, CorruptArtifact, "one of"),
        ({"devices": [{"rows": 3}]}, CorruptArtifact, "the report.devices"),
        ({"added": 1}, CorruptArtifact, "added"),
    ],
)
def test_a_file_that_is_no_report_is_refused(
    tmp_path: Path, changed: dict[str, object], error: type[Exception], told: str
) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(to_plain(EMPTY) | changed))
    with pytest.raises(error, match=told):
        read_report(path)


def test_a_file_that_is_not_there_or_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(UsageError, match="cannot be read"):
        read_report(path)
    path.write_text(json.dumps(to_plain(EMPTY)))
    assert read_report(path) == EMPTY
    monkeypatch.setattr(record, "MOST_BYTES", 10)
    with pytest.raises(UsageError, match="too large"):
        read_report(path)


def test_the_document_names_every_field() -> None:
    text = DOCUMENT.read_text()
    for kind in (KernelReport, DeviceReport, record.Chip, Row):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in text, f"{kind.__name__}.{field.name}"
