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
print(torch.backends.cpu.get_cpu_capability(), here.name if here else None)
"""


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


@pytest.mark.parametrize("isa", ["sse", "AVX2"])
def test_an_unknown_name_is_told_with_those_that_are_known(isa: str) -> None:
    said = run(isa).stderr
    assert f"TESSELLA_ISA names an instruction set that is not known. Seen: '{isa}'" in said
    assert "avx512, avx2" in said
