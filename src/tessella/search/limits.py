"""What a machine can do at most, measured: copy bandwidth and the rate of large matrix products.

These are the ceilings of a roofline. They are measured with the libraries' own large products, and
kept in a file beside the timing cache: the quickest of several readings, as other work on the
machine can only lower them. On a GPU these products are of zeros,
which draw so little power that no clock is lowered: with random numbers an H200's float16 is a
tenth slower, and layers behind a ReLU would pass the ceiling.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tessella.core.device import fingerprint, torch_device
from tessella.core.dtype import Math
from tessella.core.errors import ArtifactError
from tessella.core.record import canonical_json, from_plain, parse_json
from tessella.device.float32_math import float32_math
from tessella.operations.problem import Problem
from tessella.search.timing import quickest_us

VERSION = 4  # of how they are measured
READINGS = 3  # by so many processes that ask, each at a moment of its own
PASSES = 3  # of one reading, some tenths of a second apart


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The ceilings of one machine.

    Attributes:
        device: its name, for people.
        copy_bytes_s: bytes read plus bytes written in a large copy, a second.
        flops_s: operations a second (a multiply-add is two) of a large product, by input type;
            ``tf32`` is float32 with that rounding.
        readings: of how many these are the best.
    """

    device: str
    copy_bytes_s: float
    flops_s: dict[str, float]
    readings: int = 1

    def best_of(self, other: Limits) -> Limits:
        """The higher ones of two readings of one machine."""
        rates = {dtype: max(rate, other.flops_s[dtype]) for dtype, rate in self.flops_s.items()}
        return replace(
            self,
            copy_bytes_s=max(self.copy_bytes_s, other.copy_bytes_s),
            flops_s=rates,
            readings=self.readings + other.readings,
        )

    def flops_limit(self, problem: Problem) -> float | None:
        """Operations a second that this machine reaches with the problem's types."""
        dtype = next((meta.dtype for meta in problem.inputs if meta is not None), "float32")
        return self.flops_s.get("tf32" if dtype == "float32" and problem.math == "tf32" else dtype)

    def least_us(self, problem: Problem) -> float:
        """The least microseconds of a problem here.

        Only a kernel that needs fewer operations than the plain sum of products can be faster.
        """
        moved_s = problem.nbytes / self.copy_bytes_s
        work, rate = problem.flops, self.flops_limit(problem)
        return 1e6 * (max(moved_s, work / rate) if work and rate else moved_s)


def limits(target: str, folder: Path | None = None) -> Limits:
    """This machine's limits for ``target``: from ``folder``, or measured (about a second).

    They are measured again by the first few processes that ask, and the best are kept.
    """
    here = fingerprint(target)
    path = folder / f"limits-{VERSION}-{here.hash[:16]}.json" if folder else None
    known = None if path is None else _read(path)
    if known is not None and (known.readings >= READINGS or path in _measured_here):
        return known
    found = measured(target, here.name)
    found = found if known is None else found.best_of(known)
    if path is not None:
        _measured_here.add(path)
        with contextlib.suppress(OSError):  # no writable folder: measured again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_text(canonical_json(found) + "\n", encoding="utf-8")
            part.replace(path)
    return found


_measured_here: set[Path] = set()  # by this process


def _read(path: Path) -> Limits | None:
    """The limits in a file; None if there is none, or a broken one: measured and replaced."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        return from_plain(Limits, parse_json(text, where="limits"), where="limits")
    except (OSError, ArtifactError):
        return None


def measured(target: str, name: str) -> Limits:
    """The limits, measured now."""
    device = torch_device(target)
    gpu = device.type == "cuda"
    source = torch.randn((512 if gpu else 32) << 20, device=device)
    copy = torch.empty_like(source)
    products = _gpu_products(device) if gpu else _cpu_products()
    copied_us, multiplied_us = math.inf, dict.fromkeys(products, math.inf)
    for _ in range(PASSES):
        # not copy_: in a CUDA graph that is a memcpy node, which reads 2.8 TB/s on an H200 of 4.25
        copied_us = min(copied_us, _time_us(lambda: torch.neg(source, out=copy), device, "ieee"))
        for dtype, (product, _) in products.items():
            rounding: Math = "tf32" if dtype == "tf32" else "ieee"
            took_us = _time_us(product, device, rounding)
            multiplied_us[dtype] = min(multiplied_us[dtype], took_us)
    rates: dict[str, float] = {
        t: round(2e6 * size**3 / multiplied_us[t]) for t, (_, size) in products.items()
    }
    return Limits(device=name, copy_bytes_s=round(2e6 * source.nbytes / copied_us), flops_s=rates)


def _time_us(run: Callable[[], object], device: torch.device, rounding: Math) -> float:
    with torch.inference_mode(), float32_math(rounding):
        run()
        return quickest_us(run, device=device, budget_s=0.1 / PASSES)


Products = dict[str, tuple[Callable[[], object], int]]  # type → (product, size of its cube)


def _cpu_products() -> Products:
    """Products by oneDNN, where torch has it: MKL's float32 reaches a fifth on an AMD EPYC.

    Without bfloat16 in the processor a product takes a hundred times as long: a small one will do.
    """
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]

    def product(dtype: torch.dtype, with_onednn: bool) -> tuple[Callable[[], object], int]:
        sides = 1024 if with_onednn or dtype == torch.float32 else 256
        a, b = (torch.randn(sides, sides).to(dtype) for _ in range(2))
        if not with_onednn:
            return lambda: torch.mm(a, b), sides
        weight = torch.ops.mkldnn._reorder_linear_weight(b, sides)
        return lambda: torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], ""), sides

    has_bfloat16 = has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return {
        "float32": product(torch.float32, has_onednn),
        "bfloat16": product(torch.bfloat16, has_bfloat16),
    }


def _gpu_products(device: torch.device) -> Products:
    size = 8192
    x = torch.zeros(size, size, device=device)

    def product(dtype: torch.dtype, size: int = size) -> tuple[Callable[[], object], int]:
        y = x[:size, :size].to(dtype, memory_format=torch.contiguous_format)
        out = torch.empty_like(y)
        return lambda: torch.mm(y, y, out=out), size

    y8, one = x.to(torch.float8_e4m3fn), torch.ones((), device=device)
    fp8 = (
        lambda: torch._scaled_mm(
            y8, y8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        ),
        size,
    )
    return {
        "float32": product(torch.float32, 4096),
        "tf32": product(torch.float32),
        "float16": product(torch.float16),
        "bfloat16": product(torch.bfloat16),
        "float8_e4m3fn": fp8,
        "float8_e5m2": fp8,
        # tensor cores multiply both equally fast; torch's product of int8 writes four bytes a sum
        # and reaches half of it
        "int8": fp8,
    }
