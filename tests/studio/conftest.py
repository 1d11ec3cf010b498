"""A studio in a process of its own, a client that holds its cookie, and headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from tests.support.studio.served import Served, serve, stop
from tests.support.studio.workspaces import make_workspace

# Everything that Chromium would fetch by itself is off, and no name resolves but this machine's.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--force-prefers-reduced-motion",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-pictures", action="store_true", help="write the README's pictures to docs/images"
    )


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


@pytest.fixture(scope="session")
def started_chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """One for all tests of a process: to start it and to read the pages' scripts takes seconds."""
    driver, browser = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or browser is None:
        missing = "chromedriver" if driver is None else "chromium"
        pytest.skip(f"{missing} is not installed (apt-get install chromium chromium-driver)")
    options = Options()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium') / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    chrome.set_page_load_timeout(60)
    yield chrome
    chrome.quit()


@pytest.fixture
def chromium(started_chromium: webdriver.Chrome) -> webdriver.Chrome:
    """Headless Chromium in a new tab, with no cookie and nothing stored; its console and its
    network are recorded from here on.
    """
    chrome = started_chromium
    old = chrome.window_handles
    chrome.switch_to.new_window("tab")
    new = chrome.current_window_handle
    for handle in old:
        chrome.switch_to.window(handle)
        chrome.close()
    chrome.switch_to.window(new)
    chrome.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    everything = {"origin": "*", "storageTypes": "all"}  # cookies, too
    chrome.execute_cdp_cmd("Storage.clearDataForOrigin", everything)
    for log in ("browser", "performance"):
        chrome.get_log(log)
    return chrome
