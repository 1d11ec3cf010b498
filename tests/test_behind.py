"""How far behind kernels were, from a timing cache."""

import json

from benchmarks.behind import LEAST_PROBLEMS, behind, beside


def line(problem: int, kernel: str, time_us: float | None) -> str:
    trial = {"kernel": kernel, "time_us": time_us}
    return json.dumps({"device": "d", "problem": str(problem), "version": 1, "trial": trial})


def test_times_are_compared_within_a_problem() -> None:
    lines = [line(0, "a", 900.0)]  # measured again below
    for problem in range(LEAST_PROBLEMS):
        lines += [line(problem, "a", 10.0), line(problem, "b", 30.0 + problem)]
        lines += [line(problem, "refused", None), line(problem, "program.0", 1000.0)]
    lines.append(line(0, "seldom", 20.0))
    assert behind(lines) == [
        {"kernel": "b", "problems": 20, "at best": 3.0, "median": 3.95},
        {"kernel": "a", "problems": 20, "at best": 1.0, "median": 1.0},
    ]


def test_our_fastest_stands_beside_a_library_s() -> None:
    ours, other, peer = "conv2d.implicit_gemm.sm90", "conv2d.gemm", "conv2d.cudnn_graph"
    lines = [
        line(0, ours, 10.0), line(0, other, 8.0), line(0, "conv2d.cudnn", 1.0), line(0, peer, 12.0),
        line(1, ours, 10.0), line(1, peer, 9.0),
        line(2, ours, 10.0),  # which the peer does not take
        line(3, "program.0", 10.0),
    ]  # fmt: skip
    assert beside(lines, peer) == [
        {"ours": ours, "us": 10.0, "peer us": 9.0, "ratio": 0.9},
        {"ours": other, "us": 8.0, "peer us": 12.0, "ratio": 1.5},
    ]
