"""Compiling kernels for a GPU that is not there, in a process whose Triton does not interpret.

``compile_all("tests.kernels.test_x:cases")`` calls ``cases()`` in another process, one for all
tests of this one. It yields (name, run) pairs; each ``run()`` launches kernels through ``launch``,
which must be such that a plan can carry them, must not write where a product still reads
(``overwritten``), and must not leave barriers where something else may come (``barriers``). What
comes back are, by name, the resources and opcode counts of every launch.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton

ROOT = Path(__file__).parents[3]
# SASS: tensor-core products by type, and which of them are sparse; bulk tensor copies in and out,
# products of the plain units, and what must not be there: local memory
OPCODES = (
    "HGMMA", "IGMMA", "QGMMA", "HMMA", "IMMA", "SP", "UTMALDG", "UTMASTG", "FFMA", "LDL", "STL",
)  # fmt: skip
INSTRUCTION_BYTES = 16
# What ptxas 12.8 leaves of a product whose result it takes for a constant: of a loop of products
# that begins with zeros and whose sum is negated. The answers are wrong then.
LEFT_OUT = re.compile(r"GMMA\S* RZ, gdesc\[URZ\]")
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
    from tessella.device.launch import Launched, compiling
    from tests.support.kernels.barriers import left_valid
    from tests.support.kernels.overwritten import overwritten

    module, _, function = cases.partition(":")
    made_by: dict[str, list[Launched]] = {}
    for name, run in getattr(importlib.import_module(module), function)():
        with compiling(target) as launches, collecting(target) as made:
            run()
        assert not made.left_out, "a plan could not carry it"
        assert made.compiled.wrong(target) is None, made.compiled.wrong(target)
        assert not (places := [told for one in launches for told in overwritten(one)]), places
        assert not (left := [told for one in launches for told in left_valid(one)]), left
        made_by[name] = launches
    cubins = [one.compiled.asm["cubin"] for launches in made_by.values() for one in launches]
    counts = iter(opcodes(cubins, target))
    return {
        name: [{**asdict(one.resources()), "opcodes": next(counts)} for one in launches]
        for name, launches in made_by.items()
    }


def opcodes(cubins: list[bytes], target: str) -> list[Counter[str]]:
    """How often each of ``OPCODES`` stands in the machine code of each.

    The disassembler takes 0.7 s to start and next to nothing for a kernel: it is given the
    instructions of all at once.
    """
    if not cubins:
        return []
    codes = [b"".join(instructions(cubin)) for cubin in cubins]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        folder = Path(triton.__file__).parent / "backends/nvidia/bin"
        command = [str(folder / "nvdisasm"), "--binary", target.upper().replace("_", ""), file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not LEFT_OUT.search(text), "ptxas left products out"
    lines = iter(re.findall(r"/\*[0-9a-f]{4,}\*/(.*)", text))
    counts = [
        Counter(op for line in itertools.islice(lines, len(code) // INSTRUCTION_BYTES)
                for op in re.findall(r"\b([A-Z0-9]+)\b", line) if op in OPCODES)
        for code in codes
    ]  # fmt: skip
    assert next(lines, None) is None, "not one line for each instruction"
    return counts


def instructions(cubin: bytes) -> Iterator[bytes]:
    """The sections of an ELF file that hold machine code."""
    (at,) = struct.unpack_from("<Q", cubin, 40)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 58)
    heads = [struct.unpack_from("<IIQQQQ", cubin, at + i * size) for i in range(count)]
    names = heads[of_names][4]
    for name, _, _, _, begin, nbytes in heads:
        if cubin.startswith(b".text.", names + name):
            yield cubin[begin : begin + nbytes]


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
