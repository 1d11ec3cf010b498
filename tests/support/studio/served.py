"""A studio in a process of its own, and a client that holds its cookie."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx

PROGRAM = """
import sys
from tessella.studio.app import studio
studio(sys.argv[1], port=0, scheduler=sys.argv[2] == "yes",
       ready=lambda address: print("ready", address, flush=True))
"""


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running studio: ``url`` without a slash at the end, the workspace that it shows."""

    url: str
    token: str
    root: Path
    pid: int

    def client(self) -> httpx.Client:
        """A client that has been let in."""
        client = httpx.Client(base_url=self.url, follow_redirects=True, timeout=60)
        assert client.get("/", params={"token": self.token}).status_code == 200
        return client


def serve(root: Path, *, scheduler: bool) -> tuple[subprocess.Popen[str], Served]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, str(root), "yes" if scheduler else "no"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=root,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready "):
            address = urlsplit(line.split()[1])
            token = parse_qs(address.query)["token"][0]
            url = f"http://{address.netloc}"
            return process, Served(url=url, token=token, root=root, pid=process.pid)
    raise AssertionError(f"the studio ended with {process.wait()} before it answered")


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
