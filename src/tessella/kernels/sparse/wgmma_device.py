"""CUDA C++ of the sparse product for Hopper: what Gluon has no instruction for.

The weight is the sparse operand, so channels are a tile's rows and what the layer reads its
columns: out[row, channel] = Σ weight[channel, k] · x[row, k]. One group of warps loads: values and
x by TMA in rows of 128 bytes with TMA's swizzle, metadata as one copy. The others multiply from
shared memory, and turn their sums through it, so that results leave with channels innermost.
"""

from __future__ import annotations

from dataclasses import dataclass

ROW_BYTES = 128  # of a stage's values; of x it is twice as much
PAD = 4  # floats between columns of sums: no bank is asked twice, and vectors stay aligned
# element types as numbers of the source
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int32": 4}
NAMES = {"float16": "f16", "bfloat16": "bf16", "int8": "s8"}
NONE = -1  # an operand that is not there


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a product is cut.

    Attributes:
        channels, rows: of a block's result; multiples of 64 and of 8.
        stages: that are loaded ahead.
    """

    channels: int
    rows: int
    stages: int

    @property
    def groups(self) -> int:
        """Of 128 threads, that multiply."""
        return min(2, self.channels // 64)

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    def stage_bytes(self, itemsize: int) -> int:
        """Values, x, and metadata of a stage."""
        metadata = self.channels // 64 * 128 * 4 * words(itemsize)
        return ROW_BYTES * self.channels + 2 * ROW_BYTES * self.rows + metadata

    def shared_bytes(self, itemsize: int) -> int:
        """Of a block: stages or sums, barriers, and what aligning may cost."""
        sums = 4 * self.rows * (self.channels + PAD)
        return max(self.stages * self.stage_bytes(itemsize), sums) + 16 * self.stages + 1024


def words(itemsize: int) -> int:
    """Registers of metadata that a thread has for 64 channels of a stage."""
    return 2 if itemsize == 2 else 4


def depth(itemsize: int) -> int:
    """How much of the reduction a stage holds."""
    return 2 * ROW_BYTES // itemsize


def source(
    tiling: Tiling,
    *,
    dtype: str,
    out: str,
    bias: str | None,
    residual: str | None,
    scaled: bool,
    rescaled: bool,
    activation: str | None,
    machine: str | None = None,
) -> str:
    """The code for one tiling and one epilogue; element types by torch's names.

    Args:
        rescaled: the activation's result is multiplied by ``gamma``.
        machine: instead of ``MACHINE`` and the instruction that multiplies.
    """
    itemsize = 1 if dtype == "int8" else 2
    settings = {
        "CHANNELS": tiling.channels,
        "ROWS": tiling.rows,
        "STAGES": tiling.stages,
        "GROUPS": tiling.groups,
        "ITEM": itemsize,
        "OUT": KINDS[out],
        "BIAS": NONE if bias is None else KINDS[bias],
        "RESIDUAL": NONE if residual is None else KINDS[residual],
        "SCALED": int(scaled),
        "RESCALED": int(rescaled),
        "PAD": PAD,
    }
    constants = "".join(f"constexpr int {name} = {value};\n" for name, value in settings.items())
    sums = "typedef int Sum;\n" if itemsize == 1 else "typedef float Sum;\n"
    activate = (
        "__device__ __forceinline__ float activate(float x) { return "
        f"{ACTIVATIONS[activation]}; }}\n"
    )
    machine = machine or MACHINE + _multiply(tiling.rows, dtype)
    return constants + sums + TYPES + machine + EPILOGUE + activate + _KERNEL


def _multiply(rows: int, dtype: str) -> str:
    """The instruction: 64 channels by ``rows``, 64 bytes of each row of x."""
    count = rows // 2
    kind, register = ("s32", "r") if dtype == "int8" else ("f32", "f")
    step, tail = (64, "") if dtype == "int8" else (32, ", 1, 1, 0, 0")
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+{register}"(d[{i}])' for i in range(count))
    name = f"m64n{rows}k{step}.{kind}.{NAMES[dtype]}.{NAMES[dtype]}"
    return f"""
template <int SELECTOR> __device__ __forceinline__
void multiply(Sum (&d)[{count}], u64 a, u64 b, u32 places) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"
    "wgmma.mma_async.sp.sync.aligned.{name} {{{registers}}}, "
    "%{count}, %{count + 1}, %{count + 2}, %{count + 3}, p{tail};\\n}}"
    : {outputs} : "l"(a), "l"(b), "r"(places), "n"(SELECTOR));
}}
"""


# epilogue.ACTIVATIONS of a float x; NaN stays NaN
_SIGMOID = "1.0f / (1.0f + __expf(-({})))"
_CLAMP6 = "({0} < 0.0f ? 0.0f : {0} > 6.0f ? 6.0f : {0})"
ACTIVATIONS: dict[str | None, str] = {
    None: "x",
    "relu": "x < 0.0f ? 0.0f : x",
    "relu6": _CLAMP6.format("x"),
    "sigmoid": _SIGMOID.format("x"),
    "tanh": "tanhf(x)",
    "silu": "x * (" + _SIGMOID.format("x") + ")",
    "gelu": "0.5f * x * (1.0f + erff(x * 0.7071067811865476f))",
    "gelu_tanh": "x * ("
    + _SIGMOID.format("1.5957691216057308f * (x + 0.044715f * x * x * x)")
    + ")",
    "hardswish": "x * " + _CLAMP6.format("(x + 3.0f)") + " * 0.16666666666666666f",
    "hardsigmoid": _CLAMP6.format("(x + 3.0f)") + " * 0.16666666666666666f",
}

TYPES = """
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
struct alignas(64) CUtensorMap { u64 words[16]; };
"""

# What only this machine has. ``source`` can be given other functions of these names: plain C++, so
# that all the rest runs on a processor.
MACHINE = r"""
__device__ __forceinline__ float of_half(u32 bits) {
  float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits)); return x;
}
__device__ __forceinline__ u32 to_half(float x) {
  u16 bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits;
}
__device__ __forceinline__ u32 to_bfloat(float x) {
  u16 bits; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits;
}
__device__ __forceinline__ u32 to_byte(float x) {  // half to even, saturated
  int code; asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(code) : "f"(x)); return code & 255;
}

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  asm volatile("{\n.reg .pred done;\nagain:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
               :: "r"(barrier), "r"(phase) : "memory");
}
__device__ __forceinline__ void tile(u32 to, const CUtensorMap* map, int x, int y, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];"
               :: "r"(to), "l"((u64)map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
__device__ __forceinline__ void bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               :: "r"(to), "l"((u64)from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void begin(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
}
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
}
__device__ __forceinline__ void read(u32 (&to)[2], u32 at) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at));
}
__device__ __forceinline__ void read(u32 (&to)[4], u32 at) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at));
}
template <int COUNT> __device__ __forceinline__ void meet() {
  asm volatile("bar.sync 1, %0;" :: "n"(COUNT) : "memory");
}
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// nothing that reads a sum moves before the wait for it
__device__ __forceinline__ void settled(float& sum) { asm volatile("" : "+f"(sum) :: "memory"); }
__device__ __forceinline__ void settled(int& sum) { asm volatile("" : "+r"(sum) :: "memory"); }
template <int BLOCKS, int COUNT> __device__ __forceinline__
void wait_for(Sum (&sums)[BLOCKS][COUNT]) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  #pragma unroll
  for (int m = 0; m < BLOCKS; ++m)
    #pragma unroll
    for (int j = 0; j < COUNT; ++j) settled(sums[m][j]);
}
"""

EPILOGUE = r"""
// four elements from a place that is a multiple of four
template <int KIND> __device__ __forceinline__
void load(const void* from, long long place, float (&x)[4]) {
  if constexpr (KIND == 0) {
    float4 v = ((const float4*)from)[place / 4];
    x[0] = v.x; x[1] = v.y; x[2] = v.z; x[3] = v.w;
  } else if constexpr (KIND == 1) {
    uint2 v = ((const uint2*)from)[place / 4];
    x[0] = of_half(v.x); x[1] = of_half(v.x >> 16);
    x[2] = of_half(v.y); x[3] = of_half(v.y >> 16);
  } else if constexpr (KIND == 2) {
    uint2 v = ((const uint2*)from)[place / 4];
    x[0] = __uint_as_float(v.x << 16); x[1] = __uint_as_float(v.x & 0xffff0000u);
    x[2] = __uint_as_float(v.y << 16); x[3] = __uint_as_float(v.y & 0xffff0000u);
  } else if constexpr (KIND == 3) {
    char4 v = ((const char4*)from)[place / 4];
    x[0] = (signed char)v.x; x[1] = (signed char)v.y;
    x[2] = (signed char)v.z; x[3] = (signed char)v.w;
  } else {
    x[0] = x[1] = x[2] = x[3] = 0.0f;
  }
}
template <int KIND> __device__ __forceinline__
void store(void* to, long long place, const float (&x)[4]) {
  if constexpr (KIND == 0) {
    ((float4*)to)[place / 4] = make_float4(x[0], x[1], x[2], x[3]);
  } else if constexpr (KIND == 1) {
    ((uint2*)to)[place / 4] =
        make_uint2(to_half(x[0]) | to_half(x[1]) << 16, to_half(x[2]) | to_half(x[3]) << 16);
  } else if constexpr (KIND == 2) {
    ((uint2*)to)[place / 4] = make_uint2(
        to_bfloat(x[0]) | to_bfloat(x[1]) << 16, to_bfloat(x[2]) | to_bfloat(x[3]) << 16);
  } else {
    ((u32*)to)[place / 4] =
        to_byte(x[0]) | to_byte(x[1]) << 8 | to_byte(x[2]) << 16 | to_byte(x[3]) << 24;
  }
}
"""

_KERNEL = r"""
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int BLOCKS = CHANNELS / 64 / GROUPS;  // of 64 channels, a group of warps
constexpr int WORDS = ITEM == 2 ? 2 : 4;        // of metadata, a thread, block and stage
constexpr int DEPTH = 256 / ITEM;               // of the reduction, a stage
constexpr int VALUE_BYTES = CHANNELS * 128;
constexpr int X_BYTES = ROWS * 256;
constexpr int PLACE_BYTES = CHANNELS / 64 * 128 * WORDS * 4;
constexpr int TOGETHER = 16;  // tiles of channels that neighbours share their rows with

// rows of 128 bytes, eight of them a swizzled atom
__device__ __forceinline__ u64 operand(u32 at) {
  return (u64)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_linear(
    const __grid_constant__ CUtensorMap values, const __grid_constant__ CUtensorMap x,
    const int* __restrict__ places, void* __restrict__ out, const void* __restrict__ bias,
    const void* __restrict__ residual, const void* __restrict__ scale,
    float alpha, float beta, int channels, int rows, int depth, float gamma) {
  extern __shared__ char memory[];
  char* shared = memory + (-(int)address(memory) & 1023);
  const u32 value_at = address(shared), x_at = value_at + STAGES * VALUE_BYTES;
  const u32 place_at = x_at + STAGES * X_BYTES;
  constexpr int RING = STAGES * (VALUE_BYTES + X_BYTES + PLACE_BYTES);
  constexpr int SUMS = 4 * ROWS * (CHANNELS + PAD);
  const u32 full = value_at + (RING > SUMS ? RING : SUMS), empty = full + 8 * STAGES;

  const int tiles = (channels + CHANNELS - 1) / CHANNELS, row_tiles = (rows + ROWS - 1) / ROWS;
  const int band = blockIdx.x / (TOGETHER * row_tiles), left = tiles - band * TOGETHER;
  const int width = left < TOGETHER ? left : TOGETHER;
  const int within = blockIdx.x - band * TOGETHER * row_tiles;
  const int channel = (band * TOGETHER + within % width) * CHANNELS, row = within / width * ROWS;
  const int steps = (depth + DEPTH - 1) / DEPTH;
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      begin(full + 8 * s, 1);
      begin(empty + 8 * s, 4 * GROUPS);
    }
    show_barriers();
  }
  __syncthreads();

  if (group == GROUPS) {  // loads
    if constexpr (GROUPS == 2) give_registers();
    if (warp == 0 && lane == 0) {
      #pragma unroll 1
      for (int i = 0; i < steps; ++i) {
        const int s = i % STAGES;
        if (i >= STAGES) wait(empty + 8 * s, (i / STAGES - 1) & 1);
        const u32 ready = full + 8 * s;
        expect(ready, VALUE_BYTES + X_BYTES + PLACE_BYTES);
        tile(value_at + s * VALUE_BYTES, &values, i * (DEPTH / 2), channel, ready);
        tile(x_at + s * X_BYTES, &x, i * DEPTH, row, ready);
        tile(x_at + s * X_BYTES + X_BYTES / 2, &x, i * DEPTH + DEPTH / 2, row, ready);
        #pragma unroll
        for (int m = 0; m < CHANNELS / 64; ++m) {
          const long long at = ((long long)(channel / 64 + m) * steps + i) * (128 * WORDS);
          bulk(place_at + s * PLACE_BYTES + m * 512 * WORDS, places + at, 512 * WORDS, ready);
        }
      }
    }
    return;
  }

  if constexpr (GROUPS == 2) take_registers();
  Sum sums[BLOCKS][ROWS / 2];
  #pragma unroll
  for (int m = 0; m < BLOCKS; ++m)
    #pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) sums[m][i] = 0;

  #pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    const int s = i % STAGES;
    wait(full + 8 * s, (i / STAGES) & 1);
    u32 word[BLOCKS][WORDS];
    #pragma unroll
    for (int m = 0; m < BLOCKS; ++m) {
      const u32 at = place_at + s * PLACE_BYTES
          + ((group * BLOCKS + m) * 128 + threadIdx.x % 128) * (4 * WORDS);
      read(word[m], at);
    }
    begin_products();
    const u64 b = operand(x_at + s * X_BYTES);
    #pragma unroll
    for (int m = 0; m < BLOCKS; ++m) {
      const u64 a = operand(value_at + s * VALUE_BYTES + (group * BLOCKS + m) * 8192);
      // 32 bytes of values and 64 of x each; the second half of x lies in a tile of its own
      if constexpr (ITEM == 2) {
        multiply<0>(sums[m], a, b, word[m][0]);
        multiply<1>(sums[m], a + 2, b + 4, word[m][0]);
        multiply<0>(sums[m], a + 4, b + ROWS * 8, word[m][1]);
        multiply<1>(sums[m], a + 6, b + ROWS * 8 + 4, word[m][1]);
      } else {
        multiply<0>(sums[m], a, b, word[m][0]);
        multiply<0>(sums[m], a + 2, b + 4, word[m][1]);
        multiply<0>(sums[m], a + 4, b + ROWS * 8, word[m][2]);
        multiply<0>(sums[m], a + 6, b + ROWS * 8 + 4, word[m][3]);
      }
    }
    wait_for(sums);
    __syncwarp();
    if (lane == 0) arrive(empty + 8 * s);
  }

  // sums [row][channel], where the stages were
  int* staged = (int*)shared;
  meet<128 * GROUPS>();
  #pragma unroll
  for (int m = 0; m < BLOCKS; ++m)
    #pragma unroll
    for (int i = 0; i < ROWS / 2; ++i) {
      int bits;
      if constexpr (ITEM == 2) bits = __float_as_int(sums[m][i]); else bits = (int)sums[m][i];
      const int c = (group * BLOCKS + m) * 64 + warp * 16 + lane / 4 + i % 4 / 2 * 8;
      const int r = i / 4 * 8 + lane % 4 * 2 + i % 2;
      staged[r * (CHANNELS + PAD) + c] = bits;
    }
  meet<128 * GROUPS>();

  constexpr int FOURS = CHANNELS / 4;  // a thread keeps its four channels
  const int c = threadIdx.x % FOURS * 4;
  if (channel + c >= channels) return;
  float factor[4] = {1.0f, 1.0f, 1.0f, 1.0f}, shift[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if constexpr (SCALED) load<0>(scale, channel + c, factor);
  if constexpr (BIAS >= 0) load<BIAS>(bias, channel + c, shift);
  for (int r = threadIdx.x / FOURS; r < ROWS && row + r < rows; r += 128 * GROUPS / FOURS) {
    const long long place = (long long)(row + r) * channels + channel + c;
    const int4 raw = *(const int4*)(staged + r * (CHANNELS + PAD) + c);
    if constexpr (OUT == 4) {
      ((int4*)out)[place / 4] = raw;
    } else {
      const int bits[4] = {raw.x, raw.y, raw.z, raw.w};
      float more[4], y[4];
      if constexpr (RESIDUAL >= 0) load<RESIDUAL>(residual, place, more);
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        float sum;
        if constexpr (ITEM == 2) sum = __int_as_float(bits[j]); else sum = (float)bits[j];
        sum *= alpha;
        if constexpr (SCALED) sum *= factor[j];
        if constexpr (BIAS >= 0) sum += shift[j];
        if constexpr (RESIDUAL >= 0) sum += more[j] * beta;
        y[j] = activate(sum);
        if constexpr (RESCALED) y[j] *= gamma;
      }
      store<OUT>(out, place, y);
    }
  }
}
"""
