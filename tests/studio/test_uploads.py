import io
import zipfile
from pathlib import Path

import pytest

from tessella.core.errors import DataError, UsageError
from tessella.studio.uploads import MAX_CHUNK_BYTES, Uploads, unpack
from tessella.studio.workspace import Workspace


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(Workspace(tmp_path / "work"))


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def sent(uploads: Uploads, content: bytes, name: str = "x.zip") -> str:
    upload = uploads.begin(name, len(content))
    uploads.add(upload, 0, content)
    return upload


def test_chunks_make_the_file_whatever_it_is_called(uploads):
    upload = uploads.begin("../../etc/passwd", 10)
    assert uploads.add(upload, 0, b"01234") == 5
    with pytest.raises(UsageError, match="not complete"):
        uploads.file(upload)
    assert uploads.add(upload, 5, b"56789") == 10
    assert uploads.file(upload).read_bytes() == b"0123456789"
    assert uploads.file(upload).name == "content"
    assert uploads.name(upload) == "../../etc/passwd"


def test_lying_sizes_and_offsets_are_refused(uploads):
    upload = uploads.begin("a.png", 10)
    with pytest.raises(UsageError, match="out of order"):
        uploads.add(upload, 5, b"x")
    with pytest.raises(UsageError, match="larger than announced"):
        uploads.add(upload, 0, b"x" * 11)
    with pytest.raises(UsageError, match="bytes"):
        uploads.begin("a.png", 0)
    with pytest.raises(UsageError, match="bytes"):
        uploads.begin("a.png", 1 << 50)
    for name in ("../../x", "", "0" * 32):
        with pytest.raises(UsageError, match="no such upload"):
            uploads.file(name)


def test_a_zip_of_class_folders_is_unpacked_without_its_wrapping(uploads):
    members = {f"flowers/{c}/{i}.png": b"png" for c in ("rose", "tulip") for i in range(2)}
    litter = {"__MACOSX/flowers/._x": b"", "flowers/.DS_Store": b""}
    members |= {f"flowers/rose/Screenshot 9.41\u202fAM \xa0 {n}.png": b"x" for n in "👩\u200d🔬‏"}
    folder = uploads.images(sent(uploads, zipped(members | litter)))
    assert sorted(p.name for p in folder.iterdir()) == ["rose", "tulip"]
    assert (folder / "rose" / "1.png").read_bytes() == b"png"


@pytest.mark.parametrize(
    "name", ["../evil.png", "a/../../evil.png", "/etc/evil", "..\\evil", "C:/x"]
)
def test_a_member_that_leads_out_is_refused(uploads, tmp_path, name):
    with pytest.raises(DataError, match="leads out"):
        uploads.images(sent(uploads, zipped({"a/ok.png": b"x", name: b"evil"})))
    assert not list(tmp_path.rglob("*evil*"))


def damaged(how: int, name: str = "a/1.png") -> bytes:
    """A ZIP whose member begins with eight wrong bytes, packed in a way."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        archive.writestr(name, bytes(range(256)) * 40)
    content = bytearray(out.getvalue())
    at = 30 + len(name)  # behind the header
    content[at : at + 8] = bytes(b ^ 0xFF for b in content[at : at + 8])
    return bytes(content)


@pytest.mark.parametrize(
    "content",
    [
        *map(damaged, (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)),
        zipped({"a": b"x", "a/b.png": b"x"}), zipped({f"a/{'b' * 300}.png": b"x"}),
        zipped({"a/ü.png": b"x"}).replace("ü".encode(), b"\xff\xfe"), zipped({}),
        zipped({"a/" * 30 + "b.png": b"x"}), zipped({"a\n\x1b[2J/x.png": b"x"}),
    ],
)  # fmt: skip
def test_a_damaged_or_odd_zip_is_refused_with_what_to_do(uploads, content):
    with pytest.raises(DataError):
        uploads.images(sent(uploads, content))


def test_links_bombs_and_nonsense_are_refused(tmp_path):
    link = zipfile.ZipInfo("a/link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(DataError, match="leads out"):
        unpack(tmp_path / "link.zip", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/zeros", bytes(50 << 20))
    with pytest.raises(DataError, match="too much"):
        unpack(tmp_path / "bomb.zip", tmp_path / "out")
    (tmp_path / "not.zip").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="not a ZIP"):
        unpack(tmp_path / "not.zip", tmp_path / "out")


def test_over_http_in_chunks(client):
    content = bytes(range(256)) * 40
    begun = client.post("/api/uploads", params={"name": "<b>.png", "nbytes": len(content)}).json()
    url = f"/api/uploads/{begun['id']}"
    assert client.put(url, params={"offset": 0}, content=content[:4000]).json() == {
        "received": 4000
    }
    again = client.put(url, params={"offset": 0}, content=content[:4000])
    assert again.status_code == 400
    assert "out of order" in again.json()["error"]
    assert client.put(url, params={"offset": 4000}, content=content[4000:]).status_code == 200
    large = client.put(url, params={"offset": 0}, content=bytes(MAX_CHUNK_BYTES + 1))
    assert large.status_code == 413


def test_a_folder_arrives_as_it_was_and_is_an_import_source(client, studio):
    files = {f"my digits/{c}/{i} ü.png": bytes([i]) * 5 for c in ("one", "two") for i in range(3)}
    files["my digits/one/empty.png"] = b""
    nbytes = sum(map(len, files.values()))
    about = {"name": "my digits", "files": len(files), "nbytes": nbytes}
    upload = client.post("/api/uploads/folders", params=about).json()["id"]
    url = f"/api/uploads/{upload}"
    for path, content in files.items():
        for offset in range(0, max(1, len(content)), 3):
            query, part = {"path": path, "offset": offset}, content[offset : offset + 3]
            answer = client.put(f"{url}/files", params=query, content=part)
            assert answer.status_code == 200, answer.text
    assert client.post(f"{url}/done").status_code == 200
    folder = Uploads(Workspace(studio.root)).images(upload)
    found = {f"my digits/{p.relative_to(folder).as_posix()}": p.read_bytes()
             for p in folder.rglob("*.png")}  # fmt: skip
    assert found == files
    late = client.put(f"{url}/files", params={"path": "x", "offset": 0}, content=b"")
    assert late.status_code == 400


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "a/../../x",
        "/etc/x",
        "..\\x",
        "C:/x",
        "",
        "a\0b",
        "a\nb",
        "x" * 300,
        "a/" * 30 + "b",
    ],
)
def test_a_file_of_a_folder_cannot_leave_it(uploads, tmp_path, path):
    upload = uploads.begin_folder("f", 2, 100)
    with pytest.raises(UsageError):
        uploads.add_file(upload, path, 0, b"evil")
    uploads.add_file(upload, "a/ok.png", 0, b"ok")
    with pytest.raises(UsageError, match="cannot be written"):
        uploads.add_file(upload, "a/ok.png/b", 0, b"evil")
    assert b"evil" not in b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())


def test_a_folder_is_never_larger_than_announced(uploads):
    for files, nbytes in ((0, 1), (10**9, 1), (1, 0), (1, 1 << 50)):
        with pytest.raises(UsageError, match="to"):
            uploads.begin_folder("f", files, nbytes)
    upload = uploads.begin_folder("f", 1, 4)
    with pytest.raises(UsageError, match="larger than announced"):
        uploads.add_file(upload, "a", 0, b"12345")
    uploads.add_file(upload, "a", 0, b"12")
    with pytest.raises(UsageError, match="out of order"):
        uploads.add_file(upload, "a", 3, b"3")
    with pytest.raises(UsageError, match="larger than announced"):
        uploads.add_file(upload, "b", 0, b"")
    with pytest.raises(UsageError, match="not complete"):
        uploads.finish_folder(upload)
