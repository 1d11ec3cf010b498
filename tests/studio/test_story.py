"""The whole way by clicking: a folder of digits becomes a dataset, a run, a plan, and answers HTTP.

With ``--write-pictures`` it also writes the README's pictures into ``docs/images``.
"""

import io
import json
import random
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from sklearn.datasets import load_digits

from tessella.artifacts.dataset import Dataset
from tests.support.studio.browsing import (
    alive,
    choose,
    enter,
    field,
    fill,
    go,
    press,
    resize,
    see,
    series,
    take_picture,
    until,
)
from tests.support.studio.served import serve, stop

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SLOW_S = 120.0  # a job starts an interpreter and torch; on a busy machine that takes a while


def write_digits(folder: Path, count: int = 1797) -> None:
    """Scikit-learn's handwritten digits as PNG files, a subfolder a class."""
    digits = load_digits()
    for index, (pixels, target) in enumerate(
        zip(digits.images[:count], digits.target[:count], strict=True)
    ):
        path = folder / NAMES[target] / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.uint8(pixels * 15.9375))
        image.resize((28, 28), Image.Resampling.BICUBIC).save(path)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A studio with its scheduler, on a workspace that is empty when the first test comes."""
    root = tmp_path_factory.mktemp("story") / "flowers-and-digits"
    root.mkdir()
    process, found = serve(root, scheduler=True)
    yield found
    stop(process)


@pytest.fixture
def picture(request, chromium):
    """Takes a picture for the README, if asked to."""

    def take(name: str, theme: str = "light", height: int = 768) -> None:
        if request.config.getoption("--write-pictures", default=False):
            resize(chromium, 1366, height, theme)
            chromium.execute_script("window.scrollTo(0, 0)")
            chromium.execute_async_script("setTimeout(arguments[0], 900)")
            take_picture(chromium, name)
            resize(chromium, 1366, 768)

    return take


def free_port() -> int:
    """One that nobody gets meanwhile who asks for any: those are from 32,768 on."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def test_from_a_folder_to_a_served_network(served, chromium, picture):
    write_digits(served.root / "photos" / "my digits")
    resize(chromium, 1366, 768)
    enter(chromium, served)
    see(chromium, "This workspace is empty")

    import_folder(chromium, served, "photos/my digits", picture)
    train(chromium, served, picture)
    explore(chromium, served, picture)
    compile_plan(chromium, served, picture)
    serve_plan(chromium, served, served.root / "photos" / "my digits" / "seven" / "0007.png")


def import_folder(chromium, served, folder, picture):
    press(chromium, "Import images")
    see(chromium, "New dataset")
    alive(chromium)
    fill(chromium, "Folder or file on this machine", folder)
    until(lambda: field(chromium, "Name").get_attribute("value"), what="a name that is proposed")
    fill(chromium, "Name", "digits")
    fill(chromium, "Size (height × width)", "28")
    choose(chromium, "Channels", "Grey (1)")
    fill(chromium, "Held out to validate", "0.2")
    loaded(chromium, ".mode img", 4, 28)
    see(chromium, "--size 28 --channels 1 --depth 8 --resize squash --holdout 0.2")
    press(chromium, "Import")
    see(chromium, "Train on it", SLOW_S)
    see(chromium, "1,438")
    until(lambda: len(chromium.find_elements(By.CSS_SELECTOR, ".thumb img")) == 60)
    alive(chromium)
    run_shown(chromium, served, "tessella data import 'photos/my digits'")
    made = Dataset(served.root / "datasets" / "digits-2").info
    assert made.content_hash == Dataset(served.root / "datasets" / "digits").info.content_hash
    picture("data", height=860)


def run_shown(chromium, served, start):
    """Run a command that the page shows as it stands, in the workspace; returns its output."""
    codes = until(lambda: [c for c in texts(chromium, ".command code") if c.startswith(start)])
    program = shlex.join([sys.executable, "-m", "tessella"])
    line = codes[0].replace("tessella", program, 1) if start.startswith("tessella") else codes[0]
    done = subprocess.run(
        ["bash", "-c", line], cwd=served.root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


def train(chromium, served, picture):
    press(chromium, "Train on it")
    see(chromium, "Start training")
    alive(chromium)
    fill(chromium, "Name of the run", "digits")
    fill(chromium, "Epochs", "3")
    fill(chromium, "Batch size", "32")
    fill(chromium, "Learning rate", "0.003")
    see(chromium, "tessella train lenet datasets/digits --out runs/digits --epochs 3")
    until(
        lambda: chromium.find_elements(By.CSS_SELECTOR, ".network-box img"), SLOW_S, "the drawing"
    )
    picture("train")
    press(chromium, "Start training")
    until(lambda: "/monitor" in chromium.current_url)
    first = until(lambda: series(chromium).get("loss"), SLOW_S, "a first point")
    until(lambda: series(chromium).get("loss", 0) > first, SLOW_S, "a growing curve")
    see(chromium, "finished", SLOW_S)
    until(lambda: series(chromium).get("val/accuracy") == 3, what="three validations")
    until(lambda: series(chromium).get("loss") == 3 * -(-1438 // 32), what="every step")
    picture("monitor", "dark", 860)


def explore(chromium, served, picture):
    press(chromium, "Explore")
    see(chromium, "Classify a picture")
    alive(chromium)
    upload = served.root / "photos" / "my digits" / "three" / "0003.png"
    chromium.find_element(By.CSS_SELECTOR, "input[type=file]").send_keys(str(upload))
    answers = until(lambda: texts(chromium, ".answer .name"), SLOW_S, "answers")
    assert len(answers) == 5
    assert answers[0] == "three"
    assert "three" in run_shown(chromium, served, "tessella run").splitlines()[1]
    names = until(lambda: texts(chromium, "button.item .name"), SLOW_S, "layers")
    assert {"conv1", "conv2", "fc1", "fc2"} <= set(names)
    chromium.find_elements(By.CSS_SELECTOR, "button.item")[names.index("conv2")].click()
    see(chromium, "25,050 parameters")
    loaded(chromium, ".layer figure img", 2)
    picture("explore", height=1000)
    press(chromium, "Measure")
    see(chromium, "Rows are the truth", SLOW_S)
    reports = list((served.root / ".studio" / "evaluations").glob("*.json"))
    report = json.loads(reports[0].read_text())
    see(chromium, f"{100 * report['accuracy']:.2f} %")
    assert np.sum(report["confusion"]) == 1797 - 1438
    show_cell(chromium, report)


def texts(chromium, selector):
    """What all elements of this kind say."""
    return [e.text for e in chromium.find_elements(By.CSS_SELECTOR, selector)]


def loaded(chromium, selector, count, width=None):
    """Wait until so many pictures of this kind have come; they load when they are in sight."""

    def there():
        pictures = chromium.find_elements(By.CSS_SELECTOR, selector)
        if pictures:
            chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", pictures[0])
        widths = [p.get_property("naturalWidth") for p in pictures]
        return len(widths) == count and all(w if width is None else w == width for w in widths)

    until(there, what=f"{count} pictures {selector}")


def show_cell(chromium, report):
    """Click a cell of the confusion matrix, where it lies by now: its images appear."""
    row = report["labels"].index("three")
    count = report["confusion"][row][row]
    words = f"three taken for three: {count}"

    def clicked():
        chart = chromium.find_element(By.CSS_SELECTOR, ".chart.tall")
        chromium.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
        x, y = chromium.execute_script(
            "return getElement(Number(arguments[0].id.slice(1))).chart"
            ".convertToPixel({seriesIndex: 0}, [arguments[1], arguments[1]])",
            chart,
            row,
        )
        size = chart.size
        ActionChains(chromium).move_to_element_with_offset(
            chart, int(x - size["width"] / 2), int(y - size["height"] / 2)
        ).click().perform()
        chromium.execute_async_script("setTimeout(arguments[0], 500)")
        return words in chromium.execute_script("return document.body.innerText")

    until(clicked, what=words)
    until(lambda: len(chromium.find_elements(By.CSS_SELECTOR, ".card .stack .thumb img")) >= count)


def compile_plan(chromium, served, picture):
    go(chromium, served, "/plan?source=runs/digits")
    fill(chromium, "Batch: least, usual, most", "1, 2, 4")
    see(chromium, "tessella compile runs/digits --out plans/digits.plan")
    press(chromium, "Compile")
    see(chromium, "Why this kernel", SLOW_S)
    assert (served.root / "plans" / "digits.plan").is_file()
    alive(chromium)
    press(chromium, "Compare with the checkpoint")
    see(chromium, "same answer", SLOW_S)
    see(chromium, "100.00 % of")
    picture("plan", "dark", 1000)


def serve_plan(chromium, served, image):
    port = free_port()
    fill(chromium, "Port", str(port))
    see(chromium, f"curl -s http://127.0.0.1:{port}/v2/models/digits/classify")
    press(chromium, "Serve")
    see(chromium, "Stop")
    url = f"http://127.0.0.1:{port}/v2/models/digits/classify"

    def answered():
        try:
            request = urllib.request.Request(url, data=image.read_bytes())
            with urllib.request.urlopen(request, timeout=5) as response:
                return json.load(io.TextIOWrapper(response))
        except OSError:
            return None

    answer = until(answered, SLOW_S, "an answer")
    assert "seven" in json.dumps(answer)
    if shutil.which("curl") is not None:
        top = json.loads(run_shown(chromium, served, "curl"))["predictions"][0]
        assert top[0]["label"] in NAMES
    press(chromium, "Stop")
    until(lambda: answered() is None, SLOW_S, "the end of the service")
    go(chromium, served, "/")
    see(chromium, "stopped")
    assert "aborted" not in chromium.execute_script("return document.body.innerText")


def test_a_zip_is_imported_and_its_training_aborted_and_resumed(served, chromium, tmp_path):
    write_digits(tmp_path / "digits", 200)
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "digits")
    resize(chromium, 1366, 768)
    enter(chromium, served, "/data")
    fill(chromium, "Size (height × width)", "28")
    choose(chromium, "Channels", "Grey (1)")
    fields = chromium.find_elements(By.CSS_SELECTOR, "input[type=file][accept='.zip']")
    fields[0].send_keys(packed)
    see(chromium, "packed.zip is here")
    press(chromium, "Import")
    see(chromium, "Train on it", SLOW_S)
    see(chromium, "packed")

    go(chromium, served, "/train?dataset=datasets/packed")
    fill(chromium, "Name of the run", "long")
    fill(chromium, "Epochs", "3000")
    press(chromium, "Start training")
    until(lambda: "/monitor" in chromium.current_url)
    alive(chromium)
    until(lambda: series(chromium).get("val/loss"), SLOW_S, "a first epoch")
    switch_to_log_scale(chromium)
    press(chromium, "Abort")
    see(chromium, "aborted", SLOW_S)
    reached = until(lambda: series(chromium).get("loss"), what="the curve")
    press(chromium, "Resume")
    until(lambda: series(chromium).get("loss", 0) > reached + 20, SLOW_S, "growth after it")
    written = (served.root / "runs" / "long" / "events.jsonl").read_text()
    history = [json.loads(line) for line in written.splitlines()]
    assert any(e["kind"] == "phase" and e["name"] == "resume" for e in history)
    press(chromium, "Abort")
    see(chromium, "aborted", SLOW_S)


def switch_to_log_scale(chromium):
    """The switch of the first chart, which is the loss."""

    def scale():
        return chromium.execute_script(
            "const box = document.querySelector('.nicegui-echart');"
            "return getElement(Number(box.id.slice(1))).chart.getOption().yAxis[0].type"
        )

    until(lambda: scale() == "value", what="a linear axis")
    chromium.find_element(By.CSS_SELECTOR, ".q-toggle").click()
    until(lambda: scale() == "log", what="a logarithmic axis")
