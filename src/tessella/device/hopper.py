"""The names of Gluon that Hopper kernels use, the same under Triton 3.6 and later.

Gluon is Triton's lower level: layouts, shared memory, barriers and warps are the author's. It is
experimental and renames things between versions; every difference that our kernels meet is settled
here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tessella.core.errors import KernelError
from tessella.device.machine import ALIGNMENT

__all__ = [
    "DTYPES",
    "OVERLAPPING_TILES",
    "TensorDescriptor",
    "barrier",
    "commit_copies",
    "copy_elements",
    "descriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "reinterpret",
    "store_tile",
    "store_wait",
    "wait_for_copies",
    "wait_for_dependencies",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]

# all threads of a block (or of one role, inside warp_specialize) meet here
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# load_tile(descriptor, coordinates, mbarrier, shared, pred) and
# store_tile(descriptor, coordinates, shared): the bulk tensor copies
_renamed = hasattr(tma, "async_load")
load_tile = tma.async_load if _renamed else tma.async_copy_global_to_shared
store_tile = tma.async_store if _renamed else tma.async_copy_shared_to_global
store_wait = tma.store_wait
# copy_elements(shared, pointers): every thread copies what its pointers name, on the way while it
# goes on; commit_copies() closes a group, wait_for_copies(n) leaves the n newest groups under way
copy_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit_copies = async_copy.commit_group
wait_for_copies = async_copy.wait_group
# reinterpret(shared, dtype, shape, layout): the same bytes, seen as another tile
_shared = gl.shared_memory_descriptor
_checked = hasattr(_shared, "reinterpret")
reinterpret = _shared.reinterpret if _checked else _shared._reinterpret
# whether the new tile may reach beyond the old one: later versions refuse it
OVERLAPPING_TILES = not _checked

DTYPES: dict[torch.dtype, Any] = {
    torch.float32: gl.float32,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.int8: gl.int8,
    torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


def descriptor(tensor: torch.Tensor, block: Sequence[int], **layout: Any) -> TensorDescriptor:
    """A TMA descriptor of ``tensor`` (dense in its last axis) that moves tiles of shape ``block``.

    Args:
        block: powers of two, each at most 256.
        layout: arguments of ``NVMMASharedLayout.get_default_for``, such as ``transposed``.

    Raises:
        KernelError: the tensor begins where TMA cannot.
    """
    if tensor.data_ptr() % ALIGNMENT:
        raise KernelError(
            "a tensor is not aligned to 16 bytes, as TMA wants it",
            seen=f"address {tensor.data_ptr():#x}, shape {tuple(tensor.shape)}",
            fix="pass a copy of it (tensor.clone())",
        )
    block = list(block)
    shared = gl.NVMMASharedLayout.get_default_for(block, DTYPES[tensor.dtype], **layout)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, shared)


@gluon.jit
def wait_for_dependencies(LET_START: gl.constexpr = True):
    """Waits until the kernels before this one have ended and their results can be read.

    With LET_START the next kernel may start then, if it is launched with ``launch_pdl``;
    ``overlap`` says why not before. Else it may when this one's blocks end. That is for products
    with several tiles a block: where they let the next one start at once, BERT-large took 15.7 ms
    on an H100 for 15.0, and ViT-B/16 10.0 for 9.4; ResNet-50 for one image, with a tile a block at
    most, 0.222 ms for 0.259.
    """
    if LET_START:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;",
            "=r", [], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
