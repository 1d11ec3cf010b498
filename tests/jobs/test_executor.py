"""The process around a job's command, on its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from tessella.jobs.executor import MARK


def start(folder, *command, cwd=None):
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tessella.jobs.executor", str(folder), "--", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=cwd,
    )


def test_the_exit_code_is_written_and_the_output_passed_on(tmp_path):
    code = f"import os, sys; print(os.environ['{MARK}']); sys.exit(7)"
    process = start(tmp_path, sys.executable, "-c", code)
    assert process.communicate(timeout=90)[0].decode() == f"{tmp_path}\n"
    assert json.loads((tmp_path / "exit.json").read_text())["exit_code"] == 7


def test_sigterm_is_passed_on_once_to_the_whole_group(tmp_path):
    """The child and the grandchild each get one; the executor itself stays to write the code."""
    # Short sleeps: a signal that comes right before a long one waits for its end.
    program = """
import os, signal, sys, time
def told(number, frame):
    os.write(1, b"told\\n"); time.sleep(0.2); sys.exit(5)
signal.signal(signal.SIGTERM, told)
os.fork()
os.write(1, b"ready\\n")
for _ in range(1200): time.sleep(0.05)
"""
    process = start(tmp_path, sys.executable, "-c", program)
    assert [process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=90)[0] == b"told\n" * 2
    assert json.loads((tmp_path / "exit.json").read_text())["exit_code"] == 5


def test_it_is_light():
    """One waits beside every job. What is heavy is named: a time would depend on the machine."""
    code = "import sys, tessella.jobs.executor; print(*sys.modules)"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    heavy = {"torch", "numpy", "sqlalchemy", "alembic", "psutil", "asyncio", "cv2", "pydantic"}
    assert not loaded & heavy


def test_no_exit_code_without_an_end(tmp_path):
    code = """
import os, time
print("runs", flush=True)
while not os.path.exists("enough"): time.sleep(0.01)
"""
    process = start(tmp_path, sys.executable, "-c", code, cwd=tmp_path)
    assert process.stdout.readline() == b"runs\n"
    assert not (tmp_path / "exit.json").exists()
    (tmp_path / "enough").touch()
    process.communicate(timeout=90)
    assert (tmp_path / "exit.json").exists()
