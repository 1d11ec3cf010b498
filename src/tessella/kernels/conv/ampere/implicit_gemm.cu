constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int VALUES = 16 / ITEM;  // numbers of 16 bytes
constexpr int BK = ROW_BYTES / ITEM, CHUNKS = ROW_BYTES / 16;  // of a row of a stage
constexpr int ROWS = THREADS / CHUNKS;  // that all threads load at a time
constexpr int LOADS_A = BM / ROWS, LOADS_B = BN / ROWS;
constexpr int MI = BM / WARPS_M / 16, NI = BN / WARPS_N / 8;  // products of a warp, 16 × 8 each
constexpr int DEEP = ROW_BYTES / 32;  // products below one another in a stage
constexpr bool PATCH = PATCHES > 0;  // all taps read the same pixels in shared memory
constexpr int A_BYTES = PATCH ? 0 : BM * ROW_BYTES, STAGE_BYTES = A_BYTES + BN * ROW_BYTES;
constexpr int PATCH_BYTES = PATCH_ROWS * ROW_BYTES, PATCH_AT = STAGES * STAGE_BYTES;
constexpr int COUNT = PATCH ? PATCHES : 1, ZERO_AT = PATCH_AT + PATCHES * PATCH_BYTES;
constexpr int OUT_AT = EARLY || PERSISTENT ? STAGES * STAGE_BYTES : 0;
constexpr int OUT_VALUES = 16 / OUT_ITEM, OUT_CHUNKS = BN / OUT_VALUES;
static_assert(BM % ROWS == 0 && BN % ROWS == 0 && ROWS % 16 == 0 && NI % 2 == 0 && DEEP % 2 == 0);
static_assert(!PATCH || (!PERSISTENT && !EARLY));
static_assert(EARLY || !RESIDUAL || !PERSISTENT);
static_assert(BM * OUT_CHUNKS % THREADS == 0 && OUT_CHUNKS % 4 == 0);

// where in a row of so many chunks one lies: eight rows never ask a bank for two of them
template <int COUNT> __device__ __forceinline__ int turned(int row, int chunk) {
  return chunk ^ (COUNT % 8 == 0 ? row & 7 : row >> 1 & 3);
}

template <int KIND> __device__ __forceinline__ float number(const void* from, int place) {
  if constexpr (KIND == 0) return ((const float*)from)[place];
  else if constexpr (KIND == 1) return of_half(((const u16*)from)[place]);
  else if constexpr (KIND == 2) return __uint_as_float((u32)((const u16*)from)[place] << 16);
  else return 0.0f;
}
// the same of a result: here eight rows ask for words, or four of them for pairs of words
__device__ __forceinline__ int result_place(int row, int chunk) {
  const int apart = OUT_CHUNKS % 8 == 0 ? (row & 3) << 1 | row >> 2 & 1 : row >> 1 & 3;
  return 16 * (row * OUT_CHUNKS + (chunk ^ apart));
}
// four neighbouring numbers of the result in shared memory
__device__ __forceinline__ void read_numbers(float (&y)[4], u32 at) {
  uint2 words;
  if constexpr (OUT_ITEM == 1) words.x = read_word(at) ^ 0x80808080;
  else words = read_two(at);
  #pragma unroll
  for (int l = 0; l < 4; ++l) {
    const u32 bits = (l < 2 ? words.x : words.y) >> 16 * (l % 2);
    if constexpr (OUT == 1) y[l] = of_half(bits & 0xffff);
    else if constexpr (OUT == 2) y[l] = __uint_as_float(bits << 16);
    else y[l] = of_byte(words.x, l);
  }
}
__device__ __forceinline__ void write_numbers(u32 at, const float (&y)[4]) {
  if constexpr (OUT == 1) write_two(at, to_halves(y[0], y[1]), to_halves(y[2], y[3]));
  else if constexpr (OUT == 2) write_two(at, to_bfloats(y[0], y[1]), to_bfloats(y[2], y[3]));
  else write_word(at, to_bytes<!RELU>(y));
}

struct Window {
  int height, width, out_h, out_w, taps_h, taps_w, stride_h, stride_w, padding_h, padding_w, dilation_h,
      dilation_w;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv_implicit_gemm(
    const void* x, const void* weight, const void* bias, const void* residual, const void* scale,
    void* out, float alpha, float beta, float gamma, int pixels, int filters, int channels,
    int pitch, int out_pitch, struct Window window, int across, int tiles, int blocks) {
  const int height = window.height, width = window.width, out_h = window.out_h, out_w = window.out_w;
  const int taps_h = window.taps_h, taps_w = window.taps_w;
  const int stride_h = window.stride_h, stride_w = window.stride_w;
  const int padding_h = window.padding_h, padding_w = window.padding_w;
  const int dilation_h = window.dilation_h, dilation_w = window.dilation_w;
  extern __shared__ __align__(128) char memory[];
  const u32 shared = address(memory);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int chunk = thread % CHUNKS, row = thread / CHUNKS;
  // of sixteen filters, the one that lies in a row: so a thread's sums of two neighbouring products
  // are four neighbours of the result
  const int filter = row & ~15 | (row & 6) << 1 | row >> 2 & 2 | row & 1;
  const int warp_m = warp / WARPS_N * MI * 16, warp_k = warp % WARPS_N * NI * 8;
  constexpr int PIXELS = PATCH ? MI : LOADS_A;  // that a thread reads, from one memory or the other
  const int taps = taps_h * taps_w, depth = taps * channels, steps = (depth + BK - 1) / BK;

  // of the tile that is loaded: where the first tap of this thread's pixels is, which taps the image
  // has, which filters there are; and which tap and channel of it the next stage begins with
  int at[PIXELS], c, tap, r, s, d, moved;
  u32 seen[PIXELS], used;
  const char* from_w;
  int loading = blockIdx.x, load_step = 0;
  auto settle = [&] {
    moved = c;
    if constexpr (TAPS && !PATCH) {
      do {  // without a branch where a stage is no deeper than the channels
        const bool next = c >= channels;
        c -= next ? channels : 0;
        tap += next;
        s += next;
        const bool below = s == taps_w;
        s = below ? 0 : s;
        r += below;
      } while (DEEPER && c >= channels);
      moved = (r * dilation_h * width + s * dilation_w) * pitch + c;
    }
  };
  auto begin_tile = [&](int tile) {
    const int m0 = tile / across * BM, k0 = tile % across * BN;
    #pragma unroll
    for (int i = 0; i < PIXELS; ++i) {
      const int m = m0 + (PATCH ? warp_m + lane % 16 + i * 16 : row + i * ROWS);
      const int q = m % out_w, line = m / out_w, p = line % out_h, n = line / out_h;
      const int h = p * stride_h - padding_h, v = q * stride_w - padding_w;
      at[i] = ((n * height + h) * width + v) * pitch;
      seen[i] = m < pixels;
      if constexpr (TAPS) {
        u32 columns = 0, all = 0;
        for (int t = 0; t < taps_w; ++t)
          columns |= (u32)((u32)(v + t * dilation_w) < (u32)width) << t;
        for (int t = 0; t < taps_h; ++t)
          if ((u32)(h + t * dilation_h) < (u32)height) all |= columns << (t * taps_w);
        seen[i] = m < pixels ? all : 0;
      }
    }
    used = 0;
    #pragma unroll
    for (int i = 0; i < LOADS_B; ++i) used |= (u32)(k0 + filter + i * ROWS < filters) << i;
    from_w = (const char*)weight + ITEM * ((long long)(k0 + filter) * depth + VALUES * chunk);
    c = d = VALUES * chunk;
    tap = r = s = 0;
    settle();
  };
  const long long rows_apart = (long long)ITEM * ROWS * depth;
  const u32 mine = row * ROW_BYTES + turned<CHUNKS>(row, chunk) * 16;
  auto load_a = [&](int i, u32 stage) {
    const bool there = TAPS ? tap < 32 && (seen[i] >> (tap & 31) & 1) : seen[i] && c < channels;
    const char* from = (const char*)x + ITEM * (long long)(there ? at[i] + moved : 0);
    copy_16(stage + mine + i * ROWS * ROW_BYTES, from, there);
  };
  auto load_b = [&](int i, u32 stage) {
    const bool there = (PATCH ? load_step < steps : d < depth) && (used >> i & 1);
    copy_16(stage + A_BYTES + mine + i * ROWS * ROW_BYTES,
            there ? from_w + i * rows_apart : (const char*)weight, there);
  };
  auto advance = [&] {
    ++load_step;
    if constexpr (PATCH) {
      const bool next = ++tap == taps;
      tap = next ? 0 : tap;
      from_w += ITEM * channels + (next ? ROW_BYTES - ITEM * depth : 0);
      return;
    }
    if (PERSISTENT && load_step == steps) {
      load_step = 0;
      loading += blocks;
      if (loading < tiles) return begin_tile(loading);
      used = 0;  // nothing is left
      #pragma unroll
      for (int i = 0; i < LOADS_A; ++i) seen[i] = 0;
    }
    c += BK;
    d += BK;
    from_w += ROW_BYTES;
    settle();
  };
  auto load_patch = [&](int part) {  // so many channels of all pixels that taps read
    #pragma unroll 4
    for (int j = thread; j < PATCH_ROWS * CHUNKS; j += THREADS) {
      const int line = j / CHUNKS, column = j % CHUNKS;
      const int pixel = blockIdx.x / across * BM - padding_h * width - padding_w + line;
      const bool there = pixel >= 0 && pixel < pixels;
      const long long place = (long long)pixel * pitch + part * BK + VALUES * column;
      copy_16(shared + PATCH_AT + part % COUNT * PATCH_BYTES + line * ROW_BYTES
                  + turned<CHUNKS>(line, column) * 16,
              (const char*)x + (there ? ITEM * place : 0), there);
    }
  };
  auto load_residual = [&](int m0, int k0) {
    #pragma unroll 2
    for (int i = 0; i < BM * OUT_CHUNKS / THREADS; ++i) {
      const int j = thread + i * THREADS, line = j / OUT_CHUNKS, column = j % OUT_CHUNKS;
      const bool there = m0 + line < pixels && k0 + OUT_VALUES * column < filters;
      const long long place = (long long)(m0 + line) * filters + k0 + OUT_VALUES * column;
      copy_16(shared + OUT_AT + result_place(line, column),
              (const char*)residual + (there ? OUT_ITEM * place : 0), there);
    }
  };

  begin_tile(loading);
  if constexpr (PATCH) {
    if (thread < ROW_BYTES / 4) write_word(shared + ZERO_AT + 4 * thread, 0);
    load_patch(0);
  }
  #pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if constexpr (!PATCH) {
      #pragma unroll
      for (int i = 0; i < LOADS_A; ++i) load_a(i, shared + stage * STAGE_BYTES);
    }
    #pragma unroll
    for (int i = 0; i < LOADS_B; ++i) load_b(i, shared + stage * STAGE_BYTES);
    advance();
    end_copies();
  }

  u32 a_at = (warp_m + lane % 16) * ROW_BYTES + turned<CHUNKS>(lane % 16, lane / 16) * 16;
  int read_tap = 0, read_r = 0, read_s = 0, part = 0;  // in a patch
  auto next_tap = [&] {
    const bool below = ++read_s == taps_w, next = ++read_tap == taps;
    read_s = below ? 0 : read_s;
    read_r = next ? 0 : read_r + below;
    read_tap = next ? 0 : read_tap;
    part += next;
    const int line = warp_m + lane % 16 + read_r * width + read_s;
    a_at = PATCH_AT + part % COUNT * PATCH_BYTES + line * ROW_BYTES
         + turned<CHUNKS>(line, lane / 16) * 16;
  };
  if constexpr (PATCH) a_at += PATCH_AT;
  const int b_row = lane % 8 + lane / 16 * 8;
  const u32 b_at =
      A_BYTES + (warp_k + b_row) * ROW_BYTES + turned<CHUNKS>(b_row, lane / 8 % 2) * 16;
  u32 a[2][MI][4], b[2][NI][2];
  auto fetch = [&](int to, u32 stage, int deep) {
    #pragma unroll
    for (int i = 0; i < MI; ++i) {
      u32 from = (PATCH ? shared : stage) + ((a_at + i * 16 * ROW_BYTES) ^ deep * 32);
      if constexpr (PATCH) {
        if (!(seen[i] >> read_tap & 1)) from = shared + ZERO_AT;
      }
      read_blocks(a[to][i][0], a[to][i][1], a[to][i][2], a[to][i][3], from);
    }
    #pragma unroll
    for (int j = 0; j < NI; j += 2)
      read_blocks(b[to][j][0], b[to][j][1], b[to][j + 1][0], b[to][j + 1][1],
                  stage + ((b_at + j * 8 * ROW_BYTES) ^ deep * 32));
  };
  Sum sums[MI][NI][4];
  // counted from the first stage: of a `read` that began as `shared`, nvrtc 13.0 made the base of the
  // next tile's residual, too
  u32 read = 0, write = (STAGES - 1) * STAGE_BYTES;
  constexpr u32 end = STAGES * STAGE_BYTES;
  wait_for_copies<STAGES - 2>();
  __syncthreads();
  fetch(0, shared + read, 0);
  #pragma unroll 1
  for (int tile = blockIdx.x; tile < tiles; tile += blocks) {
    const int m0 = tile / across * BM, k0 = tile % across * BN;
    if constexpr (EARLY) load_residual(m0, k0);  // they belong to the next stage's copies
    #pragma unroll
    for (int i = 0; i < MI; ++i)
      #pragma unroll
      for (int j = 0; j < NI; ++j)
        #pragma unroll
        for (int l = 0; l < 4; ++l) sums[i][j][l] = 0;
    #pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (PATCHES > 1 && read_tap == 0 && step + taps < steps) load_patch(part + 1);
      #pragma unroll
      for (int deep = 0; deep < DEEP; ++deep) {
        if (deep == DEEP - 1) {
          wait_for_copies<STAGES - 2>();
          __syncthreads();
          read += STAGE_BYTES;
          if (read == end) read = 0;
          if constexpr (PATCH) next_tap();
        }
        fetch((deep + 1) % 2, shared + read, (deep + 1) % DEEP);
        if (deep < DEEP - 1) {  // copies are spread between products
          constexpr int PARTS = DEEP - 1;
          #pragma unroll
          for (int i = 0; i < LOADS_A; ++i)
            if (!PATCH && i * PARTS / LOADS_A == deep) load_a(i, shared + write);
          #pragma unroll
          for (int i = 0; i < LOADS_B; ++i)
            if (i * PARTS / LOADS_B == deep) load_b(i, shared + write);
          if (deep == DEEP - 2) {
            advance();
            end_copies();
            write += STAGE_BYTES;
            if (write == end) write = 0;
          }
        }
        #pragma unroll
        for (int i = 0; i < MI; ++i)
          #pragma unroll
          for (int j = 0; j < NI; ++j) multiply(sums[i][j], a[deep % 2][i], b[deep % 2][j]);
      }
    }
    if constexpr (EARLY || !PERSISTENT) {
      wait_for_copies<0>();
      __syncthreads();
    }
    if constexpr (RESIDUAL && !EARLY) {
      load_residual(m0, k0);
      end_copies();
      wait_for_copies<0>();
      __syncthreads();
    }

    const int g = lane / 4, pair = lane % 4;
    #pragma unroll
    for (int j = 0; j < NI; j += 2) {
      const int column = warp_k + j * 8 + 4 * pair, k = k0 + column;
      float shift[4] = {}, factor[4] = {};
      if (k < filters) {
        #pragma unroll
        for (int l = 0; l < 4; ++l) {
          if constexpr (BIAS >= 0) shift[l] = number<BIAS>(bias, k + l);
          if constexpr (SCALE >= 0) factor[l] = number<SCALE>(scale, k + l);
        }
      }
      #pragma unroll
      for (int i = 0; i < MI; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int line = warp_m + i * 16 + half * 8 + g;
          const u32 to = shared + OUT_AT + result_place(line, column / OUT_VALUES)
                       + column % OUT_VALUES * OUT_ITEM;
          float added[4], y[4];
          if constexpr (RESIDUAL) read_numbers(added, to);
          #pragma unroll
          for (int l = 0; l < 4; ++l) {
            float sum = (float)sums[i][j + l / 2][2 * half + l % 2];
            if constexpr (ALPHA) sum = sum * alpha;
            if constexpr (SCALE >= 0) sum = sum * factor[l];
            if constexpr (BIAS >= 0) sum = sum + shift[l];
            if constexpr (RESIDUAL) sum = sum + (BETA ? added[l] * beta : added[l]);
            if constexpr (RELU) sum = larger(sum, 0.0f);
            else sum = activate(sum);
            if constexpr (RESCALED) sum = sum * gamma;
            y[l] = sum;
          }
          write_numbers(to, y);
        }
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < BM * OUT_CHUNKS / THREADS; ++i) {
      const int j = thread + i * THREADS, line = j / OUT_CHUNKS, column = j % OUT_CHUNKS;
      if (m0 + line < pixels && k0 + OUT_VALUES * column < filters) {
        const u32 from = shared + OUT_AT + result_place(line, column);
        const long long to = (long long)(m0 + line) * out_pitch + k0 + OUT_VALUES * column;
        *(uint4*)((char*)out + OUT_ITEM * to) = read_four(from);
      }
    }
    if constexpr (!PERSISTENT) break;
    if constexpr (EARLY) __syncthreads();  // all have read the result, where the residual comes
  }
}
