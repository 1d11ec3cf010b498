"""Tables of labels: CSV, TSV and Parquet files with a row for each picture.

One column has the pictures' paths: the one that is called path, file, filename or image, else the
first. A column ``group`` beside others says which pictures a holdout must not tear apart. A cell is
text until a task reads it. The file may be a stranger's: its size, its columns and the length of a
cell are bounded, and a path that leads out of the folder is refused.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from tessella.annotations.files import NOWHERE, inside
from tessella.artifacts.dataset import SkippedFile
from tessella.core.errors import DataError
from tessella.tasks.found import Found, Source

SUFFIXES = (".csv", ".tsv", ".parquet")
PATH_NAMES = ("path", "file", "filename", "image", "file_name", "image_path", "filepath")
GROUP = "group"
MAX_BYTES = 2 << 30
MAX_COLUMNS = 1 << 14
MAX_ROWS = 10_000_000
MAX_CELLS = 1 << 26
MAX_CLASSES = 1 << 16
MAX_CELL = 1 << 16  # characters of a cell that is read
MOST_NAMED = 10  # columns in a message
LINES_BYTES = 1 << 22  # of a CSV's lines that are read at once
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")
MAX_RAGGED = 1000  # rows that are listed for the number of their cells


def is_table(source: Path) -> bool:
    """Whether a source is a table by its name."""
    return source.suffix.lower() in SUFFIXES and source.is_file()


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with the places of its pictures.

    Attributes:
        files: path to open, one a row.
        paths: name in the dataset, one a row.
        columns: the other columns by name, one a row; an empty cell is the empty text.
        groups: of the column ``group``, by path: pictures of one stay in one split.
        skipped: rows whose path leads out of the folder, and the first of those that have more or
            fewer cells than the header.
        commas: semicolons part the cells, so that a comma in a number is its point: so spreadsheets
            write where a comma is one.
    """

    files: tuple[str, ...]
    paths: tuple[str, ...]
    columns: dict[str, pa.Array]
    groups: dict[str, str]
    skipped: tuple[SkippedFile, ...] = ()
    commas: bool = False
    where: Path

    def only_column(self, *names: str) -> str:
        """The column of one of these names, or the only one that there is."""
        known = {name.strip().lower(): name for name in self.columns}
        for name in names:
            if name in known:
                return known[name]
        if len(self.columns) != 1:
            raise DataError(
                f"no column of the table is called {' or '.join(names)}",
                seen=f"{_some(self.columns)} in {self.where}",
                fix=f"call the column with the labels {names[0]!r}",
            )
        return next(iter(self.columns))

    def texts(self, column: str) -> list[str]:
        """The cells of a column, without blanks around them."""
        texts = [text.strip() for text in self.columns[column].to_pylist()]
        if longest := [t for t in texts if len(t) > MAX_CELL]:
            raise DataError(
                f"a cell of the column {column[:80]!r} is too long",
                seen=f"{len(longest[0]):,} characters",
                fix=f"shorten it to {MAX_CELL:,}",
            )
        return texts

    def numbers(self, column: str) -> list[str]:
        """The cells of a column of numbers, all with a point or, where semicolons part the cells,
        all with a comma in its place, which becomes one.

        Raises:
            DataError: every comma may stand for thousands as well, as in 1,234.
        """
        texts = self.texts(column)
        commas = [text for text in texts if "," in text]
        if not self.commas or not commas or any("." in text for text in texts):
            return texts
        if all(THOUSANDS.fullmatch(text) for text in commas):
            raise DataError(
                f"the commas in {column[:80]!r} may be points, or part thousands",
                seen=f"{commas[0][:80]!r} in {self.where}",
                fix="write 1234 or 1.234 (or 1,2340)",
            )
        return [text.replace(",", ".") for text in texts]

    def floats(self, column: str) -> npt.NDArray[np.float64]:
        """The cells of a column as numbers, NaN where a cell is empty.

        Raises:
            DataError: a cell is no finite number; the message names its row.
        """
        values = np.full(len(self.paths), np.nan)
        for row, text in enumerate(self.numbers(column)):
            if not text:
                continue
            number = number_in(text)
            if number is None:
                raise DataError(
                    f"row {row + 1} of the table has no finite number in {column[:80]!r}",
                    seen=f"{text[:80]!r} in {self.where}",
                    fix="correct the cell (1.5; where semicolons part the cells 1,5 in all rows), "
                    "or leave it empty",
                )
            values[row] = number
        return values

    def found(
        self,
        classes: Sequence[str],
        sources: Sequence[Source],
        skipped: Sequence[SkippedFile],
    ) -> Found:
        """What a task has found in the table."""
        return Found(
            classes=tuple(classes),
            sources=tuple(sources),
            skipped=tuple(skipped),
            groups=self.groups,
        )


def number_in(text: str) -> float | None:
    """The finite number that a text is, which float32 can hold, else None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and abs(number) <= 3e38 else None


def read(source: Path, *, image_root: Path | None) -> Table:
    """The table in a file.

    Raises:
        DataError: the file is no table of this kind, is too large, names no pictures, or more than
            half of its rows have more or fewer cells than the header.
    """
    nbytes = source.stat().st_size
    if nbytes > MAX_BYTES:
        raise DataError("the table is too large", seen=f"{nbytes:,} bytes", fix="split it")
    try:
        ragged = _Ragged()
        parquet = source.suffix.lower() == ".parquet"
        data, delimiter = (_read_parquet(source), "") if parquet else _read_csv(source, ragged)
    except (pa.ArrowException, OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise DataError(
            "this is not a table that can be read",
            seen=f"{source}: {str(error)[:200]}",
            fix="write CSV with a header line, in UTF-8 (Excel's 'CSV UTF-8'), or Parquet",
        ) from error
    told = ragged.told(data.num_rows, source)
    if data.num_columns < 2 or not data.num_rows:
        raise DataError(
            "the table has no row with a path and a label",
            seen=f"{data.num_rows} rows, columns {_some(data.column_names)} in {source}",
            fix="write a header line, then a row a picture: its path and its labels",
        )
    key = _path_column(data.column_names)
    root = source.parent if image_root is None else image_root
    table = _placed(data, key, source, root)
    return replace(table, skipped=(*told, *table.skipped), commas=delimiter == ";")


def _path_column(names: Sequence[str]) -> str:
    known = {name.strip().lower(): name for name in reversed(names)}
    return next((known[name] for name in PATH_NAMES if name in known), names[0])


def _placed(data: pa.Table, key: str, source: Path, root: Path) -> Table:
    """The rows whose pictures lie in ``root``, with their files."""
    files, paths, kept, skipped = [], [], [], []
    for row, cell in enumerate(data.column(key).to_pylist()):
        path = inside(cell, root)
        if path is None:
            seen = cell[:120] or f"row {row + 1}"
            skipped.append(SkippedFile(path=seen, reason=NOWHERE))
            continue
        files.append(os.path.join(root, path))
        paths.append(path)
        kept.append(row)
    if skipped:
        data = data.take(pa.array(kept, pa.int64()))
    columns = {n: data.column(n).combine_chunks() for n in data.column_names if n != key}
    groups: dict[str, str] = {}
    grouped = next((n for n in columns if n.strip().lower() == GROUP), None)
    if grouped is not None and len(columns) > 1:
        cells = (text.strip() for text in columns.pop(grouped).to_pylist())
        for path, cell in zip(paths, cells, strict=True):
            if cell and groups.setdefault(path, cell) != cell:
                raise DataError(
                    "a picture of the table is in two groups",
                    seen=f"{path}: {groups[path][:40]!r} and {cell[:40]!r}",
                    fix=f"give all its rows one {GROUP}: pictures of a group stay in one split",
                )
    return Table(
        files=tuple(files),
        paths=tuple(paths),
        columns=columns,
        groups=groups,
        skipped=tuple(skipped),
        where=source,
    )


class _Ragged:
    """The rows that have more or fewer cells than the header: how many, and the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[SkippedFile] = []

    def __call__(self, row: Any) -> str:
        """What pyarrow does with such a row: ``skip``, and ``error`` beyond a table's rows."""
        self.count += 1
        if len(self.first) < MAX_RAGGED:
            reason = f"{row.actual_columns} cells where the header has {row.expected_columns}"
            self.first.append(SkippedFile(path=row.text[:120], reason=reason))
        return "skip" if self.count <= MAX_ROWS else "error"

    def told(self, rows: int, source: Path) -> list[SkippedFile]:
        """The first rows that were left out, and before them the number of all.

        Args:
            rows: that have as many cells as the header.

        Raises:
            DataError: they are more than half of the table.
        """
        if self.count > rows:
            first = self.first[0]
            raise DataError(
                "most rows of the table have more or fewer cells than its header",
                seen=f"{self.count:,} of {self.count + rows:,} rows in {source}; the first: "
                f"{first.path}: {first.reason}",
                fix="correct the header, or quote cells that hold a comma, semicolon or tab",
            )
        if self.count <= len(self.first):
            return self.first
        listed = self.first[: MAX_RAGGED - 1]
        reason = f"{self.count:,} rows have more or fewer cells than the header"
        reason += f"; listed are {len(listed):,}"
        return [SkippedFile(path=source.name, reason=reason), *listed]


def _read_csv(source: Path, ragged: _Ragged) -> tuple[pa.Table, str]:
    """All cells as text, for a task knows their types and a guess does not, and what parts them.

    Args:
        ragged: is told of the rows that have more or fewer cells than the header.
    """
    with source.open(encoding="utf-8-sig", newline="") as file:
        head = file.read(1 << 20)
    first = head.splitlines()[0] if head.strip() else ""
    delimiter = max(",;\t", key=first.count)
    names = next(csv.reader(head.splitlines()[:1], delimiter=delimiter), [])
    _check_names(names)
    parse = pa.csv.ParseOptions(
        delimiter=delimiter, newlines_in_values=False, invalid_row_handler=ragged
    )
    convert = pa.csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False
    )
    tables: list[pa.Table] = []
    rows = 0
    with source.open("rb") as file:
        while lines := file.read(LINES_BYTES) + file.readline():
            # In this thread: pyarrow's own took 27 µs to call ``ragged``, and this one 2.
            read = pa.csv.ReadOptions(
                column_names=names, skip_rows=0 if tables else 1, use_threads=False
            )
            if lines.strip():
                tables.append(pa.csv.read_csv(pa.py_buffer(lines), read, parse, convert))
                rows += tables[-1].num_rows
                _check_cells(rows, len(names))
    return pa.concat_tables(tables), delimiter


def _read_parquet(source: Path) -> pa.Table:
    with pa.parquet.ParquetFile(source) as file:
        names, metadata = file.schema_arrow.names, file.metadata
        _check_names(names)
        _check_cells(metadata.num_rows, len(names))
        _check_unfolded(
            sum(metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
        )
        leaves = [file.schema.column(i) for i in range(len(file.schema))]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    # Texts stay a dictionary and places in it: a file of 100 KB can have a gigabyte of equal cells.
    with pa.parquet.ParquetFile(source, read_dictionary=texts) as file:
        table = file.read()
    _check_unfolded(sum(_nbytes(table.column(name)) for name in names))
    return pa.table({name: _texts_of(table.column(name)) for name in names})


def _nbytes(column: pa.ChunkedArray) -> int:
    """The bytes of a column whose texts are written out."""
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = pa.compute.list_flatten(column)
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    total = 0
    for chunk in column.chunks:
        lengths = pa.compute.binary_length(chunk.dictionary).cast(pa.int64())
        total += int(pa.compute.sum(lengths.take(chunk.indices)).as_py() or 0)
    return total


def _texts_of(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column as text; a list becomes its elements with | between them."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        cells = ["|".join(map(str, cell or ())) for cell in column.to_pylist()]
        return pa.chunked_array([pa.array(cells, pa.string())])
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    return column.cast(pa.string()).fill_null("")


def _check_unfolded(nbytes: int) -> None:
    if nbytes > MAX_BYTES:
        raise ValueError(f"it unfolds to {nbytes:,} bytes")


def _check_names(names: Sequence[str]) -> None:
    if not names or len(names) > MAX_COLUMNS:
        raise ValueError(f"{len(names):,} columns")
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ValueError(f"two columns of one name: {_some(twice)}")


def _check_cells(rows: int, columns: int) -> None:
    if rows > MAX_ROWS or rows * columns > MAX_CELLS:
        raise ValueError(f"{rows:,} rows of {columns:,} columns")


def ordered(names: Iterable[str]) -> tuple[str, ...]:
    """Class names in order: numbers by their value, others by the alphabet.

    Raises:
        DataError: there are more than any network tells apart.
    """
    known: set[str] = set()
    for name in names:
        known.add(name)
        if len(known) > MAX_CLASSES:
            raise DataError(
                f"more than {MAX_CLASSES:,} different labels",
                seen=_some(sorted(known)[:MOST_NAMED]),
                fix="give the column with the labels",
            )
    numbers = all(name.isascii() and name.isdigit() and len(name) < 19 for name in known)
    return tuple(sorted(known, key=int) if numbers else sorted(known))


def _some(names: Iterable[str]) -> str:
    known = list(names)
    more = ", …" if len(known) > MOST_NAMED else ""
    return ", ".join(repr(name[:40]) for name in known[:MOST_NAMED]) + more
