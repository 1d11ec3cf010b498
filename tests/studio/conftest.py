"""A studio in a process of its own, a client that holds its cookie, and headless Chromium."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from tests.studio.made import make_workspace

# Everything that Chromium would fetch by itself is off, and no name resolves but this machine's.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--force-prefers-reduced-motion",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip

PROGRAM = """
import sys
from tessella.studio.app import studio
studio(sys.argv[1], port=0, scheduler=sys.argv[2] == "yes",
       ready=lambda address: print("ready", address, flush=True))
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-pictures", action="store_true", help="write the README's pictures to docs/images"
    )


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running studio: ``url`` without a slash at the end, the workspace that it shows."""

    url: str
    token: str
    root: Path

    def client(self) -> httpx.Client:
        """A client that has been let in."""
        client = httpx.Client(base_url=self.url, follow_redirects=True, timeout=30)
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
            return process, Served(url=f"http://{address.netloc}", token=token, root=root)
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


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The studio on the made workspace; nothing runs in it."""
    root = tmp_path_factory.mktemp("studio") / "work"
    make_workspace(root)
    process, served = serve(root, scheduler=False)
    yield served
    stop(process)


@pytest.fixture(scope="session")
def client(studio: Served) -> Iterator[httpx.Client]:
    client = studio.client()
    yield client
    client.close()


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    """Headless Chromium with a fresh profile; its console and its network are recorded."""
    driver, browser = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or browser is None:
        missing = "chromedriver" if driver is None else "chromium"
        pytest.skip(f"{missing} is not installed (apt-get install chromium chromium-driver)")
    options = Options()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    chrome.set_page_load_timeout(60)
    yield chrome
    chrome.quit()
