"""Without a GPU, Triton's kernels are interpreted; it must know before any of them is decorated."""

import os

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# 0.2 s, the usual bound of an example, is the machine's doing where others compute beside it.
hypothesis.settings.register_profile("tessella", deadline=None)
hypothesis.settings.load_profile("tessella")

# Their assertions say what was compared, as those of test files do.
pytest.register_assert_rewrite("tests.support")

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.support.emulators.quicker_triton import quicken

    quicken()

# Files whose few tests take a minute: begun last, one worker would be busy long after the others.
LONG = (
    "tests/studio/test_story.py",
    "tests/test_zoo_plans.py",
    "tests/attack/",
    "tests/training/test_parallel.py",
    "tests/test_quickstart.py",
    "tests/test_coverage.py",
    "tests/studio/",
    "tests/examples/",
    "tests/training/",
    "tests/kernels/",
    "tests/operations/",
    "tests/device/",
    "tests/search/",
    "tests/compiler/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; with ``--no-loadscope-reorder`` they are handed out like this."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    places = (i for i, path in enumerate(LONG) if item.nodeid.startswith(path))
    return next(places, len(LONG))
