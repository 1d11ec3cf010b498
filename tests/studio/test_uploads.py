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
