"""Compiling kernels for a GPU that is not there, in a process whose Triton does not interpret.

``compile_all("tests.kernels.test_x:cases")`` calls ``cases()`` in another process, one for all
tests of this one. It yields (name, run) pairs; each ``run()`` launches kernels through ``launch``,
and all of them must be such that a plan can carry them. What comes back are, by name, the resources
and opcode counts of every launch.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
# SASS: tensor-core products by type, and which of them are sparse; bulk tensor copies in and out,
# products of the plain units, and what must not be there: local memory
OPCODES = (
    "HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA", "SP", "UTMALDG", "UTMASTG", "FFMA", "LDL", "STL",
)  # fmt: skip
ANSWER = "answer "  # what else a line begins with, a case has printed


def compile_all(cases: str, target: str = "sm_90") -> dict[str, list[dict[str, Any]]]:
    """By case: a list of {kernel, threads, registers, spilled_bytes, shared_bytes, opcodes}."""
    compiler = _compiler()
    try:
        answer = _asked(compiler, f"{cases} {target}")
    except BaseException:  # a test's time is over: the answer that still comes is nobody's
        _compiler.cache_clear()
        compiler.kill()
        compiler.wait()
        raise
    assert "error" not in answer, answer["error"]
    return answer["found"]


def _asked(compiler: subprocess.Popen[str], order: str) -> dict[str, Any]:
    assert compiler.stdin
    assert compiler.stdout
    print(order, file=compiler.stdin, flush=True)
    while line := compiler.stdout.readline():
        if line.startswith(ANSWER):
            return json.loads(line.removeprefix(ANSWER))
    raise AssertionError(f"the compiling process ended with {compiler.wait()}")


@functools.cache
def _compiler() -> subprocess.Popen[str]:
    """Kept, as importing torch takes seconds; it ends with this process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    given = environment.get("PYTHONPATH", "").split(os.pathsep)  # another Triton, for instance
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT), *filter(None, given)]
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.kernels.compile_only"],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)  # ends its input, and waits
    return process


def compiled(cases: str, target: str) -> dict[str, list[dict[str, Any]]]:
    from tessella.device.ahead_of_time import collecting
    from tessella.device.launch import compiling

    module, _, function = cases.partition(":")
    found: dict[str, list[dict[str, Any]]] = {}
    for name, run in getattr(importlib.import_module(module), function)():
        with compiling(target) as launches, collecting(target) as made:
            run()
        assert not made.left_out, "a plan could not carry it"
        assert made.compiled.wrong(target) is None, made.compiled.wrong(target)
        found[name] = [
            {**asdict(one.resources()), "opcodes": opcodes(one.sass())} for one in launches
        ]
    return found


def opcodes(sass: str) -> Counter[str]:
    """How often each of ``OPCODES`` stands in the machine code."""
    return Counter(op for op in re.findall(r"\b([A-Z0-9]+)\b", sass) if op in OPCODES)


def main() -> None:
    """Answer each line of the input, "module:function target", by one of JSON."""
    for line in sys.stdin:
        try:
            answer = {"found": compiled(*line.split())}
        except Exception:  # told to the test that asked
            answer = {"error": traceback.format_exc()[-4000:]}
        print(ANSWER + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
