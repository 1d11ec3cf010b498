"""Compiling kernels for a GPU that is not there, in a process whose Triton does not interpret.

``compile_all("tests.kernels.test_x:cases")`` calls ``cases()`` in a fresh process. It yields
(name, run) pairs; each ``run()`` launches kernels through ``launch``, and all of them must be such
that a plan can carry them. What comes back are, by name, the resources and opcode counts of every
launch.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def compile_all(cases: str, target: str = "sm_90") -> dict[str, list[dict[str, Any]]]:
    """By case: a list of {kernel, threads, registers, spilled_bytes, shared_bytes, opcodes}."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_only", cases, target],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(cases: str, target: str) -> None:
    from tessella.kernels.carried import collecting
    from tessella.kernels.launch import compiling

    module, _, function = cases.partition(":")
    found: dict[str, list[dict[str, Any]]] = {}
    for name, run in getattr(importlib.import_module(module), function)():
        with compiling(target) as launches, collecting(target) as made:
            run()
        assert not made.left_out, "a plan could not carry it"
        assert made.compiled.wrong(target) is None, made.compiled.wrong(target)
        found[name] = [{**asdict(one.resources()), "opcodes": one.opcodes()} for one in launches]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
