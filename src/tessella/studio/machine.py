"""The machine's readings, live: processors, memory, and every GPU."""

from __future__ import annotations

import asyncio

from nicegui import ui

from tessella.studio import parts
from tessella.studio.theme import text
from tessella.telemetry.gpus import Gpu
from tessella.telemetry.readings import Readings, readings

INTERVAL_S = 1.5


class Machine:
    """A card of meters that refreshes itself while the page is open."""

    def __init__(self, disk: str = "/") -> None:
        self._disk = disk
        self._meters: dict[str, _Meter] = {}
        with parts.card("Machine", tight=True):
            self._box = ui.element("div").classes("meters")
        ui.timer(INTERVAL_S, self._refresh)

    async def _refresh(self) -> None:
        now = await asyncio.to_thread(readings, self._disk)
        for name, fraction, line in meters(now):
            if name not in self._meters:
                with self._box:
                    self._meters[name] = _Meter(name)
            self._meters[name].show(fraction, line)


class _Meter:
    def __init__(self, name: str) -> None:
        with parts.box("meter"):
            text("span", name).classes("cut")
            self._line = text("span", "").classes("muted num nowrap")
            with parts.box("track"):
                self._fill = ui.element("div")

    def show(self, fraction: float, line: str) -> None:
        self._fill.style(f"width:{100 * min(1.0, max(0.0, fraction)):.0f}%")
        if self._line.text != line:
            self._line.text = line


def meters(now: Readings) -> list[tuple[str, float, str]]:
    """(name, fraction, text) of every reading of this machine."""
    host = now.host
    out = [
        ("Processors", host.cpu_percent / 100, f"{host.cpu_percent:.0f} %"),
        (
            "Memory",
            host.memory_used_bytes / host.memory_total_bytes,
            f"{parts.nbytes(host.memory_used_bytes)} of {parts.nbytes(host.memory_total_bytes)}",
        ),
    ]
    for gpu in now.gpus:
        out += _gpu(gpu)
    return out


def _gpu(gpu: Gpu) -> list[tuple[str, float, str]]:
    name = f"GPU {gpu.index}"
    shown = [
        "" if gpu.utilization is None else f"{gpu.utilization:.0f} %",
        "" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} °C",
        "" if gpu.power_w is None else f"{gpu.power_w:.0f} W",
    ]
    out = [(name, (gpu.utilization or 0.0) / 100, " · ".join(s for s in shown if s))]
    if gpu.memory_used_bytes is not None and gpu.memory_total_bytes:
        used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
        out.append(
            (f"{name} memory", used / total, f"{parts.nbytes(used)} of {parts.nbytes(total)}")
        )
    return out
