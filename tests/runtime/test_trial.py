"""Trials: a plan with operators of torch runs first in a child that may end; others do not."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tessella import runtime
from tessella.artifacts.plan import Plan
from tessella.core.errors import ArtifactError
from tessella.server import Server
from tessella.server.repository import Repository
from tests.support.plans.linear import linear_plan
from tests.support.plans.subjects import good

Load = Callable[..., runtime.Engine]


@pytest.fixture
def tried(tmp_path: Path) -> Load:
    """``load_tried`` with a memory of its own."""
    return functools.partial(runtime.load_tried, folder=tmp_path / "cache")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return good().save(tmp_path / "tiny.plan")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started."""

    def start(*args: Any, **named: Any) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr(subprocess, "run", start)


def dying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Python's children do this when they start."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import os, sys\n{how}\n")
    monkeypatch.syspath_prepend(folder)


def test_a_plan_that_passes_is_not_tried_again(
    tried: Load, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 1, 6, 6)
    with tried(path) as engine, runtime.load(path) as right:
        assert torch.equal(engine(x)["scores"], right(x)["scores"])
    monkeypatch.setattr(subprocess, "run", None)
    tried(path).close()
    other = replace(good(), manifest=replace(good().manifest, built_from="elsewhere"))
    with pytest.raises(TypeError):  # another plan is tried
        tried(other.save(path))


@pytest.mark.usefixtures("alone")
def test_our_own_kernels_need_no_trial(tried: Load, tmp_path: Path) -> None:
    tried(linear_plan().save(tmp_path / "linear.plan")).close()


def test_a_plan_that_ends_its_process(
    tried: Load, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server says so to who wanted it loaded, and goes on."""
    dying(tmp_path, monkeypatch, "os.kill(os.getpid(), 11)")
    with pytest.raises(ArtifactError, match=r"ended the process that tried it.*SIGSEGV"):
        tried(path)
    assert not (tmp_path / "cache").exists()
    with Server(Repository({}, folder=tmp_path, open_engine=tried)) as server:
        answer = httpx.post(f"{server.url}/v2/repository/models/tiny/load", timeout=60)
        assert answer.status_code == 500
        assert "SIGSEGV" in answer.json()["error"]
        assert httpx.get(f"{server.url}/v2/health/live").status_code == 200


def test_a_plan_that_does_not_end(
    tried: Load, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying(tmp_path, monkeypatch, "import time; time.sleep(60)")
    with pytest.raises(ArtifactError, match="does not end"):
        tried(path, trial_s=0.5)


def test_a_child_tells_what_is_wrong_with_a_plan(tried: Load, path: Path) -> None:
    plan: Plan = good()
    golden = {**plan.golden, "output.scores": plan.golden["output.scores"] + 1}
    with pytest.raises(ArtifactError, match="fails its self-test"):
        tried(replace(plan, golden=golden).save(path))
