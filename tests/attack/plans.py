"""Attacks on plans: bytes, words behind honest hashes, and compiled kernels, in plans of each kind.

A plan for a GPU is read here, and not run: its driver is another matter, see docs/plans.md.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessella.artifacts.plan import from_bytes, to_bytes
from tessella.core.compiled import CompiledKernel, CompiledKernels
from tessella.core.errors import TessellaError
from tessella.core.record import from_plain
from tests.support.plans.fuzz_plans import MUTATIONS, machine_code, outcome
from tests.support.plans.subjects import KINDS, good, subject

ROOT = Path(__file__).parents[2]
EVERY = (*KINDS, "cubins")


@functools.cache
def for_gpu() -> bytes:
    """A plan that says it is for a GPU, with kernels that were compiled for one."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")
        environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        subprocess.run(
            [sys.executable, "-m", "tests.support.kernels.ahead_of_time_only", str(out)],
            env=environment, cwd=ROOT, capture_output=True, check=True,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(out.read_text())
    compiled = CompiledKernels(
        kernels=tuple(from_plain(CompiledKernel, k, where="test") for k in found["kernels"]),
        cubins={h: base64.b64decode(text) for h, text in found["cubins"].items()},
    )
    made = good()
    there = replace(made.manifest.fingerprint, target="sm_90", arch="sm_90")
    manifest = replace(made.manifest, fingerprint=there)
    return to_bytes(replace(made, manifest=manifest, compiled=compiled))


def prepare() -> None:
    for kind in KINDS:
        assert outcome(subject(kind).content, subject(kind)) == "same"
    assert _read(for_gpu()) == "unrun"


def case(seed: int, index: int) -> tuple[str, Callable[[], str]]:
    """The mutant of this number: the same one for the same seed, of the same plan."""
    rng = random.Random(f"{seed}/{index}")
    kind = EVERY[index % len(EVERY)]
    compiled = kind == "cubins"
    mutation = machine_code if compiled and rng.random() < 0.8 else rng.choice(MUTATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name twice in a ZIP
        content = mutation(rng, for_gpu() if compiled else subject(kind).content)
    return f"{kind} {mutation.__name__}", functools.partial(
        _judged, content, None if compiled else kind
    )


def _judged(content: bytes, kind: str | None) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of odd shapes
        return _read(content) if kind is None else outcome(content, subject(kind))


def _read(content: bytes) -> str:
    try:
        plan = from_bytes(content)
        str(plan).encode()
        repr(plan).encode()
    except TessellaError as error:
        str(error).encode()
        return "refused"
    return "unrun"
