"""Configurations compile in other processes, into Triton's cache; nobody waits for a dead one."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

from tessella.core.compiled import CompiledKernels
from tessella.device import listing
from tessella.kernels import catalog
from tessella.kernels.norm import batch
from tessella.nn import fused
from tessella.search import allowance as allowances
from tessella.search import compile_ahead as compilers
from tessella.search import find as search
from tessella.search import prefetch as prefetching
from tessella.search.allowance import Allowance, OutOfTime
from tessella.search.tuning import TimingCache
from tests.support.problems.convolutions import Case

ROW = catalog.kernel("conv2d.implicit_gemm")
CASE = Case(x=(1, 16, 8, 8), w=(16, 16, 3, 3), padding=1, dtype="float16", x_format="channels_last")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As in a process that has asked for nothing yet, with an empty cache."""
    monkeypatch.setattr(compilers, "_asked", {})
    monkeypatch.setattr(compilers, "_running", [])
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield
    compilers.end_compilers()


def requests(count: int) -> list[compilers.Request]:
    problem = CASE.problem
    return [(problem, ROW, config) for config in ROW.configs(problem)[:count]]


def test_the_cache_is_filled(tmp_path: Path) -> None:
    """Though one of the configurations crashes Triton's compiler, or is refused by it."""
    wanted = requests(4)
    crash = (wanted[0][0], ROW, {**wanted[0][2], "depth": 3})
    assert compilers.compile_ahead([*wanted, crash], "sm_90").wait(120)
    assert len(list(tmp_path.rglob("implicit_gemm.cubin"))) == 4
    assert compilers.compile_ahead(wanted, "sm_90").wait(0)  # not asked for again
    assert not any(compilers.crashed(one, "sm_90") for one in wanted)
    made = compilers.kernel_cache("sm_90")
    assert len({k.cubin for k in made._kernels.values() if k.name == "implicit_gemm"}) == 4


def compile_or_crash(request: dict[str, Any]) -> CompiledKernels:
    """Do as a request says; in a worker."""
    match request["does"]:
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            time.sleep(3600)
        case "refuse":
            raise ValueError("no such tile")
    return CompiledKernels()


def test_a_compiler_that_crashes_is_told_from_those_beside_it() -> None:
    """So is one that hangs; the others' answers come, and all processes end with the input."""
    does = ["compile", "crash", "compile", "refuse", "hang", "crash", *["compile"] * 6]
    program = (
        f"from tessella.search import compile_ahead as a; from {__name__} import compile_or_crash\n"
        "a.compile_one, a.LONGEST_S, a._cores = compile_or_crash, 3.0, lambda: 3\n"
        "a.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number, what in enumerate(does):
            request = json.dumps({"does": what, "target": "sm_90"})
            process.stdin.write(f"{number} {request}\n".encode())
        process.stdin.flush()
        answers = [pickle.load(process.stdout) for _ in does]
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert workers
        process.stdin.close()
        assert process.stdout.read() == b""  # no worker holds it
    told = {number: "crash" if crashed else made for number, _, made, crashed in answers}
    means = {"hang": "crash", "crash": "crash", "refuse": None, "compile": CompiledKernels()}
    assert told == {number: means[what] for number, what in enumerate(does)}
    deadline = time.monotonic() + 90
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_crashed_the_compiler_is_refused_and_not_compiled_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All configurations of a kernel but one, asked of a process that says that they crash."""
    problem, configs = CASE.problem, ROW.configs(CASE.problem)[:6]

    class Crashing:
        has_ended = False

        def end(self) -> None:
            """There is no process."""

        def ask(self, requests: list[str]) -> list[compilers.Future[compilers.Answered]]:
            made: list[compilers.Future[compilers.Answered]] = [
                compilers.Future() for _ in requests
            ]
            for number, future in enumerate(made):
                future.set_result(compilers.Answered(None, number > 0))
            return made

    monkeypatch.setattr(compilers, "_running", [Crashing()])
    row = replace(ROW, writes_out=False)
    compilers.compile_ahead([(problem, row, config) for config in configs], "sm_90").wait()
    searching = search.Search(problem, {}, "cpu", TimingCache(), search.SearchOptions(), None)
    searching._device, searching._target = torch.device("cuda"), "sm_90"
    called: list[Any] = []
    module = SimpleNamespace(bind=lambda *_, **config: called.append(config))
    monkeypatch.setattr(catalog.Kernel, "load", lambda _: module)
    monkeypatch.setattr(search, "own_inputs", lambda *_: [])
    made = [searching._prepare(row, config) for config in configs]
    assert called == [configs[0]]
    assert {one.refused for one in made[1:]} == {"crashed the compiler"}


def test_few_are_left_to_the_one_who_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "_Compilers", None)
    asked = compilers.compile_ahead(few := requests(compilers.FEW - 1), "sm_90")
    assert asked.wait(0)
    assert asked.left == few


def test_kernels_of_users_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "_Compilers", None)
    theirs = replace(ROW, id="conv2d.mine", source="user")
    wanted = [(problem, theirs, config) for problem, _, config in requests(8)]
    asked = compilers.compile_ahead(wanted, "sm_90")
    assert asked.wait(0)
    assert asked.left == wanted


def test_nobody_waits_for_a_process_that_died() -> None:
    done = compilers.compile_ahead(requests(5), "sm_90")
    compilers._running[0]._process.kill()
    assert done.wait(60)
    compilers._running[0]._process.wait()
    assert compilers._running[0].has_ended


# --- preselecting ahead ---------------------------------------------------------------------------


@pytest.fixture
def preselected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The problems whose candidates were selected, in order; each takes a second of a clock."""
    order: list[str] = []
    monkeypatch.setattr(allowances, "time", SimpleNamespace(monotonic=lambda: float(len(order))))

    class Search:
        def __init__(self, problem: Any, *_: Any, evidence: Any) -> None:
            self.name = problem

        def shortlist(self, rows: list[Any]) -> list[Any]:
            return [(row, {"shown": True}) for row in rows] if self.name == "shown" else []

        def unknown_rows(self) -> list[Any]:
            return [] if self.name == "known" else [ROW]

        def first_candidates(self, rows: list[Any]) -> list[Any]:
            return [(row, {}) for row in rows]

        def preselect(self, rows: list[Any]) -> list[Any]:
            order.append(self.name)
            return [(row, {"preselected": True}) for row in rows]

    monkeypatch.setattr(prefetching, "Search", Search)
    monkeypatch.setattr(prefetching, "torch_device", lambda target: torch.device("cuda"))

    def compiled(requests: list[Any], target: str) -> compilers.Compiling:
        COMPILED.extend((problem, config) for problem, _, config in requests)
        return compilers.Compiling([])

    COMPILED.clear()
    monkeypatch.setattr(prefetching, "compile_ahead", compiled)
    return order


COMPILED: list[Any] = []  # problems and configurations


def prefetch(names: list[str], seconds: float | None) -> tuple[prefetching.Prefetch, Allowance]:
    allowance = Allowance(seconds)
    options = search.SearchOptions(allowance=allowance)
    problems: Any = {name: (name, {}) for name in names}
    made = prefetching.Prefetch(problems, target="sm_90", cache=TimingCache(), options=options)
    return made, allowance


def test_some_problems_are_preselected_ahead_of_their_searches(preselected: list[str]) -> None:
    names = [f"p{i}" for i in range(prefetching.AHEAD + 4)]
    ahead, _ = prefetch(["known", *names], None)
    assert ahead.candidates("known") is None
    assert preselected == []
    for done, name in enumerate(names):
        assert ahead.candidates(name) == [(ROW, {"preselected": True})]
        assert preselected == names[: prefetching.AHEAD + done]
    assert ahead.candidates(names[0]) is None  # a search is held once


def test_what_others_have_shown_is_compiled_at_once_and_alone(preselected: list[str]) -> None:
    ahead, _ = prefetch(["shown", "p0"], None)
    assert dict(COMPILED) == {"shown": {"shown": True}, "p0": {}}
    assert ahead.candidates("shown") == [(ROW, {"shown": True})]
    assert preselected == ["p0"]  # meanwhile


def test_preselecting_counts_as_measuring_and_yet_something_is_measured(
    preselected: list[str],
) -> None:
    ahead, allowance = prefetch([f"p{i}" for i in range(30)], 3.0)
    assert ahead.candidates("p0")
    assert len(preselected) == 3  # when the third was done the time was over
    assert allowance.left_s == 0.0
    allowance.spend()  # the first measurement is made
    assert ahead.candidates("p1")  # was preselected
    assert ahead.candidates("p9") is None
    with pytest.raises(OutOfTime):
        allowance.spend()
    assert len(preselected) == 3


def list_and_compile() -> None:
    """A norm with its ReLU, forward and backward, found on tensors without numbers."""
    listed: dict[str, bytes] = {}
    batch.runs = lambda x: x.dim() == 4  # on a CPU, too

    def backend(graph: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        fused.fuse(graph)
        listed.update(fused.launches_of(graph, examples, "sm_90", "cpu"))
        return lambda *given: [given[0]]

    net = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU())
    image = torch.randn(2, 16, 4, 4).to(memory_format=torch.channels_last)
    torch.compile(net, backend=backend, dynamic=False)(image.requires_grad_())
    names = {listing.read(launch)[0].fn.__name__ for launch in listed.values()}
    assert names == {
        "moments_kernel", "statistics_kernel", "normalize_kernel", "gradient_sums_kernel",
        "parameters_kernel", "input_gradient_kernel",
    }, names  # fmt: skip
    compilers.start_compilers()
    started = list(compilers._running)
    assert compilers.compile_listed(listed, "sm_90").wait(120)
    assert compilers._running == started
    cached = compilers.known_launches().parent
    for name in names:  # where Triton looks before it compiles
        assert len(list(cached.rglob(f"{name}.cubin"))) == 1, name
    compilers.end_compilers()
    compilers._Compilers = None  # none is started for what is known
    assert compilers.compile_listed(listed, "sm_90").wait(0)


def test_what_a_pass_launches_is_compiled_once_on_a_machine() -> None:
    """In a process whose kernels are not interpreted."""
    program = f"from {__name__} import list_and_compile; list_and_compile()"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_compilers_that_are_ended_leave_nothing() -> None:
    """Neither a process nor an open file, which Python would warn of; even before it was ready."""
    compilers.start_compilers()
    (one,) = compilers._running
    compilers.end_compilers()
    assert compilers._running == []
    assert one.has_ended
    assert one._process.returncode == -signal.SIGKILL
    assert one._process.stdin.closed
    assert one._process.stdout.closed
    del one
    gc.collect()  # a warning of what is still open would be an error


def test_another_process_compiles_it(tmp_path: Path) -> None:
    """A launch that one compiles is waited for, and not compiled again."""
    known = tmp_path / "known" / "launch"
    known.parent.mkdir()
    with open(known.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(compilers._compile_known, b"no launch", "sm_90", known)
            with pytest.raises(TimeoutError):
                waiting.result(0.2)
            known.touch()
            fcntl.flock(lock, fcntl.LOCK_UN)
            waiting.result(60)
    with pytest.raises(pickle.UnpicklingError):
        compilers._compile_known(b"no launch", "sm_90", known.with_name("other"))
