"""The tests marked ``instructions`` once more, as on a processor with AVX2 and nothing newer.

Most desktops have such a processor, the machines of CI seldom do. torch and oneDNN read the
variables that narrow them when they are first used: hence a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

NARROW = {"TESSELLA_ISA": "avx2"}
MARK = "pytest.mark.instructions"


def main() -> int:
    """Run them, unless the processor is such a one itself; returns the exit status."""
    seen = torch.backends.cpu.get_cpu_capability()
    if seen in ("AVX2", "DEFAULT", "NO AVX"):
        print(f"this processor has {seen}: its tests have run already")
        return 0
    # importing all other files to find nothing in them takes each worker a quarter of a minute
    files = [str(p) for p in sorted(Path("tests").rglob("test_*.py")) if MARK in p.read_text()]
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-m",
               "instructions", "-q", *files]  # fmt: skip
    return subprocess.run(command, env={**os.environ, **NARROW}).returncode


if __name__ == "__main__":
    sys.exit(main())
