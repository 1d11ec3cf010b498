constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int CHUNKS = BK / 8;  // of a row of a stage, 16 bytes each
constexpr int ROWS = THREADS / CHUNKS;  // that all threads load at a time
constexpr int LOADS_A = BM / ROWS, LOADS_B = BN / ROWS;
constexpr int MI = BM / WARPS_M / 16, NI = BN / WARPS_N / 8;  // products of a warp, 16 × 8 each
constexpr int DEEP = BK / 16;  // products below one another in a stage
constexpr int ROW_BYTES = 2 * BK, A_BYTES = BM * ROW_BYTES, STAGE_BYTES = (BM + BN) * ROW_BYTES;
constexpr int OUT_AT = EARLY ? STAGES * STAGE_BYTES : 0;
constexpr int OUT_CHUNKS = BN / 8;
static_assert(BM % ROWS == 0 && BN % ROWS == 0 && ROWS % 8 == 0 && NI % 2 == 0 && DEEP % 2 == 0);
static_assert(BM * OUT_CHUNKS % THREADS == 0 && OUT_CHUNKS % 8 == 0);

// where in a row its chunks lie: eight rows never ask a bank for two of them
__device__ __forceinline__ int turn(int row) { return CHUNKS == 8 ? row & 7 : row >> 1 & 3; }

template <int KIND> __device__ __forceinline__ float number(const void* from, int place) {
  if constexpr (KIND == 0) return ((const float*)from)[place];
  else if constexpr (KIND == 1) return of_half(((const u16*)from)[place]);
  else if constexpr (KIND == 2) return __uint_as_float((u32)((const u16*)from)[place] << 16);
  else return 0.0f;
}
__device__ __forceinline__ float of_bits(u32 bits) {
  if constexpr (KIND == 1) return of_half(bits);
  else return __uint_as_float(bits << 16);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv_implicit_gemm(
    const void* x, const void* weight, const void* bias, const void* residual, const void* scale,
    void* out, float alpha, float beta, float gamma, int pixels, int filters, int channels,
    int pitch, int out_pitch, int height, int width, int out_h, int out_w, int taps_h, int taps_w, int stride_h,
    int stride_w, int padding_h, int padding_w, int dilation_h, int dilation_w, int across) {
  extern __shared__ __align__(128) char memory[];
  const u32 shared = address(memory);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int m0 = blockIdx.x / across * BM, k0 = blockIdx.x % across * BN;
  const int chunk = thread % CHUNKS, row = thread / CHUNKS;
  const int taps = taps_h * taps_w, depth = taps * channels, steps = (depth + BK - 1) / BK;

  // the pixels that this thread loads: where their first tap is, and which taps the image has
  int at[LOADS_A];
  u32 seen[LOADS_A];
  #pragma unroll
  for (int i = 0; i < LOADS_A; ++i) {
    const int m = m0 + row + i * ROWS;
    const int q = m % out_w, line = m / out_w, p = line % out_h, n = line / out_h;
    const int h = p * stride_h - padding_h, v = q * stride_w - padding_w;
    at[i] = ((n * height + h) * width + v) * pitch;
    seen[i] = m < pixels;
    if constexpr (TAPS) {
      u32 columns = 0, all = 0;
      for (int s = 0; s < taps_w; ++s)
        columns |= (u32)((u32)(v + s * dilation_w) < (u32)width) << s;
      for (int r = 0; r < taps_h; ++r)
        if ((u32)(h + r * dilation_h) < (u32)height) all |= columns << (r * taps_w);
      seen[i] = m < pixels ? all : 0;
    }
  }
  u32 used = 0;  // filters that there are
  #pragma unroll
  for (int i = 0; i < LOADS_B; ++i) used |= (u32)(k0 + row + i * ROWS < filters) << i;
  const u16* from_w = (const u16*)weight + (long long)(k0 + row) * depth + 8 * chunk;
  const long long rows_apart = (long long)ROWS * depth;
  int c = 8 * chunk, tap = 0, r = 0, s = 0, d = 8 * chunk, moved;
  auto settle = [&] {  // which tap and channel of it a place of the depth is
    moved = c;
    if constexpr (TAPS) {
      while (c >= channels) {
        c -= channels;
        ++tap;
        if (++s == taps_w) { s = 0; ++r; }
      }
      moved = (r * dilation_h * width + s * dilation_w) * pitch + c;
    }
  };
  settle();
  const u32 mine = row * ROW_BYTES + (chunk ^ turn(row)) * 16;
  auto load_a = [&](int i, u32 stage) {
    const bool there = TAPS ? tap < 32 && (seen[i] >> (tap & 31) & 1) : seen[i] && c < channels;
    const u16* from = (const u16*)x + (there ? at[i] + moved : 0);
    copy_16(stage + mine + i * ROWS * ROW_BYTES, from, there);
  };
  auto load_b = [&](int i, u32 stage) {
    const bool there = d < depth && (used >> i & 1);
    copy_16(stage + A_BYTES + mine + i * ROWS * ROW_BYTES,
            there ? from_w + i * rows_apart : (const u16*)weight, there);
  };
  auto advance = [&] {
    c += BK;
    d += BK;
    from_w += BK;
    settle();
  };
  auto load_residual = [&] {
    #pragma unroll 2
    for (int i = 0; i < BM * OUT_CHUNKS / THREADS; ++i) {
      const int j = thread + i * THREADS, line = j / OUT_CHUNKS, column = j % OUT_CHUNKS;
      const bool there = m0 + line < pixels && k0 + 8 * column < filters;
      const long long place = (long long)(m0 + line) * filters + k0 + 8 * column;
      copy_16(shared + OUT_AT + 16 * (line * OUT_CHUNKS + (column ^ (line & 7))),
              (const u16*)residual + (there ? place : 0), there);
    }
  };

  #pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    #pragma unroll
    for (int i = 0; i < LOADS_A; ++i) load_a(i, shared + stage * STAGE_BYTES);
    #pragma unroll
    for (int i = 0; i < LOADS_B; ++i) load_b(i, shared + stage * STAGE_BYTES);
    advance();
    if constexpr (EARLY) {
      if (stage == STAGES - 2) load_residual();
    }
    end_copies();
  }

  const int warp_m = warp / WARPS_N * MI * 16, warp_k = warp % WARPS_N * NI * 8;
  const u32 a_at = (warp_m + lane % 16) * ROW_BYTES + (lane / 16 ^ turn(lane % 16)) * 16;
  const int b_row = lane % 8 + lane / 16 * 8;
  const u32 b_at =
      A_BYTES + (warp_k + b_row) * ROW_BYTES + (lane / 8 % 2 ^ turn(b_row)) * 16;
  u32 a[2][MI][4], b[2][NI][2];
  auto fetch = [&](int to, u32 stage, int deep) {
    #pragma unroll
    for (int i = 0; i < MI; ++i)
      read_blocks(a[to][i][0], a[to][i][1], a[to][i][2], a[to][i][3],
                  stage + ((a_at + i * 16 * ROW_BYTES) ^ deep * 32));
    #pragma unroll
    for (int j = 0; j < NI; j += 2)
      read_blocks(b[to][j][0], b[to][j][1], b[to][j + 1][0], b[to][j + 1][1],
                  stage + ((b_at + j * 8 * ROW_BYTES) ^ deep * 32));
  };
  float sums[MI][NI][4];
  #pragma unroll
  for (int i = 0; i < MI; ++i)
    #pragma unroll
    for (int j = 0; j < NI; ++j)
      #pragma unroll
      for (int l = 0; l < 4; ++l) sums[i][j][l] = 0.0f;

  u32 read = shared, write = shared + (STAGES - 1) * STAGE_BYTES;
  const u32 end = shared + STAGES * STAGE_BYTES;
  wait_for_copies<STAGES - 2>();
  __syncthreads();
  fetch(0, read, 0);
  #pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    #pragma unroll
    for (int deep = 0; deep < DEEP; ++deep) {
      if (deep == DEEP - 1) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        read += STAGE_BYTES;
        if (read == end) read = shared;
      }
      fetch((deep + 1) % 2, read, (deep + 1) % DEEP);
      if (deep < DEEP - 1) {  // copies are spread between products
        constexpr int PARTS = DEEP - 1;
        #pragma unroll
        for (int i = 0; i < LOADS_A; ++i)
          if (i * PARTS / LOADS_A == deep) load_a(i, write);
        #pragma unroll
        for (int i = 0; i < LOADS_B; ++i)
          if (i * PARTS / LOADS_B == deep) load_b(i, write);
        if (deep == DEEP - 2) {
          end_copies();
          advance();
          write += STAGE_BYTES;
          if (write == end) write = shared;
        }
      }
      #pragma unroll
      for (int i = 0; i < MI; ++i)
        #pragma unroll
        for (int j = 0; j < NI; ++j) multiply(sums[i][j], a[deep % 2][i], b[deep % 2][j]);
    }
  }
  wait_for_copies<0>();
  __syncthreads();
  if constexpr (RESIDUAL && !EARLY) {
    load_residual();
    end_copies();
    wait_for_copies<0>();
    __syncthreads();
  }

  const int g = lane / 4, pair = lane % 4;
  #pragma unroll
  for (int j = 0; j < NI; ++j) {
    const int column = warp_k + j * 8 + 2 * pair, k = k0 + column;
    float shift[2] = {0.0f, 0.0f}, factor[2] = {1.0f, 1.0f};
    if (k < filters) {
      #pragma unroll
      for (int l = 0; l < 2; ++l) {
        if constexpr (BIAS >= 0) shift[l] = number<BIAS>(bias, k + l);
        if constexpr (SCALE >= 0) factor[l] = number<SCALE>(scale, k + l);
      }
    }
    #pragma unroll
    for (int i = 0; i < MI; ++i)
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int line = warp_m + i * 16 + half * 8 + g;
        const u32 to =
            shared + OUT_AT + 16 * (line * OUT_CHUNKS + (column / 8 ^ (line & 7))) + 4 * pair;
        u32 added = 0;
        if constexpr (RESIDUAL) added = read_word(to);
        float y[2];
        #pragma unroll
        for (int l = 0; l < 2; ++l) {
          float sum = sums[i][j][2 * half + l] * alpha;
          if constexpr (SCALE >= 0) sum = sum * factor[l];
          if constexpr (BIAS >= 0) sum = sum + shift[l];
          if constexpr (RESIDUAL) sum = sum + of_bits(l ? added >> 16 : added & 0xffff) * beta;
          sum = activate(sum);
          if constexpr (RESCALED) sum = sum * gamma;
          y[l] = sum;
        }
        write_word(to, KIND == 1 ? to_half(y[0]) | to_half(y[1]) << 16
                                 : to_bfloat(y[0]) | to_bfloat(y[1]) << 16);
      }
  }
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < BM * OUT_CHUNKS / THREADS; ++i) {
    const int j = thread + i * THREADS, line = j / OUT_CHUNKS, column = j % OUT_CHUNKS;
    if (m0 + line < pixels && k0 + 8 * column < filters) {
      const u32 from = shared + OUT_AT + 16 * (line * OUT_CHUNKS + (column ^ (line & 7)));
      *(uint4*)((u16*)out + (long long)(m0 + line) * out_pitch + k0 + 8 * column) =
          read_four(from);
    }
  }
}
