"""``pooled_device``'s own source as C++ on a processor, a thread for each of a block's.

Beside what ``sparse_on_cpu`` says of Hopper: TMA's boxes of three axes with zeros around the image,
and products whose left matrix lies in the registers of a group's threads; their sums come late.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import torch

from tessella.kernels.conv.hopper import pooled
from tessella.kernels.conv.hopper.pooled_device import Stem, source
from tessella.operations.problem import Problem
from tests.support.emulators.sparse_on_cpu import COMMON, library

_HEAD = r"""
struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
"""

_MACHINE = r"""
inline float larger(float x, float y) { return std::isnan(x) || x > y ? x : y; }
inline u32 pack_16_bit(float x, float y) { return to_half(x) | to_half(y) << 16; }
inline u32 bfloats(float x, float y) { return to_bfloat(x) | to_bfloat(y) << 16; }
inline u32 word(u32 at) { u32 x; memcpy(&x, memory + at, 4); return x; }
float passed[128];
inline float of_next_pixels(float x) {
  const int t = threadIdx.x;
  passed[t] = x;
  __syncwarp();
  const float y = passed[t % 32 < 28 ? t + 4 : t];
  __syncwarp();
  return y;
}
u32 shown[128];
inline u32 of_lane(u32 x, int lane) {
  const int t = threadIdx.x;
  shown[t] = x;
  __syncwarp();
  const u32 y = shown[t / 32 * 32 + lane];
  __syncwarp();
  return y;
}
// a map's words: address, bytes of a row and of an image; then words, rows, images; then the box
inline void box(u32 to, const CUtensorMap* map, int x, int y, int z, u32 barrier) {
  const u64* m = map->words;
  if (to % 128) abort();
  for (int r = 0; r < (int)m[7]; ++r)
    for (int c = 0; c < (int)m[6]; ++c) {
      const bool inside = x + c >= 0 && x + c < (int)m[3] && y + r >= 0 && y + r < (int)m[4]
          && z >= 0 && z < (int)m[5];
      u32 found = 0;
      if (inside) memcpy(&found, (const char*)m[0] + z * m[2] + (y + r) * m[1] + 4 * (x + c), 4);
      memcpy(memory + to + 4 * (r * m[6] + c), &found, 4);
    }
  count(barrier, 0, -4 * (long)(m[6] * m[7]));
}
inline void settled(u32&) {}
// sums are not there before someone waits for them
thread_local float pending[32];
thread_local int next_sum;
inline void end_products() {}
inline void wait_for_products() { next_sum = 0; }
inline void settled(float& sum) { sum = pending[next_sum++]; }
inline float number(u32 bits) {
  return KIND_OF_X == 2 ? as<float>(bits << 16) : of_half(bits & 0xffff);
}
u32 left[128][4];
template <bool ADDS> void multiply(float (&d)[32], u32 a, u32 b, u32 c, u32 e, u64 weight) {
  const int t = threadIdx.x, quad = t / 4 * 4;
  const u32 given[4] = {a, b, c, e};
  memcpy(left[t], given, 16);
  __syncwarp();
  for (int i = 0; i < 32; ++i) {
    const int half = i / 2 % 2, n = i / 4 * 8 + t % 4 * 2 + i % 2;
    float sum = ADDS ? pending[i] : 0.0f;
    for (int k = 0; k < 16; ++k) {
      const u32 x = left[quad + k % 8 / 2][half + k / 8 * 2] >> k % 2 * 16;
      u16 w;
      const u32 matrix = (weight & 0x3fff) << 4;
      memcpy(&w, memory + swizzled(matrix + n / 8 * 1024 + n % 8 * 128 + 2 * k), 2);
      sum += number(x) * number(w);
    }
    pending[i] = sum;
    d[i] = NAN;
  }
  __syncwarp();
}
"""

_TAIL = r"""
extern "C" void run(CUtensorMap* x, const void* weight, const void* bias, void* out, float gamma,
                    int tasks, int grid) {
  for (int b = 0; b < grid; ++b) {
    barriers.clear();
    memset(memory, 0x7f, sizeof memory);  // NaN
    std::vector<std::thread> threads;
    for (int t = 0; t < THREADS; ++t)
      threads.emplace_back([=] {
        threadIdx.x = t; blockIdx.x = b;
        conv_pool(*x, weight, bias, out, gamma, tasks, grid);
      });
    for (auto& thread : threads) thread.join();
  }
}
"""


def conv_pool(
    problem: Problem,
    operands: Mapping[int, torch.Tensor],
    out: torch.Tensor,
    folder: Path,
    *,
    grid: int,
    **config: int,
) -> torch.Tensor:
    """What the kernel makes of x, weight and bias, in ``out``.

    Args:
        folder: where it is compiled.
        grid: blocks, one after another.
    """
    stem = pooled.stem_of(problem, **config)
    x, bias = operands[0], operands.get(2)
    meta = problem.meta(2)
    code = source(
        stem,
        dtype=problem.inputs[0].dtype,
        out=problem.output.dtype,
        bias=meta.dtype if meta else None,
        rescaled=problem.gamma is not None,
        activation=problem.attrs["activation"],
        blocks=1,
        machine=f"constexpr int KIND_OF_X = {2 if x.dtype == torch.bfloat16 else 1};\n"
        + COMMON
        + _MACHINE,
    ).replace("extern __shared__ char memory[];", "")
    weight = pooled.pack(operands[1], stem)
    pointers = (ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (weight, bias, out))
    gamma = ctypes.c_float(float(problem.attr("gamma")))
    box = ctypes.byref(_map(x, stem))
    library(_HEAD + code + _TAIL, folder).run(box, *pointers, gamma, stem.tasks, grid)
    return out


class _Map(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]


def _map(x: torch.Tensor, stem: Stem) -> _Map:
    words = stem.width * stem.channels // 2
    pitches = (4 * words, 4 * words * stem.height)
    extents = (words, stem.height, stem.images)
    return _Map((ctypes.c_uint64 * 16)(x.data_ptr(), *pitches, *extents, stem.pitch, stem.stride_h))
