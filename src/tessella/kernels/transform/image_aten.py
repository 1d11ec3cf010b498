"""Bytes of images to a network's input by torch: whole rows of pixels at once, two roundings."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem


def fits(problem: Problem) -> str | None:
    x = problem["input"]
    if problem.constant:
        return "takes no constants"
    if x.dtype != "uint8" or x.format != "contiguous":
        return f"takes dense uint8, not {x.format} {x.dtype}"
    return None


def workspace_bytes(problem: Problem) -> int:
    """Room for the pixels in float32, where the result's memory cannot hold them."""
    return 0 if _in_result(problem) else 4 * problem["input"].nbytes


def bind(problem: Problem, constants: Mapping[int, torch.Tensor]) -> Call:
    if problem.output_is_empty:
        return lambda x, *, out: out
    n, height, width, channels = problem["input"].shape
    rows = (n * height, width * channels)  # a row of three floats at a time would take 50,000 loops
    gain, offset = (
        torch.tensor(problem.attrs[name], dtype=torch.float32).repeat(width)
        for name in ("gain", "offset")
    )
    on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def scale(x: torch.Tensor, scaled: torch.Tensor) -> None:
        if x.device not in on_device:
            on_device[x.device] = gain.to(x.device), offset.to(x.device)
        a, b = on_device[x.device]
        scaled.copy_(x.view(rows)).mul_(a).add_(b)

    def convert_in_place(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        scale(x, out.permute(0, 2, 3, 1).view(rows))
        return out

    def convert(x: torch.Tensor, *, out: torch.Tensor, workspace: torch.Tensor) -> torch.Tensor:
        scaled = workspace.view(torch.float32).view(rows)
        scale(x, scaled)
        return out.copy_(scaled.view(n, height, width, channels).permute(0, 3, 1, 2))

    return convert_in_place if _in_result(problem) else convert


def _in_result(problem: Problem) -> bool:
    """Whether the result's memory holds float32 pixels in the input's order."""
    return problem.output.dtype == "float32" and problem.output.has("channels_last")
