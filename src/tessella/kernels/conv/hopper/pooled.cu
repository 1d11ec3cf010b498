constexpr int THREADS = 128;
constexpr int KEPT = TAPS_H - STRIDE_H;  // rows of taps whose words the next row needs again
constexpr int AHEAD = (KEPT + STRIDE_H - 1) / STRIDE_H;  // stages before the first row's last
constexpr int LOADED = 4 * STRIDE_H * PITCH;
constexpr u32 LEAST = 0xff800000u;  // -inf

// rows of 128 bytes, eight of them a swizzled atom
__device__ __forceinline__ u64 operand(u32 at) {
  return (u64)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// whether a word of a run, counted from zero, holds values of it in its upper and lower 16 bits
__device__ __forceinline__ constexpr bool counts(int value) {
  return value >= SHIFT && value < SHIFT + RUN;
}
__device__ __forceinline__ constexpr bool whole(int c) {  // for every lane
  for (int q = 0; q < 4; ++q)
    if (!counts(2 * (q * WORDS + c)) || !counts(2 * (q * WORDS + c) + 1)) return false;
  return true;
}

struct Band {
  int image, row, column, rows;  // the first window, and how many below one another
  __device__ __forceinline__ Band(int task) {
    column = task % ACROSS * WINDOWS;
    row = task / ACROSS % BANDS * ROWS;
    image = task / (ACROSS * BANDS);
    rows = OUT_H - row < ROWS ? OUT_H - row : ROWS;
  }
  __device__ __forceinline__ int stages() const { return AHEAD + 1 + 2 * rows; }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv_pool(
    const __grid_constant__ CUtensorMap x, const void* __restrict__ weight,
    const void* __restrict__ bias, void* __restrict__ out, float gamma, int tasks, int grid) {
  extern __shared__ char memory[];
  char* shared = memory + (-(int)address(memory) & 1023);
  const u32 weight_at = address(shared), x_at = weight_at + WEIGHT_BYTES;
  constexpr int END = WEIGHT_BYTES + STAGES * STAGE_BYTES;
  float* biases = (float*)(shared + END);
  const u32 full = weight_at + END + 256, empty = full + 8 * STAGES, there = empty + 8 * STAGES;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;

  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      begin(full + 8 * s, 1);
      begin(empty + 8 * s, 4);
    }
    begin(there, 1);
    show_barriers();
  }
  if (threadIdx.x < 16) {
    float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if constexpr (BIAS >= 0) load<BIAS>(bias, 4 * threadIdx.x, four);
    #pragma unroll
    for (int j = 0; j < 4; ++j) biases[4 * threadIdx.x + j] = four[j];
  }
  __syncthreads();

  // one thread asks for rows, stage by stage, the next task's behind this one's
  int asked = blockIdx.x, stage = 0;
  auto ask = [&](int slot, u32 before) {
    if (asked >= tasks) return;
    const Band band(asked);
    wait(empty + 8 * slot, before);
    expect(full + 8 * slot, LOADED);
    const int top = (2 * band.row - POOL_PADDING_H) * STRIDE_H - PADDING_H;
    box(x_at + slot * STAGE_BYTES, &x, FIRST - LEAD + band.column * 2 * STEP,
        top + KEPT + (stage - AHEAD) * STRIDE_H, band.image, full + 8 * slot);
    if (++stage == band.stages()) { stage = 0; asked += grid; }
  };
  if (threadIdx.x == 0) {
    #pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) {
      ask(s, 1);  // there is nothing to wait for
      if (s == 0) {
        expect(there, WEIGHT_BYTES);
        bulk(weight_at, weight, WEIGHT_BYTES, there);
      }
    }
  }

  u32 a[TAPS_H][WORDS][2], fresh[STRIDE_H][WORDS][2];  // words under rows of taps, of both pixels
  #pragma unroll
  for (int r = 0; r < TAPS_H; ++r)
    #pragma unroll
    for (int c = 0; c < WORDS; ++c) a[r][c][0] = a[r][c][1] = 0;
  u32 mask[WORDS];
  #pragma unroll
  for (int c = 0; c < WORDS; ++c) {  // what lies beside a run may be infinite
    const int value = 2 * (q * WORDS + c);
    mask[c] = (counts(value) ? 0xffffu : 0u) | (counts(value + 1) ? 0xffff0000u : 0u);
  }
  const u32 mine = x_at + 4 * (LEAD + (14 * warp + 2 * g) * STEP + q * WORDS);
  int taken = 0;
  u32 phase = 0;
  auto fetch = [&] {  // what the next row of the convolution reads first
    if (threadIdx.x == 0) {  // where the row before this one was, which all have read
      ask(taken == 0 ? STAGES - 1 : taken - 1, taken == 0 ? phase ^ 1 : phase);
    }
    wait(full + 8 * taken, phase);
    const u32 at = mine + taken * STAGE_BYTES;
    #pragma unroll
    for (int r = 0; r < STRIDE_H; ++r)
      #pragma unroll
      for (int c = 0; c < WORDS; ++c)
        #pragma unroll
        for (int p = 0; p < 2; ++p) {
          const u32 read = word(at + 4 * (r * PITCH + p * STEP + c));
          fresh[r][c][p] = whole(c) ? read : read & mask[c];
        }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty + 8 * taken);
    if (++taken == STAGES) { taken = 0; phase ^= 1; }
  };
  auto advance = [&] {  // to that row, when no product reads the words any more
    #pragma unroll
    for (int r = 0; r < TAPS_H; ++r)
      #pragma unroll
      for (int c = 0; c < WORDS; ++c)
        #pragma unroll
        for (int p = 0; p < 2; ++p)
          a[r][c][p] = r < KEPT ? a[r < KEPT ? r + STRIDE_H : 0][c][p]
                                : fresh[r < KEPT ? 0 : r - KEPT][c][p];
    if constexpr (MOVED) {
      #pragma unroll
      for (int lane = 0; lane < 3; ++lane)
        #pragma unroll
        for (int p = 0; p < 2; ++p) {
          const u32 given = of_lane(a[TAPS_H - 1][WORDS - 1][p], threadIdx.x % 32 - q + lane);
          u32& free = a[lane * STRIDE_H][WORDS - 1][p];
          free = q == 3 ? given : free;
        }
    }
  };
  const u64 filters = operand(weight_at);
  Sum sums[32];
  auto convolve = [&] {
    begin_products();
    #pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
      const u64 b = filters + i / 4 * 512 + i % 4 * 2;
      const int one = 2 * i, two = 2 * i + 1 < DEPTH ? 2 * i + 1 : one;
      const u32 used = 2 * i + 1 < DEPTH ? ~0u : 0u;
      u32 (&low)[2] = a[one / WORDS][one % WORDS], (&high)[2] = a[two / WORDS][two % WORDS];
      if (i == 0)
        multiply<false>(sums, low[0], low[1], high[0] & used, high[1] & used, b);
      else
        multiply<true>(sums, low[0], low[1], high[0] & used, high[1] & used, b);
    }
    end_products();
  };
  auto finish = [&] {
    wait_for_products();
    #pragma unroll
    for (int j = 0; j < 32; ++j) settled(sums[j]);
    #pragma unroll
    for (int r = 0; r < TAPS_H; ++r)
      #pragma unroll
      for (int c = 0; c < WORDS; ++c) { settled(a[r][c][0]); settled(a[r][c][1]); }
  };

  const float least = __uint_as_float(LEAST);
  float made[16];  // the largest sums of a window
  auto leave = [&](int pixel) {
    u32 words[16];
    #pragma unroll
    for (int j = 0; j < 16; j += 4) {
      const float4 more = *(const float4*)(biases + 16 * q + j);
      const float shift[4] = {more.x, more.y, more.z, more.w};
      float y[4];
      #pragma unroll
      for (int k = 0; k < 4; ++k) {
        y[k] = activate(made[j + k] + shift[k]);
        if constexpr (RESCALED) y[k] *= gamma;
      }
      if constexpr (OUT == 3) {
        words[j / 4] = to_byte(y[0]) | to_byte(y[1]) << 8 | to_byte(y[2]) << 16
                     | to_byte(y[3]) << 24;
      } else if constexpr (OUT == 1) {
        words[j / 2] = pack_16_bit(y[0], y[1]); words[j / 2 + 1] = pack_16_bit(y[2], y[3]);
      } else {
        words[j / 2] = bfloats(y[0], y[1]); words[j / 2 + 1] = bfloats(y[2], y[3]);
      }
    }
    constexpr int FOURS = OUT == 3 ? 1 : 2;
    uint4* to = (uint4*)out + (4 * pixel + q) * FOURS;  // fewer than 2^31 values
    #pragma unroll
    for (int k = 0; k < FOURS; ++k)
      to[k] = make_uint4(words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]);
  };

  wait(there, 0);
  #pragma unroll 1
  for (int task = blockIdx.x; task < tasks; task += grid) {
    const Band band(task);
    const int column = band.column + 7 * warp + g;  // this thread's windows are below another
    const bool stores = g < 7 && column < OUT_W;
    const int left = 2 * column - POOL_PADDING_W;
    const bool inside[3] = {
        left >= 0 && left < MIDDLE_W, left + 1 < MIDDLE_W, left + 2 < MIDDLE_W};
    int pixel = (band.image * OUT_H + band.row) * OUT_W + column;
    int y = 2 * band.row - POOL_PADDING_H;
    #pragma unroll 1
    for (int i = 0; i <= AHEAD; ++i) {
      fetch();
      advance();
    }
    convolve();
    fetch();
    finish();
    float most[32];
    #pragma unroll
    for (int j = 0; j < 32; ++j) most[j] = y >= 0 && y < MIDDLE_H ? sums[j] : least;

    #pragma unroll 1
    for (int i = 0; i < band.rows; ++i, y += 2) {  // while products are made, all else is done
      advance();
      convolve();
      if (i > 0) {
        if (stores) leave(pixel);
        pixel += OUT_W;
      }
      fetch();
      finish();
      if (y + 1 < MIDDLE_H) {
        #pragma unroll
        for (int j = 0; j < 32; ++j) most[j] = larger(most[j], sums[j]);
      }
      advance();
      convolve();
      if (i + 1 < band.rows) fetch();
      finish();
      if (y + 2 < MIDDLE_H) {
        #pragma unroll
        for (int j = 0; j < 32; ++j) most[j] = larger(most[j], sums[j]);
      }
      #pragma unroll
      for (int j = 0; j < 16; ++j) made[j] = of_next_pixels(most[j / 2 * 4 + j % 2]);
      if (!inside[0] || !inside[1] || !inside[2]) {  // few warps have such threads
        #pragma unroll
        for (int j = 0; j < 16; ++j) {
          const int even = j / 2 * 4 + j % 2;
          most[even] = inside[0] ? most[even] : least;
          most[even + 2] = inside[1] ? most[even + 2] : least;
          made[j] = inside[2] ? made[j] : least;
        }
      }
      #pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int even = j / 2 * 4 + j % 2;
        made[j] = larger(larger(most[even], most[even + 2]), made[j]);
      }
      #pragma unroll
      for (int j = 0; j < 32; ++j) most[j] = sums[j];
    }
    if (stores) leave(pixel);
  }
}
