"""What the quick starts on scattered digits share: COCO's JSON → dataset → run → plan → HTTP."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tessella import api
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.files import write_atomic
from tessella.core.device import default_target
from tessella.core.events import Emit, phase, progress
from tessella.data.importing import ImportSettings, import_images
from tessella.nn import zoo
from tessella.quickstart.scattered import write_scattered
from tessella.quickstart.workspace import measure_latency, prepare
from tessella.server import Server
from tessella.tasks import named
from tessella.tasks.finished import finished

HELD_OUT = 60  # pictures for validation

Answers = Sequence[Sequence[Mapping[str, Any]]]  # of each picture the things that were told


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What every such quick start measures.

    Attributes:
        agreement: fraction of the pictures for validation in which plan and checkpoint say the
            same; ``max_abs_diff``: the largest difference between two of their numbers.
        eager_ms, plan_ms: median latency from pixels to the answer, in interleaved rounds.
    """

    agreement: float
    max_abs_diff: float
    eager_ms: float
    plan_ms: float
    plan_bytes: int
    seconds: float
    train_seconds: float
    compile_seconds: float
    images: int
    target: str


@dataclass(frozen=True)
class Gone:
    """The way behind a quick start: what lies in the workspace, and what a server told.

    Attributes:
        plan_score: of the plan, in the task's score.
    """

    dataset: Dataset
    checkpoint: Checkpoint
    plan_score: float
    told: Answers
    measured: Measured


def go(
    workspace: Path,
    *,
    task: str,
    network: str,
    recipe: Mapping[str, Any],
    epochs: int,
    pictures: int,
    held_out: int,
    size: int,
    sides: tuple[int, int],
    query: str = "",
    emit: Emit,
) -> Gone:
    """The whole way in ``workspace``, where an earlier quick start is replaced.

    Args:
        size, sides: as ``write_scattered`` takes them.
        query: behind the address of a request, such as ``?top=11``.
    """
    started = time.perf_counter()
    prepare(workspace)
    emit(phase("digits", f"scattering real digits on {pictures + held_out} textures"))
    folder = workspace / "digits"
    train, val = write_scattered(folder, count=pictures, val=held_out, size=size, sides=sides)

    emit(phase("import", f"importing {train} as a dataset"))
    settings = ImportSettings(task=task, size=size, val_folder=val, name="digits")
    dataset = import_images(train, workspace / "datasets" / "digits", settings, emit=emit)

    emit(phase("train", f"training {network}"))
    begun = time.perf_counter()
    run = api.train(
        network, dataset, out=workspace / "runs" / "digits", epochs=epochs,
        val_interval=max(1, epochs // 8), emit=emit, **recipe,
    )  # fmt: skip
    train_seconds = time.perf_counter() - begun
    checkpoint = api.open_checkpoint(run)
    emit(phase("compile", f"compiling {checkpoint.path.name} for {default_target()}"))
    begun = time.perf_counter()
    plan = workspace / "plans" / "digits.plan"
    api.compile(run, batch=(1, 1, 8), emit=emit).save(plan)
    compile_seconds = time.perf_counter() - begun

    emit(phase("verify", "comparing the answers of plan and checkpoint"))
    verification = api.verify(plan, against=run, data=dataset, emit=emit)

    emit(phase("serve", "serving the plan and asking it over HTTP"))
    told = _told_over_http(workspace, task, plan, dataset, query, emit)

    emit(phase("measure", "measuring the latency of one picture"))
    module = finished(zoo.load(checkpoint), named(task).head, checkpoint.info.task.numbers)
    eager_ms, plan_ms = measure_latency(module, plan)
    measured = Measured(
        agreement=verification.agreement,
        max_abs_diff=verification.max_abs_diff,
        eager_ms=eager_ms,
        plan_ms=plan_ms,
        plan_bytes=plan.stat().st_size,
        seconds=time.perf_counter() - started,
        train_seconds=train_seconds,
        compile_seconds=compile_seconds,
        images=len(dataset.val),
        target=default_target(),
    )
    return Gone(dataset, checkpoint, verification.plan_score, told, measured)


def _told_over_http(
    workspace: Path, task: str, plan: Path, dataset: Dataset, query: str, emit: Emit
) -> Answers:
    """What a server of the plan tells of each picture for validation; the first one is drawn."""
    files = [workspace / "digits" / example.path for example in dataset.val]
    verb, told = named(task).answers.VERB, []
    address = f"/v2/models/digits/{verb}"
    with Server({"digits": plan}, port=0) as server, httpx.Client(base_url=server.url) as client:
        for index, file in enumerate(files):
            answer = client.post(address + query, content=file.read_bytes())
            answer.raise_for_status()
            told.append(answer.json()["predictions"][0])
            emit(progress(f"{verb} over HTTP", index + 1, len(files)))
        shown = client.post(f"{address}?draw=1", content=files[0].read_bytes())
        shown.raise_for_status()
    write_atomic(workspace / "drawn.png", shown.content)
    return told
