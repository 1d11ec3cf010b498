"""How many files lie on the way from a folder of images to an answer over HTTP:
``python -m benchmarks.main_path``.

Import, training, compilation and one request of LeNet on digits run as processes of their own, and
each tells the files of which a function was called; what runs only while a module is imported does
not count. Passes (``compiler/rewrites`` and ``choices``) and families (``kernels/FAMILY``,
``operations/reference``) are counted apart. Of the rest, files touch the image in which a function
takes or returns bytes, an array or a tensor; and docs/tour.md leads through some.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tessella
from tessella.quickstart.classification import write_digits

SOURCE = Path(tessella.__file__).parent
TOUR = Path(__file__).parents[1] / "docs" / "tour.md"
CONFINED = {"data/reading.py"}  # runs where nothing may be written but its shard: it tells nothing
APART = re.compile(r"compiler/(rewrites|choices)/|kernels/\w+/|operations/reference/")
# Imported by every Python that finds it on its path; a file is told when it is first seen.
HOOK = """
import os, sys, threading
told = set()
out = os.open(os.environ["MAIN_PATH"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
source = os.environ["MAIN_PATH_SOURCE"]
DATA = {"bytes", "memoryview", "ndarray", "Tensor"}
def is_imported(frame):
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(source):
            return True
        frame = frame.f_back
    return False
def note(frame, event, arg):
    if event not in ("call", "return"):
        return
    code = frame.f_code
    if not code.co_filename.startswith(source) or not code.co_flags & 1:
        return
    values = [arg] if event == "return" else list(frame.f_locals.values())
    data = any(type(v).__name__ in DATA for v in values)
    key = (code.co_filename, data)
    if key not in told and not is_imported(frame):
        told.add(key)
        os.write(out, f"{int(data)} {code.co_filename[len(source) + 1:]}\\n".encode())
sys.setprofile(note)
threading.setprofile(note)
"""
STAGES = {
    "import": "ts.data.images('images', size=32, crop=28, channels=1, holdout=0.2, out='dataset')",
    "train": "ts.train('lenet', 'dataset', out='run', epochs=1, batch_size=16)",
    "compile": "ts.compile('run').save('lenet.plan')",
    "serve": """
from tessella.server import Server
with Server({'lenet': 'lenet.plan'}, port=0) as server:
    place = server.url + '/v2/models/lenet/classify'
    kind = {'Content-Type': 'application/octet-stream'}
    sent = urllib.request.Request(place, open('images/0/0000.png', 'rb').read(), kind)
    print(urllib.request.urlopen(sent).read())
""",
}
Files = dict[str, bool]  # whether each touches the image


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "sitecustomize.py").write_text(HOOK)
        write_digits(folder / "images")
        stages = {name: walked(name, code, folder) for name, code in STAGES.items()}
    together: Files = {}
    for name, files in stages.items():
        print(f"{name}: {counted(files)}")
        for path, touches in files.items():
            together[path] = touches or together.get(path, False)
    for path in sorted(p for p in together if not APART.match(p)):
        where = " ".join(name for name, files in stages.items() if path in files)
        print(f"{'*' if together[path] else ' '} {path}: {where}")
    print(f"together: {counted(together)}")
    stops = set(re.findall(r"`([\w/]+\.py)", TOUR.read_text()))
    on_tour = sorted(p for p in {*together, *CONFINED} if p in stops and not APART.match(p))
    print(f"{len(on_tour)} of these are on the path of docs/tour.md: {', '.join(on_tour)}")
    return 0


def walked(name: str, code: str, folder: Path) -> Files:
    """The files whose functions a stage calls, in all of its processes."""
    told = folder / f"{name}.txt"
    paths = os.pathsep.join([str(folder), str(SOURCE.parent)])
    told_to = {"MAIN_PATH": str(told), "MAIN_PATH_SOURCE": str(SOURCE), "PYTHONPATH": paths}
    program = "import urllib.request\nimport tessella as ts\nif __name__ == '__main__':\n"
    program += "\n".join(f"    {line}" for line in code.strip().splitlines())
    (folder / f"{name}.py").write_text(program)
    subprocess.run(
        [sys.executable, f"{name}.py"],
        cwd=folder,
        env=os.environ | told_to,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    files: Files = {}
    for line in told.read_text().splitlines():
        touches, path = line.split(" ", 1)
        files[path] = touches == "1" or files.get(path, False)
    return files


def counted(files: Files) -> str:
    plain = {path: touches for path, touches in files.items() if not APART.match(path)}
    passes = sum(path.startswith("compiler/") for path in files.keys() - plain.keys())
    return (
        f"{len(plain)} files, {sum(plain.values())} of them touch the image, beside {passes} of "
        f"passes and {len(files) - len(plain) - passes} of families"
    )


if __name__ == "__main__":
    sys.exit(main())
