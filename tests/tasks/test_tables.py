from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from PIL import Image

from tessella.core.errors import DataError, UsageError
from tessella.data import ImportSettings, import_images
from tessella.tasks import Found, Request, named, tables


def found(task: str, path, **asked) -> Found:
    request = Request(
        source=path, **{"labels": None, "image_root": None, "by_folder": lambda p: None, **asked}
    )
    return named(task).examples.find(request)


def write(path, text: str):
    path.write_text(text)
    return path


def test_one_class_a_row(tmp_path):
    path = write(tmp_path / "a.csv", "image,weight,label\nx.png,3,10\ny.png,,9\nz.png,1,\n")
    got = found("classification", path)
    assert got.classes == ("9", "10")
    assert [(s.path, s.label) for s in got.sources] == [("x.png", 1), ("y.png", 0)]
    assert [s.path for s in got.skipped] == ["z.png"]
    assert got.notes == ()
    text = "path;labels\na.png;cat\nb.png;dog\nc.png;cat, dog\n"
    (note,) = found("classification", write(tmp_path / "b.csv", text)).notes
    assert "'cat, dog' is taken for one class" in note
    assert "multilabel" in note


@pytest.mark.parametrize(
    "text",
    [
        "path,labels\na.png,cat|dog\nb.png,\nc.png,dog; dog\n",
        "path;cat;dog\na.png;1;1\nb.png;0;0\nc.png;0;1\n",
        "path\tcat\tdog\na.png\ttrue\tyes\nb.png\tno\tfalse\nc.png\t\t1.0\n",
    ],
)
def test_several_labels_in_each_of_their_forms(tmp_path, text):
    got = found("multilabel", write(tmp_path / "a.csv", text))
    assert got.classes == ("cat", "dog")
    assert [s.label for s in got.sources] == [(0, 1), (), (1,)]


def test_parquet_with_lists_numbers_and_booleans(tmp_path):
    columns = {"file": ["a.png", "b.png"], "labels": [["dog", "cat"], []]}
    pa.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert [s.label for s in found("multilabel", tmp_path / "a.parquet").sources] == [(0, 1), ()]
    columns = {"file": ["a.png", "b.png"], "wide": [True, False], "x": [0.1, None]}
    pa.parquet.write_table(pa.table(columns), tmp_path / "b.parquet")
    one, other = (s.label for s in found("regression", tmp_path / "b.parquet").sources)
    assert one == (1.0, 0.1)
    assert other[0] == 0.0
    assert other[1] != other[1]  # missing


def test_folders_of_label_sets_and_of_numbers(tmp_path):
    for name in ("cat", "cat+dog", "none", "2.5", "-1"):
        (tmp_path / name).mkdir()
    folders = Found(
        classes=("cat", "cat+dog", "none"),
        sources=tuple(tables_source(f"{n}/1.png", k) for k, n in enumerate(("cat", "c+d", "none"))),
    )
    got = found("multilabel", tmp_path, by_folder=lambda path: folders)
    assert [s.label for s in got.sources] == [(0,), (0, 1), ()]
    folders = Found(
        classes=("-1", "2.5"), sources=tuple(tables_source(f"{k}.png", k) for k in (0, 1))
    )
    got = found("regression", tmp_path, by_folder=lambda path: folders)
    assert [s.label for s in got.sources] == [(-1.0,), (2.5,)]


def tables_source(path: str, label: int):
    from tessella.tasks import Source

    return Source(path, path, label)


def test_held_out_numbers_come_in_the_order_of_the_others():
    """A table for validation may lack a column, and have them in another order."""
    renumbered = named("regression").examples.renumbered
    assert str(renumbered((1.0, 2.0), (2, 0), 3)) == "(2.0, nan, 1.0)"


def test_what_a_hostile_table_may_hold_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROWS", 50)
    monkeypatch.setattr(tables, "MAX_CELLS", 200)
    monkeypatch.setattr(tables, "MAX_CLASSES", 20)
    many = [f"{k}.png,{k}|{k + 1}" for k in range(51)]
    for rows, what in (
        (many, "51 rows of 2 columns"),
        (many[:30], "more than 20 different labels"),
        (["a.png," + "|".join("ab" * 60)] * 2, "too many labels"),
    ):
        path = write(tmp_path / "a.csv", "path,labels\n" + "\n".join(rows))
        with pytest.raises(DataError, match=what):
            found("multilabel", path)
    digits = write(tmp_path / "a.csv", f"path,label\na.png,{'9' * 5000}\nb.png,1\n")
    assert found("classification", digits).classes == ("1", "9" * 5000)
    with pytest.raises(UsageError, match=r"named twice.*cat"):
        found("multilabel", digits, labels=("cat", "dog", "cat"))


@pytest.mark.parametrize("cell", ["nan", "inf", "1e39", "-1e400", "0x10", "12;", "one"])
def test_what_is_no_number_names_its_row(tmp_path, cell):
    path = write(tmp_path / "a.csv", f"path,x\na.png,1\nb.png,{cell}\n")
    with pytest.raises(DataError, match=r"row 2 .* no finite number in 'x'"):
        found("regression", path)


def test_numbers_with_a_comma_where_semicolons_part_the_cells(tmp_path):
    """As a German Excel writes them; never where a comma may stand for thousands."""
    text = "Datei;x;y\na.png;1,5;-2\nb.png;;0,25\n"
    one, other = (s.label for s in found("regression", write(tmp_path / "a.csv", text)).sources)
    assert one == (1.5, -2.0)
    assert other[1] == 0.25
    text = "path;x\na.png;1,234\nb.png;0,125\n"
    got = found("regression", write(tmp_path / "a.csv", text)).sources
    assert [s.label for s in got] == [(1.234,), (0.125,)]
    text = "path;x\na.png;1,234\nb.png;12,500\nc.png;900\n"
    with pytest.raises(DataError, match=r"may be points, or part thousands.*1,234"):
        found("regression", write(tmp_path / "a.csv", text))
    for text in ("path;x\na.png;1,5\nb.png;1.5\n", "path;x\na.png;1,234,567\nb.png;2,5\n",
                 "path\tx\na.png\t1,234\nb.png\t2\n"):  # fmt: skip
        with pytest.raises(DataError, match="no finite number in 'x'"):
            found("regression", write(tmp_path / "a.csv", text))


@pytest.mark.parametrize(
    "path", ["../x.png", "/etc/passwd", "a/../../x.png", "..\\x.png", "", "a\0b.png", "."]
)
def test_a_path_out_of_the_folder_is_listed(tmp_path, path):
    pa.parquet.write_table(
        pa.table({"path": [path, "sub/../ok.png"], "x": [1.0, 2.0]}), tmp_path / "a.parquet"
    )
    got = found("regression", tmp_path / "a.parquet")
    assert [(s.path, s.label) for s in got.sources] == [("ok.png", (2.0,))]
    assert "out of the folder" in got.skipped[0].reason


def test_a_row_with_other_cells_than_the_header_is_listed(tmp_path):
    """Behind Excel's mark, with semicolons and quotes."""
    text = '\ufeffpath;label\n"a;b.png";"cat"\nc.png;dog;2\nd.png\ne f.png;"d""g"\n'
    got = found("classification", write(tmp_path / "a.csv", text))
    assert [s.path for s in got.sources] == ["a;b.png", "e f.png"]
    assert got.classes == ("cat", 'd"g')
    assert [(s.path, s.reason) for s in got.skipped] == [
        ("c.png;dog;2", "3 cells where the header has 2"),
        ("d.png", "1 cells where the header has 2"),
    ]


def test_many_rows_with_other_cells_are_counted_and_too_many_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_RAGGED", 3)
    monkeypatch.setattr(tables, "LINES_BYTES", 30)  # in several readings
    good = "".join(f"{k}.png,{'cat' if k % 2 else 'dog'}\n" for k in range(5))
    bad = "".join(f"b{k}.png,cat,x\n" for k in range(5))
    got = found("classification", write(tmp_path / "a.csv", f"path,label\n{bad}{good}" + "\n" * 99))
    assert len(got.sources) == 5
    assert [(s.path, s.reason) for s in got.skipped] == [
        ("a.csv", "5 rows have more or fewer cells than the header; listed are 2"),
        ("b0.png,cat,x", "3 cells where the header has 2"),
        ("b1.png,cat,x", "3 cells where the header has 2"),
    ]
    for rows, what in ((bad + good[10:], "5 of 9 rows"), (bad, "5 of 5 rows")):
        with pytest.raises(DataError, match=f"{what} in .*b0.png,cat,x: 3 cells where the header"):
            found("classification", write(tmp_path / "a.csv", f"path,label\n{rows}"))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\n\n", b"path,x\n", b"path\na.png\n", b"path,x,x\na.png,1,2\n",
        b"path,x\na.png,1,2\n", b"\xff\xfe\x00",
        b"path," + b",".join(b"%d" % i for i in range(20_000)) + b"\na.png\n",
        b"path,x\na.png," + b"1" * 100_000 + b"\n",
    ],
)  # fmt: skip
def test_a_table_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError):
        found("regression", tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(DataError):
        found("regression", tmp_path / "a.parquet")


def test_a_parquet_that_unfolds_to_gigabytes_is_refused(tmp_path, monkeypatch):
    """One long text in a dictionary, and 200,000 rows that point at it."""
    monkeypatch.setattr(tables, "MAX_BYTES", 8 << 20)
    for cells in (["y" * 5000] * 20_000, [["y" * 5000]] * 20_000):
        table = pa.table({"path": ["a.png"] * 20_000, "labels": cells})
        pa.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
        assert (tmp_path / "a.parquet").stat().st_size < 100_000
        before = pa.total_allocated_bytes()
        del table
        with pytest.raises(DataError, match="unfolds"):
            found("multilabel", tmp_path / "a.parquet")
        assert pa.total_allocated_bytes() <= before


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_with_a_row_a_box(suffix: str, tmp_path: Path) -> None:
    """What is broken is listed, what is good is kept, and groups stay together."""
    for name in ("a.png", "b.png", "sub/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (40, 30)).save(tmp_path / name)
    rows = [
        ("a.png", "dog", "1.5", "2", "11.5", "10", "x"), ("a.png", "cat", "5", "5", "5", "9", "x"),
        ("sub/c.png", "cat", "30", "20", "50", "30", "x"), ("b.png", "", "", "", "", "", "y"),
        ("b.png", "dog", "1", "2", "many", "4", "y"), ("../d.png", "dog", "1", "2", "3", "4", "y"),
        ("lost.png", "dog", "1", "2", "3", "4", "y"),
    ]  # fmt: skip
    head = ("filename", "class", "xmin", "ymin", "xmax", "ymax", "group")
    table = pa.table(dict(zip(head, map(list, zip(*rows, strict=True)), strict=True)))
    file = tmp_path / f"boxes.{suffix}"
    if suffix == "csv":
        pa.csv.write_csv(table, file)
    else:
        pa.parquet.write_table(table, file)
    got = found("detection", file)
    assert got.classes == ("cat", "dog")
    assert got.groups["a.png"] == got.groups["sub/c.png"] != got.groups["b.png"]
    boxes = {s.path: [(t.label, t.x, t.y, t.width, t.height) for t in s.label.things]
             for s in got.sources}  # fmt: skip
    assert boxes == {
        "a.png": [(1, 1.5, 2.0, 10.0, 8.0)], "b.png": [],
        "sub/c.png": [(0, 30.0, 20.0, 10.0, 10.0)],
    }  # fmt: skip
    assert "4 problems" in got.notes[0]  # no area, cut, no number, no picture
    assert "data annotations" not in got.notes[0]  # which takes no table
    assert [s.path for s in got.skipped] == ["../d.png"]
    dataset = import_images(file, tmp_path / "data", ImportSettings(task="detection", size=32))
    assert len(dataset.train) == 3  # two groups, of which a tenth is none
    pa.csv.write_csv(table.drop_columns(["xmax"]), tmp_path / "other.csv")
    torn = table.set_column(6, "group", pa.array([*"xz", *table["group"].to_pylist()[2:]]))
    pa.csv.write_csv(torn, tmp_path / "torn.csv")
    with pytest.raises(DataError, match="two groups"):
        found("detection", tmp_path / "torn.csv")
    with pytest.raises(DataError, match="no columns of boxes"):
        import_images(tmp_path / "other.csv", tmp_path / "no", ImportSettings(task="detection"))
