"""The sparse kernel's own source as C++ on a processor, a thread for each of a block's.

``MACHINE`` says in plain C++ what Hopper does: TMA's tiles and swizzle, barriers that count bytes,
and products read from shared memory and from the registers of a group's threads, as the PTX manual
has them. Everything else is the kernel's own text: its ring, its order of tiles, its epilogue.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from tessella.kernels.sparse import wgmma
from tessella.kernels.sparse.wgmma_device import Tiling, source
from tessella.operations.epilogue import Epilogue

COMPILER = ("g++", "-O1", "-std=c++20", "-w", "-shared", "-fPIC", "-pthread")
_HEAD = r"""
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __shared__
#define __expf expf
struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct char4 { signed char x, y, z, w; };
struct int4 { int x, y, z, w; };
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
template <class To, class From> To as(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
inline float __uint_as_float(unsigned x) { return as<float>(x); }
inline float __int_as_float(int x) { return as<float>(x); }
inline int __float_as_int(float x) { return as<int>(x); }

struct Place { int x; };
thread_local Place threadIdx, blockIdx;
alignas(4096) char memory[1 << 18];
struct Meeting {  // all who come wait for the last
  std::mutex lock; std::condition_variable changed; int here = 0; unsigned round = 0;
  void come(int count) {
    std::unique_lock<std::mutex> held(lock);
    const unsigned mine = round;
    if (++here == count) { here = 0; ++round; changed.notify_all(); }
    else changed.wait(held, [&] { return round != mine; });
  }
};
Meeting block, consumers, group_of[2], warp_of[12];
#define __syncthreads() block.come(THREADS)
#define __syncwarp() warp_of[threadIdx.x / 32].come(32)
"""

# what other kernels ask of the machine too
COMMON = r"""
inline float of_half(u32 bits) { return (float)as<_Float16>((u16)bits); }
inline u32 to_half(float x) { return as<u16>((_Float16)x); }
inline u32 to_bfloat(float x) { u32 b = as<u32>(x); return (b + 0x7fff + (b >> 16 & 1)) >> 16; }
inline u32 to_byte(float x) {
  return (int)fminf(fmaxf(nearbyintf(x), -128.0f), 127.0f) & 255;
}

inline u32 address(const void* p) { return (u32)((const char*)p - memory); }
struct Barrier {
  int arrivals, missing; long bytes; u32 phase; std::condition_variable changed;
  void look() {
    if (missing == 0 && bytes == 0) { phase ^= 1; missing = arrivals; changed.notify_all(); }
  }
};
std::map<u32, Barrier> barriers;
std::mutex of_barriers;
inline void begin(u32 at, int arrivals) {
  Barrier& b = barriers[at];
  b.arrivals = b.missing = arrivals; b.bytes = 0; b.phase = 0;
}
inline void count(u32 at, int arrivals, long bytes) {
  std::lock_guard<std::mutex> held(of_barriers);
  Barrier& b = barriers[at];
  b.missing -= arrivals; b.bytes += bytes; b.look();
}
inline void expect(u32 at, u32 bytes) { count(at, 1, bytes); }
inline void arrive(u32 at) { count(at, 1, 0); }
inline void wait(u32 at, u32 phase) {
  std::unique_lock<std::mutex> held(of_barriers);
  Barrier& b = barriers[at];
  b.changed.wait(held, [&] { return b.phase != phase; });
}
inline u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }
inline void bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  memcpy(memory + to, from, bytes);
  count(barrier, 0, -(long)bytes);
}
inline void show_barriers() {}
inline void give_registers() {}
inline void take_registers() {}
template <int COUNT> void read(u32 (&to)[COUNT], u32 at) { memcpy(to, memory + at, 4 * COUNT); }
template <int COUNT> void meet() { consumers.come(COUNT); }
inline void begin_products() {}
template <int BLOCKS, int COUNT> void wait_for(Sum (&)[BLOCKS][COUNT]) {}
"""

MACHINE = (
    COMMON
    + r"""
// a map's words: address, rows, columns, bytes of a row, rows of a tile
inline void tile(u32 to, const CUtensorMap* map, int x, int y, u32 barrier) {
  const u64* m = map->words;
  for (int r = 0; r < (int)m[4]; ++r)
    for (int c = 0; c < 128 / ITEM; ++c) {
      const bool inside = y + r < (int)m[1] && x + c < (int)m[2];
      const char* from = (const char*)m[0] + (y + r) * m[3] + (x + c) * ITEM;
      for (int i = 0; i < ITEM; ++i)
        memory[swizzled(to + r * 128 + c * ITEM) + i] = inside ? from[i] : 0;
    }
  count(barrier, 0, -128 * (long)m[4]);
}
inline double element(u32 matrix, int row, int byte) {
  const char* at = memory + swizzled(matrix + row / 8 * 1024 + row % 8 * 128 + byte);
  if (ITEM == 1) return *(const signed char*)at;
  u16 bits; memcpy(&bits, at, 2);
  return of_half(bits);
}
u32 registers[2][128];
template <int SELECTOR> void multiply(Sum (&d)[ROWS / 2], u64 a, u64 b, u32 places) {
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
  const u32 values = (a & 0x3fff) << 4, x = (b & 0x3fff) << 4;
  registers[group][thread] = places;
  group_of[group].come(128);
  const int quad = thread / 4 * 4;
  for (int half = 0; half < 2; ++half) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * half;
    for (int four = 0; four < 16 / ITEM; ++four) {
      const u32 bits = ITEM == 2
          ? registers[group][quad + 2 * SELECTOR + four / 4] >> (16 * half + four % 4 * 4)
          : registers[group][quad + half + four / 8 * 2] >> four % 8 * 4;
      for (int one = 0; one < 2; ++one) {
        const double value = element(values, row, (2 * four + one) * ITEM);
        const int byte = (4 * four + (bits >> 2 * one & 3)) * ITEM;
        for (int i = 0; i < ROWS / 4; ++i) {
          const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
          d[i / 2 * 4 + half * 2 + i % 2] += (Sum)(value * element(x, column, byte));
        }
      }
    }
  }
  group_of[group].come(128);
}
"""
)

TAIL = r"""
extern "C" void run(
    int grid, CUtensorMap* values, CUtensorMap* x, const int* places, void* out, const void* bias,
    const void* residual, const void* scale, float alpha, float beta, int channels, int rows,
    int depth, float gamma) {
  for (int b = 0; b < grid; ++b) {
    barriers.clear();
    memset(memory, 0x7f, sizeof memory);
    std::vector<std::thread> threads;
    for (int t = 0; t < THREADS; ++t)
      threads.emplace_back([=] {
        threadIdx.x = t; blockIdx.x = b;
        sparse_linear(*values, *x, places, out, bias, residual, scale, alpha, beta, channels,
                      rows, depth, gamma);
      });
    for (auto& thread : threads) thread.join();
  }
}
"""


class _Map(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]


@functools.cache
def _head() -> Path:
    """What all texts begin with, compiled once: half of a text's second."""
    folder = Path(tempfile.mkdtemp(prefix="tessella-head-"))
    atexit.register(shutil.rmtree, folder)
    head = folder / "head.hpp"
    head.write_text(_HEAD)
    made = [head, "-o", head.with_suffix(".hpp.gch")]
    subprocess.run([*COMPILER, "-x", "c++-header", *made], check=True)
    return head


def library(text: str, folder: Path) -> ctypes.CDLL:
    """A text in C++ behind the common head, compiled in a folder."""
    made = folder / "kernel.so"
    command = [*COMPILER, "-include", _head(), "-x", "c++", "-", "-o", made]
    subprocess.run(command, input=text, text=True, check=True)
    return ctypes.CDLL(made)


def _map(matrix: torch.Tensor, rows: int) -> _Map:
    pitch = matrix.stride(0) * matrix.itemsize
    return _Map((ctypes.c_uint64 * 16)(matrix.data_ptr(), *matrix.shape, pitch, rows))


def linear(
    tiling: Tiling,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    folder: Path,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 1.0,
) -> torch.Tensor:
    """What the kernel makes of [M, K] and a 2:4 weight [N, K], in ``out`` [M, N].

    Args:
        folder: where it is compiled.
    """
    name = {t: str(t)[6:] for t in (torch.float16, torch.bfloat16, torch.float32, torch.int8)}
    name[torch.int32] = "int32"
    given = {"bias": bias, "residual": residual, "scale": scale}
    epilogue = Epilogue(
        activation=activation,
        **{operand: name[t.dtype] for operand, t in given.items() if t is not None},
    )
    code = source(
        tiling, name[x.dtype], name[out.dtype], epilogue, rescaled=gamma != 1, machine=MACHINE
    )
    code = code.replace("extern __shared__ char memory[];", "")
    values, places = wgmma._packed(weight)
    (m, k), n = x.shape, len(weight)
    pointers = (
        ctypes.c_void_p(None if t is None else t.data_ptr())
        for t in (places, out, bias, residual, scale)
    )
    library(code + TAIL, folder).run(
        math.ceil(n / tiling.channels) * math.ceil(m / tiling.rows),
        ctypes.byref(_map(values, tiling.channels)), ctypes.byref(_map(x, tiling.rows)), *pointers,
        ctypes.c_float(alpha), ctypes.c_float(beta), n, m, k, ctypes.c_float(gamma),
    )  # fmt: skip
    return out
