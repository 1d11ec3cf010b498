"""The onnx package's own node tests: every case compiled for the CPU, the refused ones listed.

``python -m tests.graph.test_onnx_cases`` writes the list anew, for the installed version of onnx.
"""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
from onnx.backend.test.case.test_case import TestCase

from tests.support.onnx_backend import cases, opset, outcome

LIST = Path(__file__).parent / "onnx_refused.txt"
CONTRACT = 21  # the newest version that models are promised to be read in
LEAST = 0.90
CHUNKS = 8  # so that the cases spread over several workers

pytestmark = pytest.mark.skipif(
    onnx.__version__ not in LIST.read_text().splitlines()[0], reason="the list is of another onnx"
)


def listed() -> dict[str, str]:
    """Case → reason, of the committed list."""
    lines = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("  ", 1) for line in lines)


def reason(case: TestCase) -> str | None:
    """``outcome`` without what differs from run to run."""
    made = outcome(case)
    if made is None:
        return None
    plain = re.sub(r"differs: .*", "differs from the case", " ".join(made.split()))
    return re.sub(r"(does not compute what the network computes).*", r"\1", plain)[:200]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_list_of_refused_cases_is_exact(chunk: int) -> None:
    chosen = cases()[chunk::CHUNKS]
    found = {case.name: why for case in chosen if (why := reason(case)) is not None}
    names = {case.name for case in chosen}
    assert found == {name: why for name, why in listed().items() if name in names}


@pytest.mark.parametrize("newest", [CONTRACT, None])
def test_nine_in_ten_cases_pass(newest: int | None) -> None:
    counted = {case.name for case in cases(newest)}
    assert set(listed()) <= {case.name for case in cases()}
    assert len(counted - set(listed())) >= LEAST * len(counted)


def write() -> None:
    """The list, and what it says in one line."""
    every = cases()
    refused = {case.name: why for case in every if (why := reason(case)) is not None}
    parts = []
    for newest in (CONTRACT, max(map(opset, every))):
        counted = [case.name for case in every if opset(case) <= newest]
        passed = sum(name not in refused for name in counted)
        share = 100 * passed / len(counted)
        parts.append(f"{passed} of {len(counted)} to opset {newest} pass ({share:.1f} %)")
    head = f"# onnx {onnx.__version__}, target cpu: {', '.join(parts)}. The others, and why not:"
    lines = [f"{name}  {why}" for name, why in sorted(refused.items())]
    LIST.write_text("\n".join([head, *lines]) + "\n")
    print(head)


if __name__ == "__main__":
    write()
