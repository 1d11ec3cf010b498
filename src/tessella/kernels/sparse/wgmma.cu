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
