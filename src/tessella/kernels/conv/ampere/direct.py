"""A network's first layer, of few channels and channels_last, by ``mma.sync``, and the maximum over
its windows in the same kernel.

The device code is in ``direct_device``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from tessella.core.architectures import has
from tessella.core.dtype import FLOATS
from tessella.core.integers import ceil_div
from tessella.device.cuda import CudaKernel, cuda
from tessella.device.launch import only_compiles, record
from tessella.device.machine import gpu, gpu_target, multiprocessors
from tessella.device.packing import packed
from tessella.kernels.catalog import Call, Config
from tessella.kernels.conv.ampere.direct_device import FILTERS, Layer, source
from tessella.operations.problem import Problem

DTYPES = ("float16", "bfloat16")
MOST_CHANNELS = 8  # 1×1 layers of 64 to 256 took 1.1 to 6 times as long as ``implicit_gemm``
MOST_PRODUCTS = 16  # their code is unrolled
TRIED = 6
# warps, tiles of a warp at a time, and blocks that share a multiprocessor
_SHAPES = ((7, 4, 1), (7, 2, 2), (4, 4, 2), (4, 2, 3))
# the same, and rows of windows that are pooled at a time
_POOLED = ((7, 2, 2, 1), (14, 2, 1, 2), (7, 2, 1, 1), (4, 2, 2, 1))
_ROWS = (1, 2, 4, 8, 16)


def fits(problem: Problem) -> str | None:
    x, weight, output = problem["input"], problem["weight"], problem.output
    a, epilogue = problem.attrs, problem.epilogue
    if len(x.shape) != 4:
        return f"takes [N, C, H, W], not {len(x.shape)} axes"
    if x.dtype not in DTYPES or not x.dtype == weight.dtype == output.dtype:
        return f"multiplies and makes {' or '.join(DTYPES)}"
    if not problem.is_constant("weight"):
        return "the weight must be constant: it is packed in advance"
    if (epilogue.residual, epilogue.scale, epilogue.alpha) != (None, None, 1):
        return "no residual, scale or alpha"
    if epilogue.bias is not None and epilogue.bias.dtype not in FLOATS:
        return f"a bias of {', '.join(FLOATS)}"
    if not (x.has("channels_last") and output.has("channels_last")):
        return "image and result must be channels_last"
    if weight.shape[0] % FILTERS:
        return f"channels of the result must be a multiple of {FILTERS}"
    if a["groups"] != 1 or tuple(a["dilation"]) != (1, 1):
        return "one group, no dilation"
    if 0 in (*x.shape, *output.shape):
        return "empty"
    if problem.op == "conv2d_pool" and (why := _not_pooled(problem)):
        return why
    layer = layer_of(problem)
    if layer.stride_w * layer.channels % 2:
        return "a pixel of the result must begin with a whole word of the image"
    if layer.width * layer.channels % 8:
        return f"a row of {layer.width * layer.channels} values is no multiple of 16 bytes"
    if layer.channels > MOST_CHANNELS or layer.products > MOST_PRODUCTS:
        return f"for few channels: {layer.products} times 16 values, at most {MOST_PRODUCTS}"
    return None if configs(problem) else "a row does not fit the shared memory"


def _not_pooled(problem: Problem) -> str | None:
    a = problem.attrs
    if tuple(a["kernel_size"]) != (3, 3) or tuple(a["pool_stride"]) != (2, 2):
        return "windows of 3×3 with stride 2"
    return None if tuple(a["pool_dilation"]) == (1, 1) else "no dilation of windows"


def outclassed(problem: Problem) -> str | None:
    """Hopper multiplies by ``wgmma`` 1.6 times as fast."""
    target = gpu_target()
    return f"{target} has wgmma" if has(target, "wgmma") else None


def layer_of(problem: Problem, **changes: int) -> Layer:
    """The layer in numbers."""
    a, (_, channels, height, width) = problem.attrs, problem["input"].shape
    pairs = {
        "taps": problem["weight"].shape[2:],
        "stride": a["stride"],
        "padding": a["padding"],
        "out": problem.output.shape[2:],
    }
    if problem.op == "conv2d_pool":
        window = (pairs["padding"], pairs["taps"], pairs["stride"])
        pairs |= {
            "out": [
                (size + 2 * pad - taps) // stride + 1
                for size, pad, taps, stride in zip((height, width), *window, strict=True)
            ],
            "pool": problem.output.shape[2:],
            "pool_padding": a["pool_padding"],
        }
    numbers = {
        f"{name}_{axis}": int(n)
        for name, two in pairs.items()
        for axis, n in zip("hw", two, strict=True)
    }
    return Layer(height=height, width=width, channels=channels, **numbers, **changes)


def configs(problem: Problem) -> tuple[Config, ...]:
    """Rows of a block and its warps, by the tiles that the busiest multiprocessor makes."""
    images = problem["input"].shape[0] * problem["weight"].shape[0] // FILTERS
    pooled = problem.op == "conv2d_pool"
    names = ("warps", "mi", "blocks", "lines")[: 4 if pooled else 3]
    found: dict[tuple[int, ...], float] = {}
    for rows in _ROWS:
        for shape in _POOLED if pooled else _SHAPES:
            layer = layer_of(problem, rows=rows, **dict(zip(names, shape, strict=True)))
            if layer.shared_bytes > gpu().shared_bytes_of_block(layer.blocks):
                continue
            together = layer.warps * layer.mi
            tiles = sum(ceil_div(n * ceil_div(layer.out_w, 16), together) for n in layer.parts)
            rounds = ceil_div(images * layer.bands, multiprocessors() * layer.blocks)
            work = tiles * together * (1 + 1 / layer.mi) + 2 * layer.read
            if pooled:  # few warps do not hide the waits between rows: 229 µs by 7, 199 by 14
                work *= 1 + 4 / (layer.warps * layer.blocks)
            found[rows, *shape] = rounds * layer.blocks * work
    best = sorted(found, key=found.__getitem__)[:TRIED]
    return tuple(dict(zip(("rows", *names), numbers, strict=True)) for numbers in best)


def bind(problem: Problem, constants: Mapping[int, torch.Tensor], **config: int) -> Call:
    layer = layer_of(problem, **(config or configs(problem)[0]))
    kernel, weight = _kernel(code_of(problem, layer)), pack(constants[1], layer)
    grid, factors, numbers = launch_of(problem, layer)

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        x, _, added = problem.product_operands(constants, inputs)
        launched = kernel.launch(
            (grid, 1, 1),
            (32 * layer.warps, 1, 1),
            (x, weight, out if added.bias is None else added.bias, out, *factors, *numbers),
            shared_bytes=layer.shared_bytes,
            target=gpu_target() if only_compiles() else None,
        )
        record(launched)
        return out

    return call


def code_of(problem: Problem, layer: Layer, machine: str | None = None) -> str:
    """The kernel's source."""
    bias = problem.epilogue.bias
    return source(
        layer,
        problem["input"].dtype,
        bias.dtype if bias else None,
        rescaled=problem.gamma is not None,
        activation=problem.epilogue.activation,
        machine=machine,
    )


def launch_of(problem: Problem, layer: Layer) -> tuple[int, tuple[float], tuple[int, int, int]]:
    """Blocks, and the kernel's numbers behind its pointers: floats, then ints."""
    images, filters = problem["input"].shape[0], problem["weight"].shape[0]
    across = filters // FILTERS
    gamma = float(problem.epilogue.gamma)
    return images * layer.bands * across, (gamma,), (layer.bands, across, filters)


@functools.lru_cache(maxsize=64)
def _kernel(code: str) -> CudaKernel:
    # products and sums are not contracted: the epilogue rounds as torch's does
    return cuda(code, "conv_direct", options=("--fmad=false",))


def pack(weight: torch.Tensor, layer: Layer) -> torch.Tensor:
    """[K, C, R, S] as the shared memory of blocks of 64 filters: runs of each, in the order that
    ``direct.cu`` says.
    """
    how = ("conv.ampere.direct", layer.shift, layer.words)
    return packed(weight, how, lambda weight: _packed(weight, layer))


def _packed(weight: torch.Tensor, layer: Layer) -> torch.Tensor:
    filters = len(weight)
    column = torch.arange(FILTERS, device=weight.device)
    channel = column // 32 * 32 + column % 8 // 2 * 8 + column // 8 % 4 * 2 + column % 2
    runs = weight.permute(0, 2, 3, 1).reshape(filters // FILTERS, FILTERS, layer.taps_h, layer.run)
    made = weight.new_zeros(filters // FILTERS, FILTERS, layer.weight_pitch // 2)
    for row in range(layer.taps_h):
        at = 2 * layer.words * row + layer.shift
        made[:, :, at : at + layer.run] = runs[:, channel, row]
    return made
