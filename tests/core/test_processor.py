"""TESSELLA_ISA narrows our code and the libraries' at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = """
import tessella, torch
from tessella.device.x86 import code
torch.ones(8).sum()
here = code.instructions()
has = [name for name in code.EXTENDED if code.refusal(name) is None]
print(torch.backends.cpu.get_cpu_capability(), here.name if here else None, *has)
"""
WIDE = ["avx512_amx", "avx512_bf16", "avx512_vnni", "avx512"]  # names, from the widest on


def run(isa: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ATEN_", "ONEDNN_"))}
    return subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**environment, "TESSELLA_ISA": isa},
        capture_output=True,
        text=True,
    )


def test_a_wider_processor_is_used_as_one_with_avx2() -> None:
    seen = run("avx2").stdout.split()
    assert seen in (["AVX2", "avx2"], ["DEFAULT", "None"])  # the second: a machine without AVX2


def test_a_narrower_name_takes_extensions_away() -> None:
    seen = [set(run(name).stdout.split()) for name in WIDE]
    if "avx512" not in seen[0]:
        pytest.skip("this processor has no AVX-512")
    extensions = [names - {"AVX512", "avx512"} for names in seen]
    assert extensions[0] >= extensions[1] >= extensions[2] >= extensions[3] == set()
    assert not extensions[1] & {"amx_int8", "amx_bf16"}
    assert "avx512_bf16" not in extensions[2]


@pytest.mark.parametrize("isa", ["sse", "AVX2"])
def test_an_unknown_name_is_told_with_those_that_are_known(isa: str) -> None:
    said = run(isa).stderr
    assert f"TESSELLA_ISA names an instruction set that is not known. Seen: '{isa}'" in said
    assert "avx512_vnni, avx512, avx2_vnni, avx2" in said
