"""How many lines the rooms of kernels have, now and at an earlier state, like for like:
``python -m benchmarks.lines [--beside dd26bbf]``.

Counted are Python and CUDA C++ of the rooms that ``kernels/`` was then, and of what met in them.
``APART`` is what came since for other work; it is left out on both sides, by its old name too.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import Counter
from pathlib import Path

from benchmarks.report import markdown

ROOMS = re.compile(
    r"src/tessella/(kernels|search|device|operations|execution)/.*\.(py|cuh?)$"
    r"|src/tessella/(compiler/(execution|race)|runtime/(bucket|graphs)|graph/ops)\.py$"
)
APART = {
    "machine code for CPUs, of two instruction sets": r"x86",
    "recurrent layers": r"recurrent",
    "detectors": r"/detect\b|numpy_views|embedding",
    "pictures on the GPU": r"kernels/pictures/|nvjpeg|page_locked|transform/image",
    "gradients and norms of training": r"/trained|norm/(batch|layer)|entropy|column_sums",
    "Ampere's convolutions": r"conv/ampere/",
    "joins and resizing": r"join_rows|resize|repeat_pixels",
    "plans for absent GPUs, reports of foreign ones": r"kernel_report/|search/estimate|scaling",
    "torch's operators, checked": r"torch_operators/|fallback/allowed",
    "set-up time: less is searched": r"search/(evidence|fewer_images|interruptions)",
}
NOW = "now"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", default="dd26bbf", metavar="COMMIT")
    args = parser.parse_args()
    counts = {state: counted(state) for state in (args.beside, NOW)}
    titles = [*APART, "like for like"]
    rows = [[title, *(str(counts[state][title]) for state in counts)] for title in titles]
    rows.append(["together", *(str(sum(found.values())) for found in counts.values())])
    print(markdown(["lines", *counts], rows))


def counted(state: str) -> Counter[str]:
    """Lines at a commit, or in the working tree, by why they are apart."""
    listing = ["ls-files"] if state == NOW else ["ls-tree", "-r", "--name-only", state]
    lines: Counter[str] = Counter()
    for path in filter(ROOMS.match, git(*listing).splitlines()):
        text = Path(path).read_text() if state == NOW else git("show", f"{state}:{path}")
        why = next((why for why, what in APART.items() if re.search(what, path)), "like for like")
        lines[why] += text.count("\n")
    return lines


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
