"""8-bit integers on the device without conversion instructions: what bounds an epilogue's stores.

Those instructions make 16 results a clock and multiprocessor, additions 128. Three conversions an
element (sum, residual, result) bounded 8-bit convolutions with a residual: 93 µs for 64 → 256
channels at 56 × 56, 128 images, on an H200. A float32 of 2^23 and more holds an integer in its low
bits, so adding such a number converts.
"""

from __future__ import annotations

from tessella.kernels.hopper import gl, gluon


@gluon.jit
def float_of_small(x):
    """int32 from -2^22 to 2^22 → float32."""
    return (x + 0x4B400000).to(gl.float32, bitcast=True) - 12582912.0


@gluon.jit
def float_of_int8(x):
    """int8 → float32; four elements, or a multiple, in each thread."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 u, f0, f1, f2, f3;
        xor.b32 u, $4, 0x80808080;
        prmt.b32 f0, u, 0x4B000000, 0x7440;
        prmt.b32 f1, u, 0x4B000000, 0x7441;
        prmt.b32 f2, u, 0x4B000000, 0x7442;
        prmt.b32 f3, u, 0x4B000000, 0x7443;
        add.rn.f32 $0, f0, 0fCB000080;
        add.rn.f32 $1, f1, 0fCB000080;
        add.rn.f32 $2, f2, 0fCB000080;
        add.rn.f32 $3, f3, 0fCB000080;
        }""",
        "=f,=f,=f,=f,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def int8_of_float(x):
    """float32 → int8, half to even, saturated; four elements, or a multiple, in each thread."""
    return gl.inline_asm_elementwise(
        """{
        .reg .f32 f0, f1, f2, f3;
        .reg .b32 low, high;
        max.f32 f0, $1, 0fC3000000;
        max.f32 f1, $2, 0fC3000000;
        max.f32 f2, $3, 0fC3000000;
        max.f32 f3, $4, 0fC3000000;
        min.f32 f0, f0, 0f42FE0000;
        min.f32 f1, f1, 0f42FE0000;
        min.f32 f2, f2, 0f42FE0000;
        min.f32 f3, f3, 0f42FE0000;
        add.rn.f32 f0, f0, 0f4B400000;
        add.rn.f32 f1, f1, 0f4B400000;
        add.rn.f32 f2, f2, 0f4B400000;
        add.rn.f32 f3, f3, 0f4B400000;
        prmt.b32 low, f0, f1, 0x0040;
        prmt.b32 high, f2, f3, 0x0040;
        prmt.b32 $0, low, high, 0x5410;
        }""",
        "=r,f,f,f,f",
        [x],
        dtype=gl.int8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def by_channel(sums):
    """Sums in the order of channels, where sum 8 j + q of every 64 is that of channel j + 8 q.

    The weights' rows were spread so, to give a thread 16 neighbours of a row: no data moves here.
    """
    ROWS: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    blocks = sums.reshape([ROWS, COLUMNS // 64, 8, 8])
    return blocks.permute((0, 1, 3, 2)).reshape([ROWS, COLUMNS])


@gluon.constexpr_function
def sorted_layout(layout):
    """The same elements in each thread, neighbours beside each other: wide loads of vectors."""
    if not isinstance(layout, gl.DistributedLinearLayout):
        return layout
    return gl.DistributedLinearLayout(
        reg_bases=sorted(layout.reg_bases),
        lane_bases=layout.lane_bases,
        warp_bases=layout.warp_bases,
        block_bases=layout.block_bases,
        shape=layout.shape,
    )
