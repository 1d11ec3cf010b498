"""TESSELLA_ISA narrows our code and the libraries' at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tessella.core import processor
from tessella.core.device import fingerprint

SHOW = """
import os, sys
import torch  # reads the variables when it first computes: each child does so by itself
for name in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    os.environ["TESSELLA_ISA"] = name
    import tessella
    from tessella.core.errors import UsageError
    from tessella.device.x86 import code
    torch.ones(8).sum()
    try:
        here = code.instructions()
        has = [name for name in code.EXTENDED if code.refusal(name) is None]
        print(torch.backends.cpu.get_cpu_capability(), here.name if here else None, *has)
    except UsageError as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)
"""
WIDE = ("avx512_amx", "avx512_bf16", "avx512_vnni", "avx512")  # names, from the widest on
UNKNOWN = ("sse", "AVX2")


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    """By name what a process that it narrows says, in a line."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ATEN_", "ONEDNN_"))}
    names = (*WIDE, "avx2", *UNKNOWN)
    command = [sys.executable, "-c", SHOW, *names]
    done = subprocess.run(command, env=kept, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return dict(zip(names, done.stdout.splitlines(), strict=True))


def test_a_wider_processor_is_used_as_one_with_avx2(shown: dict[str, str]) -> None:
    seen = shown["avx2"].split()
    assert seen in (["AVX2", "avx2"], ["DEFAULT", "None"])  # the second: a machine without AVX2


def test_a_narrower_name_takes_extensions_away(shown: dict[str, str]) -> None:
    seen = [set(shown[name].split()) for name in WIDE]
    if "avx512" not in seen[0]:
        pytest.skip("this processor has no AVX-512")
    extensions = [names - {"AVX512", "avx512"} for names in seen]
    assert extensions[0] >= extensions[1] >= extensions[2] >= extensions[3] == set()
    assert not extensions[1] & {"amx_int8", "amx_bf16"}
    assert "avx512_bf16" not in extensions[2]
    told = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert told is not None
    tiles = ("amx_int8", "amx_bf16") if processor.tiles_refusal() is None else ()
    names = {"avx512_vnni", "avx512_bf16", *tiles}
    assert extensions[0] == names & set(told[1].split())  # Linux calls them as we do


def test_a_processor_with_more_instructions_has_another_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name may be the same, as in virtual machines, and so are its vectors."""
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    monkeypatch.setattr(processor, "_granted", [True])
    flags = [set[str](), {"avx512_vnni"}, {"avx512_vnni", "amx_tile", "amx_int8"}]
    seen = []
    for has in flags:
        monkeypatch.setattr(processor, "flags", lambda has=has: frozenset(has))
        seen.append(fingerprint("cpu"))
    assert len({here.hash for here in seen}) == len(seen)
    assert len({here.arch for here in seen}) == 1
    assert seen[2].name == f"{seen[0].name} with avx512_vnni, amx_int8"
    seen[2].require_same(seen[0], rebuild="x")  # what a plan needs of them, its steps say


@pytest.mark.parametrize("isa", UNKNOWN)
def test_an_unknown_name_is_told_with_those_that_are_known(isa: str, shown: dict[str, str]) -> None:
    said = shown[isa]
    assert f"TESSELLA_ISA names an instruction set that is not known. Seen: '{isa}'" in said
    assert "avx512_vnni, avx512, avx2_vnni, avx2" in said
