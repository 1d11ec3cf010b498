"""Decoding within a budget: hostile files against clocks and memory, good ones against Pillow."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from tessella.core.confined import Budget
from tessella.core.decoding import Decoder
from tessella.core.errors import DataError, UsageError
from tessella.core.headers import PLAIN_SCANS, bits_of, is_plain
from tessella.core.preprocess import Preprocess, decode, fit, fitted
from tests.support.pictures.encoded import png, saved
from tests.support.pictures.hostile import (
    PROMISES,
    exif_of,
    good_pictures,
    mutated,
    peak_bytes,
    scans_of,
)

RECORD = Preprocess(height=24, width=16, resize="crop")
GOOD = good_pictures()
PLAIN = {"jpeg", "turned jpeg", "progressive", "cmyk", "png", "palette", "bmp"}
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    running = Decoder(Budget(nbytes=256 * MEGABYTE, seconds=5.0), processes=1)
    yield running
    running.close()


def refusal(decoder: Decoder, content: bytes, record: Preprocess | None = RECORD) -> str:
    with pytest.raises(DataError) as caught:
        decoder(content, record, name="the file")
    return str(caught.value)


# --- good pictures ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GOOD)
def test_both_ways_give_the_same_bits(decoder: Decoder, kind: str) -> None:
    content = GOOD[kind]
    for record in (RECORD, Preprocess(height=9, width=24, channels=1, depth=16)):
        expected = fit(decode(content, record), record)
        here, size = decoder.decode_here(content, record, name=kind)
        apart, size_apart = decoder.decode_apart(content, record, name=kind)
        assert size == size_apart
        assert here.dtype == apart.dtype == expected.dtype
        assert np.array_equal(here, expected)
        assert np.array_equal(apart, expected)
        assert is_plain(content, record) == (kind in PLAIN)


def test_without_a_record_a_picture_keeps_its_size(decoder: Decoder) -> None:
    shapes = {decoder(GOOD[kind], None, name=kind).shape for kind in ("png", "bmp", "webp")}
    assert shapes == {(24, 32, 3)}
    assert decoder(GOOD["16-bit tiff"], None, name="wide").dtype == np.uint8


def test_a_decoding_process_imports_no_torch() -> None:
    code = "import sys, tessella.core.decoding; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- small files that promise much --------------------------------------------------------------


@pytest.mark.parametrize(("what", "content", "why"), PROMISES, ids=[p[0] for p in PROMISES])
def test_what_promises_much_is_refused_before_memory_is_taken(
    decoder: Decoder, what: str, content: bytes, why: str
) -> None:
    before, start = peak_bytes(), time.perf_counter()
    for record in (RECORD, Preprocess(height=24, width=24), None):  # cut, and squashed
        with pytest.raises(DataError, match=why):
            decoder.decode_here(content, record, name=what)
        assert why in refusal(decoder, content, record)
    assert peak_bytes() - before < 100 * MEGABYTE
    assert time.perf_counter() - start < 30


def test_too_little_memory_is_a_refused_picture_in_the_callers_own_process_too() -> None:
    """A GIF of 2²⁸ pixels and 39 bytes under a limit: not a crash, and not another error."""
    code = (
        "import resource\n"
        "from tessella.core.errors import DataError\n"
        "from tessella.core.preprocess import Preprocess, fitted\n"
        "from tests.support.pictures.hostile import gif_of\n"
        "with open('/proc/self/statm') as file:\n"
        "    have = int(file.read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (have + (100 << 20),) * 2)\n"
        "try:\n"
        "    fitted(gif_of(65_535, 4_096), Preprocess(height=8, width=8))\n"
        "except DataError as error:\n"
        "    assert 'memory' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('decoded')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("mode", ["squash", "crop", "half_crop", "fill"])
def test_a_long_and_thin_picture_makes_no_large_one_on_its_way(mode: str) -> None:
    line = saved(Image.new("L", (1, 60_000), 7), "PNG")
    before = peak_bytes()
    record = Preprocess(height=224, width=224, resize=mode)  # type: ignore[arg-type]
    assert fitted(line, record).shape == (224, 224, 3)
    assert peak_bytes() - before < 150 * MEGABYTE
    wide = Preprocess(height=4, width=16_384)
    assert not is_plain(line, wide)
    with pytest.raises(DataError, match="between its size and the record's"):
        fitted(line, wide)  # 60,000 rows of 16,384 pixels


@pytest.mark.parametrize(
    "sizes",
    [
        {"channels": 1_000_000_000},
        {"height": 1 << 14, "width": 1 << 14, "channels": 5},
        {"height": 1 << 40},
        {"channels": 0},
    ],
)
def test_a_record_has_bounds_in_every_size(sizes: dict[str, int]) -> None:
    before = peak_bytes()
    with pytest.raises(UsageError):
        Preprocess(**({"height": 8, "width": 8} | sizes))
    assert peak_bytes() - before < 10 * MEGABYTE


# --- the budget ---------------------------------------------------------------------------------


def test_memory_is_bounded_and_the_process_lives_on() -> None:
    decoder = Decoder(Budget(nbytes=128 * MEGABYTE), processes=1)
    decoder(GOOD["gif"], RECORD, name="warm")
    (process,) = decoder._pool.idle
    bomb = png(8_192, 8_192, 8, 2, b"")  # 65 bytes; 268 MB in Pillow
    assert "takes more than 134,217,728 bytes" in refusal(decoder, bomb)
    assert decoder._pool.idle == [process]
    assert peak_bytes(str(process._popen.pid)) < 256 * MEGABYTE
    assert decoder(GOOD["gif"], RECORD, name="after").shape == (24, 16, 3)
    decoder.close()


def test_time_is_bounded_and_another_process_takes_over() -> None:
    slow = scans_of(2_048, 8_000)  # 155 kB, most of a minute
    assert not is_plain(slow, RECORD)
    decoder = Decoder(Budget(seconds=0.5), processes=1)
    decoder(GOOD["gif"], RECORD, name="warm")
    (process,) = decoder._pool.idle
    start = time.perf_counter()
    assert "takes longer than 0.5 s" in refusal(decoder, slow)
    assert time.perf_counter() - start < 20
    assert process._popen.returncode == -signal.SIGALRM
    assert decoder(GOOD["gif"], RECORD, name="after").shape == (24, 16, 3)
    decoder.close()


def test_a_process_that_was_ended_while_idle_costs_no_picture() -> None:
    decoder = Decoder(processes=1)
    decoder(GOOD["gif"], RECORD, name="warm")
    (process,) = decoder._pool.idle
    os.kill(process._popen.pid, signal.SIGKILL)
    process._popen.wait()
    assert decoder(GOOD["gif"], RECORD, name="after").shape == (24, 16, 3)
    decoder.close()


def test_a_process_that_dies_at_work_is_a_refused_picture() -> None:
    decoder = Decoder(Budget(seconds=100), processes=1)
    decoder(GOOD["gif"], RECORD, name="warm")
    (process,) = decoder._pool.idle
    spent = psutil.Process(process._popen.pid).cpu_times

    def kill() -> None:
        before, until = spent().user, time.monotonic() + 60
        while spent().user < before + 0.1 and time.monotonic() < until:  # it has begun
            time.sleep(0.01)
        os.kill(process._popen.pid, signal.SIGSEGV)

    killer = threading.Thread(target=kill)
    killer.start()
    assert "made its decoder fail. Seen: SIGSEGV" in refusal(decoder, scans_of(2_048, 8_000))
    killer.join()
    decoder.close()


def test_many_threads_share_the_processes_and_closing_ends_them() -> None:
    decoder = Decoder(processes=2)
    expected = fitted(GOOD["webp"], RECORD)
    found: list[bool] = []

    def work() -> None:
        found.extend(
            np.array_equal(decoder(GOOD["webp"], RECORD, name="webp"), expected) for _ in range(5)
        )

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 30
    processes = list(decoder._pool.idle)
    assert 1 <= len(processes) <= 2
    decoder.close()
    assert all(p._popen.returncode is not None for p in processes)


# --- what is plain ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "content"),
    [
        ("too many scans", scans_of(1_024, 40)),
        ("tags that share their bytes", exif_of(64, 60_000)),
        ("a PNG with compressed text", saved(Image.new("L", (8, 8)), "PNG", icc_profile=b"x" * 99)),
        ("no pixels", png(0, 9, 8, 2, b"")),
        ("a BMP in runs", GOOD["bmp"][:30] + b"\1" + GOOD["bmp"][31:]),
        ("many pixels", png(2_049, 2_048, 8, 0, b"")),
        ("two frames", b"\xff\xd8" + b"\xff\xc0\0\x0b\x08\0\x08\0\x08\x01\1\x11\0" * 2),
        ("a segment without length", b"\xff\xd8" + b"\xff\xe0\0\0" * 99),
        ("no end", GOOD["png"][:-12]),
        ("a long head", b"\xff\xd8" + (b"\xff\xe1\xff\xff" + bytes(65_533)) * 9),
        ("another format", GOOD["gif"]),
        ("nothing", b""),
    ],
)
def test_what_a_header_cannot_bound_is_not_plain(what: str, content: bytes) -> None:
    assert not is_plain(content, RECORD), what


@pytest.mark.parametrize("kind", GOOD)
def test_a_file_may_end_anywhere(kind: str) -> None:
    """What is asked of a header is answered, however little of it there is."""
    for end in range(min(400, len(GOOD[kind]))):
        assert is_plain(GOOD[kind][:end], RECORD) in (False, True), end
        assert bits_of(GOOD[kind][:end]) in (1, 2, 4, 8, 16), end


def test_the_costliest_plain_pictures_are_quick() -> None:
    worst = [scans_of(512, 118), scans_of(1_024, 20), scans_of(2_048, 0)]
    for content in worst:
        assert is_plain(content, RECORD)
        height = int(Image.open(io.BytesIO(content)).size[0])
        assert content.count(b"\xff\xda") * height**2 > 0.7 * PLAIN_SCANS
        start = time.process_time()
        fitted(content, RECORD)
        assert time.process_time() - start < 2  # 0.05 to 0.2 s


# --- any bytes ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # of damaged tags
def test_mutated_files_are_pictures_or_refused() -> None:
    """312 files over all formats: no signal, no hang, no memory, no error but ours."""
    decoder = Decoder(Budget(nbytes=256 * MEGABYTE, seconds=5.0), processes=1)
    records = (RECORD, Preprocess(height=9, width=24, channels=1, depth=16), None)
    before, start, decoded = peak_bytes(), time.perf_counter(), 0
    for number, (kind, content) in enumerate(list(GOOD.items()) * 13):
        hostile, record = mutated(content, number), records[number % 3]
        told: list[object] = []
        ways = [decoder.decode_apart]
        if is_plain(hostile, record):
            ways.append(decoder.decode_here)
        for decode_it in ways:
            try:
                told.append(decode_it(hostile, record, name=kind).pixels.tobytes())
            except DataError as error:
                told.append(str(error))
        assert "made its decoder fail" not in str(told[0]), (number, kind)
        decoded += isinstance(told[0], bytes)
        assert told[0] == told[-1], (number, kind)
    assert 20 < decoded < 290
    (process,) = decoder._pool.idle  # never replaced
    assert peak_bytes(str(process._popen.pid)) < 400 * MEGABYTE
    assert peak_bytes() - before < 50 * MEGABYTE
    assert time.perf_counter() - start < 200
    decoder.close()


def test_limits_of_a_process_leave_the_caller_alone(decoder: Decoder) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    decoder(GOOD["gif"], RECORD, name="any")
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_no_process_outlives_its_parent() -> None:
    code = (
        "import os, signal\n"
        "from tessella.core.decoding import Decoder\n"
        "from tests.support.pictures.hostile import good_pictures\n"
        "decoder = Decoder(processes=1)\n"
        "decoder(good_pictures()['gif'], None, name='any')\n"
        "print(decoder._pool.idle[0]._popen.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    status = Path(f"/proc/{int(ran.stdout)}/stat")
    give_up = time.monotonic() + 60
    while status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < give_up, "it waits for somebody who is gone"
        time.sleep(0.05)
