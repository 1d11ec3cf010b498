"""How far behind kernels were, from a timing cache."""

import json

from benchmarks.behind import LEAST_PROBLEMS, behind


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
