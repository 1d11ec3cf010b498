"""Short commands whose JSON answer a page waits for: the studio itself loads no engine.

Work that takes longer than a person waits is a job instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessella.core.errors import TessellaError

TIMEOUT_S = 120.0


class NoAnswer(TessellaError):
    """The command failed; the message is the command's own."""


async def ask(arguments: Sequence[str], *, folder: Path, timeout_s: float = TIMEOUT_S) -> Any:
    """Run ``tessella ARGUMENTS --json`` in ``folder`` and return the answer.

    Raises:
        NoAnswer: the command failed, with its own message, or it took too long.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # a file in the workspace must not shadow a module
        "-m",
        "tessella",
        *arguments,
        *(() if "--json" in arguments else ("--json",)),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        raise NoAnswer(
            f"tessella {arguments[0]} did not answer in {timeout_s:.0f} s",
            fix="run the command shown on the page in a terminal to see what it does",
        ) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended in this very moment
                process.kill()
            await process.wait()
    if process.returncode != 0:
        raise _failure(arguments, out, err)
    return json.loads(out)


def _failure(arguments: Sequence[str], out: bytes, err: bytes) -> NoAnswer:
    """The command's error: from its JSON if it printed one, its last line otherwise."""
    with contextlib.suppress(ValueError, AttributeError):
        error = json.loads(out)
        return NoAnswer(error["wrong"], seen=error.get("seen"), fix=error.get("fix"))
    lines = [line for line in err.decode("utf-8", "replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "no message"
    return NoAnswer(f"tessella {' '.join(arguments[:2])} failed", seen=last[:300])
