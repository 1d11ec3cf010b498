"""What the documents say is so: files and functions exist, snippets are code that tests run, and
numbers come from the benchmarks' files.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.report import RESULTS

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "tessella"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
GUIDES = sorted((ROOT / "docs").glob("add-*.md"))
TOP = tuple(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING"))
OTHERS = ("budget", "deploying", "features", "index", "onnx", "plans", "precision", "tasks", "tour")
PRESENT = (*TOP, *GUIDES, *(ROOT / "docs" / f"{name}.md" for name in OTHERS))  # not the log
ROOMS = (
    "annotations api artifacts benchmarks cli cluster compiler core data docs examples graph jobs"
    " kernels nn operations runtime server src studio tasks telemetry tests training"
)
OURS = f"(?:{ROOMS.replace(' ', '|')})"
RENAMED = ("auction", "bid", "bids", "workshop", "carried", "halves", "codes")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, and the methods of its classes as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (
                n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
            )
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


def test_benchmarks_are_what_the_json_files_say() -> None:
    fix = "run python -m benchmarks.tables --write"
    assert tables.PAGE.read_text() == tables.page(), fix
    readme = tables.README.read_text()
    assert tables.with_results(readme) == readme, fix
    assert tables.results() in readme, fix


def test_a_changed_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    page, measured = tables.page(), tables.runs_of

    def changed(name: str) -> list[tables.Run]:
        runs = json.loads(json.dumps(measured(name)))
        if name == "engine-cpu.json":
            runs[0]["rows"][0]["times"]["plan"]["median_ms"] *= 2
        return runs

    monkeypatch.setattr(tables, "runs_of", changed)
    assert tables.page() != page


def test_a_table_s_ratios_are_those_of_its_times() -> None:
    for name, _, _ in tables.PLANS:
        for row in (row for run in tables.runs_of(name) for row in run["rows"]):
            times = {n: t["median_ms"] for n, t in row["times"].items()}
            plan = times.pop("plan")
            assert row["ratio"] == pytest.approx(min(times.values()) / plan, abs=2e-3), row


def test_the_readme_is_short_and_its_sentences_hold() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    rows = json.loads((RESULTS / "coverage-cpu.json").read_text())["rows"]
    assert f"{sum(row['agrees'] for row in rows)} of torchvision" in readme
    assert "92 % of the node cases" in readme
    assert "to opset 21 pass (92." in (ROOT / "docs" / "onnx.md").read_text()
    lenet = [r for r in tables.runs_of("engine-cpu.json")[0]["rows"] if r["network"] == "lenet"]
    assert any(abs(r["ratio"] - 0.5) < 0.05 and r["best_peer"] == "onnxruntime" for r in lenet)


def test_the_tour_s_stops_exist() -> None:
    stops = re.findall(r"`([\w/]+\.py)::([\w.]+)`", (ROOT / "docs" / "tour.md").read_text())
    assert len(stops) > 30
    missing = [f"{p}::{n}" for p, n in stops if n not in names_in(SOURCE / p)]
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[\w-]+)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", PRESENT, ids=relative)
def test_files_that_are_named_exist(path: Path) -> None:
    for name in re.findall(rf"`({OURS}/[\w/.-]+)(?:::[\w.]+)?`", path.read_text()):
        if name == "kernels/SHA256.cubin":  # a member of a plan
            continue
        places = (ROOT / name, SOURCE / name, SOURCE / f"{name}.py")
        assert any(place.exists() for place in places), name


@pytest.mark.parametrize("path", GUIDES, ids=relative)
def test_snippets_are_parts_of_files_that_tests_run(path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    assert blocks
    ran = "".join(p.read_text() for p in (ROOT / "tests" / "examples").glob("test_*.py"))
    for block in blocks:
        first, _, snippet = block.partition("\n")
        file = ROOT / first.removeprefix("# ")
        assert snippet in file.read_text(), f"{path.name}: {snippet}"
        assert file.stem in ran, f"no test runs {file}"


@pytest.mark.parametrize("path", PRESENT, ids=relative)
def test_words_that_are_being_renamed_are_not_taught(path: Path) -> None:
    words = set(re.findall(r"[a-z]+", path.read_text().lower()))
    assert words.isdisjoint(RENAMED), words & set(RENAMED)


@pytest.mark.parametrize("folder", ["src", "benchmarks", "examples", "docs"])
def test_private_words_are_gone(folder: str) -> None:
    """The log keeps those of its days, and the glossary says what they meant."""
    kept = {"log.md", "glossary.md"}
    paths = (p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".md"))
    used = {
        f"{relative(path)}: {word}"
        for path in paths
        if path.name not in kept
        for word in re.findall(r"[a-z]+", path.read_text().lower())
        if word in ("auction", "auctions", "bid", "bids", "workshop", "desk")
    }
    assert not used
