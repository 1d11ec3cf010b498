"""Ampere's kernels in CUDA C++ as C++ on a processor, a thread for each of a block's.

Beside what ``sparse_on_cpu`` says of every GPU: copies that nobody sees before they are waited
for, ``ldmatrix``, and products whose operands lie in the registers of a warp, as the PTX manual has
them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.emulators.sparse_on_cpu import COMMON, library

_HEAD = r"""
#define __align__(...)
struct uint4 { unsigned x, y, z, w; };
inline unsigned __float_as_uint(float x) { return as<unsigned>(x); }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
"""

_MACHINE = r"""
struct Copy { u32 to; const void* from; int bytes; bool there; };
thread_local std::vector<std::vector<Copy>> copies(1);
inline void copy(u32 to, const void* from, int bytes, bool there) {
  if (to % bytes || (u64)from % bytes) abort();
  copies.back().push_back({to, from, bytes, there});
}
inline void copy_16(u32 to, const void* from, bool there) { copy(to, from, 16, there); }
inline void end_copies() { copies.emplace_back(); }
template <int PENDING> void wait_for_copies() {
  while (copies.size() - 1 > PENDING) {
    for (const Copy& c : copies.front()) {
      if (c.there) memcpy(memory + c.to, c.from, c.bytes);
      else memset(memory + c.to, 0, c.bytes);
    }
    copies.erase(copies.begin());
  }
}
inline u32 read_word(u32 at) { u32 x; memcpy(&x, memory + at, 4); return x; }
inline void write_word(u32 at, u32 x) { memcpy(memory + at, &x, 4); }
inline uint2 read_two(u32 at) {
  if (at % 8) abort();
  return {read_word(at), read_word(at + 4)};
}
inline void write_two(u32 at, u32 x, u32 y) {
  if (at % 8) abort();
  write_word(at, x);
  write_word(at + 4, y);
}
inline uint4 read_four(u32 at) { uint4 x; memcpy(&x, memory + at, 16); return x; }
inline void write_four(u32 at, u32 a, u32 b, u32 c, u32 d) {
  if (at % 16) abort();
  const u32 words[4] = {a, b, c, d};
  memcpy(memory + at, words, 16);
}
inline float part_of(u32 word, int place);
inline u32 larger_halves(u32 x, u32 y) {
  u32 made = 0;
  for (int i = 0; i < 2; ++i) {
    const float one = part_of(x, i), two = part_of(y, i);
    made |= (one != one || one > two ? x : y) & 0xffffu << 16 * i;
  }
  return made;
}
inline u32 larger_bfloats(u32 x, u32 y) { return larger_halves(x, y); }
inline float larger(float x, float y) { return x != x || x > y ? x : y; }
inline u32 to_halves(float x, float y) { return to_half(x) | to_half(y) << 16; }
inline u32 to_bfloats(float x, float y) { return to_bfloat(x) | to_bfloat(y) << 16; }
inline float of_byte(u32 bits, int place) { return (signed char)(bits >> 8 * place ^ 128); }
template <bool BELOW> u32 to_bytes(const float (&y)[4]) {
  u32 made = 0;
  for (int l = 0; l < 4; ++l) {
    if (!BELOW && y[l] < 0) abort();
    made |= to_byte(y[l]) << 8 * l;
  }
  return made;
}
u32 asked[256], left[256][4], right[256][2];
inline void read_blocks(u32& a, u32& b, u32& c, u32& d, u32 at) {
  const int t = threadIdx.x, first = t / 32 * 32, lane = t % 32;
  if (at % 16) abort();
  asked[t] = at;
  __syncwarp();
  u32* to[4] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; ++i) *to[i] = read_word(asked[first + 8 * i + lane / 4] + 4 * (lane % 4));
  __syncwarp();
}
inline float part_of(u32 word, int place) {  // a word has two numbers, or four of a byte
  if (KIND_OF_X == 3) return (signed char)(word >> 8 * place);
  const u32 bits = word >> 16 * place & 0xffff;
  return KIND_OF_X == 2 ? as<float>(bits << 16) : of_half(bits);
}
inline void multiply(Sum (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  const int t = threadIdx.x, first = t / 32 * 32, lane = t % 32;
  memcpy(left[t], a, 16);
  memcpy(right[t], b, 8);
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    const int n = lane % 4 * 2 + i % 2;
    for (int word = 0; word < 8; ++word) {
      const u32 x = left[first + lane / 4 * 4 + word % 4][i / 2 + word / 4 * 2];
      const u32 w = right[first + n * 4 + word % 4][word / 4];
      for (int l = 0; l < (KIND_OF_X == 3 ? 4 : 2); ++l) d[i] += part_of(x, l) * part_of(w, l);
    }
  }
  __syncwarp();
}
"""

_TAIL = r"""
extern "C" void run(int grid, const void** p, const float* f, const int* n) {
  for (int b = 0; b < grid; ++b) {
    memset(memory, 0x7f, sizeof memory);  // NaN
    std::vector<std::thread> threads;
    for (int t = 0; t < THREADS; ++t)
      threads.emplace_back([=] {
        threadIdx.x = t; blockIdx.x = b;
        KERNEL;
      });
    for (auto& thread : threads) thread.join();
  }
}
"""


def machine(dtype: torch.dtype) -> str:
    """What a source for this element type takes in the place of the GPU's instructions."""
    kind = {torch.float16: 1, torch.bfloat16: 2, torch.int8: 3}[dtype]
    return f"constexpr int KIND_OF_X = {kind};\n" + COMMON + _MACHINE


def run(
    source: str,
    name: str,
    grid: int,
    tensors: Sequence[torch.Tensor | None],
    factors: Sequence[float],
    numbers: Sequence[int | tuple[int, ...]],
    folder: Path,
) -> None:
    """Call a kernel with pointers, floats and ints, in this order; it is compiled in a folder.

    A tuple of ints is a struct of them.
    """
    taken = [f"(void*)p[{i}]" for i in range(len(tensors))]
    taken += [f"f[{i}]" for i in range(len(factors))]
    ints: list[int] = []
    for number in numbers:
        group = number if isinstance(number, tuple) else (number,)
        places = [f"n[{len(ints) + i}]" for i in range(len(group))]
        taken.append(f"{{{', '.join(places)}}}")
        ints += group
    code = source.replace("extern __shared__ __align__(128) char memory[];", "")
    text = _HEAD + code + _TAIL.replace("KERNEL", f"{name}({', '.join(taken)})")
    pointers = [None if t is None else t.data_ptr() for t in tensors]
    library(text, folder).run(
        grid,
        (ctypes.c_void_p * len(pointers))(*pointers),
        (ctypes.c_float * len(factors))(*factors),
        (ctypes.c_int * len(ints))(*ints),
    )
