"""Errors travel between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from tessella.core.errors import DataError, ServeError, TessellaError, UnboundInput, first_line


@pytest.mark.parametrize(
    "error",
    [
        TessellaError("it is wrong"),
        DataError("the file is cut off", seen=7, fix="copy it again"),
        ServeError("busy", status=503, retry_after_s=4),
        UnboundInput("a shape is not known", input="x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_comes_back_whole(error: TessellaError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
        assert again.to_json() == error.to_json()
        assert again.exit_code == error.exit_code


@pytest.mark.parametrize(
    ("said", "line"),
    [("\nno room\nfor 3 GB", "no room"), ("x" * 900, "x" * 200), ("", "MemoryError")],
)
def test_of_an_error_one_line_is_told(said: str, line: str) -> None:
    assert first_line(MemoryError(said)) == line
