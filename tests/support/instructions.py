"""A fixture that lets machine code of ours be written for each instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, AVX512, InstructionSet
from tessella.kernels import catalog


@pytest.fixture(scope="module", params=[AVX512, AVX2], ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest) -> Iterator[InstructionSet]:
    """Wider processors run what is narrower, too."""
    here, asked = code.instructions(), request.param
    if here is None or here.vector_bytes < asked.vector_bytes:
        pytest.skip(f"this processor has no {asked.name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "_known_configs", {})
        patch.setattr(code, "instructions", lambda: asked)
        if (why := code.refusal(asked.name)) is not None:
            pytest.skip(why)
        yield asked
